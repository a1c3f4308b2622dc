"""Requests of a trace, a pack of them at a time: as many as fill a pass, and never more in memory."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from replay.drafting.features import JoinedTaps
from replay.drafting.row_blocks import BLOCK_ROWS
from replay.drafting.rows import DraftInput, Span, chunk_ends
from replay.engines.behaviour import Chunk
from replay.engines.wiring import Wiring
from replay.traces.reader import RequestRows, Trace
from replay.traces.taps import FINAL

if TYPE_CHECKING:
    import polars as pl


# Rows packed into one pass, unless one request alone has more, which then goes in blocks.
PACK_ROWS = BLOCK_ROWS


def plan_packs(trace: Trace, only: Container[str] | None = None) -> Iterator[list[int]]:
    """The places of the requests of each pack, in trace order; ``only`` some of them. No row is read."""
    pack: list[int] = []
    rows = 0
    for index, record in enumerate(trace.records):
        if only is not None and record.request_id not in only:
            continue
        if pack and rows + record.tokens > PACK_ROWS:
            yield pack
            pack, rows = [], 0
        pack.append(index)
        rows += record.tokens
    if pack:
        yield pack


def read_packs(trace: Trace, taps: Sequence[str], only: Container[str] | None = None) -> Iterator[list[RequestRows]]:
    """Requests in trace order with ``taps``, a few thousand rows at a time; ``only`` some of them.

    Raises WiringError, TraceCorruptError.
    """
    for pack in plan_packs(trace, only):
        yield [trace.read(index, tuple(taps)) for index in pack]


def draft_input(
    rows: RequestRows, wiring: Wiring, sampled_T: torch.Tensor | None = None, spans: Sequence[Span] = ()
) -> DraftInput:
    """One request of the trace as a draft takes it; ``spans`` as ``served_spans`` gave them."""
    taps = JoinedTaps(tuple(rows.taps[tap] for tap in wiring.taps))
    return DraftInput(
        rows.tokens, taps, rows.prompt_tokens, sampled_T, spans=spans, pieces=rows.pieces, cached=rows.cached
    )


def sampled_after_chunks(rows: RequestRows, trace: Trace, chunk: Chunk) -> torch.Tensor:
    """What the target would say after each chunk's last prompt row [T]; 0 elsewhere. Needs the tap ``final``."""
    from replay.traces.lm_head import recompute

    sampled_T = torch.zeros_like(rows.tokens)
    ends = torch.tensor(list(chunk_ends(rows.prompt_tokens, chunk, rows.pieces)), dtype=torch.long)
    if len(ends):
        none = torch.empty((len(ends), 0), dtype=torch.long)
        weight_VE = trace.lm_head_weight()
        sampled_T[ends] = recompute(rows.taps[FINAL][ends], weight_VE, none, dtype=trace.header.target.dtype).best_id
    return sampled_T


@dataclass(frozen=True, slots=True)
class FollowedRounds:
    """The rounds of one request in the run that is followed: their anchors and accepted tokens (None: follow none)."""

    anchors: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None

    def anchors_before(self, last: int) -> torch.Tensor | None:
        """The anchors from which something is left to draft."""
        return None if self.anchors is None else torch.tensor([a for a in self.anchors if a < last], dtype=torch.long)


def followed_rounds(follow: "pl.DataFrame") -> dict[str, FollowedRounds]:
    """By request the rounds of a table such as ``Trace.served_rounds``."""
    grouped = follow.sort("round").group_by("request_id", maintain_order=True).agg("anchor", "accepted")
    return {name: FollowedRounds(tuple(anchors), tuple(accepted)) for name, anchors, accepted in grouped.iter_rows()}
