"""Two variants of a replay of one trace against each other, request by request and anchor by anchor.

Every difference is B minus A. Served walks diverge after the first round in which they accept unequally and may meet
again, so two tables are made: of all rounds, as a server would show them, and of the common anchors, the rounds of
both that start with the same tokens, where nothing differs but the draft. In two recordings of the same prompts the
target differs there too, in the rows that the head is fed and in what it accepts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replay.analysis.bootstrap import DEFAULT_RESAMPLES
from replay.analysis.compare.common_anchors import CommonAnchors, common_anchors
from replay.analysis.compare.pairing import PairedRounds, pair_rounds
from replay.analysis.compare.texts import TextAgreement, agree
from replay.analysis.counts import ACCEPTED, CUT, DRAFTED, ROUNDS, Counts, Mask, per_request, ratio
from replay.analysis.gaps import Gap, adjusted_verdict, paired_gaps
from replay.analysis.json_document import JsonObject, object_json
from replay.analysis.p_values import holm
from replay.printable import html_table
from replay.traces.parts import parts_told
from replay.traces.rounds import RequestInfo, Rounds, VariantInfo, check_are_rounds

# Near enough for a reader who asks whether a change costs anything that matters.
WITHIN = 0.01
MOST_REQUESTS = 10
_MOST_SAID = 3  # pairs of a repr


@dataclass(frozen=True, slots=True)
class Side:
    """Counts of one variant over the requests compared; ``accept_length`` = (accepted + rounds) / rounds."""

    variant: str
    rounds: int
    accepted: int
    drafted: int
    cut_rounds: int
    accept_length: float


@dataclass(frozen=True, slots=True)
class CategoryGap:
    """The requests of one category (None: those without one)."""

    category: str | None
    requests: int
    a: Side
    b: Side
    difference: float
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True)
class RequestGap:
    """One request: its rounds and accept length under both."""

    request_id: str
    category: str | None
    rounds_a: int
    rounds_b: int
    accept_length_a: float
    accept_length_b: float


@dataclass(frozen=True, slots=True)
class Pair:
    """B against A over the ``requests`` that have rounds under both; ``without_rounds`` others have none under one.

    ``verdict``: ``better`` or ``worse`` where the interval of the difference excludes 0 and the p value, adjusted after
    Holm for the number of pairs, is at most 0.05; ``equal`` where no resample tells them apart; else ``cannot tell``.
    ``within_1_percent``: the whole interval lies within 1 % of the smaller accept length; None without an interval.
    ``most_different`` are the requests whose numbers of rounds differ most.
    """

    a: Side
    b: Side
    requests: int
    without_rounds: int
    difference: float
    ci95: tuple[float, float]
    p_value: float
    p_holm: float
    verdict: str
    within_1_percent: bool | None
    anchors: CommonAnchors
    categories: tuple[CategoryGap, ...]
    most_different: tuple[RequestGap, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every pair that was compared. ``only_a`` and ``only_b`` name requests that are in one file only.

    ``texts``: how far two recordings of the same prompts agree; None where the rounds are of one trace. ``parts``: of
    each file the part of its trace that was asked for, in words; empty for all of it.
    """

    requests: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    pairs: tuple[Pair, ...]
    seed: int
    resamples: int
    texts: TextAgreement | None = None
    parts: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        """The body of ``replay compare --json``."""
        return object_json(self)

    def __repr__(self) -> str:
        said = [f"{pair.b.variant!r} is {_judged(pair)} {pair.a.variant!r}" for pair in self.pairs[:_MOST_SAID]]
        more = [f"{len(self.pairs) - _MOST_SAID} more"] if len(self.pairs) > _MOST_SAID else []
        return f"Comparison({'; '.join([*said, *more])})"

    def _repr_html_(self) -> str:
        rows = [
            [pair.b.variant, f"{pair.b.accept_length:.3f}", pair.a.variant, f"{pair.a.accept_length:.3f}",
             f"{pair.difference:+.3f}", f"{pair.ci95[0]:+.3f} to {pair.ci95[1]:+.3f}", pair.verdict]
            for pair in self.pairs
        ]  # fmt: skip
        names = ("variant", "accept length", "against", "its accept length", "difference", "95 % interval", "verdict")
        return html_table(f"{self.requests} requests", names, rows)


def _judged(pair: Pair) -> str:
    joined = {"better": "better than", "worse": "worse than", "equal": "equal to"}
    judged = joined.get(pair.verdict, "not to be told from")
    return f"{judged} ({pair.difference:+.3f}, {pair.ci95[0]:+.3f} to {pair.ci95[1]:+.3f})"


def compare(
    first: Rounds, second: Rounds | None = None, *, variant_a: str | None = None, variant_b: str | None = None
) -> Comparison:
    """Every other variant of ``first`` against its first, or those of ``second`` against that of ``first``.

    ``variant_a`` and ``variant_b`` choose by name. Raises UsageError and TraceError as ``pair_rounds``.

    >>> comparison = replay.compare(rounds, rounds)
    >>> comparison.pairs[0].verdict
    'equal'
    """
    check_are_rounds("first", first)
    if second is not None:
        check_are_rounds("second", second)
    return compare_variants(pair_rounds(first, second, variant_a=variant_a, variant_b=variant_b))


