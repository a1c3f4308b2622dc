"""From scored hypotheses to a verdict: which explanation a server's rounds leave standing, and which they cannot tell
apart. Pure functions; ``replay diagnose`` makes the replays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from replay.analysis.diagnosis.breakdown import Profile
from replay.analysis.diagnosis.evidence import DRAFTED, LENGTH, Disturbance
from replay.analysis.diagnosis.feed import Feeding
from replay.analysis.diagnosis.gain import Gain, stands_out
from replay.analysis.diagnosis.scored import CERTAIN, NOTHING, Scored, Unknown, alike, rank, undecided
from replay.analysis.ladder.ladder import Ladder
from replay.printable import counted, html_table, one_line
from replay.traces.agreement import Agreement
from replay.traces.rounds import HEALTHY_NAME

# A head that takes fewer of its first tokens than this is itself the limit; public heads take 0.65 to 0.75.
WEAK_FIRST = 0.6
# Another variant must accept so much more at the same anchors before the head is said to be made for it.
BETTER_BY = 0.03
_SHOWN = 10  # hypotheses in a notebook


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``verdict`` is one of healthy, head, fault, engine, undetermined; ``why`` one sentence.

    ``certainty`` is the probability of the named kind among all that were tried and something unknown (nan where it was
    named by what it would accept instead, or by what the draft was fed). ``healthy`` is the replay of what was served,
    ``expected`` the accept length once it is mended, ``mending`` what that gains a round at the same anchors, with its
    interval. ``ranked`` best first, ``unknown`` what none of them says; ``undecided`` names what cannot be told from
    the best, ``separate`` how to tell it. ``agreement`` counts the rounds of the healthy replay; ``profile`` says where
    a server parts from it. ``feeding`` is what the draft was really fed, where that was recorded; ``values`` are the
    lowest and the highest value of a named kind that explains the server as well. ``implausible`` says why what was
    observed is nothing that a head does, ``doubts`` what is odd in the trace's rows,
    and that few requests decide.
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
    profile: Profile | None = None
    expected: float = math.nan
    mending: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    fix: str = ""
    ladder: Ladder | None = None
    feeding: Feeding | None = None
    unknown: Unknown | None = None
    agreement: Agreement | None = None
    values: tuple[str, str] | None = None
    implausible: str | None = None
    doubts: tuple[str, ...] = ()

    def __repr__(self) -> str:
        named = f" {self.named!r}" if self.named else ""
        return one_line(f"Diagnosis({self.verdict}{named}: {self.why})")

    def _repr_html_(self) -> str:
        rows = [[one.name, f"{one.probability:.3f}", f"{one.accept_length:.3f}", one.fix] for one in self.ranked]
        return html_table(repr(self), ("hypothesis", "probability", "accept length", "fix"), rows[:_SHOWN])

    @property
    def replayed_at_served_anchors(self) -> float:
        """Accept length of the healthy replay where each of its rounds starts at an anchor of the server's own; nan
        where the server's rounds are not known. ``healthy.accept_length`` is that of its own walk over the trace."""
        evidence = self.healthy.evidence
        return evidence.accept_length if evidence.kind == DRAFTED else math.nan


def judge(
    scored: Sequence[Scored],
    *,
    gains: Sequence[Gain] = (),
    compared: int = 1,
    first_rate: float = math.nan,
) -> Diagnosis:
    """The verdict. ``scored`` begins with the healthy replay; ``gains`` are variants that accept more than what was
    served, the best of so many that were ``compared``; ``first_rate`` is how often the healthy replay's first drafted
    token is taken.

    - A fault fits and has, over all its values, a probability of at least ``CERTAIN``: ``fault``.
    - The healthy replay fits, and the feed does not contradict it: ``fault`` where the head does clearly better as
      another variant (it was made for that one), ``undetermined`` where that may be luck, else ``head`` where it is
      weak, else ``healthy``.
    - The feed contradicts the healthy replay and shows, bit for bit, what a single fault feeds: ``fault``, though the
      rounds hold more than that.
    - Some hypotheses fit, and none of them stands out: ``undetermined``.
    - None fits, or something unknown is as good as certain: ``engine``.
    """
    ranking, unknown = rank(scored)
    ranked = tuple(ranking)
    healthy = next(item for item in ranked if item.kind == HEALTHY_NAME)
    blank = Diagnosis("engine", "", None, math.nan, healthy.evidence.served, healthy, ranked, unknown=unknown)
    fitting = [item for item in ranked if item.fits and item.probability >= NOTHING]
    leading = next((item for item in fitting if item is not healthy), None)
    if leading is not None and certainty(ranked, leading.kind) >= CERTAIN:
        return _fault_of_rounds(blank, leading)
    if healthy in fitting and unknown.probability < CERTAIN and not healthy.contradicted:
        clear = _clear_gains(blank, gains, tried=compared)
        return _made_for_another(blank, clear) if clear else _as_served(blank, gains, compared, first_rate)
    shown = [item for item in ranked if item.borne_out and "+" not in item.name and item is not healthy]
    if healthy.contradicted and shown:
        return _fault_of_feed(blank, shown)
    if fitting and unknown.probability < CERTAIN:
        return _undetermined(blank, fitting)
    return _unexplained(blank)


def without_name(found: Diagnosis, implausible: str) -> Diagnosis:
    """The same where what was observed is ``implausible``: nothing is named from it, whatever comes near it."""
    fitting = tuple(item.name for item in found.ranked if item.fits and item.probability >= NOTHING)
    return replace(
        found,
        verdict="undetermined",
        why=implausible,
        named=None,
        certainty=math.nan,
        undecided=fitting,
        gains=(),
        implausible=implausible,
    )


