"""Summaries → what a person reads: answer line, table, doubts, provenance.

``assess`` decides what there is to say; ``render`` only lays it out. Nothing here prints.
"""

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.bootstrap import DEFAULT_RESAMPLES
from replay.analysis.gaps import Gap, gaps, observed_gaps, verdicts
from replay.analysis.report.agreement import agreement_legend, agreement_sentence
from replay.analysis.report.answer import answer
from replay.analysis.report.assessment import Report
from replay.analysis.report.curve import curves, render_curves
from replay.analysis.report.doubts import Results, doubts
from replay.analysis.report.expected import expected_sentence
from replay.analysis.report.provenance import provenance
from replay.analysis.report.tree_kv import layout_sentences
from replay.analysis.report.variant_table import position_table, positions_beyond, variant_table
from replay.analysis.summary import VariantSummary
from replay.analysis.tables import bullet, heading, pairs
from replay.analysis.view import LONG, WHOLE, View
from replay.errors import UsageError
from replay.traces.given import check_given, check_list
from replay.traces.rounds import Rounds, check_are_rounds
from replay.traces.rounds_join import FILES

_LOST = (
    "lost: accept length below the best's, over the same requests; ≈ where the two are not told apart, by the rule of "
    "`replay compare`"
)


def render(rounds: Rounds, summaries: Sequence[VariantSummary], view: View = WHOLE) -> RenderableType:
    """The report of ``summarise(rounds)`` as a rich renderable that adapts to the console's width.

    Raises UsageError for what is neither, and for summaries of other rounds.
    """
    check_are_rounds("rounds", rounds)
    check_list("summaries", summaries, VariantSummary, "summaries were expected: what replay.summarise(rounds) returns")
    if {one.name for one in summaries} != {one.name for one in rounds.variants}:
        raise UsageError("the summaries are not of these rounds; pass what replay.summarise(rounds) returns")
    check_given("view", view, View, "a view was expected; leave it out")
    return lay_out(assess(rounds, summaries), view)


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
    against = gaps(rounds, best.name, seed=seed, resamples=resamples) if best else {}
    seen = observed_gaps(rounds, seed=seed, resamples=resamples)
    nearest = _nearest(played, seen)
    return Report(
        summaries=tuple(summaries),
        best=best,
        together=_together(played, best, against),
        nearest=nearest,
        gaps=against,
        observed_gaps=seen,
        layouts=layout_sentences(rounds, summaries, seed=seed, resamples=resamples),
        facts=wording.joined(summaries) if rounds.trace.get(FILES) else wording.varying(summaries),
        doubts=doubts(Results(rounds, summaries, best, nearest, seen)),
        provenance=tuple(provenance(rounds, summaries, seed=seed, resamples=resamples)),
        curves=curves(rounds, summaries),
    )


def _together(
    played: Sequence[VariantSummary], best: VariantSummary | None, against: Mapping[str, Gap]
) -> tuple[VariantSummary, ...]:
    """``best`` and what is not told apart from it; a variant that shares no request with it is none of these."""
    if best is None:
        return ()
    outcomes = verdicts(against)
    alike = [row for row in played if row is not best and outcomes[row.name] in ("equal", "cannot tell")]
    shared = [row for row in alike if not math.isnan(against[row.name].difference)]
    return (best, *sorted(shared, key=lambda row: -row.accept_length))


def _nearest(played: Sequence[VariantSummary], seen: Mapping[str, Gap]) -> VariantSummary | None:
    if seen:
        return min(played, key=lambda row: abs(seen[row.name].difference), default=None)
    reported = [(row, row.observed.accept_length) for row in played if row.observed is not None]
    return min(reported, key=lambda pair: abs(pair[0].accept_length_server - pair[1]))[0] if reported else None


def lay_out(report: Report, view: View = WHOLE) -> RenderableType:
    """The report as a renderable; where the table is long the answer comes last as well."""
    shown = view.rows(report.summaries, lambda row: row.accept_length)
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
    parts.append(variant_table(report, shown))
    if left := len(report.summaries) - len(shown):
        more = "variant is" if left == 1 else "variants are"
        parts += [Text(), Text(f"{wording.count(left)} more {more} not shown")]
    if report.curves:
        parts += [Text(), heading("By step"), render_curves(report.curves, report.together)]
    if len(report.summaries) > 1:
        legends = [_LOST, agreement_legend(report.summaries)]
        parts += [Text(), *(Text(legend, style="dim") for legend in legends if legend)]
    elif report.best is not None:
        parts += [Text(), position_table(report.best)]
        if beyond := positions_beyond(report.best):
            parts.append(Text(beyond, style="dim"))
    parts += [Text(), heading("Doubts")]
    parts += [bullet(doubt) for doubt in report.doubts] or [Text("  none of the checks raised one")]
    parts += [Text(), heading("Provenance"), pairs(report.provenance)]
    if len(shown) > LONG:
        parts += [Text(), Text(answer(report), style="bold")]
    return Group(*parts)


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
    differ = {*report.facts, *wording.varying(report.summaries)}  # a name may say what differs
    facts = [name for name in wording.FACTS if name not in differ and name not in elsewhere]
    if "num_draft_tokens" in facts and len({row.num_draft_tokens for row in report.summaries}) > 1:
        facts.remove("num_draft_tokens")  # it follows from the steps
    said = " · ".join(wording.phrase(first, name) for name in facts)
    return said if len(report.summaries) == 1 else f"All variants: {said}"
