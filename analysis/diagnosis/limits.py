"""What holds a head back, where its server is as healthy as it can be.

A part of the rounds is named where an interval says that fewer tokens are accepted there.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from replay.analysis.bootstrap import DEFAULT_RESAMPLES, Floats, percentile_interval, ratios, resampled_sums
from replay.analysis.counts import histograms, position_rates
from replay.traces.rounds import Rounds

if TYPE_CHECKING:
    import polars as pl

_SEED, _LEVEL = 0, 0.95


def limits(rounds: Rounds, variant: str, *, unknown_share: float) -> Iterator[str]:
    """Sentences on what the head lacks. ``unknown_share`` of the target's tokens lie outside the draft vocabulary."""
    _, conditional = position_rates(histograms(rounds)[variant])
    yield f"data or training: {conditional[0]:.0%} of its first tokens are taken, of good public heads 65 to 75 %"
    if unknown_share > 0:
        yield f"vocabulary: {unknown_share:.1%} of the target's tokens are none that it can draft"
    taken = _taken(rounds, variant)
    if len(conditional) > 2 and _fewer(taken[2], taken[0]):
        yield (
            f"depth: of the rounds that got there, {conditional[0]:.0%} take the first token and {conditional[2]:.0%} "
            "the third; train more steps, or serve fewer"
        )
    yield from _by_category(rounds, variant)
    early, late = _halves(rounds, variant)
    if _fewer(late, early):
        yield (
            f"context length: accept length {_length(early):.2f} in the first half of the positions, "
            f"{_length(late):.2f} in the second"
        )


def _by_category(rounds: Rounds, variant: str) -> Iterator[str]:
    """Categories that accept less than all others do."""
    categories = sorted({request.category for request in rounds.requests if request.category})
    of_request = np.array([request.category or "" for request in rounds.requests])
    both = _accepted(rounds, variant)
    for category in categories:
        inside = both * (of_request == category)[:, None]
        if _fewer(inside, both - inside, comparisons=len(categories)):
            yield (
                f"category {category}: accept length {_length(inside):.2f} over {inside[:, 1].sum():.0f} rounds, "
                f"{_length(both - inside):.2f} elsewhere"
            )


def _fewer(part: Floats, other: Floats, *, comparisons: int = 1) -> bool:
    """Whether the ratio of the columns of ``part`` [requests, 2] is below that of ``other``.

    By a paired bootstrap over requests; of so many ``comparisons`` each has its share of the error (Bonferroni).
    """
    if not part[:, 1].any() or not other[:, 1].any():
        return False
    sums = resampled_sums(np.hstack([part, other]), seed=_SEED, resamples=DEFAULT_RESAMPLES)
    differences = ratios(sums[:, 0], sums[:, 1]) - ratios(sums[:, 2], sums[:, 3])
    _, high = percentile_interval(differences, level=1 - (1 - _LEVEL) / comparisons)
    return high < 0


def _taken(rounds: Rounds, variant: str) -> list[Floats]:
    """By depth and request how many tokens are taken, and how many rounds got there [requests, 2]."""
    import polars as pl

    table = rounds.table.filter(pl.col("variant") == variant)
    steps = next(one.steps for one in rounds.variants if one.name == variant)
    taken = pl.col("accepted")
    return [_sums(rounds, table, taken > depth, taken >= depth) for depth in range(steps)]


def _accepted(rounds: Rounds, variant: str) -> Floats:
    """By request accepted tokens and rounds [requests, 2]."""
    import polars as pl

    return _sums(rounds, rounds.table.filter(pl.col("variant") == variant), pl.col("accepted"), pl.lit(1))


def _halves(rounds: Rounds, variant: str) -> tuple[Floats, Floats]:
    """``_accepted`` of the anchors up to the middle one of all, and of those beyond."""
    import polars as pl

    table = rounds.table.filter(pl.col("variant") == variant)
    early = pl.col("anchor") <= pl.col("anchor").median()
    parts = (table.filter(early), table.filter(~early))
    first, second = (_sums(rounds, part, pl.col("accepted"), pl.lit(1)) for part in parts)
    return first, second


def _sums(rounds: Rounds, table: "pl.DataFrame", *columns: "pl.Expr") -> Floats:
    """Sums of the columns over each request's rows [requests, columns]; 0 for one without any."""
    import polars as pl

    row_of = {request.request_id: row for row, request in enumerate(rounds.requests)}
    found = np.zeros((len(row_of), len(columns)))
    named = [column.cast(pl.Float64).alias(str(place)) for place, column in enumerate(columns)]
    grouped = table.select("request_id", *named).group_by("request_id").sum()
    for request_id, *sums in grouped.iter_rows():
        found[row_of[request_id]] = sums
    return found


def _length(both: Floats) -> float:
    """The accept length of accepted tokens and rounds."""
    return float(1 + both[:, 0].sum() / both[:, 1].sum())
