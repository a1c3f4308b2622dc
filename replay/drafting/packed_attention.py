"""Attention over rows packed request after request: who holds the committed keys and values of a first pass.

Suffixes as in head/model.py and head/attention.py: R rows of all packed requests, A anchors of all, J drafted rows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from replay.drafting.row_blocks import overlaps
from replay.drafting.rows import DraftInput
from replay.head.attention import KeyValues, Sight, attend_committed_and_chain
from replay.head.model import Attend, Head
from replay.head.products import to_device

# Of a request: its number, how many of its committed rows are there, and which of its rows or anchors ask.
_Asked = tuple[int, int, range]


@dataclass(frozen=True, slots=True)
class CommittedKV:
    """Of one request the keys and values of its committed rows by layer, how many each anchor sees [A], and which left
    none [R] (None: all left theirs)."""

    kv: Sequence[KeyValues]
    reach_A: Tensor
    blank_R: Tensor | None


class PackedAttention:
    """Attention for rows packed request after request; holds the committed keys and values."""

    def __init__(
        self, head: Head, inputs: Sequence[DraftInput], blanks: Sequence[Tensor | None], *, anchors_last: bool
    ) -> None:
        """``blanks``: of each request, which rows leave no KV.

        ``anchors_last``: in the head's last layer the first pass asks for the anchors' rows only.
        """
        self._head, self._anchors_last = head, anchors_last
        self._rows = [item.rows for item in inputs]
        self._reach_all = [torch.arange(1, rows + 1, device=head.device) for rows in self._rows]
        # Anchor S drafts from row S-1 and sees rows 0..S-1.
        self._reach_anchors = [to_device(item.anchors_A, head.device) for item in inputs]
        self._number_all = [range(1, rows + 1) for rows in self._rows]
        self._number_anchors: list[list[int]] = [item.anchors_A.tolist() for item in inputs]
        self._blanks = [None if blank_R is None else blank_R.to(head.device) for blank_R in blanks]
        self._base: list[KeyValues] = []

    def committed_kv(self, layer: int) -> list[KeyValues]:
        """Keys and values [R, M, H] of each request's committed rows, once the first pass has made them."""
        keys, values = (part.split(self._rows) for part in self._base[layer])
        return [KeyValues(*pair) for pair in zip(keys, values, strict=True)]

    def remember(self, layer: int, block: range, kv: KeyValues) -> None:
        """Keep the keys and values of a block of rows; blocks come in order, layers of each in theirs."""
        rows = sum(self._rows)
        if len(block) == rows:
            self._base.append(kv)
            return
        if not block.start:
            self._base.append(KeyValues(*(part.new_empty((rows, *part.shape[1:])) for part in kv)))
        for whole, part in zip(self._base[layer], kv, strict=True):
            whole[block.start : block.stop] = part

    def of_requests(self) -> list[CommittedKV]:
        """What is held, request by request."""
        layers = [self.committed_kv(layer) for layer in range(len(self._base))]
        parts = zip(*layers, strict=True)
        return [CommittedKV(*one) for one in zip(parts, self._reach_anchors, self._blanks, strict=True)]

    def anchor_rows(self, block: range) -> Tensor:
        """The anchors' rows among those of a block, counted from its first."""
        parts, before = [], 0
        for count, anchors_A, numbers in zip(
            self._rows, self._reach_anchors, self._number_anchors, strict=True
        ):  # fmt: skip
            first = before - block.start
            rows = range(max(0, -first), min(count, len(block) - first))
            own = _anchors_of(numbers, rows)
            parts.append(anchors_A[own.start : own.stop] + (first - 1))
            before += count
        return torch.cat(parts)

    def committed(self, block: range) -> Attend:
        """The first pass over a block of rows: remember every row, answer for those that are asked for."""
        return partial(self._answer_committed, block)

    def _answer_committed(self, block: range, layer: int, q: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        self.remember(layer, block, KeyValues(k_RMH, v_RMH))
        none = KeyValues(*(part.new_empty((0, len(q), *part.shape[1:])) for part in (k_RMH, v_RMH)))
        some = self._anchors_last and layer == self._head.config.num_layers - 1
        asked = [
            (request, rows.stop, _anchors_of(self._number_anchors[request], rows) if some else rows)
            for request, rows in overlaps(self._rows, block)
        ]
        return self._answer(layer, q, none, 0, asked, anchors=some)

    def answer(self, layer: int, q_ANH: Tensor, chain: KeyValues, step: int, block: range) -> Tensor:
        """Mixed values for a block of all anchors: of the rows that embed their drafted token number ``step`` and see J
        drafted rows."""
        counts = [len(numbers) for numbers in self._number_anchors]
        asked = [(request, self._rows[request], anchors) for request, anchors in overlaps(counts, block)]
        return self._answer(layer, q_ANH, chain, step, asked, anchors=True)

    def _answer(
        self, layer: int, q: Tensor, chain: KeyValues, step: int, asked: Iterable[_Asked], *, anchors: bool
    ) -> Tensor:
        asked = [one for one in asked if one[2]]
        reaches = self._reach_anchors if anchors else self._reach_all
        numbers: Sequence[Sequence[int]] = self._number_anchors if anchors else self._number_all
        counts = [len(own) for *_, own in asked]
        kv = self.committed_kv(layer)
        chains = (KeyValues(*pair) for pair in zip(chain.k.split(counts, 1), chain.v.split(counts, 1), strict=True))
        answers = []
        for (request, rows, own), one, drafted in zip(asked, q.split(counts), chains, strict=True):
            base = KeyValues(kv[request].k[:rows], kv[request].v[:rows])
            part = slice(own.start, own.stop)
            reach_A = reaches[request][part]
            sight = self._sight(reach_A, self._blanks[request], step)
            answers.append(
                attend_committed_and_chain(
                    one, base, reach_A, drafted, self._head.numerics, sight, numbers[request][part]
                )
            )  # fmt: skip
        return torch.cat(answers) if answers else q.new_empty((0, q.shape[1] * kv[0].v.shape[-1]))

    def _sight(self, reach_A: Tensor, blank_R: Tensor | None, step: int) -> Sight:
        behaviour = self._head.behaviour
        first_A = None
        if behaviour.alone:
            first_A = reach_A - 1
        elif behaviour.window is not None:
            first_A = reach_A + step - behaviour.window
        return Sight(first_A, blank_R, reach_A - 1, behaviour.blank_fill == "masked")


def _anchors_of(numbers: Sequence[int], rows: range) -> range:
    """Which anchors draft from rows of this range: S drafts from row S-1."""
    return range(bisect_right(numbers, rows.start), bisect_right(numbers, rows.stop)) if rows else range(0)
