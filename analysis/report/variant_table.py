"""The tables of a report: one row for each variant, or one for each draft position of a single variant."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.text import Text

from replay.analysis import wording
from replay.analysis.counts import position_rates, reached_positions
from replay.analysis.report.agreement import agreement_cell
from replay.analysis.report.assessment import Report
from replay.analysis.report.expected import expected_cell
from replay.analysis.summary import ServerCounts, VariantSummary
from replay.analysis.tables import Column, Fitted, column

# Positions that are always shown; beyond them those that no round accepted are left out.
DEEP = 15


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of the table: one for each variant, then the server's own where it reported one."""

    summaries: Sequence[VariantSummary]
    best: VariantSummary | None
    seen: ServerCounts | None
    many: bool

    @property
    def histogram(self) -> Sequence[int]:
        """The server's rounds by accepted tokens; empty where it reported none."""
        return self.seen.histogram if self.seen else ()

    def column(self, heading: str, cells: Sequence[str], reported: str = "", *, left: bool = False) -> Column:
        """``cells`` of the variants, ``reported`` of the server."""
        texts = [
            Text(cell, style="bold" if self.many and summary is self.best else "")
            for cell, summary in zip(cells, self.summaries, strict=True)
        ]
        if self.seen is not None:
            texts.append(Text(reported, style="cyan"))
        return Column(heading, tuple(texts), "left" if left else "right")


def variant_table(report: Report, shown: Sequence[VariantSummary]) -> Fitted:
    """One row for each of the variants ``shown``, the best in bold, and the server's own row where it reported one."""
    facts = report.facts
    seen = next((summary.observed for summary in shown if summary.observed is not None), None)
    rows = _Rows(shown, report.best, seen, len(report.summaries) > 1)
    labels = [wording.label(row, facts) or "replay" for row in shown] + ["server"] * (seen is not None)
    return Fitted(_names(rows, facts), (_numbers(rows, report), _shape(rows)), tuple(labels))


def _names(rows: _Rows, facts: Sequence[str]) -> tuple[Column, ...]:
    """What tells the rows apart."""
    if not rows.many and rows.seen is not None:
        return (rows.column("", ["replay"], "server", left=True),)
    return tuple(
        rows.column(
            _heading(fact),
            [_name(row, fact) for row in rows.summaries],
            "server" * (index == 0),
            left=_side(fact) == "left",
        )
        for index, fact in enumerate(facts)
    )


def _numbers(rows: _Rows, report: Report) -> tuple[Column, ...]:
    return (*_lengths(rows), *_gaps(rows, report), *_tokens(rows))


def _lengths(rows: _Rows) -> Iterator[Column]:
    """The accept length and its interval."""
    reported = wording.decimal(rows.seen.accept_length if rows.seen else math.nan)
    yield rows.column("accept\nlength", [wording.decimal(row.accept_length) for row in rows.summaries], reported)
    yield rows.column("95 %\ninterval", [wording.interval(row.accept_length_ci95) for row in rows.summaries])


def _gaps(rows: _Rows, report: Report) -> Iterator[Column]:
    """What each of several variants lost to the best, and what its rule takes on average."""
    if not rows.many:
        return
    yield rows.column("lost", [_lost(row, report) for row in rows.summaries])
    if any(row.expected is not None for row in rows.summaries):
        yield rows.column("expected\nlength", [expected_cell(row) for row in rows.summaries])


def _tokens(rows: _Rows) -> Iterator[Column]:
    """Rates and what they were divided from."""
    summaries, seen = rows.summaries, rows.seen
    yield rows.column("accept\nrate", [wording.percent(row.accept_rate) for row in summaries])
    accepted = sum(number * count for number, count in enumerate(rows.histogram))
    yield rows.column(
        "accepted /\ndrafted",
        [f"{wording.count(row.accepted)} / {wording.count(row.drafted)}" for row in summaries],
        f"{wording.count(accepted)} / {wording.NOTHING}" if rows.histogram else "",
    )
    yield rows.column(
        "rounds", [wording.count(row.rounds) for row in summaries], wording.count(seen.rounds if seen else 0)
    )


