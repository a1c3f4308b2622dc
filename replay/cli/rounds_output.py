"""Rounds on the terminal, as JSON or as a web page: what several commands show."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.cli.page_tokens import page_tokens
from replay.cli.table_formats import print_table
from replay.cli.terminal import print_json, print_rich
from replay.cli.web_page import write_page_file

if TYPE_CHECKING:
    from rich.console import RenderableType

    from replay.analysis.flat import FlatRow
    from replay.analysis.summary import VariantSummary
    from replay.capture.observed_number import Observed
    from replay.simulator.tokens import Sources
    from replay.traces.rounds import Rounds

by_option = click.option(
    "--by",
    multiple=True,
    type=click.Choice(["category", "trace"]),
    help="Add a table by category or by trace.  [default: by trace where there are several]",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a report of rounds shows beside its tables, and in which form.

    ``peers`` adds the metrics of other projects, ``by`` groups of requests, ``observed`` what a server elsewhere
    accepted. ``sort`` and ``top`` say which rows the table has (analysis/view.py); the JSON has all. ``table_format``
    is that of the table alone.
    """

    peers: bool = False
    by: Sequence[str] = ()
    observed: "Observed | None" = None
    sort: str | None = None
    top: int | None = None
    table_format: str | None = None


def show_rounds(rounds: "Rounds", as_json: bool, wanted: Wanted = Wanted()) -> None:
    """The report of ``rounds``, its JSON, or its table alone."""
    from replay.analysis.report.elsewhere import elsewhere_json, elsewhere_sentence
    from replay.analysis.summary import summarise

    peers, observed = wanted.peers, wanted.observed

    summaries = summarise(rounds)
    if wanted.table_format is not None:
        print_table(_flat(rounds, summaries, wanted.sort, wanted.top), wanted.table_format)
    elif as_json:
        body = _body(rounds, summaries)
        if peers:
            from replay.analysis.report.peers import peer_metrics

            body["peers"] = [peer_metrics(rounds, variant.name) for variant in rounds.variants]
        if observed is not None:
            said = (observed.accept_length, observed.source, observed.rounds, observed.num_steps)
            body["observed_elsewhere"] = elsewhere_json(summaries, *said)
        if groups := _groups(rounds, wanted.by):
            from replay.analysis.report.by_group import groups_json, summarise_by

            body["by"] = {what: groups_json(summarise_by(rounds, what)) for what in groups}
        print_json(body)
    else:
        print_rich(_render(rounds, summaries, wanted))
        if observed is not None:
            print_rich("")
            print_rich(elsewhere_sentence(summaries, observed.accept_length, observed.source, observed.num_steps))


def show_ranking(rounds: "Rounds", tensors: list[str], as_json: bool) -> None:
    """The ranking of ``tensors``, quantised one by one as `one_by_one` gave the variants, or its JSON."""
    from replay.analysis.report.precision_ranking import rank_tensors, render_ranking
    from replay.analysis.summary import summarise

    summaries = summarise(rounds)
    ranking = rank_tensors(rounds, summaries, tensors)
    if as_json:
        print_json({**_body(rounds, summaries), "ranking": [*ranking.rows, ranking.together]})
    else:
        print_rich(render_ranking(ranking))


def _flat(
    rounds: "Rounds", summaries: "Sequence[VariantSummary]", sort: str | None, top: int | None
) -> "list[FlatRow]":
    from replay.analysis.report.flat import variant_rows
    from replay.analysis.report.report import assess
    from replay.analysis.view import View

    shown = View(sort, top).rows(summaries, lambda row: row.accept_length)
    return variant_rows(assess(rounds, summaries), shown)


def _groups(rounds: "Rounds", by: Sequence[str]) -> list[str]:
    """What was asked for, and by trace where there are several."""
    several = len({request.trace for request in rounds.requests}) > 1
    return list(dict.fromkeys([*by, *["trace"] * several]))


def _body(rounds: "Rounds", summaries: "Sequence[VariantSummary]") -> dict[str, Any]:
    from replay.analysis.report.report import assess
    from replay.analysis.summary import to_json

    report = assess(rounds, summaries)
    return {
        **to_json(rounds, summaries),
        "best": [row.name for row in report.together],
        "doubts": list(report.doubts),
    }


def _render(rounds: "Rounds", summaries: "Sequence[VariantSummary]", wanted: Wanted) -> "RenderableType":
    from rich.console import Group

    from replay.analysis.report.report import render
    from replay.analysis.view import View

    parts: list[Any] = [render(rounds, summaries, View(wanted.sort, wanted.top))]
    if wanted.peers:
        from replay.analysis.report.peers import peer_metrics, render_peers

        parts += [render_peers(peer_metrics(rounds, variant.name)) for variant in rounds.variants]
    if groups := _groups(rounds, wanted.by):
        from replay.analysis.report.by_group import render_groups, summarise_by
        from replay.traces.rounds_join import FILES

        several = bool(rounds.trace.get(FILES))
        parts += [render_groups(summarise_by(rounds, what), what, joined=several) for what in groups]
    return Group(*parts)


def write_html(rounds: "Rounds", path: Path, wanted: Wanted, sources: "Sources") -> None:
    """The report as a web page, with the tokens of its requests under the best variant.

    Raises OutputError where it cannot be written, and as ``write_page`` and ``show_tokens``.
    """
    from replay.analysis.page.page import Page, write_page
    from replay.analysis.report.report import assess
    from replay.analysis.summary import summarise

    summaries = summarise(rounds)
    report = assess(rounds, summaries)
    tokens = None if report.best is None else page_tokens(rounds, report.best.name, sources)
    write_page_file(path, lambda text: write_page(Page(report, text, tokens)), _render(rounds, summaries, wanted))
