"""How sure acceptance at each position of the draft is: intervals of ``position_conditional`` by request.

Requests are drawn again, as for the accept length (bootstrap.py). Where every round that got to a position accepted it,
or nearly every one, resamples hardly differ, and a plain bootstrap would call that certain. So two requests that nobody
saw are drawn from too, one that accepts all and one that accepts nothing, each with as many rounds as the mean request
that got there: the proper Bayesian bootstrap of Muliere and Secchi (Annals of the Institute of Statistical Mathematics
48, 1996) with the prior of Bayes and Laplace over requests. It weighs little among many requests. The rounds of one
request resemble each other, so the interval of few requests is wide; of fewer than ``LEAST`` there is none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from replay.analysis.bootstrap import Floats, percentile_interval, ratios, resampled_sums
from replay.analysis.counts import Counts, Mask
from replay.traces.rounds import Rounds

Interval = tuple[float, float]
NO_INTERVAL: Interval = (math.nan, math.nan)
LEAST = 5  # requests that got to a position, for an interval there
_LEVEL = 0.95


def reached_by_request(rounds: Rounds) -> dict[str, Counts]:
    """By variant [requests, steps + 1]: rounds of each request with at least j accepted, j from 0."""
    import polars as pl

    variants, requests = [one.name for one in rounds.variants], [one.request_id for one in rounds.requests]
    wide = max((one.steps for one in rounds.variants), default=0) + 1
    places = rounds.table.select(
        pl.col("variant").cast(pl.Enum(variants)).to_physical().cast(pl.Int64) * len(requests)
        + pl.col("request_id").cast(pl.Enum(requests)).to_physical().cast(pl.Int64),
        pl.col("accepted").cast(pl.Int64),
    )
    flat = places["variant"].to_numpy() * wide + places["accepted"].to_numpy()
    counts = np.bincount(flat, minlength=len(variants) * len(requests) * wide)
    counts = counts.reshape(len(variants), len(requests), wide)
    reached = counts[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    return {one.name: rows[:, : one.steps + 1] for one, rows in zip(rounds.variants, reached, strict=True)}


def position_intervals(
    reached: Mapping[str, Counts], names: Sequence[str], played: Mask, *, seed: int, resamples: int
) -> Iterator[tuple[str, tuple[Interval, ...]]]:
    """Of each of ``names`` the 95 % interval of every position's conditional acceptance, over the ``played`` requests.

    (nan, nan) where fewer than ``LEAST`` requests got there.
    """
    counts = [reached[name][played] for name in names]
    sums = resampled_sums(np.hstack([_with_unseen(rows) for rows in counts]), seed=seed, resamples=resamples)
    start = 0
    for name, rows in zip(names, counts, strict=True):
        steps = rows.shape[1] - 1
        drawn = _ends(ratios(sums[:, start + steps : start + 2 * steps], sums[:, start : start + steps]))
        trials = (rows[:, :-1] > 0).sum(axis=0)
        yield name, tuple(one if count >= LEAST else NO_INTERVAL for count, one in zip(trials, drawn, strict=True))
        start += 2 * steps


def _with_unseen(rows: Counts) -> Floats:
    """[requests + 2, 2 steps] of counts [requests, steps + 1]: rounds that got to each position, and that accepted it.

    The last two requests are those that nobody saw: one accepted all, one nothing.
    """
    got, took = rows[:, :-1].astype(np.float64), rows[:, 1:].astype(np.float64)
    mean = np.nan_to_num(ratios(got.sum(axis=0), (got > 0).sum(axis=0).astype(np.float64)))
    return np.vstack([np.hstack([got, took]), np.hstack([mean, mean]), np.hstack([mean, np.zeros_like(mean)])])


def _ends(samples: Floats) -> list[Interval]:
    """``percentile_interval`` of each column [resamples, columns]; all whole columns at once, which is much faster."""
    whole: Mask = np.asarray(np.isfinite(samples).all(axis=0), dtype=np.bool_)
    ends = np.quantile(samples[:, whole], [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], axis=0).T.tolist()
    found = iter(ends)
    return [
        (float(low), float(high)) if full else percentile_interval(samples[:, column])
        for column, full in enumerate(whole.tolist())
        for low, high in [next(found) if full else NO_INTERVAL]
    ]
