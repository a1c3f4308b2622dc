"""The tables of a report: one row for each variant, or one for each draft position of a single variant."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.text import Text

from replay.analysis import wording
from replay.analysis.counts import position_rates, reached_positions
from replay.analysis.gaps import Gap
from replay.analysis.report.agreement import agreement_cell
from replay.analysis.report.expected import expected_cell
from replay.analysis.summary import ServerCounts, VariantSummary
from replay.analysis.tables import Column, Fitted, column


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of the table: one for each variant, then the server's own where it reported one."""

    summaries: Sequence[VariantSummary]
    best: VariantSummary | None
    seen: ServerCounts | None

    @property
    def many(self) -> bool:
        return len(self.summaries) > 1

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


def variant_table(
    summaries: Sequence[VariantSummary],
    facts: Sequence[str],
    gaps: Mapping[str, Gap],
    best: VariantSummary | None,
) -> Fitted:
    """One row for each variant in the given order, the best in bold, and the server's own row where it reported one."""
    seen = next((summary.observed for summary in summaries if summary.observed is not None), None)
    rows = _Rows(summaries, best, seen)
    labels = [wording.label(row, facts) or "replay" for row in summaries] + ["server"] * (seen is not None)
    return Fitted(_names(rows, facts), (_numbers(rows, gaps), _shape(rows)), tuple(labels))


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


def _numbers(rows: _Rows, gaps: Mapping[str, Gap]) -> tuple[Column, ...]:
    return (*_lengths(rows), *_gaps(rows, gaps), *_tokens(rows))


def _lengths(rows: _Rows) -> Iterator[Column]:
    """The accept length and its interval."""
    reported = wording.decimal(rows.seen.accept_length if rows.seen else math.nan)
    yield rows.column("accept\nlength", [wording.decimal(row.accept_length) for row in rows.summaries], reported)
    yield rows.column("95 %\ninterval", [wording.interval(row.accept_length_ci95) for row in rows.summaries])


def _gaps(rows: _Rows, gaps: Mapping[str, Gap]) -> Iterator[Column]:
    """What each of several variants lost to the best, and what its rule takes on average."""
    if not rows.many:
        return
    yield rows.column("lost", [_lost(row, gaps, rows.best) for row in rows.summaries])
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
    steps = max(row.steps for row in rows.summaries)
    bars = [wording.bars(row.histogram) for row in rows.summaries]
    histogram = rows.column(f"accepted\n0 to {steps}", bars, wording.bars(rows.histogram), left=True)
    if not rows.many:
        return (histogram,)
    rates = _aligned([*(row.position_conditional for row in rows.summaries), position_rates(rows.histogram or (0,))[1]])
    heading = "% accepted at position 1, 2, ...\nof the rounds that got there"
    return histogram, rows.column(heading, rates[:-1], rates[-1], left=True), *_agreements(rows)


def _agreements(rows: _Rows) -> Iterator[Column]:
    """How each of several variants fares against the rounds of the trace's own server, where one does."""
    if any(row.agreement is not None for row in rows.summaries):
        yield rows.column("against\nthe server", [agreement_cell(row) for row in rows.summaries])


def position_table(summary: VariantSummary) -> Fitted:
    """One row for each draft position: rounds that got there, those that accepted it, the share."""
    reached = reached_positions(summary.histogram)
    seen = summary.observed.histogram if summary.observed else ()
    columns = [
        column("rounds that\ngot there", [wording.count(count) for count in reached[:-1]]),
        column("accepted\nit", [wording.count(count) for count in reached[1:]]),
        column("share", [wording.percent(rate) for rate in summary.position_conditional]),
    ]
    if seen:
        rates = [wording.percent(rate) for rate in position_rates(seen)[1]]
        columns.append(column("server's\nshare", (rates + [wording.NOTHING] * len(reached))[: len(reached) - 1]))
    shares = [rate if not math.isnan(rate) else 0.0 for rate in summary.position_conditional]
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


def _lost(summary: VariantSummary, gaps: Mapping[str, Gap], best: VariantSummary | None) -> str:
    if summary is best:
        return "best"
    gap = gaps.get(summary.name)
    if gap is None or math.isnan(gap.difference):
        return wording.NOTHING
    if gap.verdict == "equal":
        return "equal"
    return ("≈ " if gap.verdict == "cannot tell" else "") + wording.decimal(-gap.difference)


def _aligned(rows: Sequence[Sequence[float]]) -> list[str]:
    """Whole percents of each row, the same position of all rows below each other."""
    cells = [[wording.NOTHING if math.isnan(rate) else f"{100 * rate:.0f}" for rate in rates] for rates in rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    return [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in cells]
