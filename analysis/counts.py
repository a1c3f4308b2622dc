"""Counts of rounds by request, and the ratios that are made of them.

Counts are integer arrays [requests, 4] in the order of ``Rounds.requests``, with the columns below.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import Floats, percentile_interval, ratios, resampled_sums
from replay.traces.rounds import Rounds

Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Columns: rounds, accepted and drafted tokens, cut rounds.
ROUNDS, ACCEPTED, DRAFTED, CUT, WIDTH = 0, 1, 2, 3, 4


def per_request(rounds: Rounds) -> dict[str, Counts]:
    """By variant [requests, 4]: rounds, accepted, drafted, cut rounds of each request, in the order of ``requests``."""
    import polars as pl

    row_of = {request.request_id: row for row, request in enumerate(rounds.requests)}
    counts = {variant.name: np.zeros((len(row_of), WIDTH), dtype=np.int64) for variant in rounds.variants}
    grouped = rounds.table.group_by("variant", "request_id").agg(
        pl.len().cast(pl.Int64),
        pl.col("accepted").cast(pl.Int64).sum(),
        pl.col("drafted").list.len().cast(pl.Int64).sum(),
        pl.col("cut").cast(pl.Int64).sum(),
    )
    for variant, request_id, *values in grouped.iter_rows():
        counts[variant][row_of[request_id]] = values
    return counts


def histograms(rounds: Rounds) -> dict[str, Counts]:
    """By variant [steps + 1]: rounds with exactly that many accepted tokens."""
    import polars as pl

    histograms = {variant.name: np.zeros(variant.steps + 1, dtype=np.int64) for variant in rounds.variants}
    for variant, accepted, count in rounds.table.group_by("variant", "accepted").agg(pl.len()).iter_rows():
        histograms[variant][accepted] = count
    return histograms


def ratio(count: int, of: int) -> float:
    """``count / of``; nan when there is nothing to divide by."""
    return count / of if of else math.nan


def position_rates(histogram: Sequence[int] | Counts) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Joint and conditional acceptance of draft positions 1..K from ``histogram`` [K + 1].

    Joint j: rounds with at least j accepted / rounds. Conditional j: the same / rounds with at least j - 1.
    """
    reached = reached_positions(histogram)
    joint = tuple(ratio(count, reached[0]) for count in reached[1:])
    return joint, tuple(ratio(count, before) for before, count in pairwise(reached))


def reached_positions(histogram: Sequence[int] | Counts) -> list[int]:
    """Rounds with at least j accepted, j from 0, of ``histogram`` [K + 1]."""
    return [int(count) for count in np.cumsum(np.asarray(histogram)[::-1])[::-1]]


def alike(played: dict[str, Mask]) -> Iterator[tuple[list[str], Mask]]:
    """Names grouped by equal masks [requests], so that one set of draws serves a whole sweep."""
    groups: dict[bytes, list[str]] = {}
    for name, mask in played.items():
        groups.setdefault(mask.tobytes(), []).append(name)
    for names in groups.values():
        yield names, played[names[0]]


def stacked_sums(counts: Sequence[Counts], *, seed: int, resamples: int) -> Floats:
    """Resampled sums [len(counts), resamples, 4] of counts [requests, 4], the same requests drawn for all."""
    sums = resampled_sums(np.hstack(counts), seed=seed, resamples=resamples)
    return sums.reshape(resamples, len(counts), WIDTH).transpose(1, 0, 2)


def length_interval(samples: Floats, played: Mask) -> tuple[float, float]:
    """The interval of ``samples``; none from a single request, whose resamples are all the same."""
    return percentile_interval(samples) if played.sum() > 1 else (math.nan, math.nan)


def lengths(sums: Floats) -> Floats:
    """Accept length [n] of summed counts [n, 4]."""
    return ratios(sums[:, ACCEPTED] + sums[:, ROUNDS], sums[:, ROUNDS])
