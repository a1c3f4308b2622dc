"""The first pass: every committed row of many requests at once, which makes the committed draft KV.

The rows that true features made are the committed draft KV, as a server holds it after each verify (SGLang 0.5.23
speculative/eagle_worker_v2.py, draft extend). Suffixes as in head/model.py and head/attention.py: R rows of all packed
requests, A anchors of all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.product_sizes import products_of_rows
from replay.drafting.rows import DraftInput, Rows, committed_rows
from replay.head.attention import Sight, attend_committed_and_chain
from replay.head.model import Head, HeadOutput


class PackedAttention:
    """Attention for rows packed request after request; holds the committed keys and values."""

    def __init__(self, head: Head, inputs: Sequence[DraftInput], rows: Sequence[Rows]) -> None:
        self._head = head
        self._rows = [item.rows for item in inputs]
        self._reach_all = [torch.arange(1, rows + 1, device=head.device) for rows in self._rows]
        # Anchor S drafts from row S-1 and sees rows 0..S-1.
        self._reach_anchors = [item.anchors_A.to(head.device) for item in inputs]
        self._blanks = [None if part.blank_R is None else part.blank_R.to(head.device) for part in rows]
        self._base: list[tuple[Tensor, Tensor]] = []

    def committed_kv(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [R, M, H] of each request's committed rows, after pass 1."""
        keys, values = (part.split(self._rows) for part in self._base[layer])
        return list(zip(keys, values, strict=True))

    def committed(self, layer: int, q: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        """Pass 1: remember every row, answer for every row, or where only these ask for the anchors' rows."""
        self._base.append((k_RMH, v_RMH))
        none = k_RMH.new_empty((0, len(q), *k_RMH.shape[1:]))
        return self.answer(layer, q, none, none, 0, every=len(q) == len(k_RMH))

    def answer(
        self, layer: int, q: Tensor, k_JAMH: Tensor, v_JAMH: Tensor, step: int, *, every: bool = False
    ) -> Tensor:
        """Mixed values for the rows that embed the anchors' drafted token number ``step`` and see J drafted rows.

        Step 0 are the anchors' own rows, or with ``every`` all committed ones.
        """
        reaches = self._reach_all if every else self._reach_anchors
        counts = [len(reach) for reach in reaches]
        parts = zip(
            q.split(counts),
            self.committed_kv(layer),
            reaches,
            k_JAMH.split(counts, 1),
            v_JAMH.split(counts, 1),
            self._blanks,
            strict=True,
        )
        answers = [
            attend_committed_and_chain(
                q, base_k, base_v, reach, k, v, self._head.numerics, self._sight(reach, blank_R, step)
            )
            for q, (base_k, base_v), reach, k, v, blank_R in parts
        ]
        return torch.cat(answers)

    def _sight(self, reach_A: Tensor, blank_R: Tensor | None, step: int) -> Sight:
        behaviour = self._head.behaviour
        first_A = None
        if behaviour.alone:
            first_A = reach_A - 1
        elif behaviour.window is not None:
            first_A = reach_A + step - behaviour.window
        return Sight(first_A, blank_R, reach_A - 1, behaviour.blank_fill == "masked")


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What pass 1 leaves behind: the committed draft KV, and for each anchor its row's output and index [A]."""

    attention: PackedAttention
    output: HeadOutput
    positions_A: Tensor
    sizes_A: Tensor | None = None  # of the products in which a server read logits from these rows


def first_pass(head: Head, inputs: Sequence[DraftInput]) -> FirstPass:
    """One causal pass over every committed row. There must be an anchor in some request.

    A head with ``product_rows`` makes every row in a product as large as the server's (product_sizes.py).
    """
    parts = [committed_rows(item, head.behaviour, head.config.target_hidden_size) for item in inputs]
    attention = PackedAttention(head, inputs, parts)
    ids_R = torch.cat([part.ids_R for part in parts]).to(head.device)
    positions_R = torch.cat([part.positions_R for part in parts]).to(head.device)
    features_RKD = torch.cat([part.features_RKD for part in parts])
    keep_A = _anchor_rows(inputs, head.device)
    index_A = torch.cat([item.anchors_A for item in inputs]).to(head.device) - 1
    if head.product_rows is None:
        output = head.forward(head.embed(ids_R), head.fuse(features_RKD), positions_R, attention.committed, keep_A)
    else:
        # All rows to the end: an anchor's row that ran in a prefill keeps the company that it had there.
        sizes = [served_sizes(head, item, head.product_rows) for item in inputs]
        with head.products_like(torch.cat(sizes)):
            whole = head.forward(head.embed(ids_R), head.fuse(features_RKD), positions_R, attention.committed)
        output = HeadOutput(whole.normed_RE[keep_A], whole.feedback_RE[keep_A])
        # A prefill reads logits from last rows only, a draft extend from all of its rows.
        sizes_A = torch.cat(sizes).to(head.device)[keep_A]
        after_prompt_A = torch.cat([item.anchors_A == item.prompt_tokens for item in inputs]).to(head.device)
        return FirstPass(attention, output, index_A, sizes_A.masked_fill(after_prompt_A, head.product_rows))
    return FirstPass(attention, output, index_A)


def served_sizes(head: Head, item: DraftInput, product_rows: int) -> Tensor:
    """Size of the product in which the server ran each row of a request [R]."""
    return products_of_rows(
        item.rows, item.prompt_tokens, item.spans, product_rows=product_rows, prefill_rows=head.prefill_rows
    )


def _anchor_rows(inputs: Sequence[DraftInput], device: torch.device) -> Tensor:
    """Indices of the anchors' rows among all packed rows."""
    rows, start = [], 0
    for item in inputs:
        rows.append((start - 1 + item.anchors_A).to(device))
        start += item.rows
    return torch.cat(rows)
