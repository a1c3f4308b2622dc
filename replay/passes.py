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

from replay.attention import attend_committed_and_chain
from replay.head import Head, HeadOutput

# Logits in memory at a time, in elements.
_BLOCK_LOGITS = 1 << 26


@dataclass(frozen=True, slots=True)
class DraftInput:
    """One request: its tokens [T] and the features [>= T-2, K*D] of its rows, taps joined in wiring order."""

    tokens_T: Tensor
    features_RKD: Tensor
    prompt_tokens: int

    @property
    def rows(self) -> int:
        """Rows a draft ever reads: the last output token starts no round, so neither its row nor the one before."""
        return max(0, len(self.tokens_T) - 2)

    @property
    def anchors(self) -> int:
        """Anchors S = prompt_tokens .. T-2, each drafting from row S-1."""
        return max(0, len(self.tokens_T) - 1 - self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Target ids drafted at each anchor of one request [A, K], and where the best logit was shared [A, K]."""

    drafted_AK: Tensor
    tied_AK: Tensor


class PackedAttention:
    """Attention for rows packed request after request; holds the committed and the chain keys and values."""

    def __init__(self, head: Head, inputs: Sequence[DraftInput]) -> None:
        self._numerics = head.numerics
        self._rows = [item.rows for item in inputs]
        self._anchors = [item.anchors for item in inputs]
        self._reach_all = [torch.arange(1, rows + 1, device=head.device) for rows in self._rows]
        # Anchor S drafts from row S-1 and sees rows 0..S-1.
        self._reach_anchors = [
            reach[len(reach) - count :] for reach, count in zip(self._reach_all, self._anchors, strict=True)
        ]
        self._base: list[tuple[Tensor, Tensor]] = []
        self._chain: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.config.num_layers)]

    def committed_kv(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [R, M, H] of each request's committed rows, after pass 1."""
        keys, values = (part.split(self._rows) for part in self._base[layer])
        return list(zip(keys, values, strict=True))

    def committed(self, layer: int, q: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        """Pass 1: remember every row, answer for every row, or where only these ask for the anchors' rows."""
        self._base.append((k_RMH, v_RMH))
        return self._answer(layer, q, self._reach_all if len(q) == len(k_RMH) else self._reach_anchors)

    def chained(self, layer: int, q: Tensor, k_AMH: Tensor, v_AMH: Tensor) -> Tensor:
        """Pass j: one more chain row per anchor."""
        self._chain[layer].append((k_AMH, v_AMH))
        return self._answer(layer, q, self._reach_anchors)

    def _answer(self, layer: int, q: Tensor, reaches: list[Tensor]) -> Tensor:
        base_k, base_v = (part.split(self._rows) for part in self._base[layer])
        chain_k, chain_v = self._stack_chain(layer, q.shape[0], base_k[0])
        counts = [len(reach) for reach in reaches]
        parts = zip(
            q.split(counts), base_k, base_v, reaches, chain_k.split(counts, 1), chain_v.split(counts, 1), strict=True
        )
        answers = [
            attend_committed_and_chain(queries, k, v, reach, own_k, own_v, self._numerics)
            for queries, k, v, reach, own_k, own_v in parts
        ]
        return torch.cat(answers)

    def _stack_chain(self, layer: int, queries: int, like: Tensor) -> tuple[Tensor, Tensor]:
        chain = self._chain[layer]
        if not chain:
            empty = like.new_empty((0, queries, *like.shape[1:]))
            return empty, empty
        return torch.stack([k for k, _ in chain]), torch.stack([v for _, v in chain])


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What pass 1 leaves behind: the committed draft KV, and for each anchor its row's output and position [A]."""

    attention: PackedAttention
    output: HeadOutput
    positions_A: Tensor


def first_pass(head: Head, inputs: Sequence[DraftInput]) -> FirstPass:
    """One causal pass over every row of true target features. There must be an anchor in some request.

    A head with ``product_rows`` runs each prompt in products as large as the server's prefill of it.
    """
    attention = PackedAttention(head, inputs)
    ids_R = torch.cat([item.tokens_T[1 : 1 + item.rows] for item in inputs]).to(head.device)
    positions_R = torch.cat([torch.arange(item.rows, device=head.device) for item in inputs])
    features_RKD = torch.cat([item.features_RKD[: item.rows] for item in inputs])
    keep_A = _anchor_rows(inputs, head.device)
    if head.product_rows is None:
        output = head.forward(head.embed(ids_R), head.fuse(features_RKD), positions_R, attention.committed, keep_A)
    else:
        # All rows to the end: an anchor's row that ran in a prefill keeps the company that it had there.
        with head.products_of(served_products(inputs, head.product_rows)):
            whole = head.forward(head.embed(ids_R), head.fuse(features_RKD), positions_R, attention.committed)
        output = HeadOutput(whole.normed_RE[keep_A], whole.feedback_RE[keep_A])
    return FirstPass(attention, output, positions_R[keep_A])


def served_products(inputs: Sequence[DraftInput], product_rows: int) -> list[int]:
    """Sizes of the products over all rows: every prompt by itself and whole, as a server without load prefills it."""
    sizes: list[int] = []
    for item in inputs:
        prompt = min(item.prompt_tokens, item.rows)
        whole, rest = divmod(item.rows - prompt, product_rows)
        sizes += [prompt, *[product_rows] * whole, rest]
    return [size for size in sizes if size]


def draft_every_anchor(head: Head, inputs: Sequence[DraftInput], steps: int) -> list[Drafts]:
    """Drafts of ``steps`` tokens at every anchor of every request, in the order of ``inputs``.

    Equal to running each anchor by itself (twin.py) up to the rounding of products over other numbers of rows.
    """
    inputs = list(inputs)
    if sum(item.anchors for item in inputs) == 0:
        empty = torch.empty((0, steps), dtype=torch.long)
        return [Drafts(empty, empty.bool()) for _ in inputs]
    first = first_pass(head, inputs)
    attention, output, positions_A = first.attention, first.output, first.positions_A
    drafted: list[Tensor] = []
    tied: list[Tensor] = []
    for step in range(steps):
        if step:
            embeds_AE = head.embed(drafted[-1])
            output = head.forward(embeds_AE, output.feedback_RE, positions_A + step, attention.chained)
        ids_A, tied_A = next_tokens(head, output.normed_RE)
        drafted.append(ids_A)
        tied.append(tied_A)
    counts = [item.anchors for item in inputs]
    drafted_AK, tied_AK = torch.stack(drafted, 1).cpu(), torch.stack(tied, 1).cpu()
    return [Drafts(*parts) for parts in zip(drafted_AK.split(counts), tied_AK.split(counts), strict=True)]


def _anchor_rows(inputs: Sequence[DraftInput], device: torch.device) -> Tensor:
    """Indices of the anchors' rows (each request's last ``anchors`` rows) among all packed rows."""
    rows, start = [], 0
    for item in inputs:
        rows.append(torch.arange(start + item.rows - item.anchors, start + item.rows, device=device))
        start += item.rows
    return torch.cat(rows)


def next_tokens(head: Head, normed_AE: Tensor) -> tuple[Tensor, Tensor]:
    """``choose`` for every row, a block of rows at a time: logits of all anchors over a large vocabulary are many."""
    block = max(1, _BLOCK_LOGITS // head.config.draft_vocab_size)
    parts = [choose(head, head.logits(rows_AE)) for rows_AE in normed_AE.split(block)]
    return torch.cat([ids_A for ids_A, _ in parts]), torch.cat([tied_A for _, tied_A in parts])


def choose(head: Head, logits_AW: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy draft token of each row as a target id [A], and whether its logit was shared [A].

    Of equal logits the lowest draft id wins.
    """
    index_A = logits_AW.max(dim=-1).indices  # the first of equals, which topk does not promise
    best_A2 = logits_AW.topk(min(2, logits_AW.shape[1]), dim=-1).values
    tied_A = (best_A2[:, 0] == best_A2[:, -1]) & (logits_AW.shape[1] > 1)
    return head.target_ids_W[index_A], tied_A
