"""The batches of a trace's server: who was drafted for with whom, and what is replayed beside requests for that.

Where states cross between requests (drafting/crossed.py), what one drafts depends on all rounds of its verify pass. In
a walk of its own a request is elsewhere than on the server; each anchor then has the batch of the server's round in
which it lies.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from replay.drafting.crossed import BatchRow, BatchRows
from replay.simulator.fit import rows_seen
from replay.simulator.groups import Group, taps_of
from replay.simulator.inputs import FollowedRounds
from replay.traces.reader import RequestRows, Trace
from replay.traces.records import RequestRecord

if TYPE_CHECKING:
    import polars as pl

OfAnchors = TypeVar("OfAnchors")  # a tensor [A, ...] or a dataclass of such


class Batches:
    """By request where its rounds ran, and by verify pass which rounds ran in it; of ``Trace.served_rounds``."""

    def __init__(self, rounds: "pl.DataFrame") -> None:
        self._anchors: dict[str, list[int]] = {}
        self._rows: dict[str, list[BatchRow | None]] = {}
        self._rounds: dict[int, list[tuple[str, int]]] = {}
        columns = ("request_id", "anchor", "verify_pass", "batch_row", "batch")
        for name, anchor, number, row, batch in rounds.sort("anchor").select(columns).iter_rows():
            told = None not in (number, batch)
            self._anchors.setdefault(name, []).append(anchor)
            self._rows.setdefault(name, []).append(BatchRow(number, row, batch) if told else None)
            if told:
                self._rounds.setdefault(number, []).append((name, anchor))

    def rows_at(self, name: str, anchors: Iterable[int]) -> BatchRows:
        """Of each anchor of a request the batch row of the round in which it lies."""
        starts, rows = self._anchors.get(name, []), self._rows.get(name, [])
        places = [bisect_right(starts, anchor) - 1 for anchor in anchors]
        return [rows[place] if place >= 0 else None for place in places]

    def beside(self, asked: Mapping[str, Sequence[int] | None]) -> dict[str, set[int]]:
        """Where the rounds start that ran in the batches of these anchors (None: of all rounds), request by request."""
        found: dict[str, set[int]] = {}
        for name, anchors in asked.items():
            rows = self._rows.get(name, []) if anchors is None else self.rows_at(name, anchors)
            for number in {row.verify_pass for row in rows if row is not None}:
                for other, anchor in self._rounds[number]:
                    found.setdefault(other, set()).add(anchor)
        return found


@dataclass(frozen=True, slots=True)
class Together:
    """A pack with the requests that have to be replayed beside it: ``rows``, and the anchors of each in ``leads``.

    The pack's own come first; ``asked`` says which of their anchors were asked for.
    """

    rows: list[RequestRows]
    leads: list[FollowedRounds]
    asked: list[torch.Tensor]

    def keep(self, made: Sequence[OfAnchors]) -> list[OfAnchors]:
        """Of what was made at the anchors of each request that of the pack's own."""
        return [pick(one, index_A) for one, index_A in zip(made, self.asked, strict=False)]


def pick(made: OfAnchors, index_A: torch.Tensor) -> OfAnchors:
    """Some rows of a tensor, or of each tensor of a dataclass."""
    if isinstance(made, torch.Tensor):
        return made[index_A]  # type: ignore[return-value]
    return replace(made, **{field.name: getattr(made, field.name)[index_A] for field in fields(made)})  # type: ignore


def batches_for(groups: Sequence[Group], trace: Trace) -> Batches | None:
    """The batches of the trace's server, where some group asks for them: all of each, also where a part is replayed."""
    return Batches(trace.whole.served_rounds()) if any(group.crosses for group in groups) else None


def gather(
    batches: Batches,
    trace: Trace,
    stem: Sequence[Group],
    pack: Sequence[RequestRows],
    leads: Sequence[FollowedRounds],
) -> Together:
    """A pack whose ``leads`` say where it drafts, with all rounds of the batches in which these anchors lie.

    A neighbour that lacks a tap or a row that the groups of the ``stem`` read counts as one that is not in the trace.
    Memory grows with the most requests that the server verified together. Raises as ``Trace.read``.
    """
    whole = trace.whole  # of a part, neighbours may be outside of it
    asked = {rows.request_id: lead.anchors for rows, lead in zip(pack, leads, strict=True)}
    beside = batches.beside(asked)
    places = {record.request_id: place for place, record in enumerate(whole.records)}
    taps = taps_of(stem)
    can_play = _playable(whole, stem, taps)
    others = [name for name in beside.keys() - asked.keys() if can_play(whole.records[places[name]])]
    others.sort(key=lambda name: places[name])
    rows = [*pack, *(whole.read(places[name], taps) for name in others)]
    wider = [
        FollowedRounds(None if lead.anchors is None else tuple(sorted({*lead.anchors, *beside.get(name, ())})))
        for name, lead in zip(asked, leads, strict=True)
    ]
    wider += [FollowedRounds(tuple(sorted(beside[name]))) for name in others]
    kept = [_places(one, *pair) for one, *pair in zip(pack, leads, wider, strict=False)]
    return Together(rows, wider, kept)


def _playable(whole: Trace, stem: Sequence[Group], taps: Sequence[str]) -> Callable[[RequestRecord], bool]:
    """Whether a request has all that the groups of a stem read: these taps, and rows of its prompt."""
    needed = [rows_seen(group.head.config, group.head.behaviour) for group in stem]
    stored = {tap for tap in taps if tap in whole.header.taps}

    def can_play(record: RequestRecord) -> bool:
        kept = record.prompt_tokens - record.rows_left_out
        rows = not record.rows_left_out or all(seen is not None and seen <= kept for seen in needed)
        return rows and (record.taps is None or stored <= set(record.taps))

    return can_play


def _places(rows: RequestRows, asked: FollowedRounds, wider: FollowedRounds) -> torch.Tensor:
    """Where the anchors that were asked for stand among all at which a request drafts."""
    last = len(rows.tokens) - 1
    own_A, all_A = asked.anchors_before(last), wider.anchors_before(last)
    if own_A is None or all_A is None:
        return torch.arange(max(0, last - rows.prompt_tokens))
    return torch.searchsorted(all_A, own_A)
