"""`replay demo`: capture, simulate and report on a small real target."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli.capture import run_capture
from replay.cli.options import PATH, json_option
from replay.cli.replaying import run_simulation
from replay.cli.rounds_output import show_rounds
from replay.cli.terminal import refuse_existing, say
from replay.errors import OutputError
from replay.traces.sample_files import sample_prompts

if TYPE_CHECKING:
    from replay.capture.options import CaptureOptions

# What the head was trained on; what a server feeds for config ids [2, 15, 27] under the +1 convention; the engines'
# default taps; the right taps in another order; one tap off by one on either side.
WIRINGS = ("embed,3,16", "3,16,28", "2,15,27", "3,embed,16", "embed,2,16", "embed,3,15")


@click.command()
@click.option(
    "-o",
    "--output",
    type=PATH,
    default=Path("replay-demo"),
    show_default=True,
    metavar="DIR",
    help="Folder for the trace and the rounds.",
)
@click.option("--max-new-tokens", type=int, default=200, show_default=True, help="Output tokens per prompt.")
@click.option("--force", is_flag=True, help="Capture again even if the trace is there.")
@json_option
def demo(output: Path, max_new_tokens: int, force: bool, as_json: bool) -> None:
    """Record a small real target and replay its draft head under right and wrong wirings."""
    from replay.checkpoint.checkpoint import read_checkpoint
    from replay.engines.wiring import parse_wiring
    from replay.simulator.variant import sweep
    from replay.traces.reader import Trace
    from replay.traces.rounds_file import is_rounds_file, write_rounds
    from replay.traces.sample_files import sample_head

    rounds_file = output / "rounds.parquet"
    if os.path.isdir(output):
        refuse_existing(rounds_file, force=True, ours=is_rounds_file)
    options = demo_options(output, max_new_tokens, force=force, tell=say)
    if options is None:
        say(f"using the trace in {output / 'trace'} (--force captures it again)")
    else:
        run_capture(options)
    trace = Trace.open(output / "trace")
    head = read_checkpoint(sample_head())
    variants = sweep(draft=[head.name], wiring=[parse_wiring(text) for text in WIRINGS], steps=[5])
    rounds = run_simulation(trace, {head.name: head}, variants, "cpu")
    write_rounds(rounds, rounds_file, force=True)
    show_rounds(rounds, as_json)
    command = "replay" if shutil.which("replay") else sys.argv[0]  # make runs that of an environment
    say(
        f"\nNext, on the same trace:\n  {command} simulate {output / 'trace'} --draft {sample_head()} "
        f"--steps 1 --steps 3 --steps 7\n  {command} compare {rounds_file}\n"
        f"  {command} show {rounds_file} --request {trace.records[0].request_id}"
    )


def demo_options(
    folder: Path, max_new_tokens: int, *, force: bool, tell: Callable[[str], None]
) -> "CaptureOptions | None":
    """How to capture the demo's trace into ``folder``/trace; None where a whole one lies there already.

    An unfinished trace is gone on with. Raises CheckpointError where the target's package is missing; before that
    OutputError where something else lies there, or nothing can be written.
    """
    from replay.capture.demo_target import smollm2
    from replay.capture.options import CaptureOptions
    from replay.capture.prompts import read_prompts
    from replay.traces.header import read_header
    from replay.traces.place import FORCE, NEW, RESUME, check_place, check_writable, no_folder

    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise no_folder(folder)
    check_writable(folder)
    trace = folder / "trace"
    recorded = read_header(trace) if (trace / "trace.json").is_file() and not force else None
    if recorded is not None:
        asked = (read_prompts(sample_prompts()).sha256, max_new_tokens)
        if (recorded.capture.prompts_sha256, recorded.capture.max_new_tokens) != asked:
            raise OutputError(
                f"{trace} is not the demo's trace of {max_new_tokens} output tokens a prompt; "
                "name another folder with -o, or --force to replace it"
            )
        if recorded.state == "complete":
            return None
    check_place(trace, FORCE if force else NEW if recorded is None else RESUME)
    target = smollm2(tell=tell)
    return CaptureOptions(
        model=str(target),
        prompts=sample_prompts(),
        out=trace,
        max_new_tokens=max_new_tokens,
        resume=recorded is not None,
        force=force,
        go_on="type the same command",
    )
