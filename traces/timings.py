"""The timings file: how long rounds of a running server took, one JSON object a line.

Each line is one load that was asked for:

- ``format`` and ``format_version``.
- ``batch``: requests that ran together. ``context``: tokens of each, in the middle of its output.
- ``steps``, ``topk`` and ``num_draft_tokens`` of the server; 0, 1 and 1 where it does not speculate.
- ``round_ms``: milliseconds of a round in each repeat. ``rounds``: those counted, of all requests and repeats.
- ``accept_length`` of these: 1 without speculation, null for random token ids, which say nothing of it.
- ``prompts``: the SHA-256 of their file, null for random token ids.
- ``server``, ``engine``, ``model``, ``algorithm``, ``draft``, ``recording``, ``time`` (UTC) and ``replay``: what was
  timed, when, and by which version.

Lines of several servers may stand in one file. Other keys are left alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replay.errors import TraceVersionError
from replay.traces.fields import Fields, show

FORMAT = "replay-timings"
VERSION = 1
_MOST_BATCH, _MOST_STEPS, _MOST_NODES, _MOST_CONTEXT = 1 << 16, 1 << 10, 1 << 16, 1 << 24
_MOST_ROUNDS, _MOST_REPEATS, _MOST_TEXT = 1 << 40, 1 << 16, 4096
_LEAST_MS, _MOST_MS = 1e-6, 1e9


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of a timings file; the module's text says what each field is."""

    batch: int
    context: int
    steps: int
    topk: int
    num_draft_tokens: int
    round_ms: tuple[float, ...]
    rounds: int
    accept_length: float | None
    prompts: str | None
    server: str
    engine: str
    model: str
    algorithm: str | None
    draft: str | None
    recording: bool
    time: str
    replay: str


def is_measured(document: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a line of a timings file, of whatever version."""
    return document.get("format") == FORMAT


def is_timings_file(path: Path) -> bool:
    """Whether a file begins as those that replay writes."""
    start = json.dumps({"format": FORMAT})[:-1].encode()
    with path.open("rb") as file:
        return file.read(len(start)) == start


def timings_bytes(measured: Sequence[Measured]) -> bytes:
    """The whole file."""
    head = {"format": FORMAT, "format_version": VERSION}
    return b"".join(json.dumps(head | asdict(one)).encode() + b"\n" for one in measured)


def read_measured(document: Mapping[str, Any], where: str) -> Measured:
    """One line as it was parsed; ``where`` names it. Raises TraceVersionError and TraceCorruptError."""
    version = document.get("format_version")
    if version != VERSION:
        raise TraceVersionError(
            f"{where} is a timing of format version {show(version)}, this replay reads {VERSION}; measure it again"
        )
    line = Fields(where, dict(document))
    times = line.get("round_ms")
    if not isinstance(times, list) or not 1 <= len(times) <= _MOST_REPEATS:
        raise line.refuse("round_ms", f"a list of 1 to {_MOST_REPEATS} numbers")
    steps = line.integer("steps", 0, _MOST_STEPS)
    known = line.get("accept_length") is not None
    return Measured(
        batch=line.integer("batch", 1, _MOST_BATCH),
        context=line.integer("context", 1, _MOST_CONTEXT),
        steps=steps,
        topk=line.integer("topk", 1, _MOST_NODES),
        num_draft_tokens=line.integer("num_draft_tokens", 1 if steps == 0 else 2, _MOST_NODES),
        round_ms=tuple(
            Fields(where, {"round_ms": value}).number("round_ms", _LEAST_MS, _MOST_MS) for value in times
        ),
        rounds=line.integer("rounds", 1, _MOST_ROUNDS),
        accept_length=line.number("accept_length", 1, steps + 1) if known else None,
        prompts=line.optional_text("prompts"),
        server=line.text("server", _MOST_TEXT),
        engine=line.text("engine", _MOST_TEXT),
        model=line.text("model", _MOST_TEXT),
        algorithm=line.optional_text("algorithm"),
        draft=line.optional_text("draft"),
        recording=line.flag("recording"),
        time=line.text("time", _MOST_TEXT),
        replay=line.text("replay", _MOST_TEXT),
    )  # fmt: skip
