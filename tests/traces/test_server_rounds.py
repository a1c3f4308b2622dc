"""The server's own rounds in a trace: written, merged, read back, and refused where they cannot be."""

from pathlib import Path

import polars as pl
import pytest
from support.trace_maker import make_header, make_requests

from replay.errors import CaptureError, TraceCorruptError
from replay.traces.reader import Trace
from replay.traces.server_rounds import read_served
from replay.traces.writer import TraceWriter

LATER = ["parents", "batch", "verify_pass", "batch_row"]  # columns that rounds did not have at first


def rounds(*rows: tuple[str, int, int, list[int], int]) -> pl.DataFrame:
    kinds = {"request_id": pl.String, "round": pl.Int32, "anchor": pl.Int32}
    return pl.DataFrame(rows, schema=kinds | {"drafted": pl.List(pl.Int32), "accepted": pl.Int32}, orient="row")


def tree(parents: list[int | None] | None, drafted: list[int]) -> pl.DataFrame:
    """One round of r0 whose drafted tokens continue ``parents``."""
    return rounds(("r0", 0, 2, drafted, 1)).with_columns(parents=pl.Series([parents], dtype=pl.List(pl.Int32)))


def test_the_servers_rounds(tmp_path: Path) -> None:
    kept = rounds(("r0", 0, 2, [5, 6], 1), ("r0", 1, 4, [7], 0))
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add_rounds(rounds(("r0", 0, 9, [1], 1), ("never", 0, 1, [1], 1)))
        writer.add_rounds(kept)  # a second try of the same request replaces its rounds
        writer.add(make_requests(1))
        writer.finish()
    trace = Trace.open(tmp_path / "t")
    assert trace.header.rounds
    assert trace.served_rounds().drop(LATER).equals(kept)
    assert trace.served_rounds().select(LATER).null_count().row(0) == (2, 2, 2, 2)  # nothing was said of these
    with TraceWriter.resume(tmp_path / "t", make_header()) as writer:
        writer.add_rounds(rounds(("r1", 0, 3, [8], 1)))
        writer.add(make_requests(2)[1:])
        assert Trace.open(tmp_path / "t", allow_incomplete=True).served_rounds().height == 3
        writer.finish()
    assert Trace.open(tmp_path / "t").served_rounds()["request_id"].to_list() == ["r0", "r0", "r1"]


def test_parents_of_a_servers_trees(tmp_path: Path) -> None:
    """A tree of six drafted tokens, the fifth without its parent; beside it a chain, and a file of no such column."""
    kept = tree([0, 0, 1, 3, -1, 2], [5, 6, 7, 7, 3, 1])
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add_rounds(rounds(("r1", 0, 3, [8], 1)))
        writer.add_rounds(kept)
        writer.add(make_requests(2))
        writer.finish()
    assert Trace.open(tmp_path / "t").served_rounds().drop(LATER[1:]).filter(request_id="r0").equals(kept)
    assert Trace.open(tmp_path / "t").served_rounds()["parents"].to_list() == [None, [0, 0, 1, 3, -1, 2]]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0], r"1 parents of 2 drafted tokens"),
        ([0, 2], r"the parent of drafted token 2 is 2, must be a number from -1 below its own"),
        ([-2, 0], r"the parent of drafted token 1 is -2"),
        ([0, None], r"the parent of drafted token 2 is None"),
    ],
)
def test_parents_that_cannot_be(tmp_path: Path, parents: list[int | None], message: str) -> None:
    tree(parents, [5, 6]).write_parquet(tmp_path / "rounds.parquet")
    with pytest.raises(TraceCorruptError, match=message):
        read_served(tmp_path / "rounds.parquet")
    with TraceWriter.create(tmp_path / "t", make_header()) as writer, pytest.raises(CaptureError, match=message):
        writer.add_rounds(tree(parents, [5, 6]))


def test_requests_that_were_verified_together(tmp_path: Path) -> None:
    def together(batch: int) -> pl.DataFrame:
        return rounds(("r0", 0, 2, [5, 6], 1)).with_columns(batch=pl.lit(batch, pl.Int32))

    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        with pytest.raises(CaptureError, match=r"the column batch holds 0, must be 1 or more"):
            writer.add_rounds(together(0))
        writer.add_rounds(together(3))
        writer.add(make_requests(1))
        writer.finish()
    assert Trace.open(tmp_path / "t").served_rounds()["batch"].to_list() == [3]


