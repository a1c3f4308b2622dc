"""One flat table on stdout: CSV, Markdown or parquet."""

import io
import sys
from collections.abc import Mapping, Sequence

import click

from replay.errors import UsageError

FORMATS = ("csv", "md", "parquet")
Row = Mapping[str, str | int | float | bool | None]


def print_table(rows: Sequence[Row], table_format: str) -> None:
    """``rows``, which all have the same columns, in one of ``FORMATS``. Raises UsageError for parquet on a terminal."""
    if table_format == "md":
        click.echo("\n".join(_markdown(rows)))
        return
    refuse_binary(table_format)
    import polars as pl

    frame, out = pl.DataFrame(rows, infer_schema_length=None), io.BytesIO()
    frame = frame.with_columns(pl.col(pl.Null).cast(pl.Float64))  # a number that no row knows
    if table_format == "csv":
        frame.write_csv(out)
    else:
        frame.write_parquet(out)
    click.echo(out.getvalue(), nl=False)


def refuse_binary(table_format: str | None) -> None:
    """Before the work. Raises UsageError."""
    if table_format == "parquet" and sys.stdout.isatty():
        raise UsageError("parquet is no text for a terminal; send it to a file: `--format parquet > table.parquet`")


def refuse_two_forms(table_format: str | None, as_json: bool) -> None:
    """Before the work. Raises UsageError where a table and a JSON document are asked for, or parquet on a terminal."""
    if table_format is not None and as_json:
        raise UsageError("--json and --format are two forms of one output; type one of them")
    refuse_binary(table_format)


def refuse_beside(form: str, **asked: object) -> None:
    """Before the work. Raises UsageError for options, by name, of which ``form`` would show nothing."""
    if unshown := [f"--{name}" for name, value in asked.items() if value]:
        have = "has" if len(unshown) == 1 else "have"
        raise UsageError(
            f"{form} is one table, in which {' and '.join(unshown)} {have} no place; leave one of them out"
        )


def _markdown(rows: Sequence[Row]) -> list[str]:
    names = list(rows[0]) if rows else []
    cells = [[_spelled(row[name]) for name in names] for row in rows]
    return [_line(names), _line(["---"] * len(names)), *map(_line, cells)]


def _spelled(value: object) -> str:
    """For people: six digits of a number."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
