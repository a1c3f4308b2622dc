"""What every hypothesis is held against where a server's drafts are known: the healthy replay along them, how far
rounding moves it, and the rounds on which all are tried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from replay.analysis.diagnosis.drafted import noise_scales
from replay.analysis.diagnosis.evidence import outliers_allowed
from replay.analysis.followed import BOTH_SIDES, Followed, Noise, judge_rounds
from replay.diagnosis.case import Case
from replay.diagnosis.observed import count_by_request
from replay.diagnosis.progress import Tell, Told, say_nothing, within
from replay.simulator.cache import simulate_kept
from replay.simulator.following import follow_server
from replay.simulator.kept import find_followed, keep_followed, say_followed
from replay.simulator.rounding import noise_between, other_orders
from replay.simulator.variant import ResolvedVariant

if TYPE_CHECKING:
    import polars as pl

# Requests, and rounds of each, at which every hypothesis is glanced, and on which the likely ones are tried. One odd
# request decides nothing; some hypotheses play rounds one after the other, so that many of few requests take long.
_GLANCE, _SCREENING = (4, 12), (5, 30)


@dataclass(frozen=True, slots=True)
class Reference:
    """The healthy replay along the server's drafts, its ``noise`` and the noise ``scales`` at which tokens are judged.

    Every hypothesis is tried on the rounds of ``glance`` first, the likely ones on those of ``screening``.
    """

    healthy: Followed
    noise: Noise
    scales: tuple[float, ...]
    glance: "pl.DataFrame"
    screening: "pl.DataFrame"

    @property
    def healthy_fits(self) -> bool:
        """Whether rounding explains what the healthy replay leaves."""
        _, unexplained_R = judge_rounds(self.healthy, self.noise)
        return int(unexplained_R.sum()) <= outliers_allowed(self.healthy.rounds)


def measure(case: Case, tell: Tell = say_nothing) -> Reference:
    """Measure the rounding of the healthy replay, and choose the rounds for all others.

    The case's observation must have rounds. Raises whatever ``follow_server`` raises.
    """
    rounds = case.observation.rounds
    assert rounds is not None
    orders = _orders(case, case.served)
    passes = len(orders) + 2

    def passed(of: Case, variant: ResolvedVariant, number: int, scales: tuple[float, ...] = ()) -> Followed:
        told = within(tell, "measuring how far rounding goes", number, 1, passes, "passes")
        return follow(of, [variant], rounds, scales, on_event=told)[0]

    healthy = passed(case, case.served, 0)
    noise = noise_between(healthy, *(passed(of, one, number) for number, (of, one) in enumerate(orders, start=1)))
    scales = noise_scales(noise.scale)
    healthy = passed(case, case.served, passes - 1, scales)
    told = _unexplained_rounds(case, healthy, noise)
    ordered = _most_telling(told)
    glance, screening = (_some_rounds(rounds, ordered, told, *few) for few in (_GLANCE, _SCREENING))
    return Reference(healthy, noise, scales, glance, screening)


def _orders(case: Case, variant: ResolvedVariant) -> list[tuple[Case, ResolvedVariant]]:
    """What the noise of ``variant`` is measured against: other orders, and where rows are in fp8 other such rows."""
    orders = [(case, one) for one in other_orders(variant, case.trace)]
    return [*orders, (_shaken(case), variant)] if case.trace.rounded_taps else orders


def _shaken(case: Case) -> Case:
    """The case with its rows in fp8 rounded once more, about as far from those that are stored as these from the
    target's own. Workers have the stored ones."""
    return replace(case, trace=case.trace.shaken(), cache=None, workers=None)


def measure_discordance(case: Case) -> float:
    """The share of rounds that rounding sets apart in histograms by request: the healthy replay against exact numbers.

    Twice what is seen, because server and replay are both rounded (analysis/followed.py), with one round added.
    """
    exactly = other_orders(case.served, case.trace)[0]
    ours, exact = _walked(case, [case.served, exactly])
    if case.trace.rounded_taps:
        (exact,) = _walked(_shaken(case), [exactly])
    rounds = sum(sum(counts) for counts in ours.values())
    matched = sum(min(pair) for name in ours for pair in zip(ours[name], exact.get(name, ours[name]), strict=True))
    return min(0.5, BOTH_SIDES * (rounds - matched + 1) / (rounds + 2))


