"""Confidence intervals by bootstrap over requests.

Rounds of one request resemble each other, so the request is what is drawn again (with replacement), never the round.
A ratio's counts are summed over the drawn requests first and divided after, as the ratio itself is made. Intervals
are percentile intervals: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

DEFAULT_RESAMPLES = 2000
# Percentile intervals from fewer requests than this are too narrow more often than their 5 % (Efron and Tibshirani,
# An Introduction to the Bootstrap, 1993, section 13.6 and chapter 14).
FEW_REQUESTS = 20

# Cells (resamples x requests) of one block of draws: bounds memory, does not change a number.
_BLOCK_CELLS = 4_000_000


def resampled_sums(counts: npt.ArrayLike, *, seed: int, resamples: int) -> Floats:
    """Sums over requests drawn with replacement.

    ``counts`` [requests, columns] gives [resamples, columns] in float64 (exact for whole numbers below 2**53). All
    columns see the same draws, which is what makes comparisons between columns paired. The same seed gives the same
    numbers.
    """
    values = np.asarray(counts, dtype=np.float64)
    requests, columns = values.shape
    sums = np.zeros((resamples, columns))
    if requests == 0:
        return sums
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK_CELLS // requests)
    for start in range(0, resamples, block):
        stop = min(start + block, resamples)
        draws = rng.integers(requests, size=(stop - start, requests))
        # How often each request was drawn in each resample, as one bincount over flattened (resample, request).
        flat = draws + np.arange(stop - start)[:, None] * requests
        times = np.bincount(flat.ravel(), minlength=flat.size).reshape(flat.shape)
        sums[start:stop] = times @ values
    return sums


def percentile_interval(samples: Floats, *, level: float = 0.95) -> tuple[float, float]:
    """The middle ``level`` of the finite ``samples`` [resamples]; (nan, nan) when there is none."""
    finite = samples[np.isfinite(samples)]
    if finite.size == 0:
        return (float("nan"), float("nan"))
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])
    return (float(low), float(high))


def ratios(numerators: Floats, denominators: Floats) -> Floats:
    """Elementwise ratio, nan where the denominator is 0."""
    quotients: Floats = np.full(numerators.shape, np.nan)
    np.divide(numerators, denominators, out=quotients, where=denominators != 0)
    return quotients
