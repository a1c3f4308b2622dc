"""Expected acceptance as summarise() tells it: ratios of the sums that a simulation left for each request."""

from dataclasses import dataclass

import numpy as np

from replay.analysis.bootstrap import Floats, percentile_interval, ratios, resampled_sums
from replay.traces.rounds import EXPECTED_COLUMNS, Expected

ROUNDS, ACCEPTED = slice(0, None, 2), slice(1, None, 2)


@dataclass(frozen=True, slots=True)
class ExpectedSummary:
    """Accept length that ``rule`` has on average, (expected accepted + expected rounds) / expected rounds.

    ``accept_length_ci95`` is a percentile bootstrap over the requests with a round, (nan, nan) below two of them;
    ``unknown`` what becomes of ``accept_length`` with every probability that the trace leaves open at its lower or its
    upper bound. ``exact`` and ``note`` as in ``Expected``.
    """

    rule: str
    accept_length: float
    accept_length_ci95: tuple[float, float]
    unknown: tuple[float, float]
    exact: bool
    note: str


def summarise_expected(expected: Expected, *, seed: int, resamples: int) -> ExpectedSummary:
    """The ratios of ``expected``; nan without a round."""
    sums = np.array(expected.sums, dtype=np.float64).reshape(-1, EXPECTED_COLUMNS)
    sums = sums[sums[:, 0] > 0]
    middle, low, high = _lengths(sums.sum(axis=0, keepdims=True))[0]
    interval = (float("nan"), float("nan"))
    if len(sums) > 1:
        interval = percentile_interval(_lengths(resampled_sums(sums, seed=seed, resamples=resamples))[:, 0])
    unknown = (float(min(middle, low, high)), float(max(middle, low, high)))
    return ExpectedSummary(expected.rule, float(middle), interval, unknown, expected.exact, expected.note)


def _lengths(sums: Floats) -> Floats:
    """Accept lengths [n, 3] of summed columns [n, 6]."""
    return ratios(sums[:, ROUNDS] + sums[:, ACCEPTED], sums[:, ROUNDS])
