"""What a report says of the trace's own server, round by round: alike, at a near tie, unexplained."""

from collections.abc import Iterator, Sequence

from replay.analysis import wording
from replay.analysis.summary import VariantSummary
from replay.traces.agreement import Agreement


def agreement_sentence(summaries: Sequence[VariantSummary]) -> str:
    """Of a single variant how many of the server's rounds it explains; empty where it was not held against any."""
    found = summaries[0].agreement if len(summaries) == 1 else None
    if found is None:
        return ""
    differ = "differs" if found.flips == 1 else "differ"
    return (
        f"Against the server's {wording.counted(found.rounds, 'round')}: {wording.count(found.alike)} alike, "
        f"{wording.count(found.near_tie)} at a near tie, {wording.count(found.unexplained)} unexplained "
        f"(rounding flips about {wording.count(round(found.flips_expected))} of "
        f"{wording.counted(found.tokens, 'drafted token')}, {wording.count(found.flips)} {differ})."
    )


def agreement_legend(summaries: Sequence[VariantSummary]) -> str:
    """What the column of several variants holds; empty where none was held against the server."""
    told = [row.agreement for row in summaries if row.agreement is not None]
    if len(summaries) == 1 or not told:
        return ""
    return (
        f"against the server: how many of its {wording.counted(told[0].rounds, 'round')} the variant drafts alike / "
        "parts from at a near tie / leaves unexplained"
    )


def agreement_cell(summary: VariantSummary) -> str:
    """The three counts of one variant; a dash where there are none."""
    found = summary.agreement
    if found is None:
        return wording.NOTHING
    return " / ".join(map(wording.count, (found.alike, found.near_tie, found.unexplained)))


def agreement_doubts(summaries: Sequence[VariantSummary]) -> Iterator[str]:
    """Where even the variant that explains most leaves rounds of the server unexplained."""
    told: list[Agreement] = [row.agreement for row in summaries if row.agreement is not None]
    best = min(told, key=lambda found: found.unexplained, default=None)
    if best is None or not best.unexplained:
        return
    which = "" if len(told) == 1 else " even in the variant that explains most"
    are = "is" if best.unexplained == 1 else "are"
    yield (
        f"{wording.count(best.unexplained)} of {wording.counted(best.rounds, 'round')} of the server {are} "
        f"unexplained{which}, more than rounding does: `replay diagnose` names what the server does otherwise."
    )
