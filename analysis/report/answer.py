"""The first line of a report: which variants stand first, and what the others lose."""

import math
from collections.abc import Iterator, Sequence

from replay.analysis import wording
from replay.analysis.gaps import Gap
from replay.analysis.p_values import requests_needed
from replay.analysis.report.assessment import Report
from replay.analysis.summary import VariantSummary

MOST_NAMED = 3  # of the variants that stand first together


def answer(report: Report) -> str:
    """The first line: how much is accepted, under which variant, and what the others lose."""
    best = report.best
    if best is None:
        total = sum(row.requests for row in report.summaries[:1])
        return f"No rounds: {wording.counted(total, 'request')}, none with an output of more than one token."
    if len(report.summaries) == 1:
        # Rounds of a rule that changes the text cannot be had from a text recorded without it.
        other = best.expected is not None and not best.expected.exact
        return (
            f"{'As recorded, under target-only: a' if other else 'A'}ccept length "
            f"{wording.decimal(best.accept_length)}{_within(best)}: "
            f"{wording.counted(best.rounds, 'round')} of {wording.counted(best.played_requests, 'request')} accepted "
            f"{wording.count(best.accepted)} of {wording.counted(best.drafted, 'drafted token')}."
        )
    requests = wording.counted(best.played_requests, "request")
    over = f"over {wording.counted(best.rounds, 'round')} of {requests}"
    if report.gaps and all(gap.verdict == "equal" for gap in report.gaps.values()):
        length = wording.decimal(best.accept_length)
        return f"All {len(report.summaries)} variants give accept length {length}{_within(best)} {over}."
    start = f"Best of {len(report.summaries)} variants"
    losses = "".join(f"; {part}" for part in [", ".join(_losses(report))] if part)
    if len(report.together) > 1:
        told = "is best cannot be told" if best.played_requests < requests_needed(len(report.gaps)) else ""
        start = f"Which of {len(report.summaries)} variants {told}" if told else f"{start}, not told apart"
        return f"{start}: {_together(report)}, over {requests}{losses}."
    length = wording.decimal(best.accept_length)
    return f"{start}: {wording.label(best, report.facts)}, accept length {length}{_within(best)} {over}{losses}."


def _together(report: Report) -> str:
    """The variants that stand first, each with its accept length; of many the first few and how low the others are."""
    first, *others = report.together
    label, length = wording.label(first, report.facts), wording.decimal(first.accept_length)
    named = others if len(others) <= MOST_NAMED else others[: MOST_NAMED - 1]
    told = [f"{label} with accept length {length}{_within(first)}"]
    told += [f"{wording.label(row, report.facts)} with {wording.decimal(row.accept_length)}" for row in named]
    if more := len(others) - len(named):
        told.append(f"{more} more, down to {wording.decimal(others[-1].accept_length)}")
    return wording.listed(told)


def _within(summary: VariantSummary) -> str:
    bounds = wording.interval(summary.accept_length_ci95)
    return "" if bounds == wording.NOTHING else f" (95 % interval {bounds})"


def _losses(report: Report) -> Iterator[str]:
    """How the variants fare that do not stand first: losing how much, without rounds."""
    first = {row.name for row in report.together}
    others = [gap for name, gap in report.gaps.items() if name not in first]
    silent = sum(math.isnan(gap.difference) for gap in others)
    losing = sorted((gap for gap in others if not math.isnan(gap.difference)), key=lambda gap: -gap.difference)
    if losing:
        yield _lost_by(losing, among=len(others))
    if silent:
        yield f"{silent} {'has' if silent == 1 else 'have'} no rounds"


def _lost_by(losing: Sequence[Gap], *, among: int) -> str:
    """What ``losing`` variants (the nearest to the best first) of ``among`` lose."""
    lost = [wording.decimal(-gap.difference) for gap in losing]
    if len(losing) == 1:
        return f"{'the other loses' if among == 1 else '1 loses'} {lost[0]} (95 % interval {_lost_interval(losing[0])})"
    how = lost[0] if lost[0] == lost[-1] else f"{lost[0]} to {lost[-1]}"
    return f"{'the others lose' if len(losing) == among else f'{len(losing)} lose'} {how}"


def _lost_interval(gap: Gap) -> str:
    low, high = gap.ci95
    return wording.interval((-high, -low))
