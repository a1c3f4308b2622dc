"""What a report says of expected acceptance: a sentence for one variant, a column and its grounds for many."""

import math
from collections.abc import Iterator, Sequence

from replay.analysis.expected_length import ExpectedSummary
from replay.analysis.summary import VariantSummary
from replay.analysis.wording import NOTHING, decimal, interval

# A gap between the bounds of what the trace leaves open that would change the printed digits.
WIDE_UNKNOWN = 0.0005


def expected_sentence(summaries: Sequence[VariantSummary]) -> str:
    """The expected accept length of a single variant; empty for several, which have a column."""
    if len(summaries) != 1 or summaries[0].expected is None:
        return ""
    expected = summaries[0].expected
    bounds = interval(expected.accept_length_ci95)
    within = "" if bounds == NOTHING else f" (95 % interval {bounds})"
    averaged = "averaged over its coins" if expected.exact else "estimated from the recorded text"
    return f"Expected under {expected.rule}, {averaged}: accept length {decimal(expected.accept_length)}{within}."


def expected_cell(summary: VariantSummary) -> str:
    """One cell of the column ``expected``."""
    return NOTHING if summary.expected is None else decimal(summary.expected.accept_length)


def expectation_doubts(summaries: Sequence[VariantSummary]) -> Iterator[str]:
    """What each rule's expectation rests on, once for all variants that say the same, and what stays open."""
    told = {(row.expected.rule, row.expected.note): None for row in summaries if row.expected is not None}
    for rule, note in told:
        yield f"Rule {rule}: {note}."
    wide = [row.expected for row in summaries if row.expected is not None and _width(row.expected) > WIDE_UNKNOWN]
    if wide:
        widest = max(wide, key=_width)
        yield (
            "Some probabilities lie outside of what the trace records: "
            f"the expected accept length is somewhere between {decimal(widest.unknown[0])} and "
            f"{decimal(widest.unknown[1])}{'' if len(summaries) == 1 else ' in the least certain variant'}."
        )


def _width(expected: ExpectedSummary) -> float:
    low, high = expected.unknown
    return 0.0 if math.isnan(low) else high - low
