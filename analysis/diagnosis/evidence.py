"""How well a replayed hypothesis explains what a server did: three kinds of evidence, each with two likelihoods.

- ``drafted``: every token that the server drafted, against a replay of the hypothesis that is fed the server's drafts
  (analysis/followed.py). A token has the probability that a softmax of the draft logits gives it at a temperature that
  stands for rounding: the noise scale that was measured, or a multiple of it.
- ``histogram``: per request, the server's counts of accepted tokens against the hypothesis' own walk over the same
  text; a round is discordant where the two histograms cannot be matched.
- ``length``: one accept length, measured on other text: a normal error made of the spread between requests.

The first likelihood is that of the hypothesis and rounding, and nothing else. The second one is that of the hypothesis
and something unknown besides, whose size is fitted: a larger noise scale, more outliers. It tells how near a hypothesis
is to the truth where it is not the whole of it, and it is what a hypothesis has to beat before it is named.

Tokens of one request are not independent: one cause moves many. ``lead`` therefore counts them as fewer, by the design
effect of clusters (Kish, Survey Sampling, 1965, chapter 5).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import percentile_interval, resampled_sums
from replay.analysis.counts import ROUNDS, Counts, lengths, stacked_sums
from replay.analysis.followed import LEAST_SCALE, Floats, Followed, Ints, Noise, judge_rounds

if TYPE_CHECKING:
    import polars as pl


DRAFTED, HISTOGRAM, LENGTH = "drafted", "histogram", "length"  # the kinds above
# Of 5,284 rounds of real servers that were healthy or wrongly wired, 2 parted from their replay beyond any near tie for
# a reason that nobody knows; a round had five tokens.
OUTLIER_ROUNDS = 2 / 5284
OUTLIER_TOKENS = OUTLIER_ROUNDS / 5
# Rounding is at most so many times what was measured. Two orders on one machine flip as many tokens as the measured
# scale says (docs/accuracy.md); other hardware has the same formats, and other kernels.
_ROUNDING = 2.0
# Shares of outlying tokens that something unknown may cause, equally likely beforehand.
_SHARES = (OUTLIER_TOKENS, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)
_LENGTH_ERROR = 0.02  # relative: what a log or gauge of another workload is off beside sampling
_SMOOTH = 1.0  # rounds of every count that a predicted histogram is given beside its own


@dataclass(frozen=True, slots=True)
class RoundDraft:
    """What one round drafted and how much of it was accepted: a server's, or a replay's at the same anchor."""

    drafted: tuple[int, ...]
    accepted: int


RoundKey = tuple[str, int]  # request id and anchor


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


# ---- drafted tokens ----


def noise_scales(scale: float) -> tuple[float, ...]:
    """The noise scales at which tokens are judged: a quarter of the measured ``scale``, then twofold up to 1 nat.

    The least is for a server on the replay's own kernels, where hardly anything flips.
    """
    measured = max(scale, LEAST_SCALE)
    found = [measured / 4, measured / 2, measured]
    while found[-1] * 2 < 1:
        found.append(found[-1] * 2)
    return (*found, 1.0) if found[-1] < 1 else tuple(found)


MEASURED = 2  # the measured scale's place among them


def followed_evidence(followed: Followed, noise: Noise, served: float, accept_length: float = math.nan) -> Evidence:
    """A hypothesis whose replay followed the server's drafts, with scales as ``noise_scales`` gives them.

    ``noise`` is what was measured, under the hypothesis itself where it is to be named.
    """
    near_R, unexplained_R = judge_rounds(followed, noise)
    outlier = -math.log(followed.choices)
    most = _ROUNDING * max(noise.scale, LEAST_SCALE) * (1 + 1e-9)
    places = [place for place, scale in enumerate(followed.scales) if scale <= most] or [0]
    exact_ZN = [_mixed(followed, place, OUTLIER_TOKENS, outlier) for place in places]
    exact_N = max(exact_ZN, key=lambda nats_N: float(nats_N.sum()))
    log_likelihood = _log_mean([float(nats_N.sum()) for nats_N in exact_ZN])
    disturbance, disturbed_N, disturbed = _disturbed(followed, outlier)
    rounds, unexplained = followed.rounds, int(unexplained_R.sum())
    near = int(near_R.sum())
    return Evidence(
        DRAFTED,
        rounds,
        rounds - near - unexplained,
        near,
        unexplained,
        log_likelihood,
        disturbed,
        outliers_allowed(rounds),
        accept_length,
        served,
        disturbance,
        exact_N,
        disturbed_N,
        followed.request_N,
    )


def _disturbed(followed: Followed, outlier: float) -> tuple[Disturbance, Floats, float]:
    """The disturbance that fits best, its nats [N], and the log-likelihood averaged over all of them."""
    sums, best = [], None
    for place, scale in enumerate(followed.scales):
        for share in _SHARES:
            nats_N = _mixed(followed, place, share, outlier)
            sums.append(float(nats_N.sum()))
            if best is None or sums[-1] > best[0]:
                best = sums[-1], Disturbance(scale, share), nats_N
    assert best is not None
    return best[1], best[2], _log_mean(sums)


def _mixed(followed: Followed, place: int, share: float, outlier: float) -> Floats:
    """Log-probability of each token [N] at one noise scale, of which a ``share`` is drawn from all tokens alike."""
    told_N = -followed.margin_N / followed.scales[place] - followed.spread_NZ[:, place]
    mixed: Floats = np.logaddexp(math.log1p(-share) + told_N, math.log(share) + outlier)
    return mixed


def _log_mean(nats: Sequence[float]) -> float:
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


# ---- histograms and lengths ----


def histogram_evidence(
    replayed: Mapping[str, Sequence[int]],
    served: Mapping[str, Sequence[int]],
    steps: int,
    *,
    discordant: float = OUTLIER_ROUNDS,
) -> Evidence:
    """Compare histograms [steps + 1] of accepted tokens request by request.

    ``discordant`` is the share of rounds that rounding alone makes so, as it was measured between two orders.
    """
    rounds = agreeing = 0
    pairs = [
        (_padded(replayed[name], steps), _padded(counts, steps)) for name, counts in served.items() if name in replayed
    ]
    totals = np.zeros((2, steps + 1)) + np.array(pairs).reshape(-1, 2, steps + 1).sum(axis=0)
    pooled = smoothed_counts(totals[0])
    left_A = np.zeros(steps + 1)
    for ours, theirs in pairs:
        matched = np.minimum(ours, theirs)
        left_A += theirs - matched  # rounds of the server that no replayed one stands for
        rounds += int(theirs.sum())
        agreeing += int(matched.sum())
    likelihoods = {share: _discordance(agreeing, left_A, pooled, share) for share in {discordant, *_SHARES[1:]}}
    best = max(likelihoods, key=lambda share: likelihoods[share])
    accepted = totals @ np.arange(steps + 1)
    ours_mean, theirs_mean = (
        1 + part / total if total else math.nan for part, total in zip(accepted, totals.sum(1), strict=True)
    )
    return Evidence(
        HISTOGRAM,
        rounds,
        agreeing,
        0,
        rounds - agreeing,
        likelihoods[discordant],
        _log_mean(list(likelihoods.values())),
        outliers_allowed(rounds, discordant),
        ours_mean,
        theirs_mean,
        Disturbance(0.0, best),
    )


def _discordance(agreeing: int, left_A: Floats, pooled: Floats, share: float) -> float:
    """Log-likelihood of so many matched rounds, and of those left by accepted tokens, at a share of discordant ones."""
    return float(agreeing * math.log1p(-share) + left_A @ np.log(share * pooled))


def length_evidence(counts: Counts, served: float, served_rounds: int | None, steps: int, *, seed: int = 0) -> Evidence:
    """Compare one accept length with that of ``counts`` [requests, 4]; the spread between requests is its error.

    ``served_rounds`` weighs the server's own sampling error in (None: as large as ours). It fits within two standard
    errors. Something unknown makes every accept length from 1 to ``steps`` + 1 as likely as any other.
    """
    counts = counts[counts[:, ROUNDS] > 0]
    totals = counts.sum(axis=0)
    rounds = int(totals[ROUNDS])
    own = float(lengths(totals[None].astype(np.float64))[0])
    sampled = lengths(resampled_sums(counts, seed=seed, resamples=1000))
    spread = float(np.nanstd(sampled)) if len(counts) > 1 else 0.0
    theirs = spread if not served_rounds else spread * math.sqrt(rounds / served_rounds)
    error = math.sqrt(spread**2 + theirs**2 + (_LENGTH_ERROR * served) ** 2)
    off = (own - served) / error
    log_likelihood = -0.5 * off**2 - math.log(error * math.sqrt(2 * math.pi))
    fits = abs(off) <= 2
    return Evidence(
        LENGTH, rounds, rounds * fits, 0, rounds * (not fits), log_likelihood, -math.log(steps), 0, own, served
    )


def taken_likelihood(ours: Sequence[int], theirs: Sequence[int], steps: int) -> float:
    """Nats of a server's accepted tokens, round for round, at the rates at which a replay accepts."""
    return float(_counts(theirs, steps) @ np.log(smoothed_counts(_counts(ours, steps))))


