"""What a reader should hold against the numbers before believing them. One sentence each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replay.analysis.bootstrap import FEW_REQUESTS
from replay.analysis.counts import ACCEPTED, ROUNDS, per_request, ratio
from replay.analysis.gaps import Gap
from replay.analysis.p_values import requests_needed
from replay.analysis.report.agreement import agreement_doubts
from replay.analysis.report.expected import expectation_doubts
from replay.analysis.summary import VariantSummary
from replay.analysis.wording import count, counted, decimal, interval, listed, percent, varying
from replay.printable import one_line
from replay.traces.fields import some
from replay.traces.rounds import Rounds

# Half an interval, as a share of the accept length: the tolerance of vLLM's own acceptance test is 5 %.
WIDE_INTERVAL = 0.05
MANY_CUT = 0.10
MANY_TIES = 0.01
# The all-anchors mean lies 6 to 33 % above the served walk on public data; below this it misleads nobody.
WALK_GAP = 0.05
LOOP_GAP = 0.01
# Sentences of a trace on itself that are shown, the characters of one on what it lacks, and of one on its rows.
_MOST_TOLD = (8, 300, 1000)


@dataclass(frozen=True, slots=True)
class Results:
    """Everything a doubt may look at. ``best`` is None where no variant has rounds."""

    rounds: Rounds
    summaries: Sequence[VariantSummary]
    best: VariantSummary | None
    nearest: VariantSummary | None
    observed_gaps: Mapping[str, Gap]


def doubts(results: Results) -> tuple[str, ...]:
    """The sentences that apply, the gravest first."""
    return tuple(sentence for check in _CHECKS for sentence in check(results))


def _rows_mixed_up(results: Results) -> Iterator[str]:
    """What a look at a few rows found when the trace was replayed (traces/self_check.py)."""
    told = results.rounds.trace.get("doubts")
    for sentence in told[: _MOST_TOLD[0]] if isinstance(told, list) else ():
        yield one_line(str(sentence), _MOST_TOLD[2])


def _loops(results: Results) -> Iterator[str]:
    """Outputs that repeat themselves, where leaving them out changes the best variant's accept length."""
    best = results.best
    looped = [request for request in results.rounds.requests if request.loop_tokens]
    if best is None or not looped:
        return
    counts = per_request(results.rounds)[best.name]
    loops = np.array([request.loop_tokens > 0 for request in results.rounds.requests])
    if not counts[loops, ROUNDS].sum():
        return
    rounds, accepted = (int(counts[~loops, column].sum()) for column in (ROUNDS, ACCEPTED))
    without = ratio(rounds + accepted, rounds)
    if abs(without - best.accept_length) <= LOOP_GAP * best.accept_length:
        return
    longest = max(looped, key=lambda request: request.loop_tokens)
    say, them = ("says", "it") if len(looped) == 1 else ("say", "them")
    end = f"without {them} the accept length is {decimal(without)}, not {decimal(best.accept_length)}"
    if not rounds:
        end = "there is no other, so that the accept length says nothing of ordinary text"
    yield (
        f"{count(len(looped))} of {counted(len(results.rounds.requests), 'output')} "
        f"({some([request.request_id for request in looped])}) {say} the same again and again "
        f"({counted(longest.loop_period, 'token')} over {count(longest.loop_tokens)} at most), which a head soon "
        f"drafts right: {end}."
    )


def _observed_disagrees(results: Results) -> Iterator[str]:
    if results.nearest is None or results.nearest.observed is None:
        return
    gap = results.observed_gaps.get(results.nearest.name)
    if gap is None or gap.verdict not in ("better", "worse"):
        return
    more = "more" if gap.difference > 0 else "fewer"
    low, high = sorted(map(abs, gap.ci95))
    which = "The replay" if len(results.summaries) == 1 else "Even the nearest variant"
    yield (
        f"{which} accepts {decimal(abs(gap.difference))} tokens a round {more} than the server did on the same "
        f"requests (95 % interval {interval((low, high), 3)}): the server does something that no variant here does, "
        "try other wirings, precisions and heads."
    )


def _unexplained(results: Results) -> Iterator[str]:
    yield from agreement_doubts(results.summaries)


def _observed_partly(results: Results) -> Iterator[str]:
    for summary in results.summaries[:1]:
        if summary.observed is not None and summary.observed.requests < summary.played_requests:
            yield (
                f"The server reported its rounds for {count(summary.observed.requests)} of "
                f"{counted(summary.played_requests, 'request')} only."
            )


def _few_requests(results: Results) -> Iterator[str]:
    if results.best is None:
        return
    played = results.best.played_requests
    if played == 1:
        yield "One request has rounds, which gives no interval: capture more requests."
    elif played < FEW_REQUESTS:
        yield (
            f"Only {played} requests have rounds, and an interval from fewer than {FEW_REQUESTS} is often too narrow: "
            "capture more."
        )


def _resolution(results: Results) -> Iterator[str]:
    others = sum(row.rounds > 0 for row in results.summaries) - 1
    if results.best is None or others < 1 or results.best.played_requests >= requests_needed(others):
        return
    yield (
        f"{counted(results.best.played_requests, 'request')} cannot tell {count(others + 1)} variants apart, however "
        f"far they lie from each other: capture at least {requests_needed(others)}."
    )


