"""Hypotheses with their evidence: how likely each is, which fit, and which cannot be told apart. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from replay.analysis.diagnosis.evidence import OUTLIER_ROUNDS, Disturbance, Evidence, lead

# A name is said with this probability at least; what has less than one to nine against the best is told apart from it.
CERTAIN = 0.9
_APART = math.log(CERTAIN / (1 - CERTAIN))
# Of about 300 public threads, 136 have a primary cause that the table of faults plays, and 25 one that changes drafts
# and that it does not play (the engine's own state 12, multimodal embeddings 7, never found 6).
_UNKNOWN = 25 / (136 + 25)
# A feed that denies a hypothesis which the rounds bear out is as rare as an outlier among rounds; and it shows just
# what another cause would feed, one of those in 136 threads.
_FED_OTHERWISE = OUTLIER_ROUNDS / 136
AS_GOOD = 2.0  # nats: half the width of a 95 % interval of one value (Wilks, 1938)
# What has less is not told from nothing: the order is then by nearness.
NOTHING = 1e-3


@dataclass(frozen=True, slots=True)
class Scored:
    """One hypothesis with its evidence. ``probability`` among all that were tried; ``accept_length`` of its own walk
    over the whole trace where it was replayed so (nan: not), ``fix`` what to type.

    ``contradicted`` says how the bits of what the draft was fed in its prompts contradict it (empty: not),
    ``borne_out`` whether they show just what it says. ``unknowable``: its drafts depend on what is in no trace, so it
    is never named; ``taken`` is then the log-likelihood of how many of them are (nan: not compared).
    """

    name: str
    kind: str
    value: str
    log_prior: float
    evidence: Evidence
    probability: float = math.nan
    accept_length: float = math.nan
    fix: str = ""
    contradicted: str = ""
    borne_out: bool = False
    unknowable: bool = False
    taken: float = math.nan

    @property
    def beforehand(self) -> float:
        """What stands before the rounds are looked at, in nats: the prior, and what the draft was fed."""
        return self.log_prior + (math.log(_FED_OTHERWISE) if self.contradicted else 0.0)

    @property
    def log_posterior(self) -> float:
        """Of the hypothesis and rounding, up to a constant, in nats."""
        return self.beforehand + self.evidence.log_likelihood

    @property
    def nearness(self) -> float:
        """Of the hypothesis and something unknown besides: how near it is to the truth. Up to a constant, in nats."""
        return self.beforehand + self.evidence.disturbed

    @property
    def fits(self) -> bool:
        """Whether what it leaves of the rounds is rounding."""
        return self.evidence.fits and not self.unknowable


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something that no hypothesis says: its ``probability``, and its ``size`` on top of the healthy server.

    ``nearest`` is the hypothesis on top of which it is smallest, with its size there. A size is None where the evidence
    has none.
    """

    probability: float
    size: Disturbance | None
    nearest: str
    nearest_size: Disturbance | None


def rank(scored: Sequence[Scored], *, taken_by_any: float = math.nan) -> tuple[list[Scored], Unknown]:
    """Best first, with probabilities that add up to 1 over all that were tried and something unknown.

    Hypotheses that can be told by what they draft come by their odds. Something unknown may stand on top of each of
    them, and has the better odds where it explains what they leave. Unknowable ones share in what is unknown by how
    near they are and by how many tokens are taken; ``taken_by_any`` is the log-likelihood of that for any cause at all.
    Those without any probability left come by nearness.
    """
    told = [item for item in scored if not item.unknowable]
    best = max(told, key=lambda item: item.log_posterior)
    behind = [odds(best, item) for item in told]
    beside = [_odds_of_more(best, item) for item in told]
    least = min(*behind, *beside)
    weights, more = ([math.exp(least - nats) for nats in column] for column in (behind, beside))
    total = sum(weights) + sum(more)
    nearest = max(told, key=lambda item: item.nearness)
    named = [replace(item, probability=weight / total) for item, weight in zip(told, weights, strict=True)]
    named += _shares(scored, nearest, sum(more) / total, taken_by_any)
    ordered = sorted(named, key=lambda item: (-max(item.probability, NOTHING), -item.nearness))
    rest = max(0.0, 1 - sum(item.probability for item in named))
    return ordered, Unknown(rest, told[0].evidence.disturbance, nearest.name, nearest.evidence.disturbance)


def _shares(scored: Sequence[Scored], nearest: Scored, unknown: float, taken_by_any: float) -> list[Scored]:
    """The unknowable hypotheses with their part of what is ``unknown``; none where nobody counted what they take."""
    found = [item for item in scored if item.unknowable]
    nats = [item.nearness + item.taken for item in found]
    rest = nearest.nearness + math.log(_UNKNOWN) + taken_by_any
    if not all(map(math.isfinite, [*nats, rest])):
        return [replace(item, probability=0.0) for item in found]
    most = max(*nats, rest) if nats else rest
    total = sum(math.exp(one - most) for one in (*nats, rest))
    return [
        replace(item, probability=unknown * math.exp(one - most) / total) for item, one in zip(found, nats, strict=True)
    ]


def explained(scored: Sequence[Scored]) -> bool:
    """Whether one of them fits, is not denied by the feed, and is clearly likelier than something unknown.

    A replay whose logits are all alike leaves no margin, and explains nothing.
    """
    told = [item for item in scored if not item.unknowable]
    beside = max(item.nearness for item in told) + math.log(_UNKNOWN)
    return any(item.fits and not item.contradicted and item.log_posterior > beside + _APART for item in told)


def odds(first: Scored, second: Scored) -> float:
    """Nats of posterior odds of ``first`` over ``second``, tokens of one request counted as they count."""
    return first.beforehand - second.beforehand + lead(first.evidence, second.evidence)


def _odds_of_more(first: Scored, second: Scored) -> float:
    """The same, where ``second`` has something unknown besides."""
    ahead = lead(first.evidence, second.evidence, disturbed=True)
    return first.beforehand - second.beforehand - math.log(_UNKNOWN) + ahead


def alike(item: Scored, healthy: Scored) -> bool:
    """Whether neither the rounds nor the feed tell a hypothesis from the healthy server, however rare it is."""
    shows = lead(healthy.evidence, item.evidence) >= _APART
    return item is not healthy and item.fits and not item.contradicted and not shows


def undecided(ranked: Sequence[Scored]) -> list[Scored]:
    """What is not told apart from the best of ``ranked``: others that fit as it does, and are hardly less likely."""
    best = next(item for item in ranked if not item.unknowable)
    others = [item for item in ranked if item is not best and not item.unknowable]
    return [item for item in others if item.fits == best.fits and odds(best, item) < _APART]
