"""What each scheduler process of a recording server says of itself, in a file of its launch folder (spool.py)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from replay.capture.spool import FORMAT, MOST, VERSION, is_manifest, manifest_name, names_in, write_file
from replay.errors import CaptureError
from replay.traces.fields import Fields, parse_json
from replay.traces.files import read_small

STATES = ("loading", "recording", "refused", "stopped", "failed")
_MAX_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one scheduler process says of itself.

    ``ranks``: name -> number (tp, pp, attn_tp, attn_dp, attn_cp), of ``world`` that share a model. ``wiring`` is what
    the draft is fed, in its order; ``taps`` what is recorded; both canonical names, empty where not known (yet).
    ``target`` holds the fields of traces.header.TargetInfo. ``reason`` says why a state is refused (the
    server goes on, unless a wiring was asked for), stopped (it ends before it serves) or failed, ``no_feed`` why the
    target's rows are recorded and what the draft is fed is not.
    """

    launch: str
    pid: int
    host: str
    state: str
    writer: bool
    reason: str = ""
    no_feed: str = ""
    notes: Sequence[str] = ()  # what this SGLang lacks and so is not recorded, and whether it was never tried
    ranks: Mapping[str, int] = field(default_factory=dict)
    world: int = 0
    sglang: str = ""
    wiring: Sequence[str] = ()
    server_wiring: Sequence[str] = ()  # what it would have been without --wiring
    taps: Sequence[str] = ()
    url: str = ""  # where the server is asked, from the machine it runs on
    dtype: str = ""
    topk: int = 0
    target: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of its file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> "Manifest":
        """Parse and check. Raises CaptureError for another version, TraceCorruptError for anything else."""
        root = Fields(source, parse_json(text, source))
        if root.values.get("format") != FORMAT or root.values.get("version") != VERSION:
            raise CaptureError(
                f"{source} is of format {root.values.get('format')!r} version {root.values.get('version')!r}, this "
                f"replay reads {FORMAT} {VERSION}: install the same replay where the server runs and here"
            )
        return cls(
            launch=root.text("launch"),
            pid=root.integer("pid", 0, MOST),
            host=root.text("host"),
            state=root.choice("state", STATES),
            writer=root.flag("writer"),
            reason=root.text("reason"),
            no_feed=root.text("no_feed"),
            notes=root.texts("notes") if "notes" in root.values else (),
            ranks={name: root.object("ranks").integer(name, 0, MOST) for name in root.object("ranks").values},
            world=root.integer("world", 0, MOST),
            sglang=root.text("sglang"),
            wiring=root.texts("wiring"),
            server_wiring=root.texts("server_wiring"),
            taps=root.texts("taps"),
            url=root.text("url"),
            dtype=root.text("dtype"),
            topk=root.integer("topk", 0, MOST),
            target=root.object("target").values,
            details={name: root.object("details").text(name) for name in root.object("details").values},
        )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace this process's manifest in the launch folder. Raises OSError."""
    write_file(folder / manifest_name(manifest.pid), [manifest.to_json().encode()])


def read_manifests(folder: Path) -> list[Manifest]:
    """All manifests of a launch folder, by process id. Raises CaptureError, TraceCorruptError."""
    names = sorted(name for name in names_in(folder) if is_manifest(name))
    read = (read_small(folder / name, _MAX_BYTES).decode("utf-8", "replace") for name in names)
    return sorted(
        (Manifest.from_json(text, str(folder / name)) for name, text in zip(names, read, strict=True)),
        key=lambda manifest: manifest.pid,
    )