def together(*rows: tuple[str, int | None, int | None, int | None]) -> pl.DataFrame:
    """One round of each of these requests, in ``batch`` of ``verify_pass`` as ``batch_row``."""
    names = {"request_id": pl.String, "batch": pl.Int32, "verify_pass": pl.Int64, "batch_row": pl.Int32}
    told = pl.DataFrame(rows, schema=names, orient="row")
    return rounds(*((name, 0, 2, [5, 6], 1) for name, *_ in rows)).with_columns(told.drop("request_id"))


def test_which_rounds_ran_together(tmp_path: Path) -> None:
    kept = together(("r0", 3, 7, 2), ("r1", 3, 7, 0), ("r2", 1, 8, 0), ("r3", 2, None, None))
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        assert writer.next_verify_pass() == 0
        writer.add_rounds(kept)
        assert writer.next_verify_pass() == 9
        with pytest.raises(CaptureError, match=r"with those before: row 0 of verify pass 7 stands twice"):
            writer.add_rounds(together(("r5", 3, 7, 0)))
        writer.add(make_requests(4))
        writer.finish()
    found = Trace.open(tmp_path / "t").served_rounds()
    assert found.drop("parents").equals(kept.select(found.drop("parents").columns))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("r0", 3, -1, 0)], r"the column verify_pass holds -1, must be 0 or more"),
        ([("r0", 3, 1, -1)], r"the column batch_row holds -1, must be 0 or more"),
        ([("r0", 3, 1, None)], r"1 round has a verify_pass or a batch_row without the other"),
        ([("r0", 3, None, 1), ("r1", 3, 4, None)], r"2 rounds have a verify_pass or a batch_row without the other"),
        ([("r0", 3, 1, 3)], r"row 3 of a batch of 3"),
        ([("r0", 3, 1, 2), ("r1", 3, 1, 2)], r"row 2 of verify pass 1 stands twice"),
        ([("r0", 3, 1, 2), ("r1", 2, 1, 1)], r"the rounds of verify pass 1 differ in batch"),
    ],
)
def test_passes_that_cannot_be(
    tmp_path: Path, rows: list[tuple[str, int | None, int | None, int | None]], message: str
) -> None:
    together(*rows).write_parquet(tmp_path / "rounds.parquet")
    with pytest.raises(TraceCorruptError, match=message):
        read_served(tmp_path / "rounds.parquet")
    with TraceWriter.create(tmp_path / "t", make_header()) as writer, pytest.raises(CaptureError, match=message):
        writer.add_rounds(together(*rows))


def test_parents_of_another_kind(tmp_path: Path) -> None:
    rounds(("r0", 0, 2, [5, 6], 1)).with_columns(parents=pl.lit("0,1")).write_parquet(tmp_path / "rounds.parquet")
    with pytest.raises(TraceCorruptError, match=r"the column parents is String, must be List"):
        read_served(tmp_path / "rounds.parquet")


def test_rounds_that_were_changed(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add_rounds(rounds(("r0", 0, 2, [5, 6], 1)))
        writer.add(make_requests(1))
        writer.finish()
    rounds(("r0", 0, 2, [5, 6], 2)).write_parquet(tmp_path / "t" / "rounds.parquet")
    with pytest.raises(TraceCorruptError, match=r"rounds\.parquet is not the file that was finished"):
        Trace.open(tmp_path / "t").served_rounds()


def test_rounds_that_cannot_be(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        with pytest.raises(CaptureError, match=r"2 of 1 drafted tokens accepted"):
            writer.add_rounds(rounds(("r0", 0, 2, [5], 2)))
        with pytest.raises(CaptureError, match=r"the column anchor is missing"):
            writer.add_rounds(rounds(("r0", 0, 2, [5], 1)).drop("anchor"))
        writer.add(make_requests(1))
        writer.finish()
    assert Trace.open(tmp_path / "t").served_rounds().height == 0
