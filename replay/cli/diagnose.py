"""`replay diagnose`: what is wrong with a served head, found by replaying it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli.options import (
    cache_option,
    draft_option,
    json_option,
    no_verify_option,
    observed_option,
    open_trace,
    parse_wiring_option,
    part_options,
    read_draft,
    read_part,
    read_workers,
    target_option,
    trace_argument,
    trained_wiring_option,
    workers_options,
)
from replay.cli.progress import show_progress
from replay.cli.replaying import quiet_ray
from replay.cli.terminal import print_json, print_rich
from replay.cli.web_page import page_options, refuse_page, write_page_file
from replay.printable import counted

if TYPE_CHECKING:
    from replay.analysis.diagnosis.verdict import Diagnosis
    from replay.checkpoint.checkpoint import Checkpoint
    from replay.diagnosis.progress import Trying
    from replay.engines.wiring import Wiring
    from replay.traces.reader import Trace


@click.command()
@trace_argument
@draft_option
@observed_option
@trained_wiring_option
@click.option(
    "--served-wiring",
    metavar="W",
    help="What the server feeds, spelled as --wiring.  [default: as the trace or the config says]",
)
@click.option(
    "--steps",
    type=int,
    metavar="K",
    help="Of the server.  [default: as the trace says, else 5, of a DFlash head its whole block]",
)
@click.option("--topk", type=int, metavar="N", help="Of the server.  [default: as the trace says, else 1]")
@click.option("--num-draft-tokens", type=int, metavar="N", help="Of the server.  [default: as the trace says]")
@click.option("--precision", metavar="P", help="Of the served head.  [default: the target's]")
@click.option("--engine", metavar="PROFILE", help="sglang or eagle.  [default: sglang]")
@click.option("--ladder/--no-ladder", default=True, help="Show the way from the training metric down to the server.")
@part_options
@target_option
@no_verify_option
@page_options
@cache_option
@workers_options
@json_option
def diagnose(
    trace: Path, draft: Path, observed: str | None, wiring: str | None, served_wiring: str | None, steps: int | None,
    topk: int | None, num_draft_tokens: int | None, precision: str | None, engine: str | None, ladder: bool,
    category: tuple[str, ...], request: tuple[str, ...], first_turn: bool, limit: int | None, target: Path | None,
    no_verify: bool, cache: Path | None, workers: int | None, ray: str | None, html: Path | None,
    force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Name what keeps a server's accept length short.

    Replays the head under every known fault and holds each against what the server did: what is --observed, else what
    the trace's own server did, round by round. Exit code 0 whatever the verdict.
    """
    from replay.analysis.diagnosis.document import to_json
    from replay.analysis.diagnosis.report import render_diagnosis
    from replay.capture.observed import read_observed
    from replay.diagnosis.diagnose import diagnose as run
    from replay.engines.profiles import engine_profile
    from replay.simulator.binding import stated_wiring
    from replay.simulator.cache import check_cache_folder

    refuse_page(html, force)
    hands = read_workers(workers, ray)
    if cache is not None:
        check_cache_folder(cache, verify=not no_verify)
    told = None if observed is None else read_observed(observed)
    opened = open_trace(trace, read_part(category, request, first_turn, limit), target, verify=not no_verify)
    checkpoint = read_draft(draft)
    profile = engine_profile(engine or "sglang")

    def typed(text: str | None) -> "Wiring | None":
        found = parse_wiring_option(text, opened.header.target)
        return stated_wiring(checkpoint, profile, opened) if text is not None and found is None else found

    found = _diagnose(
        hands,
        lambda on_event, on_note: run(
            opened,
            checkpoint,
            trained=typed(wiring),
            observed=told,
            wiring=typed(served_wiring),
            steps=steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            precision=precision,
            engine=engine,
            ladder=ladder,
            cache=cache,
            workers=hands,
            on_event=on_event,
            on_note=on_note,
        ),
    )
    if as_json:
        print_json(to_json(found))
    else:
        print_rich(render_diagnosis(found))
    if html is not None:
        from replay.analysis.page.diagnosed import write_diagnosis

        made_of = _provenance(opened, checkpoint, [] if told is None else [("observed", told.source)])
        write_page_file(html, lambda text: write_diagnosis(found, text, made_of), render_diagnosis(found))


def _provenance(trace: "Trace", head: "Checkpoint", more: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What a diagnosis was made of: its trace, target, engine and head."""
    from replay import __version__

    header = trace.header
    target, engine = header.target, header.engine
    return [
        ("trace", f"{trace.path} · {counted(len(trace), 'request')} · taps {','.join(trace.taps)}"),
        ("target", f"{target.name} · {target.model_type} · layers {target.layers} · {target.dtype}"),
        ("engine", f"{engine.name} {engine.version}"),
        ("draft", f"{head.name} · path {head.path}" if head.path else head.name),
        *more,
        ("replay", __version__),
    ]


def _diagnose(
    workers: int | str | None, run: "Callable[[Callable[[Trying], None], Callable[[str], None]], Diagnosis]"
) -> "Diagnosis":
    with quiet_ray(workers), show_progress("replaying") as progress:

        def on_event(event: "Trying") -> None:
            progress.update(event.stage, event.done + event.part, event.total, event.unit)

        return run(on_event, progress.note)
