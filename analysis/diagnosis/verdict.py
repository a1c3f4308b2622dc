"""From scored hypotheses to a verdict: which explanation a server's rounds leave standing, and which they cannot tell
apart. Pure functions; ``replay diagnose`` makes the replays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from replay.analysis.diagnosis.evidence import DRAFTED, HISTOGRAM, LENGTH, Evidence, lead
from replay.analysis.diagnosis.feed import Feeding, feeding_json
from replay.analysis.json_document import JsonObject, interval_json, object_json
from replay.analysis.ladder.ladder import Ladder, ladder_json
from replay.traces.rounds import HEALTHY_NAME

# Nats of posterior odds: what lies closer than this to the best is not told apart from it (odds of about 150 to 1).
DECISIVE = 5.0
# Share of differing rounds up to which a hypothesis fits: another rounding order flips 2 to 3 % of drafted tokens.
FITS: Mapping[str, float] = {DRAFTED: 0.10, HISTOGRAM: 0.15, LENGTH: 0.10}
# So many rounds may differ where the accept length at the same anchors is that of the server, to this relative error.
FLIPS, LEVEL = 0.25, 0.02
# A head that takes fewer of its first tokens than this is itself the limit; public heads take 0.65 to 0.75.
WEAK_FIRST = 0.6
# Nats against what the bits of the feed contradict: as many as some seven differing rounds, because the feed is of
# prompts, and a server may feed its rounds otherwise.
_CONTRADICTED = 20.0
_NORMAL = NormalDist()
# Another variant must accept so much more at the same anchors before the head is said to be made for it.
BETTER_BY = 0.03


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


@dataclass(frozen=True, slots=True)
class Gain:
    """Another variant that accepts more than the one served, at the same anchors: accepted tokens a round, and CI.

    ``tied``: it cannot be told from the one that accepts most."""

    name: str
    kind: str
    value: str
    gain: float
    ci95: tuple[float, float]
    accept_length: float = math.nan
    fix: str = ""
    log_prior: float = 0.0
    tied: bool = False

    @property
    def label(self) -> str:
        """Kind and value; of a layer-id hypothesis the wiring that it comes to, whatever ``name`` says."""
        return self.name if "+" in self.kind else f"{self.kind}={self.value}"


@dataclass(frozen=True, slots=True)
class Stratum:
    """How the healthy replay agrees with the server in a part of the rounds."""

    by: str
    value: str
    rounds: int
    agreeing: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``verdict`` is one of healthy, head, fault, engine; ``why`` one sentence.

    ``certainty`` is the probability of the named kind among all that were tried (nan where it was named by what it
    would accept instead, or by what the draft was fed). ``ranked`` best first; ``undecided`` names what cannot be told
    from the best, ``separate`` how to tell it; ``feeding`` what the draft was really fed, where that was recorded.
    """

    verdict: str
    why: str
    named: str | None
    certainty: float
    served: float
    healthy: Scored
    ranked: tuple[Scored, ...]
    undecided: tuple[str, ...] = ()
    separate: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()
    limits: tuple[str, ...] = ()
    strata: tuple[Stratum, ...] = ()
    expected: float = math.nan
    fix: str = ""
    ladder: Ladder | None = None
    feeding: Feeding | None = None


def rank(scored: Sequence[Scored]) -> list[Scored]:
    """Best first by their odds against the likeliest, with probabilities that add up to 1 over all that were tried.

    The likeliest itself does not come first where a simpler one is behind it by near ties only.
    """
    from dataclasses import replace

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


def judge(
    scored: Sequence[Scored], *, gains: Sequence[Gain] = (), first_rate: float = math.nan, stated: bool = False
) -> Diagnosis:
    """The verdict. ``gains`` are variants that accept more than what was served, best first; ``first_rate`` is how
    often the healthy replay's first drafted token is taken. ``stated``: the gains are of the one wiring that the head
    is known to be made for, so that none of them is the best of many.

    - The healthy replay fits, nothing beats it decisively and the feed does not contradict it: ``fault`` where the
      head does clearly better as another variant (it was made for that one), else ``head`` where it is weak, else
      ``healthy``.
    - A fault beats the healthy replay decisively and accounts for at least half of what differs: ``fault``; where the
      feed contradicts that fault too, it says so.
    - The feed contradicts the healthy replay and shows, bit for bit, what a single fault feeds: ``fault``, though the
      rounds hold more than that.
    - Neither: ``engine``.
    """
    ranked = rank(scored)
    healthy = next(item for item in ranked if item.kind == HEALTHY_NAME)
    best = ranked[0]
    served = healthy.evidence.served
    close = undecided(ranked)
    beaten = best is not healthy and odds(best, healthy) >= DECISIVE
    if not beaten and healthy.fits and not healthy.contradicted:
        return _as_served(ranked, healthy, gains, first_rate, served, stated)
    if beaten and (best.fits or _explained(best, healthy) >= 0.5):
        alike = [item.name for item in close if item.kind != HEALTHY_NAME]
        doubt = "" if best.fits else f", though {best.evidence.misfit:.0%} of the rounds still differ"
        others = f"; not told apart from it: {', '.join(alike)}" if alike else ""
        return Diagnosis(
            verdict="fault",
            why=f"the server did what the replay does under {best.name}{doubt}{others}{_of_feed(best, healthy)}",
            named=best.name,
            certainty=sum(item.probability for item in ranked if item.kind == best.kind),
            served=served,
            healthy=healthy,
            ranked=tuple(ranked),
            undecided=tuple(alike),
        )
    shown = [item for item in ranked if item.borne_out and "+" not in item.name and item is not healthy]
    if healthy.contradicted and shown:
        return Diagnosis(
            verdict="fault",
            why=f"in its prompts the draft is fed just what {shown[0].name} feeds ({healthy.contradicted}); the rounds "
            "are not explained by that alone",
            named=shown[0].name,
            certainty=math.nan,
            served=served,
            healthy=healthy,
            ranked=tuple(ranked),
            undecided=tuple(item.name for item in shown[1:]),
        )
    nearest = f"; nearest is {best.name}" if beaten else ""
    explaining = sum(item.fits and item.kind != HEALTHY_NAME for item in (best, *close)) if not beaten else 0
    table = (
        "no fault of the table explains it"
        if not explaining
        else f"which of {explaining} faults explains it cannot be told"
    )
    direction = "less" if healthy.evidence.accept_length > served else "no less"
    return Diagnosis(
        verdict="engine",
        why=f"the server accepted {direction} than the replay predicts ({served:.2f} against "
        f"{healthy.evidence.accept_length:.2f}), and {table}{nearest}{_of_feed(healthy, healthy)}",
        named=None,
        certainty=math.nan,
        served=served,
        healthy=healthy,
        ranked=tuple(ranked),
        undecided=tuple(item.name for item in close),
    )


