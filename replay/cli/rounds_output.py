"""Rounds on the terminal, as JSON or as a web page: what several commands show."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.cli.terminal import Visible, print_json, print_rich
from replay.errors import OutputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from replay.analysis.summary import VariantSummary
    from replay.traces.rounds import Rounds

_PAGE = b'<!DOCTYPE html>\n<html>\n<head>\n<meta charset="UTF-8">\n<style>\n'  # how rich begins one


by_option = click.option(
    "--by",
    multiple=True,
    type=click.Choice(["category", "trace"]),
    help="Add a table by category or by trace.  [default: by trace where there are several]",
)


def show_rounds(rounds: "Rounds", as_json: bool, *, peers: bool = False, by: Sequence[str] = ()) -> None:
    """The report of ``rounds``, or its JSON; ``peers`` adds other projects' metrics, ``by`` groups of requests."""
    from replay.analysis.summary import summarise, to_json

    summaries = summarise(rounds)
    if as_json:
        body = {**to_json(rounds, summaries), "doubts": list(_doubts(rounds, summaries))}
        if peers:
            from replay.analysis.report.peers import peer_metrics

            body["peers"] = [peer_metrics(rounds, variant.name) for variant in rounds.variants]
        if wanted := _groups(rounds, by):
            from replay.analysis.report.by_group import groups_json, summarise_by

            body["by"] = {what: groups_json(summarise_by(rounds, what)) for what in wanted}
        print_json(body)
    else:
        print_rich(_render(rounds, summaries, peers, by))


def show_ranking(rounds: "Rounds", tensors: list[str], as_json: bool) -> None:
    """The ranking of ``tensors``, quantised one by one as `one_by_one` gave the variants, or its JSON."""
    from replay.analysis.report.precision_ranking import rank_tensors, render_ranking
    from replay.analysis.summary import summarise, to_json

    summaries = summarise(rounds)
    ranking = rank_tensors(rounds, summaries, tensors)
    if as_json:
        doubts = list(_doubts(rounds, summaries))
        print_json({**to_json(rounds, summaries), "doubts": doubts, "ranking": [*ranking.rows, ranking.together]})
    else:
        print_rich(render_ranking(ranking))


def _doubts(rounds: "Rounds", summaries: "Sequence[VariantSummary]") -> tuple[str, ...]:
    from replay.analysis.report.report import assess

    return assess(rounds, summaries).doubts


def _groups(rounds: "Rounds", by: Sequence[str]) -> list[str]:
    """What was asked for, and by trace where there are several."""
    several = len({request.trace for request in rounds.requests}) > 1
    return list(dict.fromkeys([*by, *["trace"] * several]))


def _render(
    rounds: "Rounds", summaries: "Sequence[VariantSummary]", peers: bool, by: Sequence[str] = ()
) -> "RenderableType":
    from rich.console import Group

    from replay.analysis.report.report import render

    parts: list[Any] = [render(rounds, summaries)]
    if peers:
        from replay.analysis.report.peers import peer_metrics, render_peers

        parts += [render_peers(peer_metrics(rounds, variant.name)) for variant in rounds.variants]
    if wanted := _groups(rounds, by):
        from replay.analysis.report.by_group import render_groups, summarise_by

        parts += [render_groups(summarise_by(rounds, what), what) for what in wanted]
    return Group(*parts)


def is_web_page(path: Path) -> bool:
    """Whether ``path`` begins as the pages that ``write_html`` writes."""
    with path.open("rb") as file:
        return file.read(len(_PAGE)) == _PAGE


def write_html(rounds: "Rounds", path: Path, peers: bool, by: Sequence[str] = ()) -> None:
    """The report as a web page. Raises OutputError where it cannot be written."""
    from rich.console import Console

    from replay.analysis.summary import summarise
    from replay.traces.files import write_whole

    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, markup=False, emoji=False)
    console.print(Visible(_render(rounds, summarise(rounds), peers, by)))
    try:
        write_whole(path, [console.export_html().encode()])
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); choose another --html") from error
