"""Replays along a server's drafts, invented token by token."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from replay.analysis.followed import Followed


def make_followed(
    margins: Sequence[Sequence[float]],
    *,
    log_probs: Sequence[Sequence[float]] | None = None,
    requests: Sequence[int] | None = None,
    spread: float | Sequence[float] = 0.0,
    scales: tuple[float, ...] = (0.1,),
    choices: int = 100,
    by_depth: bool = False,
) -> Followed:
    """Rounds by the margins of their tokens; the replay prefers those of margin 0, and depths count from 1.

    ``requests`` is that of each round (None: 0 for all), ``spread`` that of each scale, of all tokens alike.
    """
    margin_N = np.array([margin for one in margins for margin in one], dtype=np.float64)
    round_N = np.array([number for number, one in enumerate(margins) for _ in one], dtype=np.int64)
    request_R = np.zeros(len(margins), dtype=np.int64) if requests is None else np.array(requests, dtype=np.int64)
    spread_Z = np.broadcast_to(np.array(spread, dtype=np.float64), (len(scales),))
    return Followed(
        request_N=request_R[round_N],
        round_N=round_N,
        depth_N=np.array([depth for one in margins for depth in range(1, len(one) + 1)], dtype=np.int64),
        margin_N=margin_N,
        log_prob_N=-1.0 - margin_N
        if log_probs is None
        else np.array([nats for one in log_probs for nats in one], dtype=np.float64),
        spread_NZ=np.tile(spread_Z, (len(margin_N), 1)),
        same_N=margin_N == 0,
        alike_R=np.array([not any(one) for one in margins], dtype=bool),
        scales=scales,
        choices=choices,
        by_depth=by_depth,
    )


def assert_same_followed(one: Followed, other: Followed) -> None:
    """Both say the same of the same rounds; sums may be of other orders."""
    for field in fields(Followed):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("margin_N", "log_prob_N", "spread_NZ"):  # products over other numbers of rows
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
        else:
            assert np.array_equal(mine, theirs), field.name
