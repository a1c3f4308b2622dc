"""Rounds on the terminal, as JSON or as a web page: what several commands show."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.cli.table_formats import print_table
from replay.cli.terminal import Visible, print_json, print_rich
from replay.errors import OutputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from replay.analysis.flat import FlatRow
    from replay.analysis.summary import VariantSummary
    from replay.traces.rounds import Rounds


def show_rounds(
    rounds: "Rounds", as_json: bool, *, peers: bool = False, sort: str | None = None, top: int | None = None,
    table_format: str | None = None,
) -> None:  # fmt: skip
    """The report of ``rounds``, its JSON, or its table alone; ``peers`` adds the metrics of other projects.

    ``sort`` and ``top`` say which rows the table has (analysis/view.py); the JSON has all.
    """
    from replay.analysis.summary import summarise

    summaries = summarise(rounds)
    if table_format is not None:
        print_table(_flat(rounds, summaries, sort, top), table_format)
    elif as_json:
        body = _body(rounds, summaries)
        if peers:
            from replay.analysis.report.peers import peer_metrics

            body["peers"] = [peer_metrics(rounds, variant.name) for variant in rounds.variants]
        print_json(body)
    else:
        print_rich(_render(rounds, summaries, peers, sort, top))


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


def _body(rounds: "Rounds", summaries: "Sequence[VariantSummary]") -> dict[str, Any]:
    from replay.analysis.report.report import assess
    from replay.analysis.summary import to_json

    report = assess(rounds, summaries)
    return {
        **to_json(rounds, summaries),
        "best": [row.name for row in report.together],
        "doubts": list(report.doubts),
    }


def _render(
    rounds: "Rounds",
    summaries: "Sequence[VariantSummary]",
    peers: bool,
    sort: str | None = None,
    top: int | None = None,
) -> "RenderableType":
    from rich.console import Group

    from replay.analysis.report.report import render
    from replay.analysis.view import View

    parts: list[Any] = [render(rounds, summaries, View(sort, top))]
    if peers:
        from replay.analysis.report.peers import peer_metrics, render_peers

        parts += [render_peers(peer_metrics(rounds, variant.name)) for variant in rounds.variants]
    return Group(*parts)


def write_html(rounds: "Rounds", path: Path, peers: bool) -> None:
    """The report as a web page. Raises OutputError where it cannot be written."""
    from rich.console import Console

    from replay.analysis.summary import summarise
    from replay.traces.files import write_whole

    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, markup=False, emoji=False)
    console.print(Visible(_render(rounds, summarise(rounds), peers)))
    try:
        write_whole(path, [console.export_html().encode()])
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); choose another --html") from error
