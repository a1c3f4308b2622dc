"""From scored hypotheses to a verdict: which explanation a server's rounds leave standing, and which they cannot tell
apart. Pure functions; ``replay diagnose`` makes the replays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from replay.analysis.diagnosis.evidence import DRAFTED, lead
from replay.analysis.diagnosis.feed import Feeding, feeding_json
from replay.analysis.diagnosis.scored import DECISIVE, Scored, odds, rank, undecided
from replay.analysis.json_document import JsonObject, interval_json, object_json
from replay.analysis.ladder.ladder import Ladder, ladder_json
from replay.traces.rounds import HEALTHY_NAME

# A head that takes fewer of its first tokens than this is itself the limit; public heads take 0.65 to 0.75.
WEAK_FIRST = 0.6
_NORMAL = NormalDist()
# Another variant must accept so much more at the same anchors before the head is said to be made for it.
BETTER_BY = 0.03


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
    would accept instead, or by what the draft was fed). ``healthy`` is the replay of what was served, ``expected`` the
    accept length once it is mended. ``ranked`` best first; ``undecided`` names what cannot be told from the best,
    ``separate`` how to tell it; ``feeding`` what the draft was really fed, where that was recorded.
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

    @property
    def replayed_at_served_anchors(self) -> float:
        """Accept length of the healthy replay where each of its rounds starts at an anchor of the server's own; nan
        where the server's rounds are not known. ``healthy.accept_length`` is that of its own walk over the trace."""
        evidence = self.healthy.evidence
        return evidence.accept_length if evidence.kind == DRAFTED else math.nan


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
    ranked = tuple(rank(scored))
    best, healthy = ranked[0], next(item for item in ranked if item.kind == HEALTHY_NAME)
    blank = Diagnosis("engine", "", None, math.nan, healthy.evidence.served, healthy, ranked)
    beaten = best is not healthy and odds(best, healthy) >= DECISIVE
    if not beaten and healthy.fits and not healthy.contradicted:
        clear = _clear_gains(blank, gains, tried=1 if stated else len(ranked))
        return _made_for_another(blank, clear) if clear else _as_served(blank, gains, first_rate)
    if beaten and (best.fits or _explained(best, healthy) >= 0.5):
        return _fault_of_rounds(blank)
    shown = [item for item in ranked if item.borne_out and "+" not in item.name and item is not healthy]
    if healthy.contradicted and shown:
        return _fault_of_feed(blank, shown)
    return _unexplained(blank, beaten)


def _made_for_another(blank: Diagnosis, clear: Sequence[Gain]) -> Diagnosis:
    """The server runs the head as configured, which accepts clearly more as one of the ``clear`` gains."""
    leading = [gain for gain in clear if gain is clear[0] or gain.tied]
    best = max(leading, key=lambda gain: gain.log_prior)
    return replace(
        blank,
        verdict="fault",
        why=f"the server runs the head as configured, and the head was made for something else: as {best.label} it "
        f"accepts {best.gain:+.2f} tokens a round at the same anchors",
        named=best.label,
        undecided=tuple(gain.label for gain in leading if gain is not best),
        gains=tuple(clear),
    )


def _as_served(blank: Diagnosis, gains: Sequence[Gain], first_rate: float) -> Diagnosis:
    """The replay of what was served agrees with the server, and nothing else does better."""
    weak = first_rate < WEAK_FIRST
    limit = f"the head itself is the limit ({first_rate:.0%} of its first tokens are taken)" if weak else "all is well"
    return replace(
        blank,
        verdict="head" if weak else "healthy",
        why=f"the server does what the replay predicts, and no variant of the table does better: {limit}",
        certainty=blank.healthy.probability,
        undecided=tuple(item.name for item in blank.ranked if _alike(item, blank.healthy)),
        gains=tuple(gains),
    )


def _fault_of_rounds(blank: Diagnosis) -> Diagnosis:
    """The best of all hypotheses explains what the healthy one does not."""
    best = blank.ranked[0]
    alike = [item.name for item in undecided(blank.ranked) if item.kind != HEALTHY_NAME]
    doubt = "" if best.fits else f", though {best.evidence.misfit:.0%} of the rounds still differ"
    others = f"; not told apart from it: {', '.join(alike)}" if alike else ""
    return replace(
        blank,
        verdict="fault",
        why=f"the server did what the replay does under {best.name}{doubt}{others}{_of_feed(best, blank.healthy)}",
        named=best.name,
        certainty=sum(item.probability for item in blank.ranked if item.kind == best.kind),
        undecided=tuple(alike),
    )


def _fault_of_feed(blank: Diagnosis, shown: Sequence[Scored]) -> Diagnosis:
    """The feed shows what single faults feed, and the rounds are explained by none."""
    return replace(
        blank,
        verdict="fault",
        why=f"in its prompts the draft is fed just what {shown[0].name} feeds ({blank.healthy.contradicted}); the "
        "rounds are not explained by that alone",
        named=shown[0].name,
        undecided=tuple(item.name for item in shown[1:]),
    )


def _unexplained(blank: Diagnosis, beaten: bool) -> Diagnosis:
    """Neither the healthy server nor a fault of the table."""
    healthy, best, close = blank.healthy, blank.ranked[0], undecided(blank.ranked)
    nearest = f"; nearest is {best.name}" if beaten else ""
    explaining = sum(item.fits and item.kind != HEALTHY_NAME for item in (best, *close)) if not beaten else 0
    table = (
        "no fault of the table explains it"
        if not explaining
        else f"which of {explaining} faults explains it cannot be told"
    )
    direction = "less" if healthy.evidence.accept_length > blank.served else "no less"
    return replace(
        blank,
        why=f"the server accepted {direction} than the replay predicts ({blank.served:.2f} against "
        f"{healthy.evidence.accept_length:.2f}), and {table}{nearest}{_of_feed(healthy, healthy)}",
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


def _alike(item: Scored, healthy: Scored) -> bool:
    """Whether neither the rounds nor the feed tell a hypothesis from the healthy server."""
    return item is not healthy and not item.contradicted and abs(lead(item.evidence, healthy.evidence)) < DECISIVE


def _clear_gains(blank: Diagnosis, gains: Sequence[Gain], tried: int) -> list[Gain]:
    """Those that are worth it, and more than the luck of the best of ``tried``."""
    return [gain for gain in gains if gain.gain >= BETTER_BY * blank.served and _stands_out(gain, tried)]


def _stands_out(gain: Gain, tried: int) -> bool:
    """Whether a gain is more than the luck of the best of ``tried`` variants: Bonferroni, on the interval's width."""
    error = (gain.ci95[1] - gain.ci95[0]) / (2 * _NORMAL.inv_cdf(0.975))
    return gain.ci95[0] > 0 and gain.gain > _NORMAL.inv_cdf(1 - 0.025 / tried) * error


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
            "replayed_at_served_anchors": diagnosis.replayed_at_served_anchors,
            "replayed_own_walk": diagnosis.healthy.accept_length,
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
