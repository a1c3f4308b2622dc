"""Growth of trees along others, a server's: what the server surely proposed and continued is, the rest is the head's.

A server's tree is what it kept. It tells that each of its nodes was proposed after its parent, and that each node with
children stood in a column. Where the head would have left such a one out, it takes the place of the worst that the
server's tree does not ask for.

Suffixes as in trees.py, N being the nodes of the server's tree, K some of them; B rows of a block of logits, W draft
vocabulary, X rows or anchors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.next_tokens import draft_ids, likeliest, read_logits
from replay.drafting.tree_shape import ORPHAN, ROOT, count_candidates
from replay.errors import UsageError
from replay.head.model import Head


@dataclass(frozen=True, slots=True)
class ServedNodes:
    """The trees of some anchors.

    ``tokens_AN`` target ids and ``parents_AN`` as given, ORPHAN where there is no token; ``depth_AN`` 1 after the known
    token, 0 where no path leads to a node (it or one above it is an orphan); ``child_AN`` how many siblings stand
    before a node, ``twin_AN`` how many of these have its token; ``branching_AN`` whether it has children.
    """

    tokens_AN: Tensor
    parents_AN: Tensor
    depth_AN: Tensor
    child_AN: Tensor
    twin_AN: Tensor
    branching_AN: Tensor


def describe_nodes(tokens_AN: Tensor, parents_AN: Tensor, *, topk: int, steps: int) -> ServedNodes:
    """Raises UsageError for trees that no server with this ``topk`` and so many ``steps`` drafts."""
    real_AN = tokens_AN >= 0
    parents_AN = parents_AN.masked_fill(~real_AN, ORPHAN)
    above_AN = parents_AN.clamp(min=0)
    depth_AN = ((parents_AN == ROOT) & real_AN).long()
    for depth in range(1, steps + 1):
        reached_AN = (parents_AN >= 0) & real_AN & (depth_AN.gather(1, above_AN) == depth)
        depth_AN = depth_AN.masked_fill(reached_AN, depth + 1)
    has_path_AN = depth_AN > 0
    together_ANN = (parents_AN[:, :, None] == parents_AN[:, None, :]) & has_path_AN[:, :, None] & has_path_AN[:, None]
    before_ANN = together_ANN.tril(-1)
    child_AN = before_ANN.sum(-1)
    twin_AN = (before_ANN & (tokens_AN[:, :, None] == tokens_AN[:, None, :])).sum(-1)
    branching_AN = torch.zeros_like(above_AN).scatter_add(1, above_AN, (depth_AN > 1).long()) > 0
    widths = [
        int(((depth_AN == depth) & branching_AN).sum(-1).amax()) if len(depth_AN) else 0
        for depth in range(1, steps + 1)
    ]
    _refuse_more("tokens after one node", int((child_AN.max() + 1) if child_AN.numel() else 0), "topk", topk)
    _refuse_more("continued nodes in one step", max(widths), "topk", topk)
    _refuse_more("tokens on one path", int(depth_AN.max() if depth_AN.numel() else 0), "steps", steps)
    return ServedNodes(tokens_AN, parents_AN, depth_AN, child_AN, twin_AN, branching_AN)


def _refuse_more(what: str, seen: int, name: str, most: int) -> None:
    if seen > most:
        raise UsageError(
            f"the server's trees have up to {seen} {what}, with {name} {most} there are at most {most}; give the topk "
            "and the steps that the server drafted with"
        )


@dataclass(frozen=True, slots=True)
class _Children:
    """Nodes of one depth, one after the other [K].

    ``nodes`` are their anchors and numbers; ``column_K`` where their parents stand; ``where`` the rows of these, and
    how many siblings stand before each.
    """

    nodes: tuple[Tensor, Tensor]
    column_K: Tensor
    where: tuple[Tensor, Tensor]


class ForcedGrowth:
    """``trees.Choices`` of one block along the server's trees; the head's own where these ask for nothing else.

    Afterwards: ``place_AN`` which candidate each node with a path is (-1 for others), ``chance_AN`` its probability
    after its parent and ``least_AN`` that of the last of the head's own proposals there (fp32), ``known_AN`` whether
    the head can draft it, ``forced_A`` whether anything stood there that the head by itself had left out.
    """

    def __init__(self, head: Head, nodes: ServedNodes, topk: int) -> None:
        self._head, self._nodes, self._topk = head, nodes, topk
        self._ids_V = draft_ids(head)
        self._shared_W = _shared(head.target_ids_W)
        self._depth, self._first = 0, 0  # of the candidates of the last step: their depth, and the index of the first
        self._columns_AP = torch.full_like(nodes.tokens_AN[:, :1], ROOT)  # candidates that stand in columns
        self.place_AN = torch.full_like(nodes.tokens_AN, -1)
        self.chance_AN = torch.zeros(nodes.tokens_AN.shape, device=head.device)
        self.least_AN = torch.zeros(nodes.tokens_AN.shape, device=head.device)
        self.known_AN = torch.zeros_like(nodes.branching_AN)
        self.forced_A = torch.zeros_like(nodes.branching_AN[:, 0])

    def propose(self, normed_RE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens, among them every child that a row's node has in the server's tree; likeliest first.

        Of children that had to be put there it is not told whether others were as likely.
        """
        topk, rows = self._topk, len(normed_RE)
        children = self._find_children()
        tokens_RP, twin_RP = (
            torch.full((rows, topk), -1, device=normed_RE.device).index_put(children.where, of_AN[children.nodes])
            for of_AN in (self._nodes.tokens_AN, self._nodes.twin_AN)
        )

        def read(logits_BW: Tensor, block: slice) -> tuple[Tensor, ...]:
            probs_BW, *own = likeliest(logits_BW, topk)
            ids_BP = self._draft_ids(probs_BW, tokens_RP[block], twin_RP[block])
            chance_BP = probs_BW.gather(1, ids_BP.clamp(min=0)).masked_fill(ids_BP < 0, 0.0)
            return (*own, ids_BP, chance_BP)

        probs_RP, index_RP, tied_RP, ids_RP, chance_RP = read_logits(self._head, normed_RE, read)
        # What the head cannot draft stands behind its vocabulary, each for itself.
        beyond_P = len(self._head.target_ids_W) + torch.arange(topk, device=ids_RP.device)
        wanted_RP = torch.where(ids_RP < 0, beyond_P, ids_RP)
        order_RP, changed_R = _choose(index_RP, probs_RP, wanted_RP, chance_RP, tokens_RP >= 0)
        chosen_RP = torch.cat([wanted_RP, index_RP], 1).gather(1, order_RP)
        slot_K = (chosen_RP[children.where[0]] == wanted_RP[children.where][:, None]).int().argmax(-1)
        self._step_on(children, slot_K)
        self.chance_AN[children.nodes] = chance_RP[children.where]
        self.least_AN[children.nodes] = probs_RP[children.where[0], -1]
        self.known_AN[children.nodes] = ids_RP[children.where] >= 0
        self.forced_A |= changed_R.view(len(self.forced_A), -1).any(-1)
        return (
            torch.cat([chance_RP, probs_RP], 1).gather(1, order_RP),
            torch.cat([tokens_RP, self._head.target_ids_W[index_RP]], 1).gather(1, order_RP),
            torch.cat([torch.zeros_like(tied_RP), tied_RP], 1).gather(1, order_RP),
        )

    def _step_on(self, children: "_Children", slot_K: Tensor) -> None:
        """The children have become candidates: the ``slot_K``-th ones after their parents."""
        self._first = count_candidates(self._topk, self._depth) if self._depth else 0
        self._depth += 1
        self.place_AN[children.nodes] = self._first + children.column_K * self._topk + slot_K
        if self._depth == 1:
            self._columns_AP = torch.arange(self._topk, device=slot_K.device).expand(len(self.place_AN), -1)

    def continue_with(self, scores_AC: Tensor) -> Tensor:
        """The best candidates, among them every one with children in the server's tree; best first."""
        mask_AN = (self._nodes.depth_AN == self._depth) & self._nodes.branching_AN
        anchor_K, node_K = mask_AN.nonzero(as_tuple=True)
        count_AN = mask_AN.cumsum(-1) - 1
        forced_AP = torch.full((len(scores_AC), self._topk), -1, device=scores_AC.device)
        forced_AP[anchor_K, count_AN[anchor_K, node_K]] = self.place_AN[anchor_K, node_K] - self._first
        real_AP = forced_AP >= 0
        forced_AP = forced_AP.clamp(min=0)
        own_AP = scores_AC.topk(self._topk, dim=-1).indices
        order_AP, changed_A = _choose(
            own_AP, scores_AC.gather(1, own_AP), forced_AP, scores_AC.gather(1, forced_AP), real_AP
        )
        best_AP = torch.cat([forced_AP, own_AP], 1).gather(1, order_AP)
        self._columns_AP = self._first + best_AP
        self.forced_A |= changed_A
        return best_AP

    def _find_children(self) -> "_Children":
        """The server's nodes of the next depth."""
        anchor_K, node_K = (self._nodes.depth_AN == self._depth + 1).nonzero(as_tuple=True)
        column_K = torch.zeros_like(node_K)
        if self._depth > 0:
            parent_K = self.place_AN[anchor_K, self._nodes.parents_AN[anchor_K, node_K]]
            column_K = (self._columns_AP[anchor_K] == parent_K[:, None]).int().argmax(-1)
        row_K = anchor_K * self._columns_AP.shape[1] + column_K
        return _Children((anchor_K, node_K), column_K, (row_K, self._nodes.child_AN[anchor_K, node_K]))

    def _draft_ids(self, probs_BW: Tensor, tokens_BP: Tensor, twin_BP: Tensor) -> Tensor:
        """The draft ids that stand for target ids, -1 for none. Of siblings with one token each has an id of its own,
        where several draft ids stand for it: the likeliest first."""
        ids_BP = self._ids_V[tokens_BP.clamp(min=0)].masked_fill((tokens_BP < 0) | (twin_BP > 0), -1)
        shared_BP = torch.isin(tokens_BP, self._shared_W)
        for token in tokens_BP[shared_BP].unique():
            options_D = (self._head.target_ids_W == token).nonzero()[:, 0]
            row_K, child_K = (tokens_BP == token).nonzero(as_tuple=True)
            order_KD = probs_BW[row_K][:, options_D].argsort(dim=-1, descending=True, stable=True)
            twin_K = twin_BP[row_K, child_K]
            nth_K = order_KD.gather(1, twin_K.clamp(max=len(options_D) - 1)[:, None])[:, 0]
            ids_BP[row_K, child_K] = torch.where(twin_K < len(options_D), options_D[nth_K], -1)
        return ids_BP


