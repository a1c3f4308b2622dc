"""`replay plan`: from accept lengths and timings to tokens a second, and whether speculation pays."""

from pathlib import Path

import click

from replay.cli.options import PATH, json_option
from replay.cli.terminal import print_json, print_rich


@click.command()
@click.argument("rounds", type=PATH, metavar="[ROUNDS]", required=False)
@click.option(
    "--time",
    "times",
    multiple=True,
    metavar="T",
    help="A timing of the server, e.g. batch=1,tok/s=90 or batch=1,steps=5,accept=1.8,tok/s=54.8; ms=N is one round, "
    "tpot=N the ms of a token. Repeat for more.",
)
@click.option(
    "--bench",
    "benches",
    multiple=True,
    metavar="FILE[:steps=N]",
    help="Timings from a benchmark's JSON or an SGLang log. Repeat for more.",
)
@click.option(
    "--cost", "costs", multiple=True, metavar="TERM=MS", help="A cost in ms, e.g. pass=37.7,rest=35,draft=26."
)
@click.option(
    "--length",
    "lengths",
    multiple=True,
    metavar="L",
    help="An accept length, e.g. steps=3,accept=2.79. Repeat for more.",
)
@click.option("--batch", default="", metavar="N,N", help="Batches to plan for.  [default: those timed]")
@click.option("--context", type=click.IntRange(1), metavar="N", help="Tokens of context, where --cost kv says a cost.")
@click.option("--steps", default="", metavar="N,N", help="Further depths to plan for, within bounds.")
@click.option("--variant", metavar="NAME", help="The variant of ROUNDS whose depths are planned.")
@json_option
def plan(
    rounds: Path | None,
    times: tuple[str, ...],
    benches: tuple[str, ...],
    costs: tuple[str, ...],
    lengths: tuple[str, ...],
    batch: str,
    context: int | None,
    steps: str,
    variant: str | None,
    as_json: bool,
) -> None:
    """Say whether speculation pays, and at which depth and batch.

    Accept lengths come from ROUNDS, which `replay simulate --steps 1,2,3,5 -o ROUNDS` writes, or with the timings.
    """
    from replay.analysis.plan.ask import Question, answer_question
    from replay.analysis.plan.report import render_plan
    from replay.traces.rounds import read_rounds

    table = None if rounds is None else read_rounds(rounds)
    asked = Question(times, benches, costs, lengths, batch, context, steps, variant)
    found = answer_question(asked, table, str(rounds))
    if as_json:
        print_json(found.to_json())
    else:
        print_rich(render_plan(found.plan, found.provenance))
