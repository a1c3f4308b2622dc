"""The commands that look for what is wrong: diagnose by replaying, check by reading."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli.options import PATH, api_key_option, draft_option, json_option, trace_argument, trained_wiring_option
from replay.cli.terminal import print_json, print_rich, show_progress
from replay.errors import ReplayError, UsageError

if TYPE_CHECKING:
    from replay.analysis.diagnosis.verdict import Diagnosis
    from replay.diagnosis.diagnose import Trying
    from replay.engines.wiring import Wiring


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
    from replay.checkpoint.checkpoint import read_checkpoint
    from replay.diagnosis.diagnose import diagnose as run
    from replay.diagnosis.diagnose import served_variant
    from replay.traces.reader import Trace

    opened = Trace.open(trace)
    layers = opened.header.target.layers
    checkpoint = read_checkpoint(draft)
    served = served_variant(
        opened, checkpoint.name, steps=steps, topk=topk, num_draft_tokens=num_draft_tokens,
        precision=precision, engine=engine,
        wiring=_parse_wiring(served_wiring, layers),
    )  # fmt: skip
    found = _diagnose(
        lambda on_event: run(
            opened,
            checkpoint,
            served,
            trained=_parse_wiring(wiring, layers),
            observed=None if observed is None else read_observed(observed),
            ladder=ladder,
            on_event=on_event,
        )
    )
    if as_json:
        print_json(to_json(found))
    else:
        print_rich(render_diagnosis(found))


@click.command()
@draft_option
@click.option("--target", required=True, type=PATH, metavar="DIR", help="Target's folder; its config.json is enough.")
@click.option("--server", metavar="URL", help="A running SGLang server, whose arguments in force are read.")
@api_key_option
@click.option(
    "--server-args",
    metavar="TEXT",
    help='How it is or will be started, in one argument: "VARIABLE=1 --dtype bfloat16 ...".',
)
@click.option(
    "--engine", metavar="PROFILE", help="sglang, vllm or eagle.  [default: as --server-args say, else sglang]"
)
@trained_wiring_option
@click.option("--trace", type=PATH, metavar="TRACE", help="Hold the vocabulary map against its outputs.")
@click.option("--weights", is_flag=True, help="Read the head's tensors whole: NaN, constants, what fp16 cannot hold.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 even with findings of severity error.")
@json_option
def check(
    draft: Path, target: Path, server: str | None, api_key: str | None, server_args: str | None, engine: str | None,
    wiring: str | None, trace: Path | None, weights: bool, exit_zero: bool, as_json: bool,
) -> None:  # fmt: skip
    """Hold a draft head, its target and a server's arguments against the known faults, without running anything.

    Reads configs and tensor headers only. Exit code 1 with findings of severity error, 0 with warnings and notes.
    """
    from replay.check.facts import count_emitted, read_facts, read_target_config
    from replay.check.report import render_outcome
    from replay.check.run import check as run
    from replay.check.server import check_engine, live_server, parse_server_arguments

    if server is not None and server_args is not None:
        raise click.UsageError("give one of --server and --server-args")
    if server is not None and engine not in (None, "sglang"):
        raise click.UsageError("--server asks SGLang servers; give --server-args for another --engine")
    check_engine(engine)
    stated = None if server_args is None else parse_server_arguments(server_args, engine)
    if server is not None:
        stated = live_server(_server_info(server, api_key), server)
    known = _parse_wiring(wiring, read_target_config(target).layers)
    emitted = None
    if trace is not None:
        from replay.traces.reader import Trace

        emitted = count_emitted(Trace.open(trace))
    facts = read_facts(draft, target, stated, engine=engine, wiring=known, emitted=emitted, weights=weights)
    outcome = run(facts)
    if as_json:
        print_json(outcome.to_json())
    else:
        print_rich(render_outcome(outcome, facts))
    if outcome.errors and not exit_zero:
        plural = "s" if outcome.errors > 1 else ""
        raise ReplayError(f"{draft} has {outcome.errors} finding{plural} of severity error; mend what fix says")


def _parse_wiring(text: str | None, layers: int) -> "Wiring | None":
    from replay.engines.wiring import parse_wiring

    return None if text is None else parse_wiring(text, layers=layers)


def _server_info(url: str, api_key: str | None) -> object:
    from replay.capture.client.api import TransientError, open_api

    try:
        return open_api(url, api_key, timeout=30.0).call("/server_info")
    except TransientError as error:
        raise UsageError(f"{url} cannot be asked: {error}; see that an SGLang server runs there") from error


def _diagnose(run: "Callable[[Callable[[Trying], None]], Diagnosis]") -> "Diagnosis":
    from rich.console import Console

    with show_progress(Console(stderr=True)) as progress:
        task = progress.add_task("replaying", total=None, rate="hypotheses")

        def on_event(event: "Trying") -> None:
            progress.update(task, description=event.stage, completed=event.done, total=event.total)

        return run(on_event)
