"""Options and arguments that several commands take, each said once."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from replay.check.facts import Target
    from replay.checkpoint.checkpoint import Checkpoint
    from replay.engines.wiring import Wiring
    from replay.traces.header import TargetInfo

PATH = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, nothing else.")
trace_argument = click.argument("trace", type=PATH, metavar="TRACE")
draft_option = click.option("--draft", required=True, type=PATH, metavar="DIR", help="Draft head's folder.")
trained_wiring_option = click.option(
    "--wiring",
    metavar="W",
    help="What the head was trained on, if you know it: taps, e.g. embed,3,31, or an engine's layer ids, e.g. "
    "specforge:1,14,26; config is what the head states.",
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


def parse_wiring_option(text: str | None, target: "TargetInfo | Target") -> "Wiring | None":
    """The wiring that was typed for this target; None where none was, or the head's own. Raises WiringError."""
    from replay.engines.wiring import CONFIG, parse_wiring

    if text is None or text.strip() == CONFIG:
        return None
    return parse_wiring(text, layers=target.layers, architecture=target.architecture)