def _walked(case: Case, variants: list[ResolvedVariant]) -> list[dict[str, list[int]]]:
    """Of each variant's own walk the rounds of each request by accepted tokens."""
    heads = {case.served.draft: case.checkpoint}
    played = simulate_kept(case.cache, case.trace, heads, variants, served_products=False, workers=case.workers)
    return [
        count_by_request(played.table.filter(played.table["variant"] == info.name), case.served.steps)
        for info in played.variants
    ]


def follow(
    case: Case,
    variants: "list[ResolvedVariant]",
    rounds: "pl.DataFrame",
    scales: tuple[float, ...],
    *,
    served_products: bool = True,
    on_event: Told = lambda _: None,
) -> list[Followed]:
    """Variants of the case along the drafts of some of the server's rounds."""
    asked = "" if case.cache is None else say_followed(rounds, scales, served_products)
    found = {one: _kept(case, one, asked) for one in variants}
    if missing := [one for one, kept in found.items() if kept is None]:
        heads = {case.served.draft: case.checkpoint}
        made = follow_server(
            case.trace,
            heads,
            missing,
            rounds,
            scales=scales,
            served_products=served_products,
            workers=case.workers,
            on_event=on_event,
        )
        for one, followed in zip(missing, made, strict=True):
            found[one] = followed
            if case.cache is not None:
                keep_followed(case.cache, one, asked, followed)
    return [kept for one in variants if (kept := found[one]) is not None]


def _kept(case: Case, variant: ResolvedVariant, asked: str) -> Followed | None:
    return None if case.cache is None else find_followed(case.cache, variant, asked)


def noise_of(case: Case, variant: ResolvedVariant, followed: Followed, rounds: "pl.DataFrame") -> Noise:
    """How far rounding moves ``variant``, which ``followed`` the drafts of these rounds."""
    return noise_between(followed, *(follow(of, [one], rounds, ())[0] for of, one in _orders(case, variant)))


def _unexplained_rounds(case: Case, healthy: Followed, noise: Noise) -> dict[str, list[bool]]:
    """By request, whether the healthy replay leaves each of its rounds unexplained."""
    _, unexplained_R = judge_rounds(healthy, noise)
    request_R = np.full(healthy.rounds, -1)  # of a round without a token
    request_R[healthy.round_N] = healthy.request_N
    return {
        case.trace.records[number].request_id: unexplained_R[request_R == number].tolist()
        for number in np.unique(request_R[request_R >= 0])
    }


def _most_telling(told: Mapping[str, Sequence[bool]]) -> list[str]:
    """Requests by turns: those whose rounds the healthy replay leaves unexplained most often, and least often.

    The first ones show what is wrong, the others rule out what would show everywhere.
    """
    ordered = sorted(told, key=lambda name: -sum(told[name]) / len(told[name]))
    return list(dict.fromkeys(name for pair in zip(ordered, reversed(ordered), strict=True) for name in pair))


def _some_rounds(
    rounds: "pl.DataFrame", ordered: Sequence[str], told: Mapping[str, Sequence[bool]], requests: int, each: int
) -> "pl.DataFrame":
    """The first rounds of so many requests, ``each`` of each, and on to the third that is unexplained.

    Where outputs are short there are more requests, so that there are as many rounds.
    """
    import polars as pl

    kept: dict[str, int] = {}
    for name in ordered:
        if len(kept) >= requests and sum(kept.values()) >= requests * each:
            break
        third = [place for place, unexplained in enumerate(told[name]) if unexplained][:3]
        kept[name] = min(len(told[name]), max(each, third[-1] + 1 if third else 0))
    number = pl.col("round") - pl.col("round").min().over("request_id")
    most = pl.col("request_id").replace_strict(kept, default=0, return_dtype=pl.Int64)
    return rounds.filter(number < most)