def certainty(ranked: Sequence[Scored], kind: str) -> float:
    """The probability of a kind, over all its values that fit."""
    return sum(item.probability for item in ranked if item.kind == kind and item.fits)


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


def _as_served(blank: Diagnosis, gains: Sequence[Gain], compared: int, first_rate: float) -> Diagnosis:
    """The replay of what was served agrees with the server, and nothing else does clearly better."""
    weak = first_rate < WEAK_FIRST
    limit = f"the head itself is the limit ({first_rate:.0%} of its first tokens are taken)" if weak else "all is well"
    found = replace(blank, certainty=blank.healthy.probability, gains=tuple(gains))
    may_be = [gain for gain in gains if _is_worth_it(blank, gain) and stands_out(gain, compared, one=0.5)]
    if may_be:
        best = may_be[0]
        return replace(
            found,
            verdict="undetermined",
            why=f"the server does what the replay predicts, and the head may have been made for something else: as "
            f"{best.label} it accepts {best.gain:+.2f} tokens a round at the same anchors, which is more than the best "
            f"of {compared} usually gains by luck, and less than luck can",
            undecided=(HEALTHY_NAME, *(gain.label for gain in may_be)),
        )
    return replace(
        found,
        verdict="head" if weak else "healthy",
        why=f"the server does what the replay predicts, and no variant of the table does clearly better: {limit}",
        undecided=tuple(item.name for item in blank.ranked if alike(item, blank.healthy)),
    )


def _fault_of_rounds(blank: Diagnosis, best: Scored) -> Diagnosis:
    """One hypothesis explains what the healthy one does not."""
    close = [item.name for item in undecided([best, *blank.ranked]) if item.kind != HEALTHY_NAME]
    others = f"; not told apart from it: {', '.join(close)}" if close else ""
    left = best.evidence
    rest = f", {left.near_tie} of {counted(left.rounds, 'round')} at a near tie" if left.near_tie else ""
    odd = f", {left.unexplained} of {counted(left.rounds, 'round')} unexplained" if left.unexplained else ""
    return replace(
        blank,
        verdict="fault",
        why=f"the server did what the replay does under {best.name}{rest}{odd}{others}{_of_feed(best, blank.healthy)}",
        named=best.name,
        certainty=certainty(blank.ranked, best.kind),
        undecided=tuple(close),
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


def _undetermined(blank: Diagnosis, fitting: Sequence[Scored]) -> Diagnosis:
    """Several explain what was observed, and none stands out."""
    if fitting == [blank.healthy]:
        return replace(
            blank,
            verdict="undetermined",
            why=f"the rounds are what the healthy replay does{_of_feed(blank.healthy, blank.healthy)}, and no fault "
            "of the table feeds that",
        )
    kinds = list(dict.fromkeys(item.kind for item in fitting))
    said = f"{len(kinds)} kinds of fault explain it" if len(kinds) > 1 else f"only {kinds[0]} explains it"
    return replace(
        blank,
        verdict="undetermined",
        why=f"the healthy replay does not explain the server, {said}, and none is likely enough to be named "
        f"(the likeliest, {fitting[0].name}, has {fitting[0].probability:.0%})",
        undecided=tuple(item.name for item in fitting),
    )


def _unexplained(blank: Diagnosis) -> Diagnosis:
    """Neither the healthy server nor a fault of the table."""
    healthy, unknown = blank.healthy, blank.unknown
    assert unknown is not None
    evidence = healthy.evidence
    nearest = next(item for item in blank.ranked if item.name == unknown.nearest)
    if evidence.kind == LENGTH:
        parted = f"the server's accept length is not what the healthy replay gives ({evidence.accept_length:.2f})"
    elif evidence.unexplained:
        parted = f"{evidence.unexplained} of {counted(evidence.rounds, 'round')} are not what the healthy replay does"
    else:
        parted = (
            f"{evidence.near_tie} of {counted(evidence.rounds, 'round')} part at a near tie, more than rounding does"
        )
    near = ""
    if nearest is not healthy:
        near = (
            f"; nearest to it is {nearest.name}, which leaves {nearest.evidence.unexplained} of "
            f"{nearest.evidence.rounds} unexplained and is not the cause, or not all of it"
        )
    return replace(
        blank,
        why=f"{parted}, and no fault of the table explains them{_of_size(unknown.size)}{near}"
        f"{_of_feed(healthy, healthy)}",
    )


def _of_size(size: Disturbance | None) -> str:
    """How large something unknown is, in words."""
    if size is None or not size.scale:
        return ""
    said = f"; it is as large as noise of {size.scale:.2g} nats on the draft logits"
    return said + (f", with {size.share:.0%} of the tokens like drawn at random" if size.share >= 0.01 else "")


def _of_feed(best: Scored, healthy: Scored) -> str:
    """What the bits say against the best explanation, or against the server's own account of what it feeds."""
    if best.contradicted:
        return f"; but what the draft was fed in its prompts shows {best.contradicted}"
    return f"; what the draft was fed shows {healthy.contradicted}" if healthy.contradicted else ""


def _clear_gains(blank: Diagnosis, gains: Sequence[Gain], tried: int) -> list[Gain]:
    """Those that are worth it, and more than the luck of the best of ``tried``."""
    return [gain for gain in gains if _is_worth_it(blank, gain) and stands_out(gain, tried)]


def _is_worth_it(blank: Diagnosis, gain: Gain) -> bool:
    return gain.gain >= BETTER_BY * blank.served