def taken_by_any_cause(accepted: Sequence[int], steps: int) -> float:
    """The same at the server's own rates, less what fitting them costs (Schwarz, 1978): the best any cause can do."""
    return taken_likelihood(accepted, accepted, steps) - steps / 2 * math.log(max(2, len(accepted)))


def _counts(accepted: Sequence[int], steps: int) -> Floats:
    counts: Floats = np.bincount(np.minimum(accepted, steps), minlength=steps + 1).astype(np.float64)
    return counts


def smoothed_counts(histogram: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probabilities [steps + 1] of accepted tokens from counts, none of them 0."""
    spread: npt.NDArray[np.float64] = (histogram + _SMOOTH) / (histogram.sum() + _SMOOTH * len(histogram))
    return spread


def _padded(histogram: Sequence[int], steps: int) -> npt.NDArray[np.float64]:
    counts = np.zeros(steps + 1)
    for accepted, count in enumerate(histogram):
        counts[min(accepted, steps)] += count
    return counts


def accepted_gain(
    better: Mapping[RoundKey, RoundDraft], base: Mapping[RoundKey, RoundDraft], *, seed: int = 0
) -> tuple[float, float, float]:
    """Accepted tokens a round that ``better`` has over ``base`` at the same anchors, with its 95 % interval.

    Bootstrap over requests; (gain, nan, nan) for fewer than two requests.
    """
    by_request: dict[str, list[int]] = {}
    for key in base:
        if key in better:
            by_request.setdefault(key[0], []).append(better[key].accepted - base[key].accepted)
    sums = np.array([[sum(differences), len(differences)] for differences in by_request.values()], dtype=np.float64)
    if not len(sums):
        return math.nan, math.nan, math.nan
    gain = float(sums[:, 0].sum() / sums[:, 1].sum())
    if len(sums) < 2:
        return gain, math.nan, math.nan
    drawn = resampled_sums(sums, seed=seed, resamples=2000)
    return gain, *percentile_interval(drawn[:, 0] / drawn[:, 1])


def length_gain(better: Counts, base: Counts, *, seed: int = 0) -> tuple[float, float, float]:
    """Accept length of ``better`` over ``base`` [requests, 4 each] with its 95 % interval, the same requests drawn.

    (gain, nan, nan) for fewer than two requests that both played.
    """
    both = (better[:, ROUNDS] > 0) & (base[:, ROUNDS] > 0)
    if not both.any():
        return math.nan, math.nan, math.nan
    kept = [better[both], base[both]]
    totals = lengths(np.stack([counts.sum(axis=0) for counts in kept]).astype(np.float64))
    gain = float(totals[0] - totals[1])
    if both.sum() < 2:
        return gain, math.nan, math.nan
    sums = stacked_sums(kept, seed=seed, resamples=2000)
    return gain, *percentile_interval(lengths(sums[0]) - lengths(sums[1]))


def by_anchor(table: "pl.DataFrame") -> dict[RoundKey, RoundDraft]:
    """The drafts of one variant or server by request and anchor."""
    columns = table.select("request_id", "anchor", "drafted", "accepted")
    return {
        (request, anchor): RoundDraft(tuple(drafted), accepted)
        for request, anchor, drafted, accepted in columns.iter_rows()
    }
