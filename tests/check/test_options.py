"""The table of SGLang's options is that of the installed SGLang, and is read as its parser reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replay.check.options import Option, read_options, table

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ROOT / "replay" / "check" / "sglang_options.json"


@pytest.fixture(scope="module")
def installed() -> str:
    """The table as scripts/sglang_options.py writes it of the SGLang that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "rig"), "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "sglang_options.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_the_table_is_that_of_the_installed_engine(installed: str) -> None:
    new, old = ({tuple(row["names"]): row for row in json.loads(text)["options"]}
                for text in (installed, WRITTEN.read_text()))  # fmt: skip
    moved = sorted({name for names in old.keys() ^ new.keys() for name in names})
    assert not moved, "came or went: write the table anew by scripts/sglang_options.py"
    assert [names for names, row in new.items() if old[names] != row] == []
    assert installed == WRITTEN.read_text()


def test_every_option_is_read() -> None:
    """Each by its first name, with a value of its kind: none of the table's rows stands in another's way."""
    values = {"int": "3", "float": "0.5", "count": "8k", "json": "[1]", "text": "x"}
    for option in table():
        value = str(option.choices[0]) if option.choices else values.get(option.kind)
        words = [option.names[0], *([value] if value is not None else [])]
        read = read_options(words)
        assert read.refused == () and list(read.given) == [option.field], (words, read)


def test_options_that_rules_look_at_are_in_the_table() -> None:
    """What a rule asks of the arguments is a field that SGLang has, so that no rule waits for one that never comes."""
    import re

    asked = set()
    for file in (ROOT / "replay" / "check").glob("*.py"):
        text = file.read_text()
        asked |= set(re.findall(r'server\.(?:integer|number|text|flag)\(\s*"(\w+)"', text))
    assert len(asked) > 20
    assert asked - {option.field for option in table()} == set()


def test_more_options_are_those_of_the_command() -> None:
    more = (Option(("--model-type",), "model_type"),)
    assert read_options(["--model-type", "llm"], more=more).given == {"model_type": "llm"}
    assert read_options(["--router-policy", "x"], strict=False).refused == ()
