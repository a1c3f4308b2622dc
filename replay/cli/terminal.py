"""Between the commands and the terminal: text to stdout and stderr, JSON documents, web pages, progress bars."""

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from replay.analysis.summary import VariantSummary
    from replay.traces.rounds import Rounds


def say(text: str) -> None:
    """A line on stderr."""
    click.echo(text, err=True)


def print_rich(renderable: "RenderableType") -> None:
    """A report on stdout, as wide as the terminal."""
    from rich.console import Console

    Console(soft_wrap=False).print(renderable)


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def show_rounds(rounds: "Rounds", as_json: bool, *, peers: bool = False) -> None:
    """The report of ``rounds``, or its JSON; ``peers`` adds the metrics of other projects."""
    from dataclasses import asdict

    from replay.analysis.summary import summarise, to_json

    summaries = summarise(rounds)
    if as_json:
        document = to_json(rounds, summaries)
        if peers:
            from replay.analysis.report.peers import peer_metrics

            document["peers"] = [asdict(peer_metrics(rounds, variant.name)) for variant in rounds.variants]
        print_json(document)
    else:
        print_rich(_render(rounds, summaries, peers))


def show_ranking(rounds: "Rounds", tensors: list[str], as_json: bool) -> None:
    """The ranking of ``tensors``, quantised one by one as `ranking.one_by_one` gave the variants, or its JSON."""
    from replay.analysis.report.precision_ranking import rank, render_ranking
    from replay.analysis.summary import summarise, to_json

    summaries = summarise(rounds)
    ranking = rank(rounds, summaries, tensors)
    if as_json:
        print_json(
            {**to_json(rounds, summaries), "ranking": [row.to_json() for row in (*ranking.rows, ranking.together)]}
        )
    else:
        print_rich(render_ranking(ranking))


def _render(rounds: "Rounds", summaries: "Sequence[VariantSummary]", peers: bool) -> "RenderableType":
    from rich.console import Group

    from replay.analysis.report.report import render

    parts: list[Any] = [render(rounds, summaries)]
    if peers:
        from replay.analysis.report.peers import peer_metrics, render_peers

        parts += [render_peers(peer_metrics(rounds, variant.name)) for variant in rounds.variants]
    return Group(*parts)


def write_html(rounds: "Rounds", path: Path, peers: bool) -> None:
    """The report as a web page. Raises OutputError where it cannot be written."""
    from rich.console import Console

    from replay.analysis.summary import summarise
    from replay.traces.files import write_whole

    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(_render(rounds, summarise(rounds), peers))
    try:
        write_whole(path, [console.export_html().encode()])
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); choose another --html") from error


def refuse_existing(path: Path, force: bool) -> None:
    """Before the work, so that nothing is lost after it. Raises OutputError saying what stands in the way."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if path.exists() and not path.is_file():  # --force would put a file in the place of a device
        raise OutputError(f"{path} is a device or a pipe and would be replaced; name a file")
    if path.exists() and not force:
        raise OutputError(f"{path} exists already; type another name, or --force to replace it")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is not a folder, so {path.name} cannot be written there; make it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path.parent} cannot be written to; name a file in a folder that can")


@contextmanager
def show_progress(console: "Console") -> Iterator[Any]:
    """A bar that is there while the block runs, where ``console`` is a terminal; tasks take the field ``rate``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
