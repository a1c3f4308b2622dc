"""`replay inspect`: what lies in a trace or a head."""

from pathlib import Path

import click

from replay.cli.options import SOURCE, json_option, no_verify_option, open_whole, target_option
from replay.cli.progress import show_progress
from replay.cli.terminal import print_json, print_rich
from replay.errors import ReplayError, UsageError
from replay.traces.check import TraceFinding, check_trace
from replay.traces.reader import Trace


@click.command()
@click.argument("path", type=SOURCE, metavar="TRACE|DRAFT")
@click.option(
    "--check",
    is_flag=True,
    help="Check a trace whole: checksums, lengths, finiteness, lm_head(final) against recorded choices.",
)
@target_option
@no_verify_option
@json_option
def inspect(path: Path, check: bool, target: Path | None, no_verify: bool, as_json: bool) -> None:
    """Say what lies in a trace or a draft head's folder."""
    from replay.analysis.json_document import object_json
    from replay.check.inspection import draft_facts, kind_of, trace_facts
    from replay.check.report import render_facts, render_findings

    if kind_of(path) == "draft":
        _refuse_options_of_traces(path, check=check, target=target, no_verify=no_verify)
        draft = draft_facts(path)
        return print_json(object_json(draft)) if as_json else print_rich(render_facts(draft))
    trace = open_whole(path, target, allow_incomplete=not check, verify=not no_verify)
    facts = trace_facts(trace)
    findings = _check(trace) if check else []
    if as_json:
        print_json({**object_json(facts), **({"findings": findings} if check else {})})
    else:
        print_rich(render_facts(facts))
        if findings:
            print_rich(render_findings(findings))
    errors = sum(finding.severity == "error" for finding in findings)
    if errors:
        raise ReplayError(f"{path} fails its self-check with {errors} errors; capture it again before judging a head")


def _check(trace: Trace) -> list[TraceFinding]:
    with show_progress("checking") as progress:
        return list(
            check_trace(trace, on_event=lambda done, total: progress.update("checking", done, total, "requests"))
        )


def _refuse_options_of_traces(path: Path, **typed: object) -> None:
    if given := [f"--{name.replace('_', '-')}" for name, value in typed.items() if value]:
        raise UsageError(f"{path} is a draft head, and {', '.join(given)} is for a trace; leave it out")