def _of_feed(best: Scored, healthy: Scored) -> str:
    """What the bits say against the best explanation, or against the server's own account of what it feeds."""
    if best.contradicted:
        return f"; but what the draft was fed in its prompts shows {best.contradicted}"
    return f"; what the draft was fed shows {healthy.contradicted}" if healthy.contradicted else ""


def _explained(best: Scored, healthy: Scored) -> float:
    """Share of the rounds on which the healthy replay differs that the other one gets right."""
    missed = healthy.evidence.misfit
    return (missed - best.evidence.misfit) / missed if missed else 0.0


def _stands_out(gain: Gain, tried: int) -> bool:
    """Whether a gain is more than the luck of the best of ``tried`` variants: Bonferroni, on the interval's width."""
    error = (gain.ci95[1] - gain.ci95[0]) / (2 * _NORMAL.inv_cdf(0.975))
    return gain.ci95[0] > 0 and gain.gain > _NORMAL.inv_cdf(1 - 0.025 / tried) * error


def _as_served(
    ranked: Sequence[Scored],
    healthy: Scored,
    gains: Sequence[Gain],
    first_rate: float,
    served: float,
    stated: bool,
) -> Diagnosis:
    """The replay of what was served agrees with the server: is that what the head was made for?"""
    tried = 1 if stated else len(ranked)
    clear = [gain for gain in gains if gain.gain >= BETTER_BY * served and _stands_out(gain, tried)]
    if clear:
        leading = [gain for gain in clear if gain is clear[0] or gain.tied]
        best = max(leading, key=lambda gain: gain.log_prior)
        alike = [gain.label for gain in leading if gain is not best]
        return Diagnosis(
            verdict="fault",
            why=f"the server runs the head as configured, and the head was made for something else: as {best.label} it "
            f"accepts {best.gain:+.2f} tokens a round at the same anchors",
            named=best.label,
            certainty=math.nan,
            served=served,
            healthy=healthy,
            ranked=tuple(ranked),
            undecided=tuple(alike),
            gains=tuple(clear),
        )
    weak = first_rate < WEAK_FIRST
    return Diagnosis(
        verdict="head" if weak else "healthy",
        why="the server does what the replay predicts, and no variant of the table does better: "
        + (f"the head itself is the limit ({first_rate:.0%} of its first tokens are taken)" if weak else "all is well"),
        named=None,
        certainty=healthy.probability,
        served=served,
        healthy=healthy,
        ranked=tuple(ranked),
        undecided=tuple(
            item.name
            for item in ranked
            if item is not healthy and not item.contradicted and abs(lead(item.evidence, healthy.evidence)) < DECISIVE
        ),
        gains=tuple(gains),
    )


def to_json(diagnosis: Diagnosis) -> JsonObject:
    """The body of ``replay diagnose --json``."""
    evidence = diagnosis.healthy.evidence
    return object_json(
        {
            "verdict": diagnosis.verdict,
            "why": diagnosis.why,
            "fault": diagnosis.named,
            "certainty": diagnosis.certainty,
            "served": diagnosis.served,
            "replayed": evidence.accept_length,
            "expected": diagnosis.expected,
            "fix": diagnosis.fix,
            "evidence": {"kind": evidence.kind, "rounds": evidence.rounds, "agreeing": evidence.agreeing},
            **feeding_json(diagnosis.feeding),
            "cannot_tell": diagnosis.undecided,
            "separate": diagnosis.separate,
            **ladder_json(diagnosis.ladder),
            "hypotheses": [
                {
                    "fault": item.kind,
                    "value": item.value,
                    "accept_length": item.accept_length,
                    "score": item.probability,
                    "log_likelihood": item.evidence.log_likelihood,
                    "rounds": item.evidence.rounds,
                    "agreeing": item.evidence.agreeing,
                    "fix": item.fix,
                    "contradicted": item.contradicted or None,
                }
                for item in diagnosis.ranked
            ],
            "gains": [
                {
                    "fault": gain.kind,
                    "value": gain.value,
                    "gain": gain.gain,
                    "ci95": interval_json(gain.ci95),
                    "accept_length": gain.accept_length,
                    "fix": gain.fix,
                }
                for gain in diagnosis.gains
            ],
            "limits": diagnosis.limits,
            "strata": diagnosis.strata,
        }
    )
