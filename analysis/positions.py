"""How sure acceptance at each position of the draft is: intervals of ``position_conditional`` by request.

The share is a ratio of sums over the requests that got to the position. Its interval is that of Student's t on their
linearised parts (Cochran, Sampling Techniques, 3rd edition 1977, section 6.3), with one more request among them: as
many rounds as they have on average, half of them accepted. Agresti and Coull (American Statistician 52, 1998) add
trials to a binomial in this way. Without it, requests that accept all alike
would look certain, as they do to a bootstrap.
"""

import math
from functools import lru_cache

import numpy as np

from replay.analysis.counts import Counts
from replay.analysis.p_values import two_sided
from replay.traces.rounds import Rounds

Interval = tuple[float, float]
NO_INTERVAL: Interval = (math.nan, math.nan)
LEAST_REQUESTS = 5  # that got to a position, for an interval
_OUTSIDE = 0.05


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


def position_requests(reached: Counts) -> tuple[int, ...]:
    """Of ``reached`` [requests, steps + 1], by position: how many requests got there."""
    return tuple((reached[:, :-1] > 0).sum(axis=0).tolist())


def position_intervals(reached: Counts) -> tuple[Interval, ...]:
    """Of ``reached`` [requests, steps + 1] the 95 % interval of every position's conditional acceptance.

    (nan, nan) where fewer than ``LEAST_REQUESTS`` requests got there.
    """
    return tuple(_interval(reached[:, place], reached[:, place + 1]) for place in range(reached.shape[1] - 1))


def _interval(got: Counts, took: Counts) -> Interval:
    there = got > 0
    count = int(there.sum())
    if count < LEAST_REQUESTS:
        return NO_INTERVAL
    more = got[there].mean()
    trials, accepted = np.append(got[there], more), np.append(took[there], more / 2)
    share = accepted.sum() / trials.sum()
    parts = accepted - share * trials
    error = math.sqrt(float(parts @ parts) * (count + 1) / count) / float(trials.sum())
    reach = _quantile(count - 1) * error
    return max(0.0, float(share) - reach), min(1.0, float(share) + reach)


@lru_cache(maxsize=256)
def _quantile(freedom: int) -> float:
    """Student's t that 95 % lie within, by halving; at least 4 degrees of freedom, where it is below 3."""
    low, high = 1.0, 3.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > _OUTSIDE else (low, middle)
    return low
