"""Summaries → what a person reads: answer line, table, doubts, provenance.

``assess`` decides what there is to say; ``render`` only lays it out. Nothing here prints.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.bootstrap import DEFAULT_RESAMPLES
from replay.analysis.gaps import Gap, gaps, observed_gaps
from replay.analysis.report.agreement import agreement_legend, agreement_sentence
from replay.analysis.report.doubts import Results, doubts
from replay.analysis.report.expected import expected_sentence
from replay.analysis.report.provenance import provenance
from replay.analysis.report.tree_kv import layout_sentences
from replay.analysis.report.variant_table import position_table, variant_table
from replay.analysis.summary import VariantSummary
from replay.analysis.tables import bullet, heading, pairs
from replay.traces.rounds import Rounds

_LOST = (
    "lost: accept length below the best's, over the same requests; ≈ where its 95 % interval holds 0 and the two "
    "cannot be told apart"
)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a report says, before it is laid out.

    ``best`` has the largest accept length (the first of equals; None without rounds), ``nearest`` lies closest to
    what the server reported (None where it reported nothing). ``gaps`` are paired against ``best``, ``observed_gaps``
    against the server. ``layouts`` say what a tree's KV layout costs, ``facts`` name what differs between the variants.
    """

    summaries: tuple[VariantSummary, ...]
    best: VariantSummary | None
    nearest: VariantSummary | None
    gaps: Mapping[str, Gap]
    observed_gaps: Mapping[str, Gap]
    layouts: tuple[str, ...]
    facts: tuple[str, ...]
    doubts: tuple[str, ...]
    provenance: tuple[tuple[str, str], ...]


def render(rounds: Rounds, summaries: Sequence[VariantSummary]) -> RenderableType:
    """The report of ``summarise(rounds)`` as a rich renderable that adapts to the console's width."""
    return lay_out(assess(rounds, summaries))


def assess(
    rounds: Rounds,
    summaries: Sequence[VariantSummary],
    *,
    seed: int = 0,
    resamples: int = DEFAULT_RESAMPLES,
) -> Report:
    """What there is to say about ``summaries``: comparisons, doubts, provenance."""
    played = [summary for summary in summaries if summary.rounds]
    best = max(played, key=lambda summary: summary.accept_length, default=None)
    seen = observed_gaps(rounds, seed=seed, resamples=resamples)
    nearest = _nearest(played, seen)
    return Report(
        summaries=tuple(summaries),
        best=best,
        nearest=nearest,
        gaps=gaps(rounds, best.name, seed=seed, resamples=resamples) if best else {},
        observed_gaps=seen,
        layouts=layout_sentences(rounds, summaries, seed=seed, resamples=resamples),
        facts=wording.varying(summaries),
        doubts=doubts(Results(rounds, summaries, best, nearest, seen)),
        provenance=tuple(provenance(rounds, summaries, seed=seed, resamples=resamples)),
    )


def _nearest(played: Sequence[VariantSummary], seen: Mapping[str, Gap]) -> VariantSummary | None:
    if seen:
        return min(played, key=lambda row: abs(seen[row.name].difference), default=None)
    reported = [(row, row.observed.accept_length) for row in played if row.observed is not None]
    return min(reported, key=lambda pair: abs(pair[0].accept_length_server - pair[1]))[0] if reported else None


def lay_out(report: Report) -> RenderableType:
    """The report as a renderable."""
    parts: list[RenderableType] = [Text(answer(report), style="bold")]
    parts += [
        Text(sentence)
        for sentence in (
            expected_sentence(report.summaries), observed_sentence(report), agreement_sentence(report.summaries),
        )
        if sentence
    ]  # fmt: skip
    parts += [Text(sentence) for sentence in report.layouts]
    parts += [Text(), Text(_shared(report), style="dim"), Text()]
    parts.append(variant_table(report.summaries, report.facts, report.gaps, report.best))
    if len(report.summaries) > 1:
        legends = [_LOST, agreement_legend(report.summaries)]
        parts += [Text(), *(Text(legend, style="dim") for legend in legends if legend)]
    elif report.best is not None:
        parts += [Text(), position_table(report.best)]
    parts += [Text(), heading("Doubts")]
    parts += [bullet(doubt) for doubt in report.doubts] or [Text("  none of the checks raised one")]
    parts += [Text(), heading("Provenance"), pairs(report.provenance)]
    return Group(*parts)


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
    over = f"over {wording.counted(best.rounds, 'round')} of {wording.counted(best.played_requests, 'request')}"
    if report.gaps and all(gap.verdict == "equal" for gap in report.gaps.values()):
        length = wording.decimal(best.accept_length)
        return f"All {len(report.summaries)} variants give accept length {length}{_within(best)} {over}."
    return (
        f"Best of {len(report.summaries)} variants: {wording.label(best, report.facts)}, accept length "
        f"{wording.decimal(best.accept_length)}{_within(best)} {over}; {_losses(report)}."
    )


