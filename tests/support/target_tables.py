"""Tables of targets as they are shipped, and as the script derives them from SGLang's source."""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "targets" / "derive.py"


@dataclass(frozen=True)
class TargetTable:
    """One table, and what it says of each class: its rule and where that stands, ``none``, or why it is not known."""

    document: dict[str, Any]

    @property
    def said(self) -> dict[str, object]:
        rules = {
            name: ({key: value for key, value in rule.items() if key != "targets"}, where)
            for rule in self.document["rules"]
            for name, where in rule["targets"].items()
        }
        return {**rules, **dict.fromkeys(self.document["none"], "none"), **self.unknown}

    @property
    def names(self) -> list[str]:
        return sorted(self.said)

    @property
    def unknown(self) -> dict[str, str]:
        return dict(self.document["unknown"])


def shipped(release: str) -> TargetTable:
    """The table that is installed."""
    text = files("replay.targets").joinpath("tables", f"{release}.json").read_text(encoding="utf-8")
    return TargetTable(json.loads(text))


def derived(source: Path | None = None) -> TargetTable:
    """What the script makes of the installed SGLang, or of a wheel or folder."""
    command = [sys.executable, str(SCRIPT), *([] if source is None else ["--wheel", str(source)])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return TargetTable(json.loads(ran.stdout))
