"""Evidence from what a server counted: histograms of accepted tokens request by request, or one accept length."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import resampled_sums
from replay.analysis.counts import ROUNDS, Counts, lengths
from replay.analysis.diagnosis.evidence import (
    HISTOGRAM,
    LENGTH,
    OUTLIER_ROUNDS,
    SHARES,
    Disturbance,
    Evidence,
    log_mean,
    outliers_allowed,
)
from replay.analysis.followed import Floats

_LENGTH_ERROR = 0.02  # relative: what a log or gauge of another workload is off beside sampling
_SMOOTH = 1.0  # rounds of every count that a predicted histogram is given beside its own


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
    likelihoods = {share: _discordance(agreeing, left_A, pooled, share) for share in {discordant, *SHARES[1:]}}
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
        log_mean(list(likelihoods.values())),
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
