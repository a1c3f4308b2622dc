"""`replay serve`: a real SGLang server with recording on."""

import os
import sys
from pathlib import Path

import click

from replay.cli.options import PATH, json_option, parse_wiring_option
from replay.cli.terminal import print_json, say
from replay.errors import UsageError


@click.command()
@click.option(
    "--trace",
    required=True,
    type=PATH,
    metavar="DIR",
    help="Folder that the server records into; `capture --server` reads it, and may write its trace there.",
)
@click.option("--taps", metavar="T", help="Taps to record beside those the draft is fed.  [default: as of capture]")
@click.option(
    "--wiring",
    metavar="W",
    help="Feed the draft exactly these taps, in this order, e.g. embed,3,16; or layer ids, e.g. vllm:0,3,16.",
)
@click.option("--topk", type=click.IntRange(1, 4096), default=32, show_default=True, help="Logits kept of each row.")
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- SGLANG_ARGUMENTS...")
def serve(
    trace: Path, taps: str | None, wiring: str | None, topk: int, as_json: bool, arguments: tuple[str, ...]
) -> None:
    """Start a real SGLang server with recording on.

    Everything after -- goes to sglang.launch_server as it stands. With --json the document comes once the server
    answers, and the server goes on.
    """
    from replay.analysis.json_document import object_json
    from replay.capture.plugin.launch import ServeOptions
    from replay.capture.plugin.server import Ready, run_server

    def on_ready(ready: Ready) -> None:
        print_json(object_json(ready))
        sys.stdout.flush()

    options = ServeOptions(trace, arguments, taps, _as_taps(wiring, arguments), topk)
    sys.exit(run_server(options, lambda note: say(f"replay: {note}"), on_ready if as_json else None))


def _as_taps(wiring: str | None, arguments: tuple[str, ...]) -> str | None:
    """Layer ids of an engine as taps of the target that SGLang is given; taps as they were typed."""
    from replay.check.facts import read_target_config
    from replay.engines.wiring import counts_layers

    if wiring is None or not counts_layers(wiring):
        return wiring
    from replay.capture.plugin.arguments import typed_value

    target = typed_value(arguments, "--model-path", "--model")
    if target is None:
        raise UsageError(f"--wiring {wiring} is read by the target's class; add --model-path, or type taps")
    folder = _folder_of(target, typed_value(arguments, "--revision", "--revision"))
    if folder is None:
        raise UsageError(
            f"--wiring {wiring} is read by the target's class, and {target} is neither a folder here nor in the hub's "
            "cache; fetch it first, or type taps"
        )
    return str(parse_wiring_option(wiring, read_target_config(folder)) or "") or None


def _folder_of(target: str, revision: str | None) -> Path | None:
    """The folder with the config of a target, of a hub id that in the hub's cache; None where it is not here."""
    if os.path.isdir(target):
        return Path(target)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(target, "config.json", revision=revision)
    except (ImportError, ValueError):  # no hub id
        return None
    return Path(found).parent if isinstance(found, str) else None
