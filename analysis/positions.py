"""How sure acceptance at each position of the draft is: intervals of ``position_conditional`` by request.

Requests are drawn again, as for the accept length (bootstrap.py). Where every round that got to a position accepted it,
or none did, no resample differs, and a bootstrap would call that certain. There the interval is that of Clopper and
Pearson (Biometrika 26, 1934) with one trial for each request that got there: the rounds of one request resemble each
other, so it is wide rather than narrow.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from replay.analysis.bootstrap import Floats, percentile_interval, ratios, resampled_sums
from replay.analysis.counts import Counts, Mask
from replay.traces.rounds import Rounds

Interval = tuple[float, float]
NO_INTERVAL: Interval = (math.nan, math.nan)
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

    (nan, nan) where fewer than two requests got there.
    """
    counts = [reached[name][played] for name in names]
    sums = resampled_sums(np.hstack(counts), seed=seed, resamples=resamples)
    start = 0
    for name, rows in zip(names, counts, strict=True):
        end = start + rows.shape[1]
        yield name, tuple(_intervals(rows, sums[:, start:end]))
        start = end


def _intervals(rows: Counts, sums: Floats) -> Iterator[Interval]:
    totals, requests = rows.sum(axis=0), (rows > 0).sum(axis=0)
    drawn = _ends(ratios(sums[:, 1:], sums[:, :-1]))
    for position, interval in enumerate(drawn, 1):
        got, took, trials = int(totals[position - 1]), int(totals[position]), int(requests[position - 1])
        if trials < 2:
            yield NO_INTERVAL
        elif took in (0, got):
            yield _one_sided(took == got, trials)
        else:
            yield interval


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


def _one_sided(every: bool, trials: int) -> Interval:
    """Clopper and Pearson's for all or none of ``trials``: the other end is the share at which that has 2.5 %."""
    far = ((1 - _LEVEL) / 2) ** (1 / trials)
    return (far, 1.0) if every else (0.0, 1 - far)
