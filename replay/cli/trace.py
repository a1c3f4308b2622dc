"""`replay trace`: traces made of traces, and how their requests are spread."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli.options import PATH, SOURCE, json_option, no_verify_option, part_options, read_part
from replay.cli.progress import show_progress
from replay.cli.terminal import print_json, print_rich, print_text
from replay.printable import counted

if TYPE_CHECKING:
    from replay.traces.copying import Copied

_traces = click.argument("traces", type=SOURCE, metavar="TRACE...", nargs=-1, required=True)
_output = click.option("-o", "--output", required=True, type=PATH, metavar="TRACE", help="Folder to write into.")
_force = click.option("--force", is_flag=True, help="Replace an existing trace.")


@click.group()
def trace() -> None:
    """Merge traces, take a part of one, or count what one holds."""


@trace.command()
@_traces
@_output
@click.option("--name-by-trace", is_flag=True, help="Put the name of each trace's folder before its request ids.")
@_force
@no_verify_option
@json_option
def merge(
    traces: Sequence[Path], output: Path, name_by_trace: bool, force: bool, no_verify: bool, as_json: bool
) -> None:
    """Write the requests of several traces as one.

    The traces have to be of one target, recorded alike. Where taps differ, requests keep theirs.
    """
    from replay.traces.copying import copy_requests
    from replay.traces.reader import Trace
    from replay.traces.whole import check_output

    check_output(output, force=force)
    opened = [Trace.open(path, verify=not no_verify) for path in traces]
    with show_progress("copying") as progress:

        def on_event(done: int, total: int) -> None:
            progress.update("copying", done, total, "requests")

        copied = copy_requests(opened, output, named_by_trace=name_by_trace, force=force, on_event=on_event)
    _show(copied, as_json)


@trace.command()
@click.argument("source", type=SOURCE, metavar="TRACE")
@part_options
@_output
@_force
@no_verify_option
@json_option
def subset(
    source: Path, category: tuple[str, ...], request: tuple[str, ...], first_turn: bool, limit: int | None,
    output: Path, force: bool, no_verify: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write some requests of a trace as a trace.

    Of an unfinished trace those that are whole are taken, so that without other options this makes a finished one.
    """
    from replay.traces.copying import copy_requests
    from replay.traces.reader import Trace
    from replay.traces.whole import check_output

    check_output(output, force=force)
    opened = Trace.open(source, allow_incomplete=True, verify=not no_verify)
    taken = opened.take(read_part(category, request, first_turn, limit))
    with show_progress("copying") as progress:

        def on_event(done: int, total: int) -> None:
            progress.update("copying", done, total, "requests")

        copied = copy_requests([taken], output, force=force, on_event=on_event)
    _show(copied, as_json)


@trace.command()
@_traces
@no_verify_option
@json_option
def stats(traces: Sequence[Path], no_verify: bool, as_json: bool) -> None:
    """Count the requests and tokens of traces, by category.

    Accept lengths are those that the server of a trace counted itself.
    """
    from replay.analysis.json_document import json_value
    from replay.analysis.report.trace_stats import render_stats, stats_json
    from replay.traces.reader import Trace
    from replay.traces.stats import trace_stats

    counted = [trace_stats(Trace.open(path, allow_incomplete=True, verify=not no_verify)) for path in traces]
    if as_json:
        print_json({"traces": json_value([stats_json(one) for one in counted])})
    else:
        for one in counted:
            print_rich(render_stats(one))


def _show(copied: "Copied", as_json: bool) -> None:
    from replay.analysis.json_document import object_json

    if as_json:
        return print_json(object_json(copied))
    parts = ", ".join(f"{count} of {path}" for path, count in copied.traces.items())
    tokens = counted(copied.output_tokens, "output token")
    print_text(f"{copied.path}: {counted(copied.requests, 'request')} ({parts}), {tokens}")
