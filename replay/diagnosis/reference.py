"""What every hypothesis is held against where a server's drafts are known: the healthy replay along them, how far
rounding moves it, and the rounds on which all are tried."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from replay.analysis.diagnosis.evidence import noise_scales
from replay.analysis.followed import Followed, Noise, judge_rounds
from replay.diagnosis.case import Case
from replay.diagnosis.observed import GLANCED_ROUNDS, SCREENING_ROUNDS
from replay.simulator.following import follow_server
from replay.simulator.rounding import noise_between, other_orders
from replay.simulator.variant import ResolvedVariant

if TYPE_CHECKING:
    import polars as pl

# The fewest requests of each: one odd request decides nothing.
_GLANCED, _SCREENED = 2, 4


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
    ordered = _most_telling(healthy, noise, case)
    glance, screening = (
        rounds.filter(rounds["request_id"].is_in(_enough(ordered, rounds, *least)))
        for least in ((_GLANCED, GLANCED_ROUNDS), (_SCREENED, SCREENING_ROUNDS))
    )
    return Reference(healthy, noise, scales, glance, screening)


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


def _most_telling(healthy: Followed, noise: Noise, case: Case) -> list[str]:
    """Requests by turns: those whose rounds the healthy replay leaves unexplained most often, and least often.

    The first ones show what is wrong, the others rule out what would show everywhere.
    """
    _, unexplained_R = judge_rounds(healthy, noise)
    request_R = np.zeros(healthy.rounds, dtype=np.int64)
    request_R[healthy.round_N] = healthy.request_N
    shares = {int(number): float(unexplained_R[request_R == number].mean()) for number in np.unique(request_R)}
    ordered = sorted(shares, key=lambda number: -shares[number])
    turns = [number for pair in zip(ordered, reversed(ordered), strict=True) for number in pair]
    return [case.trace.records[number].request_id for number in dict.fromkeys(turns)]


def _enough(ordered: Sequence[str], rounds: "pl.DataFrame", requests: int, least: int) -> list[str]:
    """The first of them, as many as it takes to have so many ``requests`` and so many rounds at ``least``."""
    counts = dict(rounds.group_by("request_id").len().iter_rows())
    kept: list[str] = []
    for name in ordered:
        if len(kept) >= requests and sum(counts[one] for one in kept) >= least:
            break
        kept.append(name)
    return kept
