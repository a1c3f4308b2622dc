"""A comparison as one flat table, a row for each pair. The columns are in docs/compare.md."""

from collections.abc import Sequence

from replay.analysis.compare.compare import Pair
from replay.analysis.flat import Cell, FlatRow, flat_row


def pair_rows(pairs: Sequence[Pair]) -> list[FlatRow]:
    """Each B against its A."""
    return [flat_row(_pair_row(pair)) for pair in pairs]


def _pair_row(pair: Pair) -> dict[str, Cell]:
    return {
        "a": pair.a.variant,
        "b": pair.b.variant,
        "requests": pair.requests,
        "rounds_a": pair.a.rounds,
        "rounds_b": pair.b.rounds,
        "accept_length_a": pair.a.accept_length,
        "accept_length_b": pair.b.accept_length,
        "difference": pair.difference,
        "ci95_low": pair.ci95[0],
        "ci95_high": pair.ci95[1],
        "p_value": pair.p_value,
        "p_holm": pair.p_holm,
        "verdict": pair.verdict,
        "within_1_percent": pair.within_1_percent,
    }
