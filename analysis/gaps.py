"""Differences of accept length, paired: between variants, and against what the server reported."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from replay.analysis.bootstrap import DEFAULT_RESAMPLES
from replay.analysis.counts import (
    ACCEPTED,
    ROUNDS,
    WIDTH,
    Counts,
    alike,
    length_interval,
    lengths,
    per_request,
    stacked_sums,
)
from replay.analysis.p_values import LEVEL, holm, paired_p_value
from replay.traces.rounds import Rounds


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a variant's accept length lies from another's, both resampled with the same requests.

    ``p_value``: two-sided, Student's t over requests (``p_values.py``); nan without an interval.
    """

    variant: str
    difference: float
    ci95: tuple[float, float]
    p_value: float = math.nan

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``equal`` (no resample tells them apart) or ``cannot tell`` (0 in the interval)."""
        low, high = self.ci95
        if self.difference == low == high == 0:
            return "equal"
        return "better" if low > 0 else "worse" if high < 0 else "cannot tell"


def adjusted_verdict(gap: Gap, p_holm: float) -> str:
    """The verdict of one of several gaps: ``better`` and ``worse`` also need an adjusted p value of at most 0.05."""
    return gap.verdict if gap.verdict == "equal" or p_holm <= LEVEL else "cannot tell"


def verdicts(found: Mapping[str, Gap]) -> dict[str, str]:
    """By variant its ``adjusted_verdict``, after Holm for the number of ``found``."""
    adjusted = holm({name: gap.p_value for name, gap in found.items()})
    return {name: adjusted_verdict(gap, adjusted[name]) for name, gap in found.items()}


def gaps(rounds: Rounds, reference: str, *, seed: int = 0, resamples: int = DEFAULT_RESAMPLES) -> dict[str, Gap]:
    """Accept length of every other variant minus that of ``reference``, by variant name.

    Paired: only requests that have rounds under both count, and one resample draws the same requests for both. The
    interval is (nan, nan) when fewer than two requests do.
    """
    counts = per_request(rounds)
    against = counts.pop(reference)
    return paired_gaps(counts, against, seed=seed, resamples=resamples)


def observed_gaps(rounds: Rounds, *, seed: int = 0, resamples: int = DEFAULT_RESAMPLES) -> dict[str, Gap]:
    """Accept length of every variant minus the one the server reported for the same requests, by variant name.

    Paired as in ``gaps``, over the requests for which the server gave a histogram; empty when it gave none.
    """
    against = np.zeros((len(rounds.requests), WIDTH), dtype=np.int64)
    for row, request in enumerate(rounds.requests):
        histogram = np.array(request.observed_histogram or (), dtype=np.int64)
        against[row, ROUNDS] = histogram.sum()
        against[row, ACCEPTED] = histogram @ np.arange(len(histogram))
    if not against.any():
        return {}
    return paired_gaps(per_request(rounds), against, seed=seed, resamples=resamples)


def paired_gaps(
    counts: dict[str, Counts], against: Counts, *, seed: int = 0, resamples: int = DEFAULT_RESAMPLES
) -> dict[str, Gap]:
    """By variant its accept length minus that of the counts ``against`` [requests, 4]; see ``gaps``."""
    found: dict[str, Gap] = {}
    both = {name: (rows[:, ROUNDS] > 0) & (against[:, ROUNDS] > 0) for name, rows in counts.items()}
    for names, played in alike(both):
        kept = [against[played], *(counts[name][played] for name in names)]
        sums = stacked_sums(kept, seed=seed, resamples=resamples)
        totals = lengths(np.stack([rows.sum(axis=0) for rows in kept]).astype(np.float64))
        for i, name in enumerate(names, start=1):
            samples = lengths(sums[i]) - lengths(sums[0])
            interval = length_interval(samples, played)
            found[name] = Gap(name, float(totals[i] - totals[0]), interval, paired_p_value(kept[i], kept[0]))
    return found
