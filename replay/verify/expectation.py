"""Expected acceptance along one recorded path, without random numbers. Pure functions on arrays.

The path x is what the target sampled: x ~ p. Two kinds of draft ask for two estimators.

**The draft is a function of the text** (argmax chains and trees; rules ``target-only`` and ``typical``). A round takes
at least i tokens with probability sum over the drafted prefixes of length i of the product of their shares a. For a
prefix that the path runs along, weight it by 1 / p of its tokens and the expectation over x ~ p is that sum:
E[ 1{x_1..x_{i-1} drafted} * prod_{k<i} a(x_k)/p(x_k) * sum of a over the tokens offered at i ]. So ``expect_taken`` is
unbiased for every anchor, given the text before it (importance sampling; for ``target-only`` at thresholds of 1, a = p,
all weights are 1 and this is the realised match with its last step replaced by its conditional expectation:
Rao-Blackwell). Position 1 carries no weight and is exact. The served walk of that rule is itself a function of the
text, so its rounds are those of accept.py, and the mean of ``expect_taken`` over them is consistent for the accept
length. Under thresholds below 1 and under ``typical`` the output is not distributed as p: the expectation of each
anchor stands, but a server would stand at other anchors than the recorded path's.

**The draft is sampled from q** (rule ``rejection``). A round drafts and takes x_1..x_i with probability
prod min(p, q), and what follows a round is distributed as p again; dividing by p of the path gives, for a fixed path,
P(at least i taken | path) = prod_{k<=i} min(1, q(x_k)/p(x_k)), independently from round to round. So the expected
rounds and tokens of the path are exact: ``expected_walk`` adds up the probabilities of standing at each anchor.
(Own derivation from the rule of arXiv 2211.17192, algorithm 1; the tests enumerate all paths of small targets.)

Suffixes: A anchors, K steps, N drafted nodes of a tree.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.verify.rules import Floats, Rule, share_ratios, taken_shares


@dataclass(frozen=True, slots=True)
class Offers:
    """Which drafted nodes [A, N] are offered along the path: ``depth_AN`` 1..K, 0 for nodes off the path.

    ``taken_AN`` marks the node that is the path's own token at its depth.
    """

    depth_AN: NDArray[np.int64]
    taken_AN: NDArray[np.bool_]


def follow_path(drafted_AN: NDArray[np.int64], parents_AN: NDArray[np.int64], chosen_AK: NDArray[np.int64]) -> Offers:
    """Nodes whose ancestors are the path ``chosen_AK`` (accept.py ``continuations``); parents as in
    drafting/trees.py."""
    depth_AN = np.zeros(drafted_AN.shape, dtype=np.int64)
    taken_AN = np.zeros(drafted_AN.shape, dtype=np.bool_)
    node_A = np.full(len(drafted_AN), -1, dtype=np.int64)
    walking_A = np.ones(len(drafted_AN), dtype=np.bool_)
    for depth in range(1, chosen_AK.shape[1] + 1):
        # Where the output is over, nothing more is offered.
        walking_A &= chosen_AK[:, depth - 1] >= 0
        offered_AN = (parents_AN == node_A[:, None]) & walking_A[:, None]
        depth_AN[offered_AN] = depth
        match_AN = offered_AN & (drafted_AN == chosen_AK[:, depth - 1, None])
        walking_A &= match_AN.any(axis=1)
        node_A = match_AN.argmax(axis=1)
        taken_AN[walking_A, node_A[walking_A]] = True
    return Offers(depth_AN, taken_AN)


def chain_parents(anchors: int, steps: int) -> NDArray[np.int64]:
    """The parents [A, K] of chains: each token follows the one before it."""
    return np.broadcast_to(np.arange(-1, steps - 1), (anchors, steps))


@dataclass(frozen=True, slots=True)
class Expectation:
    """``joint_AK[a, i-1]`` estimates P(at least i tokens taken at anchor a); its importance weights [A, K]."""

    joint_AK: Floats
    weights_AK: Floats


def expect_taken(rule: Rule, offers: Offers, p_AN: Floats, entropy_AK: Floats) -> Expectation:
    """The estimate of the module's head for each anchor.

    ``p_AN`` is the target's probability of each offered node, after the path to its parent; ``entropy_AK`` that of the
    distribution from which x_1 .. x_K were drawn (``typical`` only).
    """
    anchors, steps = entropy_AK.shape
    weight_A = np.ones(anchors)
    joint_AK, weights_AK = np.zeros((anchors, steps)), np.zeros((anchors, steps))
    for step in range(steps):
        here_AN = offers.depth_AN == step + 1
        tried_AN = np.where(here_AN, p_AN, 0.0)
        shares_AN = taken_shares(rule, tried_AN, entropy_AK[:, step])
        weights_AK[:, step] = np.where(here_AN.any(axis=1), weight_A, 0.0)
        joint_AK[:, step] = weight_A * shares_AN.sum(axis=1)
        ratios_AN = share_ratios(rule, tried_AN, shares_AN)
        weight_A = weight_A * (ratios_AN * (here_AN & offers.taken_AN)).sum(axis=1)
    return Expectation(joint_AK, weights_AK)


def keep_probabilities(q_AK: Floats, p_AK: Floats) -> Floats:
    """P(at least i taken | path) [A, K] of ``rejection``: prod min(1, q/p) over the path's tokens x_1 .. x_i.

    ``q_AK`` is the head's probability of each, made with the path's tokens fed to it: 0 is never drafted. ``p_AK`` 0 is
    the lower bound of a token of which nothing is recorded: any q above 0 covers it.
    """
    ratio_AK = (q_AK > 0).astype(np.float64)
    np.divide(q_AK, p_AK, out=ratio_AK, where=p_AK > q_AK)
    kept_AK: Floats = np.cumprod(ratio_AK, axis=1, dtype=np.float64)
    return kept_AK


def expected_walk(kept_AK: Floats) -> tuple[float, float]:
    """Expected rounds and accepted tokens of one path, from S = its first anchor until the output ends.

    ``kept_AK[a, i-1]`` = P(at least i taken at anchor a | path), 0 beyond the end of the output. Exact: anchor a is
    visited with the sum over earlier b of visit(b) * P(exactly a - b - 1 taken at b).
    """
    anchors, steps = kept_AK.shape
    visit = np.zeros(anchors + steps + 1)
    visit[:1] = 1.0
    atleast_AJ = np.hstack([np.ones((anchors, 1)), kept_AK, np.zeros((anchors, 1))])
    exactly_AJ = atleast_AJ[:, :-1] - atleast_AJ[:, 1:]
    for anchor in range(anchors):
        visit[anchor + 1 : anchor + steps + 2] += visit[anchor] * exactly_AJ[anchor]
    return float(visit[:anchors].sum()), float((visit[:anchors, None] * kept_AK).sum())


def draw_accepted(kept_AK: Floats, coins_AK: Floats) -> NDArray[np.int64]:
    """Accepted tokens [A] of one draw of the coins, uniform in [0, 1): token i where coin_i < P(i | i - 1 taken)."""
    before_AK = np.hstack([np.ones((len(kept_AK), 1)), kept_AK[:, :-1]])
    accepted_A: NDArray[np.int64] = np.cumprod(coins_AK * before_AK < kept_AK, axis=1).sum(axis=1)
    return accepted_A


def effective_samples(total: Floats, squares: Floats) -> Floats:
    """Kish's effective sample size (sum w)^2 / sum w^2 of importance weights, elementwise; 0 without any."""
    size: Floats = np.zeros_like(total)
    np.divide(total**2, squares, out=size, where=squares > 0)
    return size
