"""Blocks of every anchor: the known token and mask tokens of each, drafted in one pass over all anchors.

The context's keys and values are made once for all (first_pass.py): those of a row come from that row's features alone,
so that no anchor needs a context of its own. What the masks stand for is never fed, so every token of a block is
drafted at once.

Suffixes as in head/block.py: A anchors, B rows of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from replay.drafting.first_pass import FirstPass
from replay.drafting.packed_attention import CommittedKV
from replay.drafting.rows import drafted_positions
from replay.engines.behaviour import Behaviour
from replay.head.attention import KeyValues
from replay.head.block import BlockSight, attend_context_and_block
from replay.head.model import Head

# Rows of blocks that run at once: as many fill the matrix units, and more would only take memory.
_ROWS = 8192


def block_states(head: Head, first: FirstPass, steps: int) -> Iterator[Tensor]:
    """Of each drafted token of a block, ``steps`` of them, the states [A, E] that give its logits."""
    size = head.behaviour.block_size or steps + 1
    anchors = max(1, _ROWS // size)
    requests = first.attention.of_requests()
    parts = [
        _one_pass(head, first, _segments(requests, start, start + anchors), slice(start, start + anchors), size)
        for start in range(0, len(first.anchor_rows_A), anchors)
    ]
    yield from torch.cat(parts)[:, 1 : steps + 1].unbind(1)


def _segments(requests: Sequence[CommittedKV], start: int, stop: int) -> list[CommittedKV]:
    """Of the anchors from ``start`` to before ``stop``, counted over all requests, those of each request."""
    found, before = [], 0
    for committed in requests:
        reach_A = committed.reach_A[max(0, start - before) : max(0, stop - before)]
        if len(reach_A):
            found.append(replace(committed, reach_A=reach_A))
        before += len(committed.reach_A)
    return found


def _one_pass(head: Head, first: FirstPass, segments: Sequence[CommittedKV], part: slice, size: int) -> Tensor:
    """Normed states [A, B, E] of the blocks of some anchors, those of ``segments``."""
    anchor_rows_A = first.anchor_rows_A[part]
    positions_AB = torch.stack([drafted_positions(anchor_rows_A, row + 1, head.behaviour) for row in range(size)], 1)
    embeds_RE = _embed_blocks(head, first.output.normed_RE[part], size).flatten(0, 1)
    output = head.forward(embeds_RE, embeds_RE, positions_AB.flatten(), BlocksOfAnchors(head, segments, size))
    normed_ABE: Tensor = output.normed_RE.unflatten(0, (-1, size))
    return normed_ABE


def _embed_blocks(head: Head, known_AE: Tensor, size: int) -> Tensor:
    """The known token's embedding, then that of the mask token [A, B, E]."""
    assert head.config.block is not None
    mask = head.config.block.mask_token if head.behaviour.mask_token is None else head.behaviour.mask_token
    mask_1E = head.embed(torch.tensor([mask]))
    return torch.cat([known_AE[:, None], mask_1E.expand(len(known_AE), size - 1, -1)], dim=1)


@dataclass(frozen=True, slots=True)
class BlocksOfAnchors:
    """Attention of the blocks of some anchors, request by request: each segment has its own context."""

    head: Head
    segments: Sequence[CommittedKV]
    size: int

    def __call__(self, layer: int, q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        """Mixed values of every row of every block."""
        counts = [len(segment.reach_A) for segment in self.segments]
        split = (rows.unflatten(0, (-1, self.size)).split(counts) for rows in (q_RNH, k_RMH, v_RMH))
        mixed = [
            attend_context_and_block(
                q_ABNH, segment.kv[layer], KeyValues(k_ABMH, v_ABMH), self._sight(segment, layer), self.head.numerics
            )
            for segment, q_ABNH, k_ABMH, v_ABMH in zip(self.segments, *split, strict=True)
        ]
        return torch.cat(mixed).flatten(0, 1)

    def _sight(self, segment: CommittedKV, layer: int) -> BlockSight:
        block, behaviour, reach_A = self.head.config.block, self.head.behaviour, segment.reach_A
        assert block is not None
        causal = block.causal[layer] if behaviour.block_attention is None else behaviour.block_attention == "causal"
        window = block.windows[layer]
        return BlockSight(
            first_AB=_first_rows(reach_A, self.size, window, behaviour, spread=not block.from_anchor),
            stop_A=torch.zeros_like(reach_A) if behaviour.alone else reach_A - behaviour.late_context,
            seen_BB=_seen_rows(self.size, causal, None if block.from_anchor else window, reach_A.device),
            blank_R=segment.blank_R,
            masked=behaviour.blank_fill == "masked",
        )


def _first_rows(reach_A: Tensor, size: int, window: int | None, behaviour: Behaviour, *, spread: bool) -> Tensor:
    """The first context row that each row of a block sees [A, B].

    A layer's own window counts from each row where it is ``spread``, else it is of context rows for the whole block.
    ``Behaviour.window`` cuts the context for the whole block, as SGLang 0.5.23 speculative/dflash_worker_v2.py
    ``_compute_compact_draft_seq_lens`` does with pages of one token. With larger ones it begins at the start of a page,
    and so leaves up to a page less one token more, which no fault says.
    """
    none_AB = torch.zeros((len(reach_A), size), dtype=torch.long, device=reach_A.device)
    rows_B = torch.arange(1, size + 1, device=reach_A.device) * spread
    own_AB = none_AB if window is None else none_AB + reach_A[:, None] + rows_B - window
    cut_A = reach_A * 0 if behaviour.window is None else reach_A - behaviour.window
    return torch.maximum(own_AB, cut_A[:, None])


def _seen_rows(size: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Which rows of its block each row sees [B, B]; a window reaches as far ahead as behind."""
    behind_BB = torch.arange(size, device=device)[:, None] - torch.arange(size, device=device)
    seen_BB = behind_BB >= 0 if causal else torch.ones_like(behind_BB, dtype=torch.bool)
    return seen_BB if window is None else seen_BB & (behind_BB.abs() < window)
