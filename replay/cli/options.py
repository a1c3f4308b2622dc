"""Options and arguments that several commands take, each said once."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from replay.checkpoint.checkpoint import Checkpoint
    from replay.engines.wiring import Wiring

PATH = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, nothing else.")
trace_argument = click.argument("trace", type=PATH, metavar="TRACE")
draft_option = click.option("--draft", required=True, type=PATH, metavar="DIR", help="Draft head's folder.")
trained_wiring_option = click.option(
    "--wiring", metavar="W", help="What the head was trained on, e.g. embed,3,31, if you know it."
)
sort_option = click.option(
    "--sort",
    type=click.Choice(("typed", "length")),
    help="Rows of the table as typed, or by accept length.  [default: typed, of more than 12 variants length]",
)
top_option = click.option("--top", type=click.IntRange(min=1), metavar="N", help="Show the first N rows only.")
format_option = click.option(
    "--format",
    "table_format",
    type=click.Choice(("csv", "md", "parquet")),
    help="Print the table alone, in this form, instead of the report.",
)
api_key_option = click.option(
    "--api-key", envvar="REPLAY_API_KEY", metavar="KEY", help="Of the server.  [default: $REPLAY_API_KEY, else none]"
)


def read_draft(path: Path) -> "Checkpoint":
    """The head in a folder that was typed after --draft. Raises UsageError for a target's, CheckpointError."""
    from replay.check.inspection import refuse_target
    from replay.checkpoint.checkpoint import read_checkpoint

    refuse_target(path)
    return read_checkpoint(path)


def parse_wiring_option(text: str | None, layers: int) -> "Wiring | None":
    """The wiring that was typed; None where none was. Raises WiringError."""
    from replay.engines.wiring import parse_wiring

    return None if text is None else parse_wiring(text, layers=layers)
