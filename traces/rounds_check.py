"""What must hold together in a table of rounds before anybody trusts it."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import TraceCorruptError
from replay.printable import counted
from replay.traces.agreement import problem
from replay.traces.fields import some
from replay.traces.rounds import EXPECTED_COLUMNS, Expected, Rounds, table_schema

if TYPE_CHECKING:
    import polars as pl


def check_rounds(rounds: Rounds, path: Path) -> None:
    """Raise TraceCorruptError unless columns, dtypes and values are those of the format."""
    import polars as pl

    schema, table = table_schema(), rounds.table
    if lost := [name for name in schema if name not in table.columns]:
        raise corrupt_rounds(path, f"it has no column {', '.join(lost)}")
    if table.columns != list(schema):
        raise corrupt_rounds(path, f"its columns are {some(table.columns)} where {', '.join(schema)} belong")
    for name, dtype in schema.items():
        if table.schema[name] != dtype:
            raise corrupt_rounds(path, f"column {name} is {table.schema[name]} where {dtype} belongs")
    _distinct([variant.name for variant in rounds.variants], "variant", path)
    _distinct([request.request_id for request in rounds.requests], "request", path)
    steps = {variant.name: variant.steps for variant in rounds.variants}
    _known(table["variant"], set(steps), "variant", path)
    for variant in rounds.variants:
        if variant.expected is not None:
            _check_expected(variant.name, variant.expected, len(rounds.requests), path)
        if variant.by_request is not None and len(variant.by_request) != len(rounds.requests):
            raise corrupt_rounds(path, f"variant {variant.name!r} has sums of {len(variant.by_request)} requests")
        if variant.agreement is not None and (wrong := problem(variant.agreement)):
            raise corrupt_rounds(path, f"variant {variant.name!r} has {wrong}")
    _known(table["request_id"], {request.request_id for request in rounds.requests}, "request", path)

    drafted = pl.col("drafted").list.len()
    limit = pl.col("variant").replace_strict(steps, return_dtype=pl.Int64) if steps else pl.lit(0)
    hole = pl.col("drafted").list.eval(pl.element().is_null()).list.any()
    broken = {
        "an empty cell": pl.any_horizontal(pl.all().is_null()) | hole,
        "a negative round, anchor or accepted": pl.min_horizontal("round", "anchor", "accepted") < 0,
        "more accepted than drafted tokens": pl.col("accepted") > drafted,
        "more accepted tokens than its variant has steps": pl.col("accepted") > limit,
        "a round that stands there twice": pl.struct("variant", "request_id", "round").is_duplicated(),
    }
    for what, rows in broken.items():
        if count := table.select(rows.fill_null(False).sum()).item():
            raise corrupt_rounds(path, f"{count} of its {table.height} rounds have {what}")


def _check_expected(name: str, expected: Expected, requests: int, path: Path) -> None:
    if len(expected.sums) != requests or any(len(row) != EXPECTED_COLUMNS for row in expected.sums):
        raise corrupt_rounds(
            path, f"variant {name!r} expects sums of {counted(len(expected.sums), 'request')} where {requests} belong"
        )
    if any(not (math.isfinite(value) and value >= 0) for row in expected.sums for value in row):
        raise corrupt_rounds(path, f"variant {name!r} expects a negative or endless number of tokens")


def _distinct(names: Sequence[str], what: str, path: Path) -> None:
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise corrupt_rounds(path, f"its metadata names {what} {name!r} {times} times")


def _known(column: "pl.Series", names: set[str], what: str, path: Path) -> None:
    if strange := sorted(set(column.drop_nulls().unique().to_list()) - names):
        raise corrupt_rounds(path, f"it has rounds of {what} {strange[0]!r}, which its metadata does not name")


def corrupt_rounds(path: Path, what: str) -> TraceCorruptError:
    """The refusal of a rounds file in which ``what`` does not hold."""
    return TraceCorruptError(f"{path} cannot be trusted, {what}: simulate again with -o")
