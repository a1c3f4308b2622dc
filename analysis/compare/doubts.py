"""What a comparison cannot say, a sentence each: too few requests, walks that rarely meet, chance among many."""

import math
from collections.abc import Iterator, Sequence

from replay.analysis import wording
from replay.analysis.bootstrap import FEW_REQUESTS
from replay.analysis.compare.compare import CategoryGap, Comparison, Pair
from replay.analysis.p_values import LEVEL, requests_needed

# Common rounds below this share of all are told apart from what a server shows.
FEW_COMMON = 0.25


def doubts(comparison: Comparison) -> tuple[str, ...]:
    """The sentences that apply."""
    return tuple(_doubts(comparison))


def _doubts(comparison: Comparison) -> Iterator[str]:
    for names, which in ((comparison.only_a, "first"), (comparison.only_b, "second")):
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            yield f"{wording.counted(len(names), 'request')} of the {which} rounds only ({shown}) were left out."
    silent = max((pair.without_rounds for pair in comparison.pairs), default=0)
    if silent:
        yield f"{wording.counted(silent, 'request')} without rounds under one of two variants were left out."
    fewest = min((pair.requests for pair in comparison.pairs), default=0)
    if fewest < FEW_REQUESTS:
        yield (
            f"Only {wording.counted(fewest, 'request')} can be compared, and an interval from fewer than "
            f"{FEW_REQUESTS} is often too narrow: capture more."
        )
    apart = [pair for pair in comparison.pairs if min(pair.anchors.share_a, pair.anchors.share_b) < FEW_COMMON]
    if apart:
        pair = min(apart, key=lambda pair: pair.anchors.share_b)
        yield (
            f"The walks rarely meet: {wording.counted(pair.anchors.rounds, 'round')} of {' and '.join(sides_of(pair))} "
            f"start at the same anchor, less than {wording.percent(FEW_COMMON, 0)} of one's."
        )
    yield from _resolution_doubts(comparison.pairs, fewest)
    if len(comparison.pairs) == 1:
        yield from _category_doubts(comparison.pairs[0].categories)
    if any(pair.anchors.drafts is None for pair in comparison.pairs):
        yield "Trees are compared by how many tokens were accepted only, not token by token."


def _resolution_doubts(found: Sequence[Pair], fewest: int) -> Iterator[str]:
    """Where the number of requests or of comparisons, not the difference, decides that nothing is told apart."""
    needed = requests_needed(len(found))
    if fewest < needed:
        yield (
            f"{wording.counted(fewest, 'request')} cannot call any difference better or worse among "
            f"{wording.counted(len(found), 'comparison')}, however large it is: capture at least {needed}."
        )
        return
    unsure = sum(pair.verdict == "cannot tell" and (pair.ci95[0] > 0 or pair.ci95[1] < 0) for pair in found)
    if unsure:
        exclude = "interval excludes" if unsure == 1 else "intervals exclude"
        yield (
            f"{wording.count(unsure)} {exclude} 0 where the p value does not suffice for "
            f"{wording.counted(len(found), 'comparison')}: capture more requests, or compare fewer variants."
        )


def _category_doubts(rows: Sequence[CategoryGap]) -> Iterator[str]:
    """By the number of requests that an interval is made of: one from a few says less than its 95 %."""
    shown = [row for row in rows if not math.isnan(row.ci95[0])]
    few = [row for row in shown if row.requests < FEW_REQUESTS]
    count = len(shown) - len(few)
    if count > 1:
        chance = wording.decimal(count * LEVEL, 1)
        of = f"categories of {FEW_REQUESTS} requests and more" if few else "categories"
        yield f"Of {count} intervals of {of} {chance} exclude 0 by chance even where nothing differs."
    if few:
        least = min(few, key=lambda row: row.requests)
        have = "category has" if len(few) == 1 else "categories have"
        yield (
            f"{len(few)} {have} fewer than {FEW_REQUESTS} requests ({least.category or 'without a name'} has "
            f"{least.requests}), and such intervals exclude 0 far more often than 5 times in 100 where nothing differs."
        )


def sides_of(pair: Pair) -> tuple[str, str]:
    """What A and B are called: their own names, with the letter where these are the same."""
    a, b = pair.a.variant, pair.b.variant
    return (a, b) if a != b else (f"A ({a})", f"B ({b})")