def _wide_interval(results: Results) -> Iterator[str]:
    if results.best is None or math.isnan(results.best.accept_length_ci95[0]):
        return
    low, high = results.best.accept_length_ci95
    half = (high - low) / 2
    if half > WIDE_INTERVAL * results.best.accept_length:
        yield (
            f"The interval of the accept length is wide, ± {decimal(half, 2)} or "
            f"{percent(half / results.best.accept_length, 0)} of it: more requests make it narrower."
        )


def _cut_rounds(results: Results) -> Iterator[str]:
    rows = [row for row in results.summaries if row.rounds and row.cut_rounds / row.rounds > MANY_CUT]
    if rows:
        row = max(rows, key=lambda row: row.cut_rounds / row.rounds)
        yield (
            f"{count(row.cut_rounds)} of {counted(row.rounds, 'round')} ({percent(row.cut_rounds / row.rounds, 0)}"
            f"{_worst(rows, results)}) were cut by the end of the output, and what they would have accepted beyond it "
            "does not count: longer outputs make this smaller."
        )


def _ties(results: Results) -> Iterator[str]:
    rows = [row for row in results.summaries if row.drafted and row.ties / row.drafted > MANY_TIES]
    if rows:
        row = max(rows, key=lambda row: row.ties / row.drafted)
        yield (
            f"{count(row.ties)} of {counted(row.drafted, 'drafted token')} ({percent(row.ties / row.drafted)}"
            f"{_worst(rows, results)}) were chosen between equal logits, where another kernel may choose otherwise."
        )


def _worst(rows: Sequence[VariantSummary], results: Results) -> str:
    """Says that the worst variant is meant, where there are several."""
    if len(results.summaries) == 1:
        return ""
    return ", in one variant" if len(rows) == 1 else f", in the worst of {len(rows)} such variants"


def _not_generated(results: Results) -> Iterator[str]:
    total = len(results.rounds.requests)
    forced = sum(request.source == "forced" for request in results.rounds.requests)
    if forced:
        yield (
            f"{count(forced)} of {counted(total, 'request')} follow text that was given, not generated by the "
            "target (teacher-forced): a server accepts more or less on text of its own."
        )
    sampled = [request.temperature for request in results.rounds.requests if request.temperature > 0]
    if sampled:
        low, high = min(sampled), max(sampled)
        warmth = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        yield (
            f"{count(len(sampled))} of {counted(total, 'request')} were sampled (temperature {warmth}): the rounds "
            "follow the one text that was drawn, another draw gives other rounds."
        )


def _expectations(results: Results) -> Iterator[str]:
    yield from expectation_doubts(results.summaries)


def _walk_gap(results: Results) -> Iterator[str]:
    best = results.best
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


def _longer_drafts(results: Results) -> Iterator[str]:
    if "steps" in varying(results.summaries):
        yield (
            "The variants differ in steps, and a longer draft accepts more and costs more: the time of a round decides."
        )


def _wired_otherwise(results: Results) -> Iterator[str]:
    """A head of which no variant is fed what it states; what it states was read when the trace was replayed."""
    for name, head in list(results.rounds.drafts.items())[: _MOST_TOLD[0]]:
        stated = head.get("stated_wiring") if isinstance(head, dict) else None
        fed = [row.wiring for row in results.summaries if row.draft == name]
        if not isinstance(stated, list) or not fed or tuple(stated) in fed:
            continue
        said, ids = one_line(",".join(map(str, stated)), _MOST_TOLD[1]), head.get("layer_ids")
        by = f" (layer ids {one_line(str(ids), _MOST_TOLD[1])})" if isinstance(ids, list) else ""
        engine = next(row.engine for row in results.summaries if row.draft == name)
        yield (
            f"No variant feeds {one_line(name, _MOST_TOLD[1])} what its config states{by}, which is {said} as {engine} "
            "reads it: a server that goes by the config feeds that; --wiring config replays it."
        )


def _requests_without_rounds(results: Results) -> Iterator[str]:
    if results.best is None:
        yield "Nothing was measured: capture with a larger --max-new-tokens, or other prompts."
        return
    # What another file's variant has rounds on was only not replayed with the best one (below).
    if without := results.best.requests - results.rounds.table["request_id"].n_unique():
        have = "has" if without == 1 else "have"
        total = counted(results.best.requests, "request")
        yield f"{count(without)} of {total} {have} no round (an output of one token)."
    played = {row.played_requests for row in results.summaries}
    if len(played) > 1:
        yield (
            f"The variants have rounds on {min(played)} to {max(played)} requests: gaps are taken on the requests that "
            "both have."
        )


def _missing(results: Results) -> Iterator[str]:
    missing = results.rounds.trace.get("missing")
    if isinstance(missing, list) and missing:
        told = [one_line(str(what).rstrip("."), _MOST_TOLD[1]) for what in missing[: _MOST_TOLD[0]]]
        if len(missing) > len(told):
            told.append(f"{count(len(missing) - len(told))} more")
        yield f"The trace does not hold everything: {listed(told)}."


_CHECKS: tuple[Callable[[Results], Iterator[str]], ...] = (
    _rows_mixed_up,
    _loops,
    _observed_disagrees,
    _unexplained,
    _few_requests,
    _resolution,
    _wide_interval,
    _longer_drafts,
    _wired_otherwise,
    _not_generated,
    _expectations,
    _cut_rounds,
    _ties,
    _walk_gap,
    _observed_partly,
    _requests_without_rounds,
    _missing,
)
