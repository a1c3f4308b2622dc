"""The rounds that the server itself ran, where it told us (``rounds.parquet``). See SPEC.md, section 6."""

import hashlib
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import CaptureError, TraceCorruptError
from replay.printable import counted
from replay.traces.files import ROUNDS, read_small
from replay.traces.header import TraceHeader
from replay.traces.parquet import check_parquet, first_line

if TYPE_CHECKING:
    import polars as pl

MAX_BYTES = 1 << 32


# Columns that version 1 did not have at first: null where a file lacks them.
_LATER = ("parents", "batch", "verify_pass", "batch_row")


def served_schema() -> "pl.Schema":
    """Columns of ``rounds.parquet``."""
    import polars as pl

    return pl.Schema(
        {
            "request_id": pl.String(),
            "round": pl.Int32(),
            "anchor": pl.Int32(),
            "drafted": pl.List(pl.Int32),
            "accepted": pl.Int32(),
            "parents": pl.List(pl.Int32),
            "batch": pl.Int32(),
            "verify_pass": pl.Int64(),
            "batch_row": pl.Int32(),
        }
    )


def read_served(path: Path, data: bytes | None = None) -> "pl.DataFrame":
    """The rounds in ``path`` (or in ``data``, its bytes). Raises TraceCorruptError."""
    import polars as pl

    data = read_small(path, MAX_BYTES) if data is None else data
    check_parquet(path, data)
    try:
        frame = pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise TraceCorruptError(f"{path} is no readable parquet file: {first_line(error)}") from error
    frame = _with_later_columns(frame)
    problem = _problem(frame)
    if problem:
        raise TraceCorruptError(f"{path}: {problem}")
    return frame.select(served_schema().names())


def read_finished(folder: Path, header: TraceHeader) -> "pl.DataFrame":
    """The rounds of the trace in ``folder``, as they were finished where it is; empty where the server told none.

    Raises TraceCorruptError.
    """
    import polars as pl

    path = folder / ROUNDS
    complete = header.state == "complete"
    if not (header.rounds if complete else os.path.lexists(path)):
        return pl.DataFrame(schema=served_schema())
    data = read_small(path, MAX_BYTES)
    if complete and hashlib.sha256(data).hexdigest() != header.rounds_sha256:
        raise TraceCorruptError(f"{path} is not the file that was finished: its SHA-256 differs from trace.json's")
    return read_served(path, data)


def merge_rounds(earlier: "pl.DataFrame | None", later: "pl.DataFrame") -> "pl.DataFrame":
    """Both, in order; the rounds of a request that ``later`` holds replace those of ``earlier``.

    Raises CaptureError where ``later`` is no table of rounds.
    """
    import polars as pl

    later = _with_later_columns(later)
    problem = _problem(later)
    if problem:
        raise CaptureError(f"the server's rounds: {problem}")
    later = later.select(served_schema().names())
    if earlier is None:
        return later
    merged = pl.concat([earlier.join(later.select("request_id").unique(), on="request_id", how="anti"), later])
    problem = _problem_of_passes(merged)
    if problem:
        raise CaptureError(f"the server's rounds, with those before: {problem}")
    return merged


def rounds_of(rounds: "pl.DataFrame", request_ids: Collection[str]) -> "pl.DataFrame":
    """The rounds of the requests that are there, in their order."""
    return rounds.filter(rounds["request_id"].is_in(list(request_ids)))


def _with_later_columns(frame: "pl.DataFrame") -> "pl.DataFrame":
    """``frame`` with columns of nulls where it was written before there were these."""
    import polars as pl

    lacking = [name for name in _LATER if name not in frame.columns]
    return frame.with_columns(pl.lit(None, served_schema()[name]).alias(name) for name in lacking)


def _problem(frame: "pl.DataFrame") -> str | None:
    """What is wrong with a table of rounds, in half a sentence."""
    for name, kind in served_schema().items():
        if name not in frame.columns:
            return f"the column {name} is missing"
        if frame.schema[name] != kind:
            return f"the column {name} is {frame.schema[name]}, must be {kind}"
        if name not in _LATER and frame[name].null_count():
            return f"the column {name} holds {frame[name].null_count()} nulls"
    for name in ("round", "anchor", "accepted"):
        negative = [value for value in frame[name].to_list() if value < 0]
        if negative:
            return f"the column {name} holds {negative[0]}, must be 0 or more"
    alone = [value for value in frame["batch"].drop_nulls().to_list() if value < 1]
    if alone:
        return f"the column batch holds {alone[0]}, must be 1 or more"
    passes = _problem_of_passes(frame)
    if passes:
        return passes
    beyond = frame.filter(frame["accepted"] > frame["drafted"].list.len())
    if len(beyond):
        accepted, drafted = int(beyond["accepted"][0]), len(beyond["drafted"].to_list()[0])
        return f"{accepted} of {drafted} drafted tokens accepted"
    for drafted, parents in frame.filter(frame["parents"].is_not_null()).select("drafted", "parents").iter_rows():
        if len(parents) != len(drafted):
            return f"{len(parents)} parents of {len(drafted)} drafted tokens"
        wrong = [(i, parent) for i, parent in enumerate(parents, start=1) if parent is None or not -1 <= parent < i]
        if wrong:
            return f"the parent of drafted token {wrong[0][0]} is {wrong[0][1]}, must be a number from -1 below its own"
    return None


def _problem_of_passes(frame: "pl.DataFrame") -> str | None:
    """What is wrong with the verify passes and the rows in them."""
    import polars as pl

    for name in ("verify_pass", "batch_row"):
        negative = [value for value in frame[name].drop_nulls().to_list() if value < 0]
        if negative:
            return f"the column {name} holds {negative[0]}, must be 0 or more"
    half = frame.filter(pl.col("verify_pass").is_null() != pl.col("batch_row").is_null())
    if len(half):
        have = "has" if len(half) == 1 else "have"
        return f"{counted(len(half), 'round')} {have} a verify_pass or a batch_row without the other"
    told = frame.filter(pl.col("verify_pass").is_not_null())
    beyond = told.filter(pl.col("batch_row") >= pl.col("batch"))
    if len(beyond):
        return f"row {beyond['batch_row'][0]} of a batch of {beyond['batch'][0]}"
    twice = told.filter(pl.struct("verify_pass", "batch_row").is_duplicated())
    if len(twice):
        return f"row {twice['batch_row'][0]} of verify pass {twice['verify_pass'][0]} stands twice"
    sizes = told.filter(pl.col("batch").n_unique().over("verify_pass") > 1)
    if len(sizes):
        return f"the rounds of verify pass {sizes['verify_pass'][0]} differ in batch"
    return None
