"""The engine: drafts of every anchor of many requests, one pass over all rows per step.

The first drafted token of every anchor comes from one causal pass over rows of true target features, the j-th from
one more pass in which each anchor's row also sees that anchor's own earlier rows: K passes replace K x rounds.
The rows that true features made are the committed draft KV, as a server holds it after each verify
(SGLang 0.5.23 speculative/eagle_worker_v2.py, draft extend).

Suffixes as in head.py and attention.py: R rows of all packed requests, A anchors of all, K steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.product_sizes import products_of_rows
from replay.drafting.rows import DraftInput, Rows, committed_rows, drafted_positions
from replay.engines.behaviour import Conduct
from replay.head.attention import Sight, attend_committed_and_chain
from replay.head.model import Head, HeadOutput

# Logits in memory at a time, in elements.
_BLOCK_LOGITS = 1 << 26


@dataclass(frozen=True, slots=True)
class Drafts:
    """Target ids drafted at each anchor of one request [A, K], and where the best logit was shared [A, K]."""

    drafted_AK: Tensor
    tied_AK: Tensor


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
        conduct = self._head.conduct
        first_A = None
        if conduct.alone:
            first_A = reach_A - 1
        elif conduct.window is not None:
            first_A = reach_A + step - conduct.window
        return Sight(first_A, blank_R, reach_A - 1, conduct.blank_fill == "masked")


class ChainAttention:
    """Attention of drafted rows: the committed rows that ``base`` holds, and the anchor's own drafted rows before."""

    def __init__(self, head: Head, base: PackedAttention) -> None:
        self._base, self._conduct = base, head.conduct
        self._chain: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.config.num_layers)]

    def __call__(self, layer: int, q: Tensor, k_AMH: Tensor, v_AMH: Tensor) -> Tensor:
        """One more drafted row per anchor."""
        chain = self._chain[layer]
        chain.append((k_AMH, v_AMH))
        seen = chain[seen_from(self._conduct, len(chain)) :]
        if seen:
            k_JAMH, v_JAMH = (torch.stack(part) for part in zip(*seen, strict=True))
        else:
            k_JAMH, v_JAMH = (part.new_empty((0, *part.shape)) for part in (k_AMH, v_AMH))
        return self._base.answer(layer, q, k_JAMH, v_JAMH, len(chain))


def seen_from(conduct: Conduct, step: int) -> int:
    """How many of the first drafted rows the drafted row of ``step`` (1, 2, ...) does not see."""
    hidden = {"grow": 0, "overwrite": step - 1, "unseen": step}[conduct.chain]
    return hidden if conduct.window is None else max(hidden, step - conduct.window)


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What pass 1 leaves behind: the committed draft KV, and for each anchor its row's output and index [A]."""

    attention: PackedAttention
    output: HeadOutput
    positions_A: Tensor
    sizes_A: Tensor | None = None  # of the products in which a server read logits from these rows


def first_pass(head: Head, inputs: Sequence[DraftInput]) -> FirstPass:
    """One causal pass over every committed row. There must be an anchor in some request.

    A head with ``product_rows`` makes every row in a product as large as the server's (served_products.py).
    """
    parts = [committed_rows(item, head.conduct, head.config.target_hidden_size) for item in inputs]
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


def draft_every_anchor(
    head: Head,
    inputs: Sequence[DraftInput],
    steps: int,
    *,
    first: FirstPass | None = None,
    fed: Sequence[Tensor] | None = None,
) -> list[Drafts]:
    """Drafts of ``steps`` tokens at every anchor of every request, in the order of ``inputs``.

    ``first`` is the first pass over the same inputs, where another variant that agrees up to there has made it.
    ``fed`` are target ids [A, >= K-1] for each request: drafted rows then embed these, one a step, whatever was
    drafted (teacher-forced, as training runs a head).
    Equal to running each anchor by itself (twin.py) up to the rounding of products over other numbers of rows. Conduct
    that follows the walk is not played here but in walk.py.
    """
    inputs = list(inputs)
    if sum(item.anchors for item in inputs) == 0:
        empty = torch.empty((0, steps), dtype=torch.long)
        return [Drafts(empty, empty.bool()) for _ in inputs]
    first = first or first_pass(head, inputs)
    output, chain = first.output, ChainAttention(head, first.attention)
    drafted: list[Tensor] = []
    tied: list[Tensor] = []
    fed_AK = None if fed is None else torch.cat(list(fed)).to(head.device)
    for step in range(steps):
        if step:
            embeds_AE = head.embed(drafted[-1] if fed_AK is None else fed_AK[:, step - 1])
            positions_A = drafted_positions(first.positions_A, step, head.conduct)
            output = head.forward(embeds_AE, output.feedback_RE, positions_A, chain)
        ids_A, tied_A = next_tokens(head, output.normed_RE, None if step else first.sizes_A)
        drafted.append(ids_A)
        tied.append(tied_A)
    counts = [item.anchors for item in inputs]
    drafted_AK, tied_AK = torch.stack(drafted, 1).cpu(), torch.stack(tied, 1).cpu()
    if head.conduct.dummy_from is not None:
        drafted_AK[first.positions_A.cpu() >= head.conduct.dummy_from] = 0
    return [Drafts(*parts) for parts in zip(drafted_AK.split(counts), tied_AK.split(counts), strict=True)]


def _anchor_rows(inputs: Sequence[DraftInput], device: torch.device) -> Tensor:
    """Indices of the anchors' rows among all packed rows."""
    rows, start = [], 0
    for item in inputs:
        rows.append((start - 1 + item.anchors_A).to(device))
        start += item.rows
    return torch.cat(rows)


def next_tokens(head: Head, normed_AE: Tensor, sizes_A: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``choose`` for every row, a block of rows at a time: logits of all anchors over a large vocabulary are many.

    ``sizes_A`` of the products in which each row's logits are computed, where these matter.
    """
    block = max(1, _BLOCK_LOGITS // head.config.draft_vocab_size)
    parts = []
    for start in range(0, len(normed_AE), block):
        with head.products_like(None if sizes_A is None else sizes_A[start : start + block]):
            parts.append(choose(head, head.logits(normed_AE[start : start + block])))
    return torch.cat([ids_A for ids_A, _ in parts]), torch.cat([tied_A for _, tied_A in parts])


def choose(head: Head, logits_AW: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy draft token of each row as a target id [A], and whether its logit was shared [A].

    Of equal logits the lowest draft id wins.
    """
    index_A = logits_AW.max(dim=-1).indices  # the first of equals, which topk does not promise
    best_A2 = logits_AW.topk(min(2, logits_AW.shape[1]), dim=-1).values
    tied_A = (best_A2[:, 0] == best_A2[:, -1]) & (logits_AW.shape[1] > 1)
    return head.target_ids_W[index_A], tied_A
