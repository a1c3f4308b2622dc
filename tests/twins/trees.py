"""The slow, obvious twin of ``draft_every_tree``: one round, one node at a time, the tree in Python.

No cache, no batching: every node recomputes the head over the committed rows and its column's whole history. Tests hold
the function equal to it.
"""

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from twins.rounds import TwinRound, plain_causal_attention

from replay.drafting.tree_shape import ORPHAN, ROOT
from replay.head.model import Head


@dataclass(frozen=True, slots=True)
class TwinNode:
    """A drafted node: its target id, and the index of its parent in the tree (ROOT: the known token; or ORPHAN)."""

    token: int
    parent: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A token that could become a node: ``parent`` is an index in the list of all candidates, ``column`` the one whose
    node it would follow."""

    token: int
    score: np.float32
    parent: int
    column: int


class InputRows:
    """Input rows of the head, one after the other, each seeing those before it."""

    def __init__(self, embeds: list[Tensor], states: list[Tensor]) -> None:
        self.embeds, self.states = embeds, states

    def then(self, embed: Tensor, state: Tensor) -> "InputRows":
        return InputRows([*self.embeds, embed], [*self.states, state])

    def last_row(self, head: Head, topk: int) -> tuple[Tensor, list[tuple[int, np.float32]]]:
        """The last row's feedback, and the likeliest tokens after it with their probabilities."""
        feedback, tokens = self.every_token(head)
        return feedback, tokens[:topk]

    def every_token(self, head: Head) -> tuple[Tensor, list[tuple[int, np.float32]]]:
        """The last row's feedback, and all tokens that can be drafted with their probabilities, likeliest first."""
        output = head.forward(
            torch.stack(self.embeds),
            torch.stack(self.states),
            torch.arange(len(self.states)),
            lambda _, q, k, v: plain_causal_attention(q, k, v, head.numerics),
        )
        probs = head.logits(output.normed_RE[-1:])[0].float().softmax(-1).numpy()
        best = sorted(range(len(probs)), key=lambda draft_id: -probs[draft_id])
        return output.feedback_RE[-1], [(int(head.target_ids_W[index]), probs[index]) for index in best]


def committed_rows(head: Head, tokens_T: Tensor, features_RKD: Tensor, anchor: int) -> InputRows:
    """The rows behind which ``anchor`` drafts."""
    return InputRows(list(head.embed(tokens_T[1 : anchor + 1])), list(head.fuse(features_RKD[:anchor])))


def draft_one_tree(
    head: Head,
    tokens_T: Tensor,
    features_RKD: Tensor,
    anchor: int,
    *,
    topk: int,
    steps: int,
    num_draft_tokens: int,
    kv: str,
) -> list[TwinNode]:
    """The tree that ``head`` drafts when ``anchor`` tokens are committed and token x[anchor] is known.

    ``kv`` ``slot``: a node sees whatever stood in its column; ``path``: it sees its ancestors.
    """
    run = growing(
        head, tokens_T, features_RKD, anchor, topk=topk, steps=steps, num_draft_tokens=num_draft_tokens, kv=kv
    )
    try:
        states = next(run)
        while True:
            states = run.send(states)
    except StopIteration as ended:
        nodes: list[TwinNode] = ended.value
        return nodes


def growing(
    head: Head,
    tokens_T: Tensor,
    features_RKD: Tensor,
    anchor: int,
    *,
    topk: int,
    steps: int,
    num_draft_tokens: int,
    kv: str,
) -> Generator[list[Tensor], list[Tensor], list[TwinNode]]:
    """``draft_one_tree``, which gives the state for each column before each step, and goes on from those it is sent."""
    committed = committed_rows(head, tokens_T, features_RKD, anchor)
    feedback, likely = committed.last_row(head, topk)
    candidates = [_Candidate(token, score, ROOT, 0) for token, score in likely]
    columns, feedbacks = [committed] * topk, [feedback] * topk
    chosen = list(range(topk))
    for step in range(1, steps):
        before, first_new = list(columns), len(candidates)
        handed = yield [feedbacks[candidates[index].column] for index in chosen]
        for column, index in enumerate(chosen):
            node = candidates[index]
            history = before[node.column if kv == "path" and step > 1 else column]
            embed = head.embed(torch.tensor([node.token]))[0]
            columns[column] = history.then(embed, handed[column])
            feedbacks[column], likely = columns[column].last_row(head, topk)
            candidates += [_Candidate(token, node.score * p, index, column) for token, p in likely]
        new = range(first_new, len(candidates))
        chosen = sorted(new, key=lambda index: -candidates[index].score)[:topk]
    return _best_nodes(candidates, num_draft_tokens - 1)


def _best_nodes(candidates: list[_Candidate], nodes: int) -> list[TwinNode]:
    kept = sorted(sorted(range(len(candidates)), key=lambda index: -candidates[index].score)[:nodes])
    node_of = {ROOT: ROOT} | {index: node for node, index in enumerate(kept)}
    return [TwinNode(candidates[index].token, node_of.get(candidates[index].parent, ORPHAN)) for index in kept]


def accept_in_tree(tree: list[TwinNode], chosen: list[int]) -> int:
    """How many tokens the target takes: from the known token on, go to the child that it chose while there is one."""
    node, accepted = ROOT, 0
    for token in chosen:
        children = [index for index, child in enumerate(tree) if child.parent == node and child.token == token]
        if not children:
            break
        node, accepted = children[0], accepted + 1
    return accepted


def replay_request_with_trees(
    head: Head,
    tokens_T: Tensor,
    features_RKD: Tensor,
    prompt_tokens: int,
    *,
    topk: int,
    steps: int,
    num_draft_tokens: int,
    kv: str,
    tail: tuple[int, ...] = (),
) -> list[TwinRound]:
    """The served walk of one request: grow a tree, compare with what the target chose, jump, until the output ends."""
    known = [int(token) for token in tokens_T] + list(tail)
    rounds = []
    anchor = prompt_tokens
    while anchor < len(tokens_T) - 1:
        tree = draft_one_tree(
            head, tokens_T, features_RKD, anchor, topk=topk, steps=steps, num_draft_tokens=num_draft_tokens, kv=kv
        )
        accepted = accept_in_tree(tree, known[anchor + 1 :])
        rounds.append(TwinRound(anchor, tuple(node.token for node in tree), accepted))
        anchor += accepted + 1
    return rounds
