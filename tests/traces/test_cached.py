"""Columns that say which forwards made the rows that a server took from its prefix cache."""

import io
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from support.trace_maker import changed, make_header, make_requests, write_trace

from replay.drafting.product_sizes import served_sizes
from replay.engines.wiring import parse_wiring
from replay.errors import CaptureError, TraceCorruptError
from replay.head.products import Execution
from replay.simulator.inputs import draft_input
from replay.traces.cached import CACHED
from replay.traces.header import TraceHeader
from replay.traces.reader import Trace
from replay.traces.request_table import read_table
from replay.traces.writer import TraceWriter

# the prompts of make_requests have 2, 3, 4 and 1 tokens
PIECES = [[(2, 5)], [(1, 9)], [(2, 4)], [(1, 7)]]
TOLD = [None, [(2, 6)], [(1, 12), (1, 4)], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    given = zip(make_requests(4), PIECES, TOLD, strict=True)
    requests = [changed(one, pieces=pieces, cached=cached) for one, pieces, cached in given]
    return write_trace(tmp_path / "t", [requests[:2], requests[2:]])


def test_they_come_back(folder: Path, tmp_path: Path) -> None:
    trace = Trace.open(folder)
    assert [record.cached for record in trace.records] == [(), ((2, 6),), ((1, 12), (1, 4)), ()]
    assert [trace.read(index, ()).cached for index in range(4)] == [record.cached for record in trace.records]
    plain = write_trace(tmp_path / "plain", [make_requests(4)])
    assert b"server_cached_rows" in (folder / "shard-00000.safetensors").read_bytes()
    assert b"server_cached_rows" not in (plain / "shard-00000.safetensors").read_bytes()


def test_a_replay_is_given_them(folder: Path) -> None:
    trace = Trace.open(folder)
    tap = next(name for name in trace.header.taps if name != "final")
    item = draft_input(trace.read(2, [tap]), parse_wiring(tap))
    sizes_R = served_sizes([item], Execution(product_rows=1))
    assert sizes_R is not None and sizes_R.tolist()[:4] == [12, 4, 4, 4]
    without_R = served_sizes([replace(item, cached=())], Execution(product_rows=1))
    assert without_R is not None and without_R.tolist()[:4] == [2, 2, 4, 4]


def test_an_older_table_lacks_them(folder: Path) -> None:
    buffer = io.BytesIO()
    pl.read_parquet(folder / "requests.parquet").drop(*CACHED).write_parquet(buffer)
    assert [record.cached for record in read_table(buffer.getvalue(), header(folder), "t")] == [()] * 4


WRONG = [
    ([], [(2, 4)], r"server_cached_rows holds 0 numbers, server_cached_forward_rows 0, both must be null or hold"),
    ([(1, 4)], [(1, 4)], r"server_cached_rows adds up to 1 and its pieces to 1, the prompt has 3 tokens"),
    ([(2, 1)], [(1, 4)], r"server_cached_rows holds 2 rows that a forward of 1 made"),
]


@pytest.mark.parametrize(("cached", "pieces", "says"), WRONG)
def test_what_cannot_be_is_not_written(
    tmp_path: Path, cached: list[tuple[int, int]], pieces: list[tuple[int, int]], says: str
) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer, pytest.raises(CaptureError, match=says):
        writer.add([changed(make_requests(2)[1], cached=cached, pieces=pieces)])


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("server_cached_rows", [2, 1], r"server_cached_rows holds 2 numbers, server_cached_forward_rows 1, both must"),
        ("server_cached_rows", [0], r"server_cached_rows is \[0\], must be a list of integers from 1"),
        ("server_cached_rows", [1], r"server_cached_rows adds up to 1 and its pieces to 1, the prompt has 3 tokens"),
        ("server_cached_forward_rows", [1], r"server_cached_rows holds 2 rows that a forward of 1 made"),
        ("server_cached_forward_rows", [-1], r"server_cached_forward_rows is \[-1\]"),
        ("server_cached_forward_rows", None, r"server_cached_rows holds 1 numbers, server_cached_forward_rows 0"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, column: str, value: list[int] | None, says: str) -> None:
    frame = pl.read_parquet(folder / "requests.parquet")
    cells = frame[column].to_list()
    cells[1] = value
    buffer = io.BytesIO()
    frame.with_columns(pl.Series(column, cells, dtype=pl.List(pl.Int64))).write_parquet(buffer)
    with pytest.raises(TraceCorruptError, match=says):
        read_table(buffer.getvalue(), header(folder), "t")


def header(folder: Path) -> TraceHeader:
    return Trace.open(folder).header
