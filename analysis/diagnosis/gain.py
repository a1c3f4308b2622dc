"""What another variant accepts more than the one served, with its interval: at the same anchors or on all requests."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from replay.analysis.bootstrap import percentile_interval, resampled_sums
from replay.analysis.counts import ROUNDS, Counts, lengths, stacked_sums

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class RoundDraft:
    """What one round drafted and how much of it was accepted: a server's, or a replay's at the same anchor."""

    drafted: tuple[int, ...]
    accepted: int


RoundKey = tuple[str, int]  # request id and anchor


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


_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Gain:
    """Another variant that accepts more than the one served, at the same anchors: accepted tokens a round, and CI.

    ``tied``: it cannot be told from the one that accepts most."""

    name: str
    kind: str
    value: str
    gain: float
    ci95: tuple[float, float]
    accept_length: float = math.nan
    fix: str = ""
    log_prior: float = 0.0
    tied: bool = False

    @property
    def label(self) -> str:
        """Kind and value; of a layer-id hypothesis the wiring that it comes to, whatever ``name`` says."""
        return self.name if "+" in self.kind else f"{self.kind}={self.value}"


def stands_out(gain: Gain, tried: int, *, one: float = 0.025) -> bool:
    """Whether a gain is more than the luck of the best of ``tried`` variants: Bonferroni, on the interval's width.

    ``one`` is how often luck alone would do as well.
    """
    error = (gain.ci95[1] - gain.ci95[0]) / (2 * _NORMAL.inv_cdf(0.975))
    return gain.ci95[0] > 0 and gain.gain > _NORMAL.inv_cdf(1 - one / tried) * error
