"""``requests.parquet``: the records of all shards in one table, read with distrust. See SPEC.md, 4."""

import io
import itertools
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.errors import TraceCorruptError
from replay.traces.cached import CACHED
from replay.traces.fields import Fields
from replay.traces.files import shard_number
from replay.traces.header import TraceHeader
from replay.traces.parquet import check_parquet, first_line
from replay.traces.record_fields import read_record
from replay.traces.records import LATER, RequestRecord, check_distinct
from replay.traces.shards import ends

if TYPE_CHECKING:
    import polars as pl


_FREE_TEXT, _TEXT_A_BYTE = 1 << 26, 100  # bytes of text that a table may hold, and that for each byte of its file


def table_schema() -> "pl.Schema":
    """Columns of ``requests.parquet``."""
    import polars as pl

    kinds: dict[Any, pl.DataType] = {str: pl.String(), int: pl.Int64(), float: pl.Float64()}
    kinds |= {str | None: pl.String(), int | None: pl.Int64()}
    lists = (
        "server_histogram", "server_prefill_rows", "server_prefill_forward_rows", *CACHED,
        "prefix_requests", "prefix_rows",
    )  # fmt: skip
    special: dict[str, pl.DataType] = {"tail_ids": pl.List(pl.Int32), **dict.fromkeys(lists, pl.List(pl.Int64))}
    special["taps"] = pl.List(pl.String)
    return pl.Schema({item.name: special.get(item.name) or kinds[item.type] for item in fields(RequestRecord)})


def to_frame(records: Sequence[RequestRecord]) -> "pl.DataFrame":
    """One row per record, in their order."""
    import polars as pl

    return pl.DataFrame([asdict(record) for record in records], schema=table_schema(), orient="row")


def read_table(data: bytes, header: TraceHeader, where: str) -> list[RequestRecord]:
    """The records of a ``requests.parquet`` with the bytes ``data``. Raises TraceCorruptError."""
    import polars as pl

    check_parquet(Path(where), data)
    try:
        frame = pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise TraceCorruptError(f"{where} is no readable parquet file: {first_line(error)}") from error
    for name, kind in table_schema().items():
        if name not in frame.columns and name in LATER:
            continue
        if name not in frame.columns:
            raise TraceCorruptError(f"{where} lacks the column {name}")
        if frame.schema[name] != kind:
            raise TraceCorruptError(f"{where}: the column {name} is {frame.schema[name]}, must be {kind}")
    texts = int(frame.select(pl.col(pl.String).str.len_bytes().sum()).sum_horizontal().sum() or 0)
    if texts > _FREE_TEXT + _TEXT_A_BYTE * len(data):  # one long text can stand for every row
        raise TraceCorruptError(f"{where} holds texts of {texts} bytes, more than any that replay writes")
    records = [read_record(Fields(f"{where}: row {index}", row), header) for index, row in enumerate(frame.to_dicts())]
    check_distinct(records, where)
    _check_places(records, where)
    return records


def _check_places(records: Sequence[RequestRecord], where: str) -> None:
    """Shards in order from 0, each request's rows right after those of the one before it in the shard."""
    for number, (shard, group) in enumerate(itertools.groupby(records, key=lambda record: record.shard)):
        if shard_number(shard) != number:
            raise TraceCorruptError(
                f"{where}: shard number {number} is called {shard}; shards stand in order from 00000"
            )
        expected = (0, 0, 0)
        for record in group:
            places = (record.token_start, record.row_start, record.output_start)
            if places != expected:
                raise TraceCorruptError(
                    f"{where}: request {record.request_id!r} is said to begin at token, row and output {places} of "
                    f"{shard}, the requests before it end at {expected}"
                )
            expected = ends(record)


def check_same(table: Sequence[RequestRecord], shards: Sequence[RequestRecord], where: str) -> None:
    """Raises TraceCorruptError where ``requests.parquet`` and the shards disagree, naming the first difference."""
    for one, other in zip(table, shards, strict=False):
        for item in fields(one):
            told, held = getattr(one, item.name), getattr(other, item.name)
            if told != held:
                raise TraceCorruptError(
                    f"{where}: {item.name} of request {one.request_id!r} is {told!r}, its shard says {held!r}"
                )
    if len(table) != len(shards):
        raise TraceCorruptError(f"{where} lists {len(table)} requests, the shards hold {len(shards)}")
