"""How far the replay is from a server's own trees: at every anchor its candidates are grown along the server's tree.

Two runs of a head part at the first node in which they differ, and what grows after it compares nothing. Grown along
the server's tree (forced_growth.py) the replay says of each of its nodes by how much it would have preferred others.
margins.py does the same for chains.

A node of the server's passed three choices. It was among the ``topk`` tokens proposed after its parent; it was among
the ``topk`` candidates of its depth that were continued, where it has children; and it was kept, among the best of all
candidates. Of candidates that the server did not keep it is not known that they were there at all: one whose parent
the server perhaps did not continue is worth no more than what it takes that it was not.

Suffixes as in trees.py: A anchors, N nodes of the server's trees, C candidates, G groups of P = topk candidates with
one parent, D depths; Z noise scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

import torch
from torch import Tensor

from replay.drafting.first_pass import FirstPass
from replay.drafting.forced_growth import ForcedGrowth, ServedNodes, describe_nodes
from replay.drafting.rows import DraftInput
from replay.drafting.tree_shape import ORPHAN, ROOT, count_candidates
from replay.drafting.trees import Candidates, anchor_blocks
from replay.errors import UsageError
from replay.head.model import Head

# Nodes x candidates held against each other at a time: they bound memory.
_BLOCK_RIVALS = 1 << 20


@dataclass(frozen=True, slots=True)
class ServedTrees:
    """The trees that a server drafted at the anchors of one request.

    ``drafted_AN`` target ids, -1 behind the last of each; ``parents_AN`` the index of each node's parent among them,
    ROOT for the known token, ORPHAN where the parent was not kept.
    """

    drafted_AN: Tensor
    parents_AN: Tensor


@dataclass(frozen=True, slots=True)
class TreeMargins:
    """A server's trees against the replay, at each anchor and node of one request, in nats (float32).

    ``margin_AN`` is how far a node falls short at most: of being proposed, of being continued where the server did, and
    of being kept; 0 where the replay would have done all that, inf where the head cannot draft it. ``spread_ANZ`` is by
    noise scale z the log of the sum of exp((score - best) / z) over the node and its rivals, best being the largest
    score: with it ``-margin / z - spread`` is the log-probability of keeping the node among them, a softmax of scores
    at z. A margin of being proposed or continued stands there instead where it is larger.
    ``score_AN`` is the replay's log-probability of the path to the node, ``depth_AN`` the length of that (int64).
    ``alike_A`` says whether the replay's own tree has exactly the server's paths. A round without a margin above 0
    that is not alike is a tie.

    Where no path leads to a node (an ORPHAN, a node below one, padding) margin, spread and score are NaN, depth is 0.
    """

    margin_AN: Tensor
    spread_ANZ: Tensor
    score_AN: Tensor
    depth_AN: Tensor
    alike_A: Tensor


def tree_margins_along(
    head: Head,
    inputs: Sequence[DraftInput],
    served: Sequence[ServedTrees],
    *,
    topk: int,
    steps: int,
    kv: str,
    scales: Sequence[float],
    first: FirstPass | None = None,
) -> list[TreeMargins]:
    """Margins at every anchor of every request, in the order of ``inputs``.

    ``served`` has the trees drafted there, with one N for all, by a server with this ``topk`` and so many ``steps``;
    ``kv`` and ``first`` are as in ``draft_every_tree``, ``scales`` noise in nats. Equal to one anchor at a time
    (tests/twins/tree_margins.py) up to the rounding of products over other numbers of rows; along the trees of
    ``draft_every_tree`` every margin is 0. Raises UsageError for behaviour that trees do not play, for scales that are
    not above 0, and for trees of another shape, with tokens that are none of the head's, or that this ``topk`` and
    ``steps`` cannot grow.
    """
    _check(head, inputs, served, scales, count_candidates(topk, steps))
    counts = [item.anchors for item in inputs]
    drafted_AN = torch.cat([trees.drafted_AN for trees in served]).to(head.device)
    parents_AN = torch.cat([trees.parents_AN for trees in served]).to(head.device)
    found = [_no_margins(drafted_AN.shape[1], len(scales))]
    for block in anchor_blocks(head, inputs, topk=topk, steps=steps, kv=kv, first=first):
        nodes = describe_nodes(drafted_AN[block.anchors], parents_AN[block.anchors], topk=topk, steps=steps)
        growth = ForcedGrowth(head, nodes, topk)
        along = _Along.of(block.grow(steps, growth), nodes, growth, steps)
        found.append(_measure(along, scales))
    columns = (torch.cat([getattr(part, field.name) for part in found]).split(counts) for field in fields(TreeMargins))
    return [TreeMargins(*request) for request in zip(*columns, strict=True)]


def _check(
    head: Head, inputs: Sequence[DraftInput], served: Sequence[ServedTrees], scales: Sequence[float], candidates: int
) -> None:
    if head.behaviour.chains_only:
        raise UsageError(
            "margins of trees are read as a healthy server lays out its rows; ask for them without faults of drafted "
            "rows, of what a row sees, and of those that follow the walk"
        )
    wrong = [scale for scale in scales if not (isfinite(scale) and scale > 0)]
    if wrong:
        raise UsageError(f"a noise scale of {wrong[0]} nats was given, possible are numbers above 0; give such")
    shapes = [(*trees.drafted_AN.shape,) for trees in served]
    same = shapes == [(*trees.parents_AN.shape,) for trees in served]
    nodes = {shape[1] for shape in shapes if len(shape) == 2}
    if not same or len(nodes) != 1 or 0 in nodes or shapes != [(item.anchors, *nodes) for item in inputs]:
        raise UsageError(
            f"drafted trees came as {', '.join(map(str, shapes)) or 'nothing'}, the requests have "
            f"{', '.join(str(item.anchors) for item in inputs) or 'no'} anchors; give tokens and parents each "
            "[anchors, nodes], with as many nodes for all"
        )
    if max(nodes) > candidates:
        raise UsageError(
            f"the server's trees have {max(nodes)} drafted tokens, this topk and steps have {candidates} candidates; "
            "give the topk and the steps that the server drafted with"
        )
    for trees in served:
        _check_nodes(head, trees)


def _check_nodes(head: Head, trees: ServedTrees) -> None:
    if trees.drafted_AN.numel() == 0:
        return
    token = int(trees.drafted_AN.max())
    if token >= head.config.vocab_size:
        raise UsageError(
            f"the server drafted token {token}, the vocabulary of draft head {head.name} has {head.config.vocab_size}; "
            "give the head that drafted, or -1 where nothing was drafted"
        )
    own_N = torch.arange(trees.parents_AN.shape[1], device=trees.parents_AN.device)
    wrong_AN = (trees.parents_AN >= own_N) | (trees.parents_AN < min(ROOT, ORPHAN))
    wrong_AN &= trees.drafted_AN >= 0
    if wrong_AN.any():
        anchor, node = wrong_AN.nonzero()[0].tolist()
        raise UsageError(
            f"node {node} of a tree has the parent {int(trees.parents_AN[anchor, node])}, possible are the nodes "
            f"before it, {ROOT} for the known token and {ORPHAN} for one that was left out; give one of these"
        )


def _no_margins(nodes: int, scales: int) -> TreeMargins:
    none_AN = torch.empty((0, nodes))
    return TreeMargins(none_AN, torch.empty((0, nodes, scales)), none_AN, none_AN.long(), torch.empty(0).bool())


@dataclass(frozen=True, slots=True)
class _Along:
    """Candidates grown along the trees of a block, on the CPU, and what was seen of the server's nodes there.

    ``logs_AC`` are logs of cumulative probabilities, ``kept_AC`` which candidates are the server's nodes, ``place_AN``
    which one each node with a path is. ``sibling_AN`` is the margin of being proposed. The rest as in ``ServedNodes``
    and ``ForcedGrowth``.
    """

    candidates: Candidates
    steps: int
    count_A: Tensor
    depth_AN: Tensor
    branching_AN: Tensor
    place_AN: Tensor
    sibling_AN: Tensor
    forced_A: Tensor
    logs_AC: Tensor
    kept_AC: Tensor

    @classmethod
    def of(cls, candidates: Candidates, nodes: ServedNodes, growth: ForcedGrowth, steps: int) -> "_Along":
        """Everything of one block."""
        depth_AN, place_AN = nodes.depth_AN.cpu(), growth.place_AN.cpu()
        chance_AN, least_AN = growth.chance_AN.cpu().double(), growth.least_AN.cpu().double()
        sibling_AN = _shortfall(least_AN.log(), chance_AN.log()).masked_fill(~growth.known_AN.cpu(), float("inf"))
        return cls(
            candidates, steps,
            count_A=(nodes.tokens_AN >= 0).sum(-1).cpu(),
            depth_AN=depth_AN,
            branching_AN=nodes.branching_AN.cpu() & (depth_AN > 0),
            place_AN=place_AN.clamp(min=0),
            sibling_AN=sibling_AN,
            forced_A=growth.forced_A.cpu(),
            logs_AC=candidates.scores_AC.double().log(),
            kept_AC=_mark(candidates.scores_AC, place_AN, depth_AN > 0),
        )  # fmt: skip


def _measure(along: _Along, scales: Sequence[float]) -> TreeMargins:
    no_path_AN = along.depth_AN == 0
    score_AN = along.logs_AC.gather(1, along.place_AN)
    kept_AN, spread_ANZ = _hold_against_rivals(along, score_AN, scales)
    margin_AN = torch.stack([along.sibling_AN, _continued(along, score_AN), kept_AN]).amax(0)
    return TreeMargins(
        margin_AN=margin_AN.masked_fill(no_path_AN, float("nan")).float(),
        spread_ANZ=spread_ANZ.masked_fill(no_path_AN[..., None], float("nan")).float(),
        score_AN=score_AN.masked_fill(no_path_AN, float("nan")).float(),
        depth_AN=along.depth_AN,
        alike_A=_find_alike(along),
    )


def _continued(along: _Along, score_AN: Tensor) -> Tensor:
    """How far nodes with children fall short of the best ``topk`` of their depth."""
    topk = along.candidates.topk
    last_AD = torch.stack([part.topk(topk, dim=-1).values[:, -1] for part in _by_depth(along, along.logs_AC)], 1)
    last_AN = last_AD.gather(1, (along.depth_AN - 1).clamp(min=0))
    return _shortfall(last_AN, score_AN).masked_fill(~along.branching_AN, 0.0)


def _by_depth(along: _Along, of_candidates_AC: Tensor) -> tuple[Tensor, ...]:
    topk = along.candidates.topk
    parts: tuple[Tensor, ...] = of_candidates_AC.split([topk, *[topk * topk] * (along.steps - 1)], dim=1)
    return parts


def _hold_against_rivals(along: _Along, score_AN: Tensor, scales: Sequence[float]) -> tuple[Tensor, Tensor]:
    """How far nodes fall short of the best candidate that the server did not keep, and by scale how many were near."""
    gap_AC = _cost_of_absence(along).repeat_interleave(along.candidates.topk, dim=1)
    size = max(1, _BLOCK_RIVALS // (score_AN.shape[1] * along.logs_AC.shape[1]))
    blocks = (slice(start, start + size) for start in range(0, len(score_AN), size))
    held = [_hold(score_AN[at], along.logs_AC[at], gap_AC[at], along.kept_AC[at], scales) for at in blocks]
    kept, spread = zip(*held, strict=True)
    return torch.cat(kept), torch.cat(spread)


def _hold(
    score_AN: Tensor, logs_AC: Tensor, gap_AC: Tensor, kept_AC: Tensor, scales: Sequence[float]
) -> tuple[Tensor, Tensor]:
    sure_A1C = (gap_AC == float("inf"))[:, None]
    absent_ANC = score_AN[..., None] + gap_AC[:, None].masked_fill(sure_A1C, 0.0)
    rival_ANC = torch.where(sure_A1C, logs_AC[:, None], absent_ANC.minimum(logs_AC[:, None]))
    best_AN = rival_ANC.masked_fill(kept_AC[:, None], float("-inf")).amax(-1).maximum(score_AN)
    # Where even the best has no probability all are equally good.
    below_ANC = (rival_ANC - best_AN[..., None]).nan_to_num(nan=0.0, neginf=float("-inf"))
    below_ANC = below_ANC.masked_fill(kept_AC[:, None], float("-inf"))
    own_AN = (score_AN - best_AN).nan_to_num(nan=0.0, neginf=float("-inf"))
    spread = [((below_ANC / scale).exp_().sum(-1) + (own_AN / scale).exp()).log() for scale in scales]
    return 0.0 - own_AN, torch.stack(spread, -1) if spread else own_AN.new_empty((*own_AN.shape, 0))


def _cost_of_absence(along: _Along) -> Tensor:
    """How far the parent of each group [A, G] beats the best candidate of its depth that was not continued.

    inf where the server surely continued it: the known token, a node with children, and all of the first step.
    """
    parents_AG, topk = along.candidates.parents_AG, along.candidates.topk
    branching_AC = _mark(along.logs_AC, along.place_AN, along.branching_AN)
    sure_AG = (parents_AG == ROOT) | branching_AC.gather(1, parents_AG.clamp(min=0))
    left_AC = along.logs_AC.masked_fill(_mark(along.logs_AC, parents_AG, parents_AG >= 0), float("-inf"))
    left_AD = torch.stack([part.amax(-1) for part in _by_depth(along, left_AC)], 1)
    depth_G = (torch.arange(parents_AG.shape[1]) - 1).clamp(min=0) // topk  # of parents, from 0
    gap_AG = _shortfall(along.logs_AC.gather(1, parents_AG.clamp(min=0)), left_AD[:, depth_G])
    return gap_AG.masked_fill(sure_AG, float("inf"))


def _mark(like_AC: Tensor, place_AX: Tensor, real_AX: Tensor) -> Tensor:
    """Which candidates stand in ``place_AX`` where that is real."""
    marks_AC = torch.zeros(like_AC.shape, dtype=torch.long, device=like_AC.device)
    return marks_AC.scatter_add(1, place_AX.clamp(min=0), real_AX.long()) > 0


def _find_alike(along: _Along) -> Tensor:
    """Where nothing was forced the candidates are the replay's own, and so is the best of these."""
    scores_AC, nodes = along.candidates.scores_AC, along.place_AN.shape[1]
    best_AN = scores_AC.topk(nodes, dim=-1).indices
    wanted_AN = torch.arange(nodes) < along.count_A[:, None]
    kept_AC = _mark(scores_AC, best_AN, wanted_AN)
    parents_AC = along.candidates.parents_AG.repeat_interleave(along.candidates.topk, dim=1)
    reached_AC = kept_AC
    for _ in range(along.steps - 1):
        reached_AC = kept_AC & ((parents_AC == ROOT) | reached_AC.gather(1, parents_AC.clamp(min=0)))
    return (reached_AC == along.kept_AC).all(-1) & ~along.forced_A


def _shortfall(better: Tensor, own: Tensor) -> Tensor:
    """By how much ``own`` is less; 0 where it is not, both being -inf included."""
    return torch.where(own >= better, 0.0, better - own)