def _shape(rows: _Rows) -> tuple[Column, ...]:
    """How many tokens the rounds accepted, and the rates by position where there are several variants."""
    shown = _deepest(rows)
    bars = [wording.bars(row.histogram[: shown + 1]) for row in rows.summaries]
    histogram = rows.column(f"accepted\n0 to {shown}", bars, wording.bars(rows.histogram[: shown + 1]), left=True)
    if not rows.many:
        return (histogram,)
    rates = _aligned([
        *(row.position_conditional[:shown] for row in rows.summaries),
        position_rates(rows.histogram or (0,))[1][:shown],
    ])  # fmt: skip
    heading = "% accepted at position 1, 2, ...\nof the rounds that got there"
    return histogram, rows.column(heading, rates[:-1], rates[-1], left=True), *_agreements(rows)


def _deepest(rows: _Rows) -> int:
    """How many positions the widest row shows."""
    return max(map(shown_positions, rows.summaries))


def shown_positions(summary: VariantSummary) -> int:
    """How many positions of a variant are shown: of deep drafts up to one more than any round accepted."""
    most = max((number for number, count in enumerate(summary.histogram) if count), default=0)
    return min(summary.steps, max(DEEP, most + 1))


def positions_beyond(summary: VariantSummary) -> str:
    """Says which positions ``position_table`` leaves out; empty where it has all."""
    first = shown_positions(summary) + 1
    return f"positions {first} to {summary.steps}: no round got there" if first <= summary.steps else ""


def _agreements(rows: _Rows) -> Iterator[Column]:
    """How each of several variants fares against the rounds of the trace's own server, where one does."""
    if any(row.agreement is not None for row in rows.summaries):
        yield rows.column("against\nthe server", [agreement_cell(row) for row in rows.summaries])


def position_table(summary: VariantSummary) -> Fitted:
    """One row for each draft position: rounds that got there, those that accepted it, the share."""
    shown = shown_positions(summary)
    reached = reached_positions(summary.histogram)[: shown + 1]
    seen = summary.observed.histogram if summary.observed else ()
    columns = [
        column("rounds that\ngot there", [wording.count(count) for count in reached[:-1]]),
        column("accepted\nit", [wording.count(count) for count in reached[1:]]),
        column("share", [wording.percent(rate) for rate in summary.position_conditional[:shown]]),
    ]
    if seen:
        rates = [wording.percent(rate) for rate in position_rates(seen)[1]]
        columns.append(column("server's\nshare", (rates + [wording.NOTHING] * len(reached))[: len(reached) - 1]))
    shares = [rate if not math.isnan(rate) else 0.0 for rate in summary.position_conditional[:shown]]
    columns.append(
        Column("", tuple(Text("█" * round(20 * share) + "░" * (20 - round(20 * share))) for share in shares), "left")
    )
    positions = column("position", [str(position) for position in range(1, len(reached))])
    return Fitted((positions,), (tuple(columns),), ())


def _heading(fact: str) -> str:
    return {"name": "variant", "num_draft_tokens": "draft\ntokens"}.get(fact, fact)


def _side(fact: str) -> str:
    return "right" if fact in ("steps", "topk", "num_draft_tokens", "temperature") else "left"


def _name(summary: VariantSummary, fact: str) -> str:
    return summary.name if fact == "name" else wording.fact(summary, fact)


def _lost(summary: VariantSummary, report: Report) -> str:
    if summary is report.best:
        return "best"
    gap = report.gaps.get(summary.name)
    if gap is None or math.isnan(gap.difference):
        return wording.NOTHING
    if gap.verdict == "equal":
        return "equal"
    return ("≈ " if summary in report.together else "") + wording.decimal(-gap.difference)


def _aligned(rows: Sequence[Sequence[float]]) -> list[str]:
    """Whole percents of each row, the same position of all rows below each other."""
    cells = [[wording.NOTHING if math.isnan(rate) else f"{100 * rate:.0f}" for rate in rates] for rates in rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    return [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in cells]
