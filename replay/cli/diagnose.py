"""`replay diagnose`: what is wrong with a served head, found by replaying it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli.options import (
    draft_option,
    json_option,
    parse_wiring_option,
    read_draft,
    trace_argument,
    trained_wiring_option,
)
from replay.cli.terminal import print_json, print_rich, show_progress

if TYPE_CHECKING:
    from replay.analysis.diagnosis.verdict import Diagnosis
    from replay.diagnosis.trials import Trying


@click.command()
@trace_argument
@draft_option
@click.option(
    "--observed",
    metavar="FILE|ACCEPT_LENGTH",
    help="An accept length, or a log, /metrics page, /server_info document or answers that have one.  "
    "[default: what the trace's own server did, round by round]",
)
@trained_wiring_option
@click.option("--served-wiring", metavar="W", help="What the server feeds.  [default: as the trace or the config says]")
@click.option("--steps", type=int, metavar="K", help="Of the server.  [default: as the trace says, else 5]")
@click.option("--topk", type=int, metavar="N", help="Of the server.  [default: as the trace says, else 1]")
@click.option("--num-draft-tokens", type=int, metavar="N", help="Of the server.  [default: as the trace says]")
@click.option("--precision", metavar="P", help="Of the served head.  [default: the target's]")
@click.option("--engine", metavar="PROFILE", help="sglang or eagle.  [default: sglang]")
@click.option("--ladder/--no-ladder", default=True, help="Show the way from the training metric down to the server.")
@json_option
def diagnose(
    trace: Path, draft: Path, observed: str | None, wiring: str | None, served_wiring: str | None, steps: int | None,
    topk: int | None, num_draft_tokens: int | None, precision: str | None, engine: str | None, ladder: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Name what keeps a server's accept length short.

    Replays the head under every known fault and holds each against what the server did. Exit code 0 whatever the
    verdict.
    """
    from replay.analysis.diagnosis.report import render_diagnosis
    from replay.analysis.diagnosis.verdict import to_json
    from replay.capture.observed import read_observed
    from replay.diagnosis.diagnose import diagnose_server, served_variant
    from replay.simulator.variant import default_steps
    from replay.traces.reader import Trace

    opened = Trace.open(trace)
    layers = opened.header.target.layers
    checkpoint = read_draft(draft)
    if steps is None and checkpoint.config.block is not None:
        steps = default_steps(checkpoint)  # a server drafts whole blocks unless it is told otherwise
    served = served_variant(
        opened, checkpoint.name, steps=steps, topk=topk, num_draft_tokens=num_draft_tokens,
        precision=precision, engine=engine,
        wiring=parse_wiring_option(served_wiring, layers),
    )  # fmt: skip
    found = _diagnose(
        lambda on_event: diagnose_server(
            opened,
            checkpoint,
            served,
            trained=parse_wiring_option(wiring, layers),
            observed=None if observed is None else read_observed(observed),
            ladder=ladder,
            on_event=on_event,
        )
    )
    if as_json:
        print_json(to_json(found))
    else:
        print_rich(render_diagnosis(found))


def _diagnose(run: "Callable[[Callable[[Trying], None]], Diagnosis]") -> "Diagnosis":
    from rich.console import Console

    with show_progress(Console(stderr=True)) as progress:
        task = progress.add_task("replaying", total=None, rate="hypotheses")

        def on_event(event: "Trying") -> None:
            progress.update(task, description=event.stage, completed=event.done, total=event.total)

        return run(on_event)
