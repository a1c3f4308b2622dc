"""What a reader should hold against the numbers before believing them. One sentence each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from replay.analysis.gaps import Gap
from replay.analysis.report.expected import expectation_doubts
from replay.analysis.summary import VariantSummary
from replay.analysis.wording import count, counted, decimal, interval, listed, percent, varying
from replay.traces.rounds import Rounds

# Percentile intervals from fewer requests than this are too narrow more often than their 5 % (Efron and Tibshirani,
# An Introduction to the Bootstrap, 1993, section 13.6 and chapter 14).
FEW_REQUESTS = 20
# Half an interval, as a share of the accept length: the tolerance of vLLM's own acceptance test is 5 %.
WIDE_INTERVAL = 0.05
MANY_CUT = 0.10
MANY_TIES = 0.01
# The all-anchors mean lies 6 to 33 % above the served walk on public data; below this it misleads nobody.
WALK_GAP = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a doubt may look at. ``best`` is None where no variant has rounds."""

    rounds: Rounds
    summaries: Sequence[VariantSummary]
    best: VariantSummary | None
    nearest: VariantSummary | None
    observed_gaps: Mapping[str, Gap]


def doubts(case: Case) -> tuple[str, ...]:
    """The sentences that apply, the gravest first."""
    return tuple(sentence for check in _CHECKS for sentence in check(case))


def _observed_disagrees(case: Case) -> Iterator[str]:
    if case.nearest is None or case.nearest.observed is None:
        return
    gap = case.observed_gaps.get(case.nearest.name)
    if gap is None or gap.verdict not in ("better", "worse"):
        return
    more = "more" if gap.difference > 0 else "fewer"
    low, high = sorted(map(abs, gap.ci95))
    which = "The replay" if len(case.summaries) == 1 else "Even the nearest variant"
    yield (
        f"{which} accepts {decimal(abs(gap.difference))} tokens a round {more} than the server did on the same "
        f"requests (95 % interval {interval((low, high), 3)}): the server does something that no variant here does, "
        "try other wirings, precisions and heads."
    )


def _observed_partly(case: Case) -> Iterator[str]:
    for summary in case.summaries[:1]:
        if summary.observed is not None and summary.observed.requests < summary.played_requests:
            yield (
                f"The server reported its rounds for {count(summary.observed.requests)} of "
                f"{count(summary.played_requests)} requests only."
            )


def _few_requests(case: Case) -> Iterator[str]:
    if case.best is None:
        return
    played = case.best.played_requests
    if played == 1:
        yield "One request has rounds, which gives no interval: capture more requests."
    elif played < FEW_REQUESTS:
        yield (
            f"Only {played} requests have rounds, and an interval from fewer than {FEW_REQUESTS} is often too narrow: "
            "capture more."
        )


def _wide_interval(case: Case) -> Iterator[str]:
    if case.best is None or math.isnan(case.best.accept_length_ci95[0]):
        return
    low, high = case.best.accept_length_ci95
    half = (high - low) / 2
    if half > WIDE_INTERVAL * case.best.accept_length:
        yield (
            f"The interval of the accept length is wide, ± {decimal(half, 2)} or "
            f"{percent(half / case.best.accept_length, 0)} of it: more requests make it narrower."
        )


def _cut_rounds(case: Case) -> Iterator[str]:
    rows = [row for row in case.summaries if row.rounds and row.cut_rounds / row.rounds > MANY_CUT]
    if rows:
        row = max(rows, key=lambda row: row.cut_rounds / row.rounds)
        yield (
            f"{count(row.cut_rounds)} of {counted(row.rounds, 'round')} ({percent(row.cut_rounds / row.rounds, 0)}"
            f"{_worst(rows, case)}) were cut by the end of the output, and what they would have accepted beyond it "
            "does not count: longer outputs make this smaller."
        )


def _ties(case: Case) -> Iterator[str]:
    rows = [row for row in case.summaries if row.drafted and row.ties / row.drafted > MANY_TIES]
    if rows:
        row = max(rows, key=lambda row: row.ties / row.drafted)
        yield (
            f"{count(row.ties)} of {counted(row.drafted, 'drafted token')} ({percent(row.ties / row.drafted)}"
            f"{_worst(rows, case)}) were chosen between equal logits, where another kernel may choose otherwise."
        )


def _worst(rows: Sequence[VariantSummary], case: Case) -> str:
    """Says that the worst variant is meant, where there are several."""
    if len(case.summaries) == 1:
        return ""
    return ", in one variant" if len(rows) == 1 else f", in the worst of {len(rows)} such variants"


def _not_generated(case: Case) -> Iterator[str]:
    total = len(case.rounds.requests)
    forced = sum(request.source == "forced" for request in case.rounds.requests)
    if forced:
        yield (
            f"{count(forced)} of {counted(total, 'request')} follow text that was given, not generated by the "
            "target (teacher-forced): a server accepts more or less on text of its own."
        )
    sampled = [request.temperature for request in case.rounds.requests if request.temperature > 0]
    if sampled:
        low, high = min(sampled), max(sampled)
        warmth = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        yield (
            f"{count(len(sampled))} of {counted(total, 'request')} were sampled (temperature {warmth}): the rounds "
            "follow the one text that was drawn, another draw gives other rounds."
        )


def _expectations(case: Case) -> Iterator[str]:
    yield from expectation_doubts(case.summaries)


def _walk_gap(case: Case) -> Iterator[str]:
    best = case.best
    if best is None or not best.anchors:
        return
    share = best.all_anchors_accept_length / best.accept_length - 1
    if abs(share) > WALK_GAP:
        yield (
            f"Over all {counted(best.anchors, 'anchor')} the accept length is "
            f"{decimal(best.all_anchors_accept_length)}, {percent(abs(share), 0)} "
            f"{'above' if share > 0 else 'below'} the served walk's {decimal(best.accept_length)}: trainers report the "
            "first, a server shows the second."
        )


def _longer_drafts(case: Case) -> Iterator[str]:
    if "steps" in varying(case.summaries):
        yield (
            "The variants differ in steps, and a longer draft accepts more and costs more: the time of a round decides."
        )


def _requests_without_rounds(case: Case) -> Iterator[str]:
    if case.best is None:
        yield "Nothing was measured: capture with a larger --max-new-tokens, or other prompts."
        return
    if without := case.best.requests - case.best.played_requests:
        have = "has" if without == 1 else "have"
        yield f"{count(without)} of {counted(case.best.requests, 'request')} {have} no round (an output of one token)."
    played = {row.played_requests for row in case.summaries}
    if len(played) > 1:
        yield (
            f"The variants have rounds on {min(played)} to {max(played)} requests: gaps are taken on the requests that "
            "both have."
        )


def _missing(case: Case) -> Iterator[str]:
    missing = case.rounds.trace.get("missing")
    if isinstance(missing, list) and missing:
        yield f"The trace does not hold everything: {listed([str(what).rstrip('.') for what in missing])}."


_CHECKS: tuple[Callable[[Case], Iterator[str]], ...] = (
    _observed_disagrees,
    _few_requests,
    _wide_interval,
    _longer_drafts,
    _not_generated,
    _expectations,
    _cut_rounds,
    _ties,
    _walk_gap,
    _observed_partly,
    _requests_without_rounds,
    _missing,
)
