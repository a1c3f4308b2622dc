"""A server's drafted tokens against a replay that follows them, one number a token: alike, near ties, unexplained.

A replay that is fed the server's own drafts says of each token by how much it preferred another one: the **margin**, in
nats, 0 where both agree. Two machines round the same head in two ways, so where two drafts are almost equally good they
may choose otherwise. How far rounding goes is measured, not assumed:

- The **noise** of a token is how far its log-odds move between the replay as the server rounds it and the same replay
  in fp32, which stands for exact arithmetic. A margin compares the server's choice with the replay's, and each
  of the two is off the exact numbers by at most the noise. So rounding explains margins up to twice the largest noise
  that was seen in the trace; of trees, up to twice the largest of that depth, because branches meet other rows there.
- A round is **alike** where the replay drafts just what the server did, a **near tie** where each of its margins is
  explained by rounding, else **unexplained**.
- The **noise scale** is the temperature of a softmax that flips choices as that noise does, between a rounded machine
  and exact numbers. It predicts how many tokens flip. Two machines that round independently flip more, by the square
  root of two; two that share most of their rounding flip fewer. Far more than that is no rounding, though each margin
  may be small.

Shapes: N drafted tokens of all rounds, R rounds, Z noise scales.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from replay.traces.agreement import Agreement

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# Server and replay are both rounded, and each is off by at most the noise.
BOTH_SIDES = 2.0
LEAST_SCALE = 1e-5  # nats: nothing is smaller than the rounding of fp32
# A logistic variable, which is what flips a softmax between two tokens, has this deviation at scale 1.
_LOGISTIC_DEVIATION = math.pi / math.sqrt(3)
# Tokens that are likelier than all others together hardly move, and are in no near tie.
_HALF = math.log(0.5)


@dataclass(frozen=True, slots=True)
class Followed:
    """Every token that a server drafted, against one variant that was fed the server's drafts.

    ``request_N`` and ``round_N`` say where it was drafted, ``round_N`` as an index of ``alike_R``, ``depth_N`` how deep
    (1 the first after the known token). ``margin_N`` in nats, inf where the head cannot draft it. ``log_prob_N`` under
    the replay's own softmax; of a tree's node all the way from the known token. ``spread_NZ`` for each of ``scales``: a
    softmax at temperature z gives the token the probability exp(-margin / z - spread). ``same_N``: it is the token that
    the replay prefers. ``alike_R``: the replay drafts just these tokens. ``choices`` is how many tokens can be drafted.
    """

    request_N: Ints
    round_N: Ints
    depth_N: Ints
    margin_N: Floats
    log_prob_N: Floats
    spread_NZ: Floats
    same_N: Bools
    alike_R: Bools
    scales: tuple[float, ...]
    choices: int
    by_depth: bool = False

    @property
    def rounds(self) -> int:
        """R."""
        return len(self.alike_R)


@dataclass(frozen=True, slots=True)
class Noise:
    """How far rounding moves what this head drafts on this trace, in nats.

    ``largest`` change of a token's log-odds (with ``by_depth`` that of each depth from 1 on, else one for all),
    ``scale`` the temperature of a softmax that flips as much; ``tokens`` they were measured on.
    """

    largest: tuple[float, ...]
    scale: float
    tokens: int

    def limit(self, depth_N: Ints) -> Floats:
        """Up to which margin rounding explains a token of each depth [N]."""
        most = np.array(self.largest, dtype=np.float64)
        limit_N: Floats = BOTH_SIDES * most[np.minimum(depth_N, len(most)) - 1]
        return limit_N


def measure_noise(rounded: Followed, exact: Followed, *others: Followed) -> Noise:
    """The noise between a replay as the server rounds it, and ``exact``; ``others`` are the replay in further orders.

    All followed the same drafts. Of tokens that all of them give at most one half.
    """
    exact_N = _log_odds(exact.log_prob_N)
    with np.errstate(invalid="ignore"):  # of a token that no draft can be, -inf less -inf
        moved = [np.abs(_log_odds(one.log_prob_N) - exact_N) for one in (rounded, *others)]
    moved_N = np.max(moved, axis=0)
    told_N = np.isfinite(moved_N) & (np.maximum(rounded.log_prob_N, exact.log_prob_N) <= _HALF)
    sizes_N, depth_N = moved_N[told_N], rounded.depth_N[told_N]
    most = int(rounded.depth_N.max(initial=1))
    groups = [depth_N == depth for depth in range(1, most + 1)] if rounded.by_depth else [depth_N > 0]
    largest = tuple(float(sizes_N[group].max(initial=0.0)) for group in groups)
    # The gap between two tokens moves by the errors of both, which are of one size.
    deviation = math.sqrt(2 * float((sizes_N**2).mean())) if len(sizes_N) else 0.0
    return Noise(largest, deviation / _LOGISTIC_DEVIATION, int(told_N.sum()))


def _log_odds(log_prob_N: Floats) -> Floats:
    """Of a token against all others: in a tie of two, the gap between them; of an unlikely one, its log-probability."""
    with np.errstate(divide="ignore", invalid="ignore"):
        odds_N: Floats = log_prob_N - np.log(-np.expm1(log_prob_N))
    return odds_N


def judge_rounds(followed: Followed, noise: Noise) -> tuple[Bools, Bools]:
    """Of each round whether it is a near tie, and whether it is unexplained [R]."""
    beyond_N = followed.margin_N > noise.limit(followed.depth_N)
    unexplained_R = np.zeros(followed.rounds, dtype=bool)
    unexplained_R[followed.round_N[beyond_N]] = True
    return ~followed.alike_R & ~unexplained_R, unexplained_R


def agreement(followed: Followed, noise: Noise, scale: int = 0) -> Agreement:
    """The rounds counted; the noise's own scale is ``scales[scale]`` of ``followed``."""
    near_R, unexplained_R = judge_rounds(followed, noise)
    limit_N = noise.limit(followed.depth_N)
    near_N = ~followed.same_N & (followed.margin_N <= limit_N)
    shares_N = np.divide(
        BOTH_SIDES * followed.margin_N, limit_N, out=np.zeros_like(limit_N), where=near_N & (limit_N > 0)
    )
    return Agreement(
        rounds=followed.rounds,
        alike=int((followed.alike_R & ~unexplained_R).sum()),
        near_tie=int(near_R.sum()),
        unexplained=int(unexplained_R.sum()),
        noise=max(noise.largest, default=0.0),
        noise_scale=noise.scale,
        largest=float(shares_N.max(initial=0.0)),
        tokens=len(followed.margin_N),
        flips=int((~followed.same_N).sum()),
        flips_expected=expected_flips(followed, scale),
    )


def expected_flips(followed: Followed, scale: int) -> float:
    """How many tokens a softmax at ``scales[scale]`` draws otherwise than the replay prefers.

    The preferred token of each has the probability exp(-spread).
    """
    if not followed.scales:
        return math.nan
    return float((1 - np.exp(-followed.spread_NZ[:, scale])).sum())


def join(parts: Sequence[Followed]) -> Followed:
    """Those of several packs of requests, their rounds numbered through."""
    offsets = np.cumsum([0, *(part.rounds for part in parts[:-1])])
    return replace(
        parts[0],
        request_N=np.concatenate([part.request_N for part in parts]),
        round_N=np.concatenate([part.round_N + offset for part, offset in zip(parts, offsets, strict=True)]),
        depth_N=np.concatenate([part.depth_N for part in parts]),
        margin_N=np.concatenate([part.margin_N for part in parts]),
        log_prob_N=np.concatenate([part.log_prob_N for part in parts]),
        spread_NZ=np.concatenate([part.spread_NZ for part in parts]),
        same_N=np.concatenate([part.same_N for part in parts]),
        alike_R=np.concatenate([part.alike_R for part in parts]),
    )
