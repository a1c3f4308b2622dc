"""Rounds on their way into a table: as a frame for each request, made by polars from plain lists, puts them there."""

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest

from replay.simulator.rounds_table import RoundsTable
from replay.traces.rounds import table_schema
from replay.verify.accept import Round, round_at


def plain(
    name: str, request: str, walk: Sequence[Round], drafted_RN: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
) -> pl.DataFrame:
    frame = {
        "variant": [name] * len(walk),
        "request_id": [request] * len(walk),
        "round": range(len(walk)),
        "anchor": [played.anchor for played in walk],
        "drafted": drafted_RN.tolist(),
        "accepted": [played.accepted for played in walk],
        "cut": [played.cut for played in walk],
    }
    return pl.DataFrame(frame, schema=table_schema())


@pytest.mark.parametrize("at_once", [1, 7, 10_000])
def test_it_is_the_table_of_frames_of_each_request(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of no round among them, and rounds that draft fewer tokens than those before."""
    monkeypatch.setattr("replay.simulator.rounds_table._AT_ONCE", at_once)
    draw, names = np.random.default_rng(3), ["a", "b"]
    table, frames = RoundsTable(names), dict[str, list[pl.DataFrame]]({name: [] for name in names})
    for number, rounds in enumerate([3, 0, 5, 1, 4, 2]):
        for member, name in enumerate(names):
            width = 1 + (number // 2 + member) % 3
            walk = [round_at(10 + 3 * place, int(draw.integers(3)), tokens=16) for place in range(rounds)]
            drafted_RN = draw.integers(-1, 50_000, (rounds, width))
            table.add(member, f"r{number}", walk, drafted_RN)
            frames[name].append(plain(name, f"r{number}", walk, drafted_RN))
    assert table.of(1).equals(pl.concat(frames["b"]))
    further = plain("called otherwise", "s", [Round(4, 1, True)], np.array([[7, 8]]))
    table.take(0, further)
    expected = pl.concat([*frames["a"], further.with_columns(variant=pl.lit("a")), *frames["b"]])
    assert table.frame().equals(expected) and table.frame().schema == expected.schema
    assert expected["cut"].any() and not expected["cut"].all() and len(expected) == 31


def test_without_a_round_it_has_the_columns() -> None:
    table = RoundsTable(["a"])
    table.add(0, "r", [], np.empty((0, 3), dtype=np.int64))
    assert table.frame().equals(pl.DataFrame(schema=table_schema())) and table.of(0).schema == table.frame().schema
