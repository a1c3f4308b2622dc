"""A report as one HTML file that needs nothing beside it: charts, tables, the text of the terminal, and the tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from replay.analysis import wording
from replay.analysis.page.charts import charts, full_label
from replay.analysis.page.document import document, own_file
from replay.analysis.page.parts import doubts_section, pairs_section, section, sentence, table
from replay.analysis.page.token_data import token_data
from replay.analysis.report.answer import answer
from replay.analysis.report.assessment import Report
from replay.analysis.report.expected import expected_sentence
from replay.analysis.report.report import observed_sentence
from replay.analysis.summary import VariantSummary
from replay.analysis.tokens.view import View

_LESS = "\\u003c"  # in JSON: a plain one could end the script that holds the data


@dataclass(frozen=True, slots=True)
class Page:
    """What a page holds: ``text`` is the report as the terminal shows it, ``tokens`` None where no request is shown."""

    report: Report
    text: str
    tokens: View | None


def write_page(page: Page) -> str:
    """The HTML. Raises UsageError where charts cannot be drawn."""
    report = page.report
    said = (expected_sentence(report.summaries), observed_sentence(report), *report.layouts)
    sections = [
        *_variants(report),
        *doubts_section(report.doubts),
        *pairs_section("Provenance", report.provenance),
    ]
    tokens = () if page.tokens is None else _tokens(page.tokens)
    return document(answer(report), said, charts(report), sections, page.text, tokens)


def _variants(report: Report) -> Iterator[str]:
    """The table: each ratio with what was divided."""
    heads = ("variant", "accept length", "95 % interval", "lost", "accepted / drafted", "rounds", "requests")
    several = len(report.summaries) > 1
    rows = [_cells(report, row, f"{place}. " if several else "") for place, row in enumerate(report.summaries, 1)]
    lost = "lost: accept length below the best's, paired over the same requests; ≈ where the two cannot be told apart."
    return section("Variants", table(heads, rows, "the variants"), sentence(lost, "dim") if several else "")


def _cells(report: Report, row: VariantSummary, place: str) -> tuple[str, ...]:
    return (
        place + full_label(report, row),
        wording.decimal(row.accept_length),
        wording.interval(row.accept_length_ci95),
        _lost(report, row),
        f"{wording.count(row.accepted)} / {wording.count(row.drafted)} ({wording.percent(row.accept_rate)})",
        wording.count(row.rounds),
        wording.count(row.played_requests),
    )


def _lost(report: Report, row: VariantSummary) -> str:
    gap = report.gaps.get(row.name)
    if row is report.best:
        return "best"
    if gap is None or gap.verdict == "equal":
        return wording.NOTHING if gap is None else "equal"
    return ("≈ " if gap.verdict == "cannot tell" else "") + wording.decimal(-gap.difference)


def _tokens(view: View) -> Iterator[str]:
    """The data, and the script that shows a request of it."""
    data = json.dumps(token_data(view), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    yield '<section id="tokens">\n<h2>Token by token</h2>'
    yield '<p id="legend"></p>\n<form id="filters"></form>\n<div id="request"></div>\n<noscript>'
    yield "The requests are shown by a script in this page, which is switched off here.</noscript></section>"
    yield f'<script type="application/json" id="token-data">{data.replace("<", _LESS)}</script>'
    yield f'<script type="text/javascript">\n{own_file("page.js")}</script>'
