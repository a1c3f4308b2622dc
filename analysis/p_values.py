"""P values of differences of accept length, and what several of them ask for together.

Student's t over requests: its resolution does not end with a number of resamples.

The accept length is a ratio of sums, so that a difference of two is a difference of two ratios over the same requests.
Each request's part in it is its first-order influence (Cochran, Sampling Techniques, 3rd edition 1977, section 6.3),
and the mean of these parts over its standard error is Student's t with as many degrees of freedom as requests, less
one.
"""

import math
from collections.abc import Mapping

import numpy as np

from replay.analysis.bootstrap import Floats
from replay.analysis.counts import ACCEPTED, ROUNDS, Counts

LEVEL = 0.05  # at which two variants are told apart


def paired_p_value(counts: Counts, against: Counts) -> float:
    """Two-sided p value of the difference of two accept lengths over the same requests, counts [requests, 4] each.

    Every request has rounds under both. Never below 2 / 2**requests, the chance that as many fair coins fall alike,
    since requests cannot say more than that each of them points the same way. nan for fewer than two requests.
    """
    requests = len(counts)
    if requests < 2:
        return math.nan
    parts = _influence(counts) - _influence(against)
    difference = _length(counts) - _length(against)
    if difference == 0:
        return 1.0
    error = float(parts.std(ddof=1)) / math.sqrt(requests)
    t = math.inf if error == 0 else difference / error
    return min(1.0, max(two_sided(t, requests - 1), least_p_value(requests)))


def least_p_value(requests: int) -> float:
    """The smallest p value that so many requests can have."""
    return 2.0 ** (1 - requests)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """P values adjusted for their number, nan left out (Holm, Scandinavian Journal of Statistics 6, 1979, page 65)."""
    known = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    adjusted = dict.fromkeys(p_values, math.nan)
    largest = 0.0
    for place, (p, name) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - place) * p))
        adjusted[name] = largest
    return adjusted


def requests_needed(comparisons: int) -> int:
    """The fewest requests that can tell any two of so many comparisons apart, however large the difference is."""
    return 1 + math.ceil(math.log2(comparisons / LEVEL))


def two_sided(t: float, freedom: int) -> float:
    """The chance that Student's t with ``freedom`` degrees of freedom lies at least as far from 0 as ``t``.

    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4; exact to about 1e-13.
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    odd = freedom % 2
    powers = np.arange(2 + odd, freedom, 2, dtype=np.float64)  # of which each term is one step
    steps = (powers - 1) / powers * math.cos(angle) ** 2
    total = float(np.cumprod(steps).sum()) + 1.0
    inside = math.sin(angle) * total
    if odd:
        more = math.sin(angle) * math.cos(angle) * total if freedom > 1 else 0.0
        inside = 2 / math.pi * (angle + more)
    return max(0.0, 1.0 - inside)


def _length(counts: Counts) -> float:
    rounds = int(counts[:, ROUNDS].sum())
    return (int(counts[:, ACCEPTED].sum()) + rounds) / rounds


def _influence(counts: Counts) -> Floats:
    """By request how far it moves the accept length of counts [requests, 4], summing to 0."""
    rounds = counts[:, ROUNDS].astype(np.float64)
    tokens = counts[:, ACCEPTED] + rounds
    parts: Floats = (tokens - _length(counts) * rounds) / rounds.mean()
    return parts
