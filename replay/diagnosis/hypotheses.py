"""What may be wrong with a server: the fault table with the values that are likely, each as a variant to replay.

Priors follow how often a kind is the primary cause in public threads (counted over about 300 of them); a kind's share
is split evenly over its values, so that trying many values makes none of them likelier.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.case import Case
from replay.diagnosis.likely_values import LIKELY_VALUES
from replay.engines.wiring import Wiring
from replay.errors import ReplayError
from replay.faults.change import Subject
from replay.faults.table import FAULTS, Fault
from replay.simulator.binding import bind
from replay.simulator.fit import PromptRowsError
from replay.simulator.variant import ResolvedVariant
from replay.traces.rounds import HEALTHY_NAME
from replay.traces.taps import EMBED, sort_taps, tap_name

WIRED_OTHERWISE = "wiring.aux-layer-id"  # as what kind another wiring is said; its value may then be the whole wiring
_P_HEALTHY = 0.5
_P_PAIR = 0.05  # a second, independent fault beside one


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One explanation: the variant that a server would then have run.

    ``kind`` and ``value`` as in the fault table (``healthy`` and empty for none; pairs are joined by ``+``).
    """

    kind: str
    value: str
    variant: ResolvedVariant
    log_prior: float

    @property
    def name(self) -> str:
        """``healthy``, ``kind=value`` or two of these joined by ``+``."""
        if self.kind == HEALTHY_NAME:
            return HEALTHY_NAME
        return self.value if "+" in self.kind else f"{self.kind}={self.value}"

    @property
    def weights(self) -> tuple[Fault, ...]:
        """Its faults that give the head weights of its own; hypotheses that are alike in these share a copy."""
        return tuple(fault for fault in self.variant.faults if FAULTS[fault.kind].changes_weights)


def share_of(kind: str) -> float:
    """The part of all the odds that a kind of fault has beforehand, whatever its value."""
    return (1 - _P_HEALTHY) * FAULTS[kind].reports / sum(one.reports for one in FAULTS.values())


def nothing_wrong(case: Case) -> Hypothesis:
    """The healthy server."""
    return Hypothesis(HEALTHY_NAME, "", case.served, log(_P_HEALTHY))


def singles(case: Case) -> list[Hypothesis]:
    """The healthy server, then every single fault that head and trace can show."""
    found = [nothing_wrong(case)]
    for kind in FAULTS:
        if kind in case.without:
            continue
        shown = list(_shown(kind, case))
        found += [Hypothesis(kind, value, variant, log(share_of(kind) / len(shown))) for value, variant in shown]
    return found


def unseen(case: Case) -> list[str]:
    """The names of the single faults that are not tried because the trace lacks the rows of prompts that they show."""
    if case.trace.prompt_rows is None:
        return []
    likely = [Fault(kind, value) for kind in FAULTS if kind not in case.without for value in LIKELY_VALUES[kind](case)]
    return [str(fault) for fault in dict.fromkeys(likely) if _lacks_prompt_rows(fault, case)]


def _lacks_prompt_rows(fault: Fault, case: Case) -> bool:
    try:
        bind(replace(case.served, faults=(*case.served.faults, fault)), case.checkpoint, case.trace)
    except PromptRowsError:
        return True
    except ReplayError:
        return False
    return False


def pairs(case: Case, base: Hypothesis, partners: Sequence[Hypothesis]) -> list[Hypothesis]:
    """``base`` with each of the ``partners`` that is of another kind and can be played together with it."""
    return [found for partner in partners if (found := joined(case, base, partner)) is not None]


def joined(case: Case, first: Hypothesis, second: Hypothesis) -> Hypothesis | None:
    """Two single faults at once; None where they are of one kind or cannot be played together."""
    if first.kind == second.kind or HEALTHY_NAME in (first.kind, second.kind):
        return None
    served = case.served
    wirings = {one.variant.wiring for one in (first, second)} - {served.wiring}
    if len(wirings) > 1:
        return None
    faults = [fault for one in (first, second) for fault in one.variant.faults[len(served.faults) :]]
    variant = replace(served, wiring=wirings.pop() if wirings else served.wiring, faults=(*served.faults, *faults))
    if not _plays(variant, case):
        return None
    # The second one is any of all faults, as likely among them as it is alone.
    prior = first.log_prior + log(_P_PAIR) + second.log_prior - log(1 - _P_HEALTHY)
    return Hypothesis(f"{first.kind}+{second.kind}", f"{first.name}+{second.name}", variant, prior)


