"""How well a replayed hypothesis explains what a server did: three kinds of evidence, each with a likelihood.

- ``drafted``: the server's drafted tokens, round for round, against those that the hypothesis drafts at the same
  anchors. A round agrees until the first differing token. Of a true hypothesis a few rounds differ (near ties fall
  otherwise in another rounding order), of a wrong one most.
- ``histogram``: per request, the server's counts of accepted tokens against the hypothesis' own walk over the same
  text; a round is discordant where the two histograms cannot be matched.
- ``length``: one accept length, measured on other text: a normal error made of the spread between requests.

Likelihoods are composite: rounds are taken as independent given the hypothesis, and one differing round is never worth
more than the odds of ``NOISE``, whatever the noise was elsewhere. Two hypotheses that draft nearly the same part in
near ties only, which fall either way in a server's rounding: ``lead`` of one over another counts these rounds no
higher than against an even split.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import percentile_interval, resampled_sums
from replay.analysis.counts import ROUNDS, Counts, lengths, stacked_sums

if TYPE_CHECKING:
    import polars as pl


DRAFTED, HISTOGRAM, LENGTH = "drafted", "histogram", "length"  # the kinds above
NOISE = 0.05  # a round of a true hypothesis differs this often
# What a round is worth to a hypothesis that cannot say what is drafted: less than one that says it and is right.
_UNSAID = 0.5
_LENGTH_ERROR = 0.02  # relative: what a log or gauge of another workload is off beside sampling
_SMOOTH = 1.0  # rounds of every count that a predicted histogram is given beside its own


@dataclass(frozen=True, slots=True)
class RoundDraft:
    """What one round drafted and how much of it was accepted: a server's, or a replay's at the same anchor."""

    drafted: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """``rounds`` compared, ``agreeing`` of them the same; ``log_likelihood`` in nats; ``kind`` as above.

    ``accept_length`` is the hypothesis' own at what was compared, ``served`` the server's.
    """

    kind: str
    rounds: int
    agreeing: int
    log_likelihood: float
    accept_length: float
    served: float
    # Of each compared round, for ``drafted``: whether it agrees, and its part of the likelihood.
    agrees_R: "npt.NDArray[np.bool_] | None" = field(default=None, compare=False, repr=False)
    nats_R: "npt.NDArray[np.float64] | None" = field(default=None, compare=False, repr=False)

    @property
    def misfit(self) -> float:
        """Share of rounds that differ; for a length, how many standard errors it is off, over 20."""
        return 1 - self.agreeing / self.rounds if self.rounds else math.nan


RoundKey = tuple[str, int]  # request id and anchor


def drafted_evidence(
    replayed: Mapping[RoundKey, RoundDraft], served: Mapping[RoundKey, RoundDraft], steps: int
) -> Evidence:
    """Compare round by round at the anchors that both have. ``steps`` is the most that can be accepted."""
    keys = [key for key in served if key in replayed]
    same = [replayed[key].drafted == served[key].drafted for key in keys]
    pooled = smoothed([replayed[key].accepted for key in keys], steps)
    # Where the drafts differ, what is left to compare is how many tokens were taken.
    nats = [
        math.log1p(-NOISE) if equal else math.log(NOISE * pooled[min(served[key].accepted, steps)])
        for key, equal in zip(keys, same, strict=True)
    ]
    count = len(keys)
    return Evidence(
        DRAFTED,
        count,
        sum(same),
        math.fsum(nats),
        1 + sum(replayed[key].accepted for key in keys) / count if count else math.nan,
        1 + sum(served[key].accepted for key in keys) / count if count else math.nan,
        np.array(same, dtype=bool),
        np.array(nats, dtype=np.float64),
    )


def accepted_evidence(
    replayed: Mapping[RoundKey, RoundDraft], served: Mapping[RoundKey, RoundDraft], steps: int
) -> Evidence:
    """Compare how many tokens were taken, for a hypothesis whose drafts nobody can know, such as those of noise.

    Rounds agree as far as the two histograms of accepted tokens do.
    """
    keys = [key for key in served if key in replayed]
    ours = Counter(min(replayed[key].accepted, steps) for key in keys)
    theirs = Counter(min(served[key].accepted, steps) for key in keys)
    pooled = smoothed([replayed[key].accepted for key in keys], steps)
    count = len(keys)
    return Evidence(
        DRAFTED,
        count,
        (ours & theirs).total(),
        math.fsum(number * math.log(_UNSAID * pooled[accepted]) for accepted, number in theirs.items()),
        1 + sum(replayed[key].accepted for key in keys) / count if count else math.nan,
        1 + sum(served[key].accepted for key in keys) / count if count else math.nan,
    )


def lead(first: Evidence, second: Evidence) -> float:
    """Nats by which ``first`` explains the server better than ``second``, on the same rounds.

    The difference of the likelihoods, in which the n rounds that only one of the two gets right count no more than
    the likelihood ratio of their split against an even one: n * (log 2 - H(split)), as in McNemar's test.
    """
    if first.log_likelihood < second.log_likelihood:
        return -lead(second, first)
    whole = first.log_likelihood - second.log_likelihood
    if first.agrees_R is None or second.agrees_R is None or len(first.agrees_R) != len(second.agrees_R):
        return whole
    assert first.nats_R is not None and second.nats_R is not None
    parted_R = first.agrees_R != second.agrees_R
    ours, theirs = int((first.agrees_R & parted_R).sum()), int((second.agrees_R & parted_R).sum())
    nats_R = first.nats_R - second.nats_R
    split = _uneven(ours, theirs) if ours > theirs else 0.0
    return min(whole, float(nats_R[~parted_R].sum()) + min(float(nats_R[parted_R].sum()), split))


def _uneven(ours: int, theirs: int) -> float:
    """Log-likelihood ratio of a split of n rounds at its own odds, against even ones."""
    count = ours + theirs
    return count * math.log(2) + sum(part * math.log(part / count) for part in (ours, theirs) if part)


def histogram_evidence(
    replayed: Mapping[str, Sequence[int]], served: Mapping[str, Sequence[int]], steps: int
) -> Evidence:
    """Compare histograms [steps + 1] of accepted tokens request by request."""
    rounds = agreeing = 0
    log_likelihood = 0.0
    totals = np.zeros((2, steps + 1))
    for name, counts in served.items():
        if name in replayed:
            totals += [_padded(replayed[name], steps), _padded(counts, steps)]
    pooled = smoothed_counts(totals[0])
    for name, counts in served.items():
        if name not in replayed:
            continue
        ours, theirs = _padded(replayed[name], steps), _padded(counts, steps)
        matched = np.minimum(ours, theirs)
        left = theirs - matched  # rounds of the server that no replayed one stands for
        rounds += int(theirs.sum())
        agreeing += int(matched.sum())
        log_likelihood += float(matched.sum() * math.log1p(-NOISE) + left @ np.log(NOISE * pooled))
    accepted = totals @ np.arange(steps + 1)
    ours_mean, theirs_mean = (
        1 + part / total if total else math.nan for part, total in zip(accepted, totals.sum(1), strict=True)
    )
    return Evidence(HISTOGRAM, rounds, agreeing, log_likelihood, ours_mean, theirs_mean)


def length_evidence(counts: Counts, served: float, served_rounds: int | None, *, seed: int = 0) -> Evidence:
    """Compare one accept length with that of ``counts`` [requests, 4]; the spread between requests is its error.

    ``served_rounds`` weighs the server's own sampling error in (None: as large as ours).
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
    # As a share of rounds, so that the three kinds read alike: 2 standard errors are the 10 % that still pass.
    agreeing = max(0.0, 1 - abs(off) / 20)
    return Evidence(LENGTH, rounds, round(agreeing * rounds), log_likelihood, own, served)


def smoothed(accepted: Sequence[int], steps: int) -> npt.NDArray[np.float64]:
    """Probabilities [steps + 1] of accepted tokens, none of them 0."""
    counted = Counter(accepted)
    return smoothed_counts(np.array([counted[number] for number in range(steps + 1)], dtype=np.float64))


def smoothed_counts(histogram: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same from counts."""
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
