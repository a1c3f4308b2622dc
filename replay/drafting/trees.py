"""Trees of every anchor of many requests, as SGLang grows them (topk > 1): one pass per step over all their branches.

Every anchor holds ``topk`` columns. A step runs the head on one node in each column, takes the ``topk`` likeliest
tokens after each as candidates, and puts the ``topk`` candidates of the largest cumulative probability into the
columns of the next step. The tree is the ``num_draft_tokens - 1`` best of all candidates. After SGLang 0.5.23
speculative/eagle_worker_v2.py ``draft_forward``, spec_utils.py ``select_top_k_tokens``, eagle_utils.py
``organize_draft_results``: probabilities are an fp32 softmax of the rounded logits, products are taken in fp32 from the
root outward, and who stands first among equals is up to ``torch.topk``, as it is there.

Draft KV of the branches: ``slot`` (SGLang) keeps one row of KV slots for each column, so that a node whose parent stood
in another column attends to a stranger's rows; ``path`` (SafeAILab/EAGLE cnets.py) lets a node see its true ancestors.

Suffixes as in head/model.py and head/attention.py: A anchors, P topk, R rows (anchors x P, column after column of each
anchor), C candidates (P + (steps - 1) * P * P), G groups of P candidates with one parent (C / P), N drafted nodes of a
tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from replay.drafting.crossed import handover
from replay.drafting.first_pass import FirstPass, first_pass
from replay.drafting.next_tokens import propose
from replay.drafting.rows import DraftInput
from replay.drafting.tree_shape import ORPHAN, ROOT, TreeSize, count_candidates
from replay.head.attention import KeyValues, attend_committed_and_chain
from replay.head.model import Head

# Rows of one pass and candidates of one block of anchors: they bound memory whatever topk and steps are.
_BLOCK_ROWS = 4096
_BLOCK_CANDIDATES = 1 << 23


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every candidate of each anchor, in the order in which a server lists them.

    ``tokens_AC`` target ids, ``scores_AC`` cumulative probabilities (fp32), ``parents_AG`` the candidate that each
    group of ``topk`` candidates continues (ROOT for the first group), ``tied_AC`` where a token left out after the
    same node was exactly as likely.
    """

    topk: int
    tokens_AC: Tensor
    scores_AC: Tensor
    parents_AG: Tensor
    tied_AC: Tensor


