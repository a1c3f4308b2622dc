"""What accepts more than what is served: variants that the head may have been made for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replay.analysis.diagnosis.gain import Gain, accepted_gain, length_gain
from replay.diagnosis.case import Case
from replay.diagnosis.hypotheses import WIRED_OTHERWISE, Hypothesis, nearby_wirings, nothing_wrong, singles, wirings
from replay.diagnosis.observed import first_rounds
from replay.diagnosis.progress import Tell, Trying
from replay.diagnosis.trials import Trial, distinct, own_drafts
from replay.simulator.binding import bind
from replay.traces.rounds import HEALTHY_NAME

if TYPE_CHECKING:
    import polars as pl

Over = Callable[[str, str], tuple[float, float, float]]  # how much more the one accepts than the other, and interval

# Rounds on which every such variant is tried, on which the likely ones are, and how many are left for all of them.
_GLANCED_ROUNDS, _LIKELY = 80, 15
_TRIED_ROUNDS, _BEST = 250, 5
# Kinds of which a value may be how a head was trained. A head is not made for a broken draft KV, nor for a lost tensor.
_TRAINED_SO = ("wiring.", "shift.", "position.", "attn.", "vocab.", "weights.overwritten", "weights.layout")


@dataclass(frozen=True, slots=True)
class _Better:
    hypothesis: Hypothesis
    gain: float


def gains_at_anchors(case: Case, tell: Tell) -> tuple[list[Gain], int]:
    """Variants that accept more at the anchors of the server's own rounds, best first; and how many were compared.

    The wiring that the head is known to be made for, else the best of all that it may have been made for; the search
    for a wiring goes on from its own winner until nothing accepts more.
    """
    rounds = case.observation.rounds
    assert rounds is not None
    served = nothing_wrong(case)
    if case.trained is not None:
        best, tried = wirings(case), 1
    else:
        few, some = (first_rounds(case.trace, rounds, most) for most in (_GLANCED_ROUNDS, _TRIED_ROUNDS))
        found = _search(case, served, few, tell)
        tried, likely = len(found), [one.hypothesis for one in found if one.gain > 0][:_LIKELY]
        best = [one.hypothesis for one in _compare(case, served, likely, some, tell)[:_BEST]]
    drafts = own_drafts(case, [served, *best], rounds, tell)
    return _ordered(case, best, lambda one, other: accepted_gain(drafts[one], drafts[other])), tried


def _search(case: Case, served: Hypothesis, rounds: "pl.DataFrame", tell: Tell) -> list[_Better]:
    known = [item for item in singles(case) if item.kind.startswith(_TRAINED_SO)]
    fresh = distinct([*known, *wirings(case)])
    found: list[_Better] = []
    seen: set[str] = set()
    while fresh:
        seen |= {item.name for item in fresh}
        found = sorted([*found, *_compare(case, served, fresh, rounds, tell)], key=lambda one: -one.gain)
        tell(Trying("what accepts more", len(found), len(found)))
        best = found[0].hypothesis
        around = nearby_wirings(case, best.variant.wiring) if best.kind == WIRED_OTHERWISE else []
        fresh = [item for item in around if item.name not in seen]
    return found


def _compare(
    case: Case, served: Hypothesis, items: Sequence[Hypothesis], rounds: "pl.DataFrame", tell: Tell
) -> list[_Better]:
    """What each accepts more than what was served, at the anchors of these rounds, most first."""
    drafts = own_drafts(case, distinct([served, *items]), rounds, tell)
    found = [_Better(item, accepted_gain(drafts[item.name], drafts[HEALTHY_NAME])[0]) for item in items]
    return sorted(found, key=lambda one: -one.gain)


def gains_of_walks(case: Case, final: Sequence[Trial]) -> list[Gain]:
    """Finalists that accept more than what was served, over the same requests, best first."""
    counts = {one.hypothesis.name: one.counts for one in final if one.counts is not None}
    items = [
        one.hypothesis
        for one in final
        if not one.is_healthy and (case.trained is None or one.hypothesis.value == str(case.trained))
    ]
    return _ordered(case, items, lambda one, other: length_gain(counts[one], counts[other]))


def _ordered(case: Case, items: Sequence[Hypothesis], over: Over) -> list[Gain]:
    """Those that accept more than the healthy replay, best first; several names of one wiring are one gain."""
    found: dict[str, tuple[Gain, str]] = {}
    for item in items:
        gain, low, high = over(item.name, HEALTHY_NAME)
        if gain > 0:
            made = Gain(item.name, item.kind, _says(case, item), gain, (low, high), log_prior=item.log_prior)
            found.setdefault(made.label, (made, item.name))
    ordered = sorted(found.values(), key=lambda pair: -pair[0].gain)
    return [replace(made, tied=over(ordered[0][1], name)[1] <= 0) for made, name in ordered]


def _says(case: Case, hypothesis: Hypothesis) -> str:
    """Its value, of a layer-id hypothesis the taps that it feeds, however its value says it."""
    if hypothesis.kind != WIRED_OTHERWISE:
        return hypothesis.value
    return str(bind(hypothesis.variant, case.checkpoint, case.trace).wiring)
