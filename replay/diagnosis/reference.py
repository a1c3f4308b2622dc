"""What every hypothesis is held against where a server's drafts are known: the healthy replay along them, how far
rounding moves it, and the rounds on which all are tried."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replay.analysis.diagnosis.evidence import noise_scales
from replay.analysis.followed import Followed, Noise, judge_rounds
from replay.diagnosis.case import Case
from replay.diagnosis.observed import SCREENING_ROUNDS
from replay.simulator.following import follow_server
from replay.simulator.rounding import noise_between, other_orders
from replay.simulator.variant import ResolvedVariant

if TYPE_CHECKING:
    import polars as pl

# Requests on which everything is tried: of fewer, one odd request would be a third or more.
_LEAST_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Reference:
    """The healthy replay along the server's drafts, its ``noise`` and the noise ``scales`` at which tokens are judged;
    ``screening`` are the rounds on which every hypothesis is tried."""

    healthy: Followed
    noise: Noise
    scales: tuple[float, ...]
    screening: "pl.DataFrame"


def measure(case: Case) -> Reference:
    """Measure the rounding of the healthy replay, and choose the rounds for all others.

    The case's observation must have rounds. Raises whatever ``follow_server`` raises.
    """
    rounds = case.observation.rounds
    assert rounds is not None
    healthy = follow(case, [case.served], rounds, ())[0]
    noise = noise_of(case, case.served, healthy, rounds)
    scales = noise_scales(noise.scale)
    healthy = follow(case, [case.served], rounds, scales)[0]
    return Reference(healthy, noise, scales, _screening(case, healthy, noise, rounds))


def follow(
    case: Case,
    variants: "list[ResolvedVariant]",
    rounds: "pl.DataFrame",
    scales: tuple[float, ...],
    *,
    served_products: bool = True,
) -> list[Followed]:
    """Variants of the case along the drafts of some of the server's rounds."""
    heads = {case.served.draft: case.checkpoint}
    return follow_server(case.trace, heads, variants, rounds, scales=scales, served_products=served_products)


def noise_of(case: Case, variant: ResolvedVariant, followed: Followed, rounds: "pl.DataFrame") -> Noise:
    """How far rounding moves ``variant``, which ``followed`` the drafts of these rounds."""
    orders = other_orders(variant, case.trace)
    return noise_between(followed, *(follow(case, [one], rounds, ())[0] for one in orders))


def _screening(case: Case, healthy: Followed, noise: Noise, rounds: "pl.DataFrame") -> "pl.DataFrame":
    """Whole requests, by turns those whose rounds the healthy replay leaves unexplained most often and least often.

    The first ones show what is wrong, the others rule out what would show everywhere.
    """
    _, unexplained_R = judge_rounds(healthy, noise)
    request_R = np.zeros(healthy.rounds, dtype=np.int64)
    request_R[healthy.round_N] = healthy.request_N
    numbers, counts = np.unique(request_R, return_counts=True)
    shares = {int(number): float(unexplained_R[request_R == number].mean()) for number in numbers}
    ordered = sorted(shares, key=lambda number: -shares[number])
    turns = [number for pair in zip(ordered, reversed(ordered), strict=True) for number in pair]
    sizes = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    kept: list[int] = []
    for number in dict.fromkeys(turns):
        if len(kept) >= _LEAST_REQUESTS and sum(sizes[one] for one in kept) >= SCREENING_ROUNDS:
            break
        kept.append(number)
    names = [case.trace.records[number].request_id for number in kept]
    return rounds.filter(rounds["request_id"].is_in(names))
