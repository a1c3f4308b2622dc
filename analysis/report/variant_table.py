"""The tables of a report: one row for each variant, or one for each draft position of a single variant."""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from rich.text import Text

from replay.analysis import wording
from replay.analysis.counts import position_rates, reached_positions
from replay.analysis.gaps import Gap
from replay.analysis.report.expected import expected_cell
from replay.analysis.summary import VariantSummary
from replay.analysis.tables import Column, Fitted, column


def variant_table(
    summaries: Sequence[VariantSummary],
    facts: Sequence[str],
    gaps: Mapping[str, Gap],
    best: VariantSummary | None,
) -> Fitted:
    """One row for each variant in the given order, the best in bold, and the server's own row where it reported one."""
    many = len(summaries) > 1
    seen = next((summary.observed for summary in summaries if summary.observed is not None), None)

    def column_of(heading: str, cells: Sequence[str], reported: str, justify: str = "right") -> Column:
        texts = [
            Text(cell, style="bold" if many and summary is best else "")
            for cell, summary in zip(cells, summaries, strict=True)
        ]
        if seen is not None:
            texts.append(Text(reported, style="cyan"))
        return Column(heading, tuple(texts), "left" if justify == "left" else "right")

    names = [
        column_of(_heading(name), [_name(row, name) for row in summaries], "server" * (index == 0), _side(name))
        for index, name in enumerate(facts)
    ]
    if not many and seen is not None:
        names = [column_of("", ["replay"], "server", "left")]
    histogram = seen.histogram if seen else ()
    accepted = sum(number * count for number, count in enumerate(histogram))
    main = [
        column_of(
            "accept\nlength",
            [wording.decimal(row.accept_length) for row in summaries],
            wording.decimal(seen.accept_length if seen else math.nan),
        ),
        column_of("95 %\ninterval", [wording.interval(row.accept_length_ci95) for row in summaries], ""),
        column_of("accept\nrate", [wording.percent(row.accept_rate) for row in summaries], ""),
        column_of(
            "accepted /\ndrafted",
            [f"{wording.count(row.accepted)} / {wording.count(row.drafted)}" for row in summaries],
            f"{wording.count(accepted)} / {wording.NOTHING}" if histogram else "",
        ),
        column_of(
            "rounds", [wording.count(row.rounds) for row in summaries], wording.count(seen.rounds if seen else 0)
        ),
    ]
    if many and any(row.expected is not None for row in summaries):
        main.insert(2, column_of("expected\nlength", [expected_cell(row) for row in summaries], ""))
    if many:
        main.insert(2, column_of("lost", [_lost(row, gaps, best) for row in summaries], ""))
    steps = max(row.steps for row in summaries)
    shape = [
        column_of(
            f"accepted\n0 to {steps}",
            [wording.bars(row.histogram) for row in summaries],
            wording.bars(histogram),
            "left",
        )
    ]
    if many:
        rates = _aligned([*(row.position_conditional for row in summaries), position_rates(histogram or (0,))[1]])
        heading = "% accepted at position 1, 2, ...\nof the rounds that got there"
        shape.append(column_of(heading, rates[:-1], rates[-1], "left"))
    labels = [wording.label(row, facts) or "replay" for row in summaries] + ["server"] * (seen is not None)
    return Fitted(tuple(names), (tuple(main), tuple(shape)), tuple(labels))


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
