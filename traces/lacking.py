"""What a trace leaves out by choice (SPEC.md, version 2), a sentence each in the ``missing`` of its header."""

import re
from collections.abc import Iterator, Sequence

from replay.printable import counted
from replay.traces.header import FP8, TraceHeader
from replay.traces.records import RequestRecord

_BY_CHOICE = re.compile(r"the taps .* of (some|\d+ of \d+) requests?\b|the exact rows of |the rows of longer prompts")


def say_rounded(taps: Sequence[str]) -> str:
    """Of ``taps`` in fp8."""
    return f"the exact rows of {', '.join(taps)}: they are stored in fp8"


def say_missing(header: TraceHeader, records: Sequence[RequestRecord]) -> tuple[str, ...]:
    """What ``header`` says to be missing, with what these of its requests lack in place of what it says of others."""
    return (*(what for what in header.missing if not _BY_CHOICE.match(what)), *_lacking(header, records))


def _lacking(header: TraceHeader, records: Sequence[RequestRecord]) -> Iterator[str]:
    every = counted(len(records), "request")
    held = [set(record.taps or header.taps) for record in records]
    if fewer := [tap for tap in header.taps if not all(tap in taps for taps in held)]:
        bare = sum(not taps.issuperset(fewer) for taps in held)
        yield f"the taps {', '.join(fewer)} of {bare} of {every}: not all have all of these"
    if rounded := [tap for tap, info in header.taps.items() if info.dtype == FP8]:
        yield say_rounded(rounded)
    kept = [record.prompt_tokens - record.rows_left_out for record in records if record.rows_left_out]
    if kept:
        yield f"the rows of longer prompts before their last {min(kept)}, of {len(kept)} of {every}"