def _shared(target_ids_W: Tensor) -> Tensor:
    """Target ids for which several draft ids stand, as under a wrong map."""
    ids_V, counts_V = target_ids_W.unique(return_counts=True)
    shared_V: Tensor = ids_V[counts_V > 1]
    return shared_V


def _choose(
    own_XP: Tensor, own_scores_XP: Tensor, wanted_XP: Tensor, scores_XP: Tensor, real_XP: Tensor
) -> tuple[Tensor, Tensor]:
    """P of ``own_XP``, best first, with every one of ``wanted_XP`` that is real among them, and where that changed any.

    Answers with indices [X, P] into wanted and own side by side: the own ones in their order where all wanted are among
    them; elsewhere wanted ones instead of the last own ones that are not wanted, by score and then by number.
    """
    topk = own_XP.shape[1]
    own_P = topk + torch.arange(topk, device=own_XP.device)
    same_XPP = (own_XP[:, :, None] == wanted_XP[:, None, :]) & real_XP[:, None, :]
    changed_X = (real_XP & ~same_XPP.any(1)).any(-1)
    rank_XP = (2 * topk - own_P).expand_as(own_XP).masked_fill(same_XPP.any(2), 0)
    priority_XP = torch.cat([(real_XP * 2 * topk).to(rank_XP), rank_XP], 1)
    picked_XP = priority_XP.topk(topk, dim=-1).indices
    by_number_XP = torch.cat([wanted_XP, own_XP], 1).gather(1, picked_XP).argsort(dim=-1, stable=True)
    picked_XP = picked_XP.gather(1, by_number_XP)
    picked_scores_XP = torch.cat([scores_XP, own_scores_XP], 1).gather(1, picked_XP)
    forced_XP = picked_XP.gather(1, picked_scores_XP.argsort(dim=-1, descending=True, stable=True))
    return torch.where(changed_X[:, None], forced_XP, own_P), changed_X