def compare_variants(joined: PairedRounds, *, seed: int = 0, resamples: int = DEFAULT_RESAMPLES) -> Comparison:
    """Every variant B of ``joined`` against its A (see ``pair_rounds``), by paired bootstrap over requests."""
    counts = per_request(joined.rounds)
    against = counts.pop(joined.a.name)
    gaps = paired_gaps(counts, against, seed=seed, resamples=resamples)
    adjusted = holm({name: gap.p_value for name, gap in gaps.items()})
    pairs = tuple(
        _pair(joined, b, against, counts[b.name], gaps[b.name], adjusted[b.name], seed=seed, resamples=resamples)
        for b in joined.others
    )
    texts = None
    if joined.texts is not None and joined.shared is not None:
        texts = agree(joined.texts, joined.shared, against, counts[joined.others[0].name])
    parts = tuple("; ".join(parts_told(trace)) for trace in joined.traces)
    return Comparison(len(joined.rounds.requests), joined.only_a, joined.only_b, pairs, seed, resamples, texts, parts)


def within(gap: Gap, length_a: float, length_b: float) -> bool | None:
    """Whether the interval lies within 1 % of the smaller accept length; None without an interval."""
    low, high = gap.ci95
    if math.isnan(low):
        return None
    margin = WITHIN * min(length_a, length_b)
    return -margin <= low and high <= margin


def _pair(
    joined: PairedRounds,
    b: VariantInfo,
    counts_a: Counts,
    counts_b: Counts,
    gap: Gap,
    p_holm: float,
    *,
    seed: int,
    resamples: int,
) -> Pair:
    both: Mask = (counts_a[:, ROUNDS] > 0) & (counts_b[:, ROUNDS] > 0)
    side_a = _side(joined.shown[joined.a.name], counts_a[both])
    side_b = _side(joined.shown[b.name], counts_b[both])
    return Pair(
        a=side_a,
        b=side_b,
        requests=int(both.sum()),
        without_rounds=int((~both).sum()),
        difference=gap.difference,
        ci95=gap.ci95,
        p_value=gap.p_value,
        p_holm=p_holm,
        verdict=adjusted_verdict(gap, p_holm),
        within_1_percent=within(gap, side_a.accept_length, side_b.accept_length),
        anchors=common_anchors(joined.rounds, joined.a, b, shared=joined.shared, seed=seed, resamples=resamples),
        categories=_categories(joined, b, counts_a, counts_b, both, seed=seed, resamples=resamples),
        most_different=_most_different(joined.rounds.requests, counts_a, counts_b, both),
    )


def _side(name: str, counts: Counts) -> Side:
    total = counts.sum(axis=0)
    rounds, accepted, drafted, cut = (int(total[column]) for column in (ROUNDS, ACCEPTED, DRAFTED, CUT))
    return Side(name, rounds, accepted, drafted, cut, ratio(accepted + rounds, rounds))


def _categories(
    joined: PairedRounds, b: VariantInfo, counts_a: Counts, counts_b: Counts, both: Mask, *, seed: int, resamples: int
) -> tuple[CategoryGap, ...]:
    """In the order in which they first come; empty where no request has one."""
    named = [request.category for request in joined.rounds.requests]
    found = []
    for category in dict.fromkeys(named) if any(named) else ():
        chosen = both & np.array([name == category for name in named], dtype=np.bool_)
        if not chosen.any():
            continue
        gap = paired_gaps({"b": counts_b[chosen]}, counts_a[chosen], seed=seed, resamples=resamples)["b"]
        side_a = _side(joined.shown[joined.a.name], counts_a[chosen])
        side_b = _side(joined.shown[b.name], counts_b[chosen])
        found.append(CategoryGap(category, int(chosen.sum()), side_a, side_b, gap.difference, gap.ci95))
    return tuple(found)


def _most_different(
    requests: Sequence[RequestInfo], counts_a: Counts, counts_b: Counts, both: Mask
) -> tuple[RequestGap, ...]:
    """The requests whose rounds differ most, the largest difference first, those that do not differ left out."""
    apart = np.where(both, np.abs(counts_b[:, ROUNDS] - counts_a[:, ROUNDS]), 0)
    order = [int(row) for row in np.argsort(-apart, kind="stable")[:MOST_REQUESTS] if apart[row]]
    return tuple(
        RequestGap(
            requests[row].request_id,
            requests[row].category,
            int(counts_a[row, ROUNDS]),
            int(counts_b[row, ROUNDS]),
            _length(counts_a[row]),
            _length(counts_b[row]),
        )
        for row in order
    )


def _length(row: Counts) -> float:
    return ratio(int(row[ACCEPTED] + row[ROUNDS]), int(row[ROUNDS]))
