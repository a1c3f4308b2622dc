"""Requests of one trace that have other taps than others: who has which. See SPEC.md, 4."""

from collections.abc import Iterable, Sequence

from replay.traces.header import TraceHeader
from replay.traces.records import RequestRecord
from replay.traces.taps import EMBED, sort_taps


def taps_of(record: RequestRecord, header: TraceHeader) -> tuple[str, ...]:
    """The stored taps that a request has."""
    return record.taps or tuple(header.taps)


def is_looked_up(tap: str, header: TraceHeader) -> bool:
    """Whether ``tap`` is not stored: the target's embedding has its rows."""
    return tap == EMBED and header.embed == "lookup"


def requests_with(tap: str, records: Sequence[RequestRecord], header: TraceHeader) -> int:
    """How many of the requests have ``tap``, stored or to be looked up."""
    looked_up = is_looked_up(tap, header)
    return sum(looked_up or tap in taps_of(record, header) for record in records)


def tiers(records: Sequence[RequestRecord], header: TraceHeader) -> list[list[RequestRecord]]:
    """The requests that have the same taps, those with the most taps first."""
    alike: dict[tuple[str, ...] | None, list[RequestRecord]] = {}
    for record in records:
        alike.setdefault(record.taps, []).append(record)
    every = len(header.taps)
    return [alike[taps] for taps in sorted(alike, key=lambda one: -(every if one is None else len(one)))]


def having(
    records: Sequence[RequestRecord], header: TraceHeader, taps: Iterable[str]
) -> tuple[str, list[RequestRecord]]:
    """Those of ``taps`` that are stored, in words, and the requests that have all of these."""
    wanted = [tap for tap in sort_taps(list(taps)) if tap in header.taps]
    named = f"the taps {', '.join(wanted)}" if len(wanted) > 1 else f"the tap {''.join(wanted)}"
    return named, [record for record in records if record.taps is None or set(wanted) <= set(record.taps)]
