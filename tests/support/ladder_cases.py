"""A ladder small enough for paper: two requests, two steps, four walks. The arithmetic stands in test_ladder.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from support.rounds_maker import Accepted, make_rounds, make_variant

from replay.analysis.ladder.ladder import Factor, Replays

Steps = Sequence[int]
# By request: anchors with a known target, with one in the draft vocabulary, right, right so far; by step.
COUNTS = (((4, 3), (4, 2), (3, 1), (3, 1)), ((6, 5), (4, 4), (2, 2), (2, 1)))
WALKS: Mapping[str, Accepted] = {
    "ideal": [[2, 0], [0, 1]],
    "low": [[1, 0], [0, 1]],
    "rewired": [[1, 0], [0, 0]],
    "served": [[0, 0], [0, 0]],
}
FACTORS = (
    Factor("precision", "The head runs in bf16.", True),
    Factor("KV", "Refreshed.", False),
    Factor("wiring", "The server feeds 3,16,28.", True),
    Factor("configuration", "Two steps.", False),
)
VARIANTS = {
    frozenset[str](): "ideal",
    frozenset({"precision"}): "low",
    frozenset({"wiring"}): "rewired",
    frozenset({"precision", "wiring"}): "served",
}


def make_anchors(counts: Sequence[Sequence[Steps]] = COUNTS) -> pl.DataFrame:
    """The table that ``score_anchors`` makes."""
    rows = [
        (f"r{request}", step, *(column[step - 1] for column in columns))
        for request, columns in enumerate(counts)
        for step in range(1, len(columns[0]) + 1)
    ]
    names = ("request_id", "step", "recorded", "in_vocabulary", "right", "right_so_far")
    return pl.DataFrame(rows, schema=names, orient="row")


def make_replays(walks: Mapping[str, Accepted] = WALKS, **options: Any) -> Replays:
    """The walks of all choices of two causes; ``options`` as ``make_rounds`` takes them."""
    steps = 2
    played = {make_variant(name, steps=steps): accepted for name, accepted in walks.items()}
    return Replays(make_rounds(played, **options), FACTORS, VARIANTS)
