"""Hypotheses with their evidence: how likely each is, which fit, and which cannot be told apart. Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from replay.analysis.diagnosis.evidence import DRAFTED, HISTOGRAM, LENGTH, Evidence, lead

# Nats of posterior odds: what lies closer than this to the best is not told apart from it (odds of about 150 to 1).
DECISIVE = 5.0
# Share of differing rounds up to which a hypothesis fits: another rounding order flips 2 to 3 % of drafted tokens.
FITS: Mapping[str, float] = {DRAFTED: 0.10, HISTOGRAM: 0.15, LENGTH: 0.10}
# So many rounds may differ where the accept length at the same anchors is that of the server, to this relative error.
FLIPS, LEVEL = 0.25, 0.02
# Nats against what the bits of the feed contradict: as many as some seven differing rounds, because the feed is of
# prompts, and a server may feed its rounds otherwise.
_CONTRADICTED = 20.0


@dataclass(frozen=True, slots=True)
class Scored:
    """One hypothesis with its evidence. ``probability`` among all that were tried; ``accept_length`` of its own walk
    over the whole trace where it was replayed so (nan: not), ``fix`` what to type.

    ``contradicted`` says how the bits of what the draft was fed in its prompts contradict it (empty: not),
    ``borne_out`` whether they show just what it says.
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

    @property
    def beforehand(self) -> float:
        """What stands before the rounds are looked at, in nats: the prior, and what the draft was fed."""
        return self.log_prior - _CONTRADICTED * bool(self.contradicted)

    @property
    def log_posterior(self) -> float:
        """Up to a constant, in nats."""
        return self.beforehand + self.evidence.log_likelihood

    @property
    def fits(self) -> bool:
        """Whether few enough rounds differ for it to be the whole story.

        Other kernels than the replay's flip drafted tokens on near ties, up to one round in four, and flips cancel in
        what is accepted.
        """
        evidence = self.evidence
        if evidence.misfit <= FITS[evidence.kind]:
            return True
        level = abs(evidence.accept_length / evidence.served - 1) <= LEVEL if evidence.served else False
        return evidence.kind != LENGTH and evidence.misfit <= FLIPS and level


def rank(scored: Sequence[Scored]) -> list[Scored]:
    """Best first by their odds against the likeliest, with probabilities that add up to 1 over all that were tried.

    The likeliest itself does not come first where a simpler one is behind it by near ties only.
    """
    likeliest = max(scored, key=lambda item: item.log_posterior)
    behind = [odds(likeliest, item) for item in scored]
    weights = [math.exp(min(behind) - nats) for nats in behind]
    total = sum(weights)
    named = [replace(item, probability=weight / total) for item, weight in zip(scored, weights, strict=True)]
    return [named[place] for place in sorted(range(len(named)), key=behind.__getitem__)]


def odds(first: Scored, second: Scored) -> float:
    """Nats of posterior odds of ``first`` over ``second``, near ties not counted for either (evidence.py, ``lead``)."""
    return first.beforehand - second.beforehand + lead(first.evidence, second.evidence)


def undecided(ranked: Sequence[Scored]) -> list[Scored]:
    """What is not told apart from the best: other hypotheses within ``DECISIVE`` nats of it."""
    return [item for item in ranked[1:] if odds(ranked[0], item) < DECISIVE]
