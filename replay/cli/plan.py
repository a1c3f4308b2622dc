"""`replay plan`: from accept lengths and timings to tokens a second, and whether speculation pays."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli.options import (
    SOURCE,
    api_key_option,
    json_option,
    no_verify_option,
    open_whole,
    parse_wiring_option,
    read_draft,
    read_workers,
    target_option,
    workers_options,
)
from replay.cli.progress import show_progress
from replay.cli.replaying import quiet_ray
from replay.cli.terminal import print_json, print_rich
from replay.cli.web_page import page_options, refuse_page, write_page_file
from replay.errors import UsageError

if TYPE_CHECKING:
    from replay.analysis.plan.lengths import Length
    from replay.analysis.plan.policies import Played
    from replay.simulator.progress import ReplayProgress


_DEEPEST = "1,2,3,4,5,6,7,8"  # depths that a trace is played at where none are typed


@click.command()
@click.argument("source", type=SOURCE, metavar="[ROUNDS|TRACE]", required=False)
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
    metavar="FILE|URL[:steps=N,topk=N,draft_tokens=N,batch=N,seconds=N]",
    help="Timings from `replay time`, a benchmark's JSON, an SGLang log, two /metrics pages (EARLIER,LATER), or the "
    "address of one. Repeat for more.",
)
@api_key_option
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
@click.option(
    "--steps",
    default="",
    metavar="N,N",
    help=f"Depths to plan for, each at most 64. Of a TRACE all of them  [default: {_DEEPEST}]; else further ones, "
    "within bounds.",
)
@click.option("--draft", type=SOURCE, metavar="DIR", help="Draft head's folder, beside a TRACE.")
@click.option("--wiring", metavar="W", help="Of that head.  [default: what it states]")
@click.option("--variant", metavar="NAME", help="The variant of ROUNDS whose depths are planned.")
@target_option
@no_verify_option
@workers_options
@page_options
@json_option
def plan(
    source: Path | None,
    times: tuple[str, ...],
    benches: tuple[str, ...],
    api_key: str | None,
    costs: tuple[str, ...],
    lengths: tuple[str, ...],
    batch: str,
    context: int | None,
    steps: str,
    draft: Path | None,
    wiring: str | None,
    variant: str | None,
    target: Path | None,
    no_verify: bool,
    workers: int | None,
    ray: str | None,
    html: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Say whether speculation pays, and at which depth and batch.

    Accept lengths come from ROUNDS, which `replay simulate --steps 1 --steps 3 -o ROUNDS` writes, from a TRACE and a
    head, or with the timings. A TRACE also tells what it is worth to stop drafting by the head's own confidence.
    """
    from replay.analysis.plan.ask import Question, answer_question, read_costs
    from replay.analysis.plan.report import render_plan
    from replay.traces.rounds_file import read_rounds

    refuse_page(html, force)
    asked = Question(times, benches, costs, lengths, batch, context, steps, variant, _pages(benches, api_key))
    told = read_costs(asked)  # before anything is replayed
    if draft is not None and (lengths or variant is not None):
        raise UsageError("--length and --variant go without a trace; leave them out, or --draft and the trace")
    is_trace = source is not None and source.is_dir()
    if is_trace and draft is None:
        raise UsageError(
            f"{source} is a folder, and a trace is planned with a head; add --draft DIR, or name a rounds file"
        )
    if is_trace != (draft is not None) or (wiring is not None and not is_trace):
        raise UsageError("--draft and --wiring go with a trace; type a trace's folder and --draft DIR, or neither")
    if not is_trace and (workers is not None or ray is not None):
        raise UsageError(
            "--workers and --ray replay a trace, and none was named; type a trace's folder and --draft DIR"
        )
    played = (
        _played(source, draft, wiring, steps, target, not no_verify, (workers, ray))
        if source is not None and draft is not None
        else ()
    )
    table = None if source is None or is_trace else read_rounds(source)
    found = answer_question(asked, told, table, "" if source is None else str(source), played)
    if as_json:
        print_json(found.to_json())
    else:
        print_rich(render_plan(found.plan, found.provenance, found.requests))
    if html is not None:
        from replay.analysis.page.planned import write_plan

        shown = render_plan(found.plan, found.provenance, found.requests)
        write_page_file(html, lambda text: write_plan(found, text), shown)


def _pages(benches: tuple[str, ...], api_key: str | None) -> dict[str, list[str]]:
    """The /metrics pages of the addresses among ``benches``."""
    from replay.analysis.plan.benchmarks import address_of_pages
    from replay.capture.client.metrics import poll_pages

    found = {}
    for bench in benches:
        if (place := address_of_pages(bench)) is not None:
            with show_progress("looking at the server's counters"):
                found[bench] = poll_pages(*place, api_key=api_key)
    return found


def _refuse_draft(draft: Path) -> None:
    """What its config alone tells, before torch is imported. Raises as ``read_draft``."""
    from replay.check.inspection import refuse_target
    from replay.checkpoint.config import parse_config
    from replay.checkpoint.config_file import CONFIG, read_config
    from replay.checkpoint.hub import head_folder

    folder = head_folder(draft)
    refuse_target(folder)
    parse_config(read_config(folder), name=str(folder / CONFIG))


def _played(
    trace: Path,
    draft: Path,
    wiring: str | None,
    steps: str,
    target: Path | None,
    verify: bool,
    workers: tuple[int | None, str | None],
) -> "list[tuple[Played, Length]]":
    """The rounds of every depth that was asked for, and of every threshold, of one replay of the trace."""
    from replay.analysis.plan.ask import listed
    from replay.analysis.plan.policies import THRESHOLDS, with_lengths
    from replay.verify.rules import MAX_STEPS

    depths = sorted(listed(steps or _DEEPEST, "--steps", MAX_STEPS))
    hands = read_workers(*workers)
    opened = open_whole(trace, target, verify=verify)
    _refuse_draft(draft)
    fed = parse_wiring_option(wiring, opened.header.target)

    # Behind what is refused, because torch comes with them.
    from replay.simulator.confidence import draft_anchors, play_depths, play_thresholds
    from replay.simulator.variant import Variant

    checkpoint = read_draft(draft)
    variant = Variant(checkpoint.name, wiring=fed, steps=depths[-1])
    with quiet_ray(hands), show_progress("replaying") as progress:

        def on_event(event: "ReplayProgress") -> None:
            progress.update(event.stage, event.done + event.part, event.total, "requests")

        anchors = draft_anchors(opened, checkpoint, variant, workers=hands, on_event=on_event, on_note=progress.note)
    stopping = [one for depth in depths if depth > 1 for one in play_thresholds(anchors, THRESHOLDS, depth)]
    return with_lengths([*play_depths(anchors, depths), *stopping])
