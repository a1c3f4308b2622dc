"""The demo: capture, simulate and report on a small real target."""

from pathlib import Path

import click

from replay.cli.capture import run_capture
from replay.cli.options import PATH, json_option
from replay.cli.simulate import run_simulation
from replay.cli.terminal import say, show_rounds


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
    from replay.demo import WIRINGS, demo_options, sample_head
    from replay.engines.wiring import parse_wiring
    from replay.simulator.variant import sweep
    from replay.traces.reader import Trace
    from replay.traces.rounds import write_rounds

    options = demo_options(output, max_new_tokens, force=force, tell=say)
    if options is None:
        say(f"using the trace in {output / 'trace'} (--force captures it again)")
    else:
        run_capture(options)
    trace = Trace.open(output / "trace")
    head = read_checkpoint(sample_head())
    variants = sweep(draft=[head.name], wiring=[parse_wiring(text) for text in WIRINGS], steps=[5])
    rounds = run_simulation(trace, {head.name: head}, variants, "cpu")
    write_rounds(rounds, output / "rounds.parquet", force=True)
    show_rounds(rounds, as_json)
    say(
        f"\nNext, on the same trace:\n  replay simulate {output / 'trace'} --draft {sample_head()} "
        f"--steps 1 --steps 3 --steps 7\n  replay report {output / 'rounds.parquet'} --peers"
    )