class Choices(Protocol):
    """What grows: asked step by step, first for proposals, then for what goes on, for all anchors of one block."""

    def propose(self, normed_RE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``topk`` proposals after each row, as ``next_tokens.propose`` gives them: one row per anchor, then P each."""

    def continue_with(self, scores_AC: Tensor) -> Tensor:
        """Which candidates of a step go into the columns [A, P]. After the first step all do, unasked."""


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The head's own choices, as a server makes them."""

    head: Head
    topk: int

    def propose(self, normed_RE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens."""
        return propose(self.head, normed_RE, self.topk)

    def continue_with(self, scores_AC: Tensor) -> Tensor:
        """The candidates of the largest cumulative probability."""
        return scores_AC.topk(self.topk, dim=-1).indices


@dataclass(frozen=True, slots=True)
class Trees:
    """The tree of each anchor of one request.

    ``drafted_AN`` target ids in the server's order (parents before children, likelier siblings first); ``parents_AN``
    the index of each node's parent among them, ROOT for the known token, ORPHAN where the parent was left out;
    ``tied_AN`` where a candidate left out was exactly as good.
    """

    drafted_AN: Tensor
    parents_AN: Tensor
    tied_AN: Tensor


def draft_every_tree(
    head: Head,
    inputs: Sequence[DraftInput],
    *,
    topk: int,
    sizes: Sequence[TreeSize],
    kv: str,
    first: FirstPass | None = None,
) -> list[list[Trees]]:
    """For each of ``sizes`` the trees of every anchor, request by request in the order of ``inputs``.

    ``kv`` is ``slot`` or ``path``, ``first`` the first pass over the same inputs where it was made before. All sizes
    are cut from the same candidates. Equal to growing each tree by itself (tests/twins/trees.py) up to the rounding of
    products over other numbers of rows.
    """
    inputs = list(inputs)
    counts = [item.anchors for item in inputs]
    most_steps = max(size.steps for size in sizes)
    blocks: list[list[Trees]] = [[_no_trees(size)] for size in sizes]
    for candidates in grow_in_blocks(head, inputs, topk=topk, steps=most_steps, kv=kv, first=first):
        for trees, size in zip(blocks, sizes, strict=True):
            trees.append(keep_best(candidates, size))
    return [_by_request(trees, counts) for trees in blocks]


def grow_in_blocks(
    head: Head, inputs: Sequence[DraftInput], *, topk: int, steps: int, kv: str, first: FirstPass | None = None
) -> Iterator[Candidates]:
    """The candidates of all requests' anchors, some anchors at a time. Those of fewer steps lead those of more."""
    for block in anchor_blocks(head, inputs, topk=topk, steps=steps, kv=kv, first=first):
        yield block.grow(steps, Likeliest(head, topk))


def anchor_blocks(
    head: Head, inputs: Sequence[DraftInput], *, topk: int, steps: int, kv: str, first: FirstPass | None = None
) -> Iterator["AnchorBlock"]:
    """All requests' anchors in blocks that bound memory, ready to grow ``steps`` steps.

    Where states cross between requests there is one block, because a batch is drafted together.
    """
    counts = [item.anchors for item in inputs]
    if sum(counts) == 0:
        return
    first = first or first_pass(head, inputs)
    size = max(1, min(_BLOCK_ROWS // topk, _BLOCK_CANDIDATES // count_candidates(topk, steps)))
    if head.behaviour.crosses:
        size = sum(counts)
    for start in range(0, sum(counts), size):
        anchors = slice(start, min(start + size, sum(counts)))
        yield AnchorBlock(head, first, anchors, list(_overlaps(counts, anchors)), topk, kv)


def keep_best(candidates: Candidates, size: TreeSize) -> Trees:
    """The best ``num_draft_tokens - 1`` candidates of the first ``steps`` steps.

    A child as good as its parent (probability 1) can be kept without it; servers leave such a node out of the tree
    (kernels/ops/speculative/spec_tree.py), here it is an ORPHAN.
    """
    topk, nodes = candidates.topk, size.num_draft_tokens - 1
    scores_AC = candidates.scores_AC[:, : count_candidates(topk, size.steps)]
    best_AN = scores_AC.topk(nodes, dim=-1).indices.sort(dim=-1).values
    wanted_AN = candidates.parents_AG.gather(1, best_AN // topk)
    index_AN = torch.searchsorted(best_AN, wanted_AN).clamp(max=nodes - 1)
    found_AN = best_AN.gather(1, index_AN) == wanted_AN
    parents_AN = torch.where(found_AN, index_AN, torch.where(wanted_AN == ROOT, ROOT, ORPHAN))
    kept_AN = scores_AC.gather(1, best_AN)
    lost_AC = scores_AC.scatter(1, best_AN, -1.0)
    tied_AN = (kept_AN == lost_AC.amax(dim=-1, keepdim=True)) | candidates.tied_AC.gather(1, best_AN)
    return Trees(candidates.tokens_AC.gather(1, best_AN), parents_AN, tied_AN)


def _no_trees(size: TreeSize) -> Trees:
    ids_AN = torch.empty((0, size.num_draft_tokens - 1), dtype=torch.long)
    return Trees(ids_AN, ids_AN, ids_AN.bool())


def _by_request(blocks: Sequence[Trees], counts: Sequence[int]) -> list[Trees]:
    drafted, parents, tied = (
        torch.cat([getattr(block, name) for block in blocks]).split(list(counts))
        for name in ("drafted_AN", "parents_AN", "tied_AN")
    )
    return [Trees(*parts) for parts in zip(drafted, parents, tied, strict=True)]


class AnchorBlock:
    """Some of all packed anchors, grown together and once: their columns, and the KV of these."""

    def __init__(
        self, head: Head, first: FirstPass, anchors: slice, requests: list[tuple[int, int]], topk: int, kv: str
    ) -> None:
        """``requests`` says which requests the ``anchors`` belong to, and how many to each."""
        self._head, self._first, self._topk, self._kv = head, first, topk, kv
        self.anchors, self._requests = anchors, requests
        # Anchor S drafts from row S-1 at position S-1 and sees rows 0..S-1.
        self._reach_R = (first.anchor_rows_A[anchors] + 1).repeat_interleave(topk)
        self._columns: list[KeyValues | None] = [None] * head.config.num_layers

    def grow(self, steps: int, choices: Choices) -> Candidates:
        """The candidates of ``steps`` steps, on the CPU."""
        topk, first = self._topk, self._first
        feedback_RE = first.output.feedback_RE[self.anchors]
        handed = handover(self._head.behaviour, first.batch_rows, self._head.device)
        scores_AP, ids_AP, tied_AP = choices.propose(first.output.normed_RE[self.anchors])
        anchors = len(ids_AP)
        anchor_R = torch.arange(anchors, device=ids_AP.device).repeat_interleave(topk)
        # The candidates that stand in the columns, by their index among those of the step before; each was proposed by
        # the anchor's row first, then by the row of a column.
        best_AP, source_R = torch.arange(topk, device=ids_AP.device).expand_as(ids_AP), anchor_R
        grown = [(ids_AP, scores_AP, tied_AP)]
        parents = [torch.full_like(ids_AP[:, :1], ROOT), best_AP]
        for step in range(1, steps):
            embeds_RE = self._head.embed(grown[-1][0].gather(1, best_AP).flatten())
            state_APE = handed(feedback_RE[source_R].unflatten(0, (anchors, topk)), step)
            output = self._head.forward(embeds_RE, state_APE.flatten(0, 1), self._reach_R + step - 1, self._attend)
            feedback_RE = output.feedback_RE
            probs, ids, tied = (part.view(anchors, topk, topk) for part in choices.propose(output.normed_RE))
            scores_AC = (scores_AP[:, :, None] * probs).flatten(1)
            grown.append((ids.flatten(1), scores_AC, tied.flatten(1)))
            best_AP = choices.continue_with(scores_AC)
            scores_AP = scores_AC.gather(1, best_AP)
            source_R = anchor_R * topk + (best_AP // topk).flatten()
            parents.append(topk + topk * topk * (step - 1) + best_AP)
            if self._kv == "path":
                self._follow_parents(source_R)
        tokens, scores, tied = (torch.cat(parts, 1).cpu() for parts in zip(*grown, strict=True))
        return Candidates(topk, tokens, scores, torch.cat(parents[:-1], 1).cpu(), tied)

    def _follow_parents(self, source_R: Tensor) -> None:
        """Give every column the KV of the column its node came from."""
        self._columns = [kv and KeyValues(kv.k[:, source_R], kv.v[:, source_R]) for kv in self._columns]

    def _attend(self, layer: int, q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        columns, own = self._columns[layer], KeyValues(k_RMH[None], v_RMH[None])
        columns = own if columns is None else KeyValues(torch.cat([columns.k, own.k]), torch.cat([columns.v, own.v]))
        self._columns[layer] = columns
        counts = [count * self._topk for _, count in self._requests]
        committed = self._first.attention.committed_kv(layer)
        parts = zip(
            self._requests,
            q_RNH.split(counts),
            self._reach_R.split(counts),
            columns.k.split(counts, 1),
            columns.v.split(counts, 1),
            strict=True,
        )
        answers = [
            attend_committed_and_chain(q, committed[request], reach, KeyValues(k, v), self._head.numerics)
            for (request, _), q, reach, k, v in parts
        ]
        return torch.cat(answers)


def _overlaps(counts: Sequence[int], anchors: slice) -> Iterator[tuple[int, int]]:
    """Which requests have anchors among the packed ``anchors``, and how many."""
    begin = 0
    for request, count in enumerate(counts):
        inside = min(anchors.stop, begin + count) - max(anchors.start, begin)
        if inside > 0:
            yield request, inside
        begin += count
