"""Options and arguments that several commands take, each said once."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.errors import UsageError

if TYPE_CHECKING:
    from replay.checkpoint.checkpoint import Checkpoint
    from replay.engines.wiring import Wiring
    from replay.traces.reader import Trace

PATH = click.Path(path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, nothing else.")
trace_argument = click.argument("trace", type=PATH, metavar="TRACE")
draft_option = click.option("--draft", required=True, type=PATH, metavar="DIR", help="Draft head's folder.")
trained_wiring_option = click.option(
    "--wiring", metavar="W", help="What the head was trained on, e.g. embed,3,31, if you know it."
)
target_option = click.option(
    "--target",
    type=PATH,
    metavar="DIR",
    help="The target's checkpoint, if the trace lacks its weights (--no-weights) and it has moved.",
)
no_verify_option = click.option(
    "--no-verify", is_flag=True, help="Read the trace as it is, without a look at its checksums."
)
cache_option = click.option(
    "--cache", type=PATH, metavar="DIR", help="Keep what was replayed here, and replay nothing twice. Safe to delete."
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


def open_trace(
    path: Path, target: Path | None = None, *, allow_incomplete: bool = False, verify: bool = True
) -> "Trace":
    """The trace that was typed, and after --target where the target's checkpoint is now.

    Raises UsageError for the checkpoint of another target, and as ``Trace.open``.
    """
    from replay.traces.reader import Trace

    opened = Trace.open(path, allow_incomplete=allow_incomplete, target=target, verify=verify)
    if target is not None:
        _check_target(target, opened)
    return opened


def _check_target(target: Path, trace: "Trace") -> None:
    from replay.capture.target_files import fingerprint_target

    if not target.is_dir():
        raise UsageError(f"--target {target} is no folder; give that of the target's checkpoint")
    if trace.header.target.fingerprint and fingerprint_target(target) != trace.header.target.fingerprint:
        raise UsageError(
            f"--target {target} is not the checkpoint of {trace.header.target.name} that {trace.path} was recorded "
            "from; give that one, with all its files as they were"
        )


def parse_wiring_option(text: str | None, layers: int) -> "Wiring | None":
    """The wiring that was typed; None where none was. Raises WiringError."""
    from replay.engines.wiring import parse_wiring

    return None if text is None else parse_wiring(text, layers=layers)
