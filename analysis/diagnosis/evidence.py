"""How well a replayed hypothesis explains what a server did: three kinds of evidence, each with two likelihoods.

- ``drafted`` (drafted.py): every token that the server drafted, against a replay of the hypothesis that is fed the
  server's drafts (analysis/followed.py). A token has the probability that a softmax of the draft logits gives it at a
  temperature that stands for rounding: the noise scale that was measured, or a multiple of it.
- ``histogram`` (counted.py): per request, the server's counts of accepted tokens against the hypothesis' own walk over
  the same text; a round is discordant where the two histograms cannot be matched.
- ``length`` (there too): one accept length, measured on other text: a normal error made of the spread between requests.

The first likelihood is that of the hypothesis and rounding, and nothing else. The second one is that of the hypothesis
and something unknown besides, whose size is fitted: a larger noise scale, more outliers. It tells how near a hypothesis
is to the truth where it is not the whole of it, and it is what a hypothesis has to beat before it is named.

Tokens of one request are not independent: one cause moves many. ``lead`` therefore counts them as fewer, by the design
effect of clusters (Kish, Survey Sampling, 1965, chapter 5).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from replay.analysis.followed import Floats, Ints

DRAFTED, HISTOGRAM, LENGTH = "drafted", "histogram", "length"  # the kinds above
# Of 5,284 rounds of real servers that were healthy or wrongly wired, 2 parted from their replay beyond any near tie for
# a reason that nobody knows; a round had five tokens.
OUTLIER_ROUNDS = 2 / 5284
OUTLIER_TOKENS = OUTLIER_ROUNDS / 5
# Shares of outlying tokens that something unknown may cause, equally likely beforehand.
SHARES = (OUTLIER_TOKENS, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Something unknown on top of a hypothesis: noise of ``scale`` nats on its draft logits (the temperature of a
    softmax), and a ``share`` of tokens that have nothing to do with it."""

    scale: float
    share: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """``rounds`` compared: ``alike``, ``near_tie`` or ``unexplained``; ``kind`` as above.

    ``log_likelihood`` of the hypothesis and rounding, ``disturbed`` of the hypothesis and the ``disturbance`` that fits
    best, both in nats. ``most`` rounds may be unexplained before it does not fit. ``accept_length`` is the hypothesis'
    own at what was compared (nan: not replayed), ``served`` the server's.
    """

    kind: str
    rounds: int
    alike: int
    near_tie: int
    unexplained: int
    log_likelihood: float
    disturbed: float
    most: int
    accept_length: float
    served: float
    disturbance: Disturbance | None = None
    # Of each compared token, for ``drafted``: its part of the two likelihoods, and the request that it belongs to.
    nats_N: Floats | None = field(default=None, compare=False, repr=False)
    disturbed_N: Floats | None = field(default=None, compare=False, repr=False)
    request_N: Ints | None = field(default=None, compare=False, repr=False)

    @property
    def agreeing(self) -> int:
        """Rounds that are alike or near ties."""
        return self.alike + self.near_tie

    @property
    def fits(self) -> bool:
        """Whether what it leaves is rounding, and outliers as few as a healthy server has."""
        return self.unexplained <= self.most


def outliers_allowed(rounds: int, share: float = OUTLIER_ROUNDS, level: float = 0.99) -> int:
    """The most outlying rounds that a healthy server shows in ``level`` of all cases: a quantile of the binomial."""
    most, mass = 0, (1 - share) ** rounds
    term = mass
    while mass < level and most < rounds:
        most += 1
        term *= (rounds - most + 1) / most * share / (1 - share)
        mass += term
    return most


def log_mean(nats: Sequence[float]) -> float:
    """The logarithm of the mean of exp(nats)."""
    most = max(nats)
    return most + math.log(sum(math.exp(one - most) for one in nats) / len(nats))


def lead(first: Evidence, second: Evidence, *, disturbed: bool = False) -> float:
    """Nats by which ``first`` explains the server better than ``second``, tokens of a request counted as they count.

    ``disturbed``: ``second`` may have something unknown besides. The difference over all tokens is divided by the
    design effect of the requests, which is 1 where tokens of a request have nothing in common.
    """
    theirs = second.disturbed if disturbed else second.log_likelihood
    whole = first.log_likelihood - theirs
    ours_N, theirs_N = first.nats_N, second.disturbed_N if disturbed else second.nats_N
    if ours_N is None or theirs_N is None or first.request_N is None or len(ours_N) != len(theirs_N):
        return whole
    return whole / design_effect(ours_N - theirs_N, first.request_N)


def design_effect(nats_N: Floats, request_N: Ints) -> float:
    """How many tokens count as one: the variance of the sums of requests over that of as many independent tokens.

    At least 1, and 1 where there are fewer than two requests.
    """
    numbers, cluster_N = np.unique(request_N, return_inverse=True)
    if len(numbers) < 2:
        return 1.0
    off_N = nats_N - nats_N.mean()
    alone = float((off_N**2).sum())
    together = float((np.bincount(cluster_N, weights=off_N) ** 2).sum())
    return max(1.0, together / alone) if alone > 0 else 1.0


def scale_up(evidence: Evidence, times: float) -> Evidence:
    """Likelihoods as of ``times`` as many tokens, for a hypothesis that only some of them were compared with."""
    if times == 1:
        return evidence
    return replace(
        evidence,
        log_likelihood=evidence.log_likelihood * times,
        disturbed=evidence.disturbed * times,
        nats_N=None,
        disturbed_N=None,
        request_N=None,
    )
