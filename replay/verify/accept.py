"""Which drafted tokens the target takes, and the rounds a server runs through. Pure functions on arrays.

Suffixes: A anchors, K steps, N drafted nodes of a tree, T tokens of a request (prompt and output).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and one verify: ``anchor`` tokens are committed, ``accepted`` of the drafted ones are taken.

    ``cut``: accepted + 1 tokens run past the end of the recorded output, so not all of them were emitted.
    """

    anchor: int
    accepted: int
    cut: bool


def round_at(anchor: int, accepted: int, *, tokens: int) -> Round:
    """The round at ``anchor`` in a request of so many ``tokens``, prompt and output."""
    return Round(anchor, accepted, cut=anchor + accepted + 1 > tokens - 1)


def continuations(
    tokens_T: NDArray[np.int64], tail: NDArray[np.int64], anchors_A: NDArray[np.int64], steps: int
) -> NDArray[np.int64]:
    """What the target chose after the known token of each anchor [A, K]: x[S+1] .. x[S+K]; -1 where not recorded.

    ``tail`` continues ``tokens_T`` beyond the end of the output where the target's choices there are known.
    """
    known = np.concatenate([tokens_T, tail, np.full(steps, -1, dtype=np.int64)])
    chosen_AK: NDArray[np.int64] = known[anchors_A[:, None] + 1 + np.arange(steps)]
    return chosen_AK


def count_accepted(drafted_AK: NDArray[np.int64], chosen_AK: NDArray[np.int64]) -> NDArray[np.int64]:
    """Length of the longest prefix of each drafted chain that equals the target's choices, 0..K [A].

    Greedy verification of a chain (SGLang 0.5.23 speculative/eagle_utils.py ``eagle_sample``). On a sampled output it
    is one draw of the target-only rule, which takes a drafted token with probability p(token).
    """
    accepted_A: NDArray[np.int64] = np.cumprod(drafted_AK == chosen_AK, axis=1).sum(axis=1)
    return accepted_A


def count_accepted_in_tree(
    drafted_AN: NDArray[np.int64], parents_AN: NDArray[np.int64], chosen_AK: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Depth to which each drafted tree holds the target's choices, 0..K [A].

    ``parents_AN`` is the place of a node's parent, -1 for the known token; other negative numbers take a node out of
    the tree. From the known token on, each step goes to the first child whose token the target chose
    (SGLang 0.5.23 kernels/ops/speculative/spec_tree.py ``verify_tree_greedy_kernel_triton``).
    """
    node_A = np.full(len(drafted_AN), -1, dtype=np.int64)
    accepted_A = np.zeros(len(drafted_AN), dtype=np.int64)
    walking_A = np.ones(len(drafted_AN), dtype=np.bool_)
    for depth in range(chosen_AK.shape[1]):
        match_AN = (parents_AN == node_A[:, None]) & (drafted_AN == chosen_AK[:, depth, None])
        walking_A &= match_AN.any(axis=1)
        accepted_A += walking_A
        node_A = match_AN.argmax(axis=1)
    return accepted_A


def served_walk(accepted_A: NDArray[np.int64], *, prompt_tokens: int, tokens: int) -> list[Round]:
    """The rounds of one request: from S = prompt length on, each advancing by accepted + 1, until the output ends.

    ``accepted_A[a]`` belongs to anchor prompt_tokens + a. The output's first token is known before the first round.
    """
    rounds = []
    anchor = prompt_tokens
    while anchor < tokens - 1:
        accepted = int(accepted_A[anchor - prompt_tokens])
        rounds.append(round_at(anchor, accepted, tokens=tokens))
        anchor += accepted + 1
    return rounds