def _within(summary: VariantSummary) -> str:
    bounds = wording.interval(summary.accept_length_ci95)
    return "" if bounds == wording.NOTHING else f" (95 % interval {bounds})"


def _losses(report: Report) -> str:
    """How the variants that are not the best fare: equal to it, losing how much, without rounds."""
    others = list(report.gaps.values())
    silent = sum(math.isnan(gap.difference) for gap in others)
    equal = sum(gap.verdict == "equal" for gap in others)
    apart = [gap for gap in others if gap.verdict != "equal" and not math.isnan(gap.difference)]
    losing = sorted(apart, key=lambda gap: -gap.difference)
    parts = [f"{equal} {'gives' if equal == 1 else 'give'} the same"] * bool(equal)
    if losing:
        parts.append(_lost_by(losing, among=len(others)))
    parts += [f"{silent} {'has' if silent == 1 else 'have'} no rounds"] * bool(silent)
    return ", ".join(parts)


def _lost_by(losing: Sequence[Gap], *, among: int) -> str:
    """What ``losing`` variants (the nearest to the best first) of ``among`` lose, and how many may lose nothing."""
    lost = [wording.decimal(-gap.difference) for gap in losing]
    unsure = sum(gap.verdict == "cannot tell" for gap in losing)
    if len(losing) == 1:
        who = "the other loses" if among == 1 else "1 loses"
        return f"{who} {lost[0]}" + (", within noise" if unsure else f" (95 % interval {_lost_interval(losing[0])})")
    who = "the others lose" if len(losing) == among else f"{len(losing)} lose"
    return f"{who} {lost[0]} to {lost[-1]}" + (f", {unsure} of them within noise" if unsure else "")


def _lost_interval(gap: Gap) -> str:
    low, high = gap.ci95
    return wording.interval((-high, -low))


def observed_sentence(report: Report) -> str:
    """What the server reported and which variant lies nearest; empty where it reported nothing."""
    nearest = report.nearest
    if nearest is None or nearest.observed is None:
        return ""
    seen = nearest.observed
    said = (
        f"The server reported {wording.decimal(seen.accept_length)} over {wording.counted(seen.rounds, 'round')} of "
        f"{wording.counted(seen.requests, 'request')}"
    )
    who = "the replay" if len(report.summaries) == 1 else f"nearest is {wording.label(nearest, report.facts)}, which"
    gap = report.observed_gaps.get(nearest.name)
    if gap is None:
        ours = wording.decimal(nearest.accept_length_server)
        return f"{said}, counting output tokens / rounds; {who} gives {ours} so counted."
    if gap.verdict == "equal":
        return f"{said}; {who} gives the same."
    side = "more" if gap.difference > 0 else "less"
    unsure = ", which cannot be told from noise" if gap.verdict == "cannot tell" else ""
    return f"{said}; {who} gives {wording.decimal(abs(gap.difference))} {side}{unsure}."


def _shared(report: Report) -> str:
    """The facts that all variants have in common, said once."""
    if not report.summaries:
        return ""
    elsewhere = ("numerics", "engine")  # said under provenance
    first = report.summaries[0]
    facts = [name for name in wording.FACTS if name not in report.facts and name not in elsewhere]
    if "steps" in report.facts and first.num_draft_tokens == first.steps + 1:
        facts.remove("num_draft_tokens")
    said = " · ".join(wording.phrase(first, name) for name in facts)
    return said if len(report.summaries) == 1 else f"All variants: {said}"