def with_value(case: Case, hypothesis: Hypothesis, kind: str, value: str) -> Hypothesis | None:
    """The hypothesis with another value of its fault of this ``kind``; None where that cannot be played."""
    old = next((fault for fault in hypothesis.variant.faults if fault.kind == kind), None)
    if old is None:
        return None
    new = Fault(kind, value)
    variant = replace(hypothesis.variant, faults=tuple(new if one is old else one for one in hypothesis.variant.faults))
    if not _plays(variant, case):
        return None
    said = hypothesis.value.replace(str(old), str(new)) if "+" in hypothesis.kind else value
    return replace(hypothesis, value=said, variant=variant, log_prior=hypothesis.log_prior - log(2))


def drafts_noise(hypothesis: Hypothesis, checkpoint: Checkpoint) -> bool:
    """Whether nobody can know its drafts, only how many are taken.

    A matrix that was never loaded holds whatever was in memory, and the weight of a norm inside the target, behind
    which its rows may have been taken, is in no trace.
    """
    if hypothesis.name == "wiring.aux-capture-stage=normed":
        return True
    if hypothesis.kind == "state.noise":
        return True
    tensor = checkpoint.tensors.get(f"{hypothesis.value.removesuffix(':noise')}.weight")
    return hypothesis.kind == "weights.missing" and tensor is not None and tensor.ndim > 1


def wirings(case: Case) -> list[Hypothesis]:
    """Other taps for the head: the wiring that it was made for where that is known, else all that are likely."""
    if WIRED_OTHERWISE in case.without:
        return []
    if case.trained is not None:
        return [rewired(case, case.trained, log(_P_HEALTHY))]
    return _rewired_by_place(case, _likely_taps(case), case.served.wiring)


def rewired(case: Case, wiring: Wiring, log_prior: float) -> Hypothesis:
    """The served variant with another wiring, as a layer-id hypothesis."""
    return Hypothesis(WIRED_OTHERWISE, str(wiring), replace(case.served, wiring=wiring), log_prior)


def nearby_wirings(case: Case, wiring: Wiring) -> list[Hypothesis]:
    """Wirings that differ from ``wiring`` in one slot, or that have its taps in another order."""
    taps = wiring.taps
    slots = [(*taps[:slot], tap, *taps[slot + 1 :]) for slot in range(len(taps)) for tap in case.trace.taps]
    return _rewired_by_place(case, [sort_taps(taps), *slots], wiring)


def _rewired_by_place(case: Case, likely: Iterable[tuple[str, ...]], known: Wiring) -> list[Hypothesis]:
    """Their shares fall so that the first ones have most of the kind's."""
    found: dict[Wiring, Hypothesis] = {}
    for place, taps in enumerate(likely):
        one = rewired(case, Wiring(taps), log(share_of(WIRED_OTHERWISE) / (place + 2) ** 2))
        wiring = one.variant.wiring
        if wiring not in (known, case.served.wiring) and wiring not in found and _plays(one.variant, case):
            found[wiring] = one
    return list(found.values())


def _likely_taps(case: Case) -> Iterator[tuple[str, ...]]:
    """Likeliest what the head's config states under any convention, then taps that were all pushed along by one more at
    the front or the back (embed,3,31 served as 3,31,59), then each slot from each recorded tap; and these in order."""
    fed, taps, ids = case.served.wiring.taps, case.trace.taps, case.checkpoint.config.layer_ids
    if ids:
        yield from (tuple(tap_name(max(0, index + by)) for index in ids) for by in (1, 0))
    pushed = [(tap, *fed[:-1]) for tap in taps] + [(*fed[1:], tap) for tap in taps]
    pushed.sort(key=lambda names: EMBED not in names)
    slots = [(*fed[:slot], tap, *fed[slot + 1 :]) for slot in range(len(fed)) for tap in taps]
    yield from (*pushed, *slots)
    yield from (sort_taps(names) for names in (*pushed, *slots) if len(set(names)) == len(names))


def _shown(kind: str, case: Case) -> Iterator[tuple[str, ResolvedVariant]]:
    """Likely values of a kind that head and trace can show, and that differ from what is served."""
    healthy = _signature(bind(case.served, case.checkpoint, case.trace), case.served)
    for value in dict.fromkeys(LIKELY_VALUES[kind](case)):
        variant = replace(case.served, faults=(*case.served.faults, Fault(kind, value)))
        if not _plays(variant, case):
            continue
        if _signature(bind(variant, case.checkpoint, case.trace), case.served) != healthy:
            yield value, variant


def _signature(subject: Subject, served: ResolvedVariant) -> tuple[object, ...]:
    """What tells subjects of one head apart."""
    own = subject.own_embedding
    if own == (served.engine.own_embedding or subject.config.vllms):
        own = None
    tensors = id(subject.checkpoint.tensors)
    return subject.wiring, subject.behaviour, subject.config, own, subject.tree_kv, subject.precision, tensors


def _plays(variant: ResolvedVariant, case: Case) -> bool:
    """Whether head and trace can show the variant at all: the refusals of ``bind`` are what they cannot."""
    try:
        bind(variant, case.checkpoint, case.trace)
    except ReplayError:
        return False
    return True
