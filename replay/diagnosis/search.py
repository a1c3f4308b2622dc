"""The search for what explains a server: from what is known to what is likely, from coarse to fine, from one to two.

Singles and wirings are tried on a few rounds. Where one of them leaves nothing but rounding, the search ends. Else the
nearest ones are refined (other values, other wirings next to them), and grow by a second fault, greedily: the nearest
first, with every other single beside it. A hypothesis that is not the whole story still is nearer to it than another
one, because its likelihood allows for something unknown besides (analysis/diagnosis/evidence.py).
"""

import math
from collections.abc import Callable, Sequence

from replay.analysis.diagnosis.scored import AS_GOOD, explained
from replay.diagnosis.case import Case
from replay.diagnosis.feed import as_fed
from replay.diagnosis.hypotheses import (
    WIRED_OTHERWISE,
    Hypothesis,
    drafts_noise,
    nearby_wirings,
    pairs,
    singles,
    wirings,
    with_value,
)
from replay.diagnosis.progress import Tell
from replay.diagnosis.reference import Reference
from replay.diagnosis.trials import (
    GLANCE,
    WHOLE,
    Trial,
    distinct,
    healthy,
    left_behind,
    nearest_first,
    run_trials,
)
from replay.diagnosis.value_search import neighbours, number_in, put_number, rounded
from replay.faults.table import Fault

# How often the distance to a finer value is halved, and how many kinds are refined.
_HALVINGS, _REFINED = 6, 2
# So many singles grow by a second fault, one after the other until one pair explains the server.
_GROWN = 2
# Times that the search for a wiring starts again from its own winner.
_RESTARTS = 4
_FINALISTS = 6
_FEW = 12  # of them a glance spares nothing

Try = Callable[[str, Sequence[Hypothesis]], list[Trial]]


def search(case: Case, reference: Reference | None, tell: Tell) -> tuple[list[Trial], list[Trial]]:
    """Every hypothesis that was tried, on the screening rounds, the healthy server first; and the finalists among them
    on more rounds."""

    def attempt(stage: str, hypotheses: Sequence[Hypothesis]) -> list[Trial]:
        if reference is None or len(hypotheses) <= _FEW:
            return run_trials(case, reference, tell, stage, hypotheses)
        return _glance_first(case, reference, tell, stage, hypotheses)

    def finish() -> list[Trial]:
        finalists = to_finish(case, tried)
        return run_trials(case, reference, tell, "the likeliest on more rounds", finalists, extent=WHOLE)

    known = [item for item in singles(case) if not drafts_noise(item, case.checkpoint)]
    others = wirings(case)
    fed = as_fed(case, [*others, *known])
    tried = attempt("single faults", distinct([*known, *fed, *others]))
    if reference is None:
        return tried, finish()
    if final := _final_if_explained(tried, finish):
        return tried, final
    tried += _refine(case, tried, attempt)
    if final := _final_if_explained(tried, finish):
        return tried, final
    partners = [one.hypothesis for one in tried if _adds(one, healthy(tried))]
    for base in _bases(tried):
        grown = [one for one in attempt("pairs of faults", pairs(case, base.hypothesis, partners)) if _adds(one, base)]
        tried += grown
        if grown and not _explained(grown):
            finer = _refine_values(case, nearest_first(grown)[:1], tried, attempt)
            tried += finer
            grown += finer
        if grown and _explained(grown):
            break
    return tried, finish()


def _glance_first(
    case: Case, reference: Reference, tell: Tell, stage: str, hypotheses: Sequence[Hypothesis]
) -> list[Trial]:
    """All on a few rounds; the nearest quarter, what fits there and the healthy server on the screening rounds.

    Likelihoods of the others are drawn out to as many rounds.
    """
    glanced = run_trials(case, reference, tell, stage, hypotheses, extent=GLANCE)
    likely = nearest_first(glanced)[: max(_FEW, len(glanced) // 4)]
    likely += [one for one in glanced if one.is_healthy or one.scored.fits]
    kept = distinct([one.hypothesis for one in likely])
    screened = {
        one.hypothesis.name: one for one in run_trials(case, reference, tell, f"{stage}, the likely ones", kept)
    }
    times = len(reference.screening) / len(reference.glance)
    return [screened.get(one.hypothesis.name) or left_behind(one, times) for one in glanced]


def to_finish(case: Case, trials: Sequence[Trial]) -> list[Hypothesis]:
    """The healthy server, the wiring known to be right, the nearest, and without drafts those that accept most."""
    nearest = [one.hypothesis for one in nearest_first(trials)[:_FINALISTS]]
    lengths = [one for one in trials if not math.isnan(one.scored.evidence.accept_length)]
    most = sorted(lengths, key=lambda one: one.scored.evidence.accept_length, reverse=True)[:3]
    stated = [one.hypothesis for one in trials if case.trained and one.hypothesis.value == str(case.trained)]
    return distinct([healthy(trials).hypothesis, *stated, *nearest, *(one.hypothesis for one in most)])


def unknowable(case: Case) -> list[Hypothesis]:
    """The single faults whose drafts nobody can know."""
    return [item for item in singles(case) if drafts_noise(item, case.checkpoint)]


def _final_if_explained(tried: Sequence[Trial], finish: Callable[[], list[Trial]]) -> list[Trial]:
    """The finalists where one hypothesis leaves nothing but rounding, on few rounds and on more; empty otherwise."""
    if not _explained(tried):
        return []
    final = finish()
    return final if _explained(final) else []


def _explained(tried: Sequence[Trial]) -> bool:
    return explained([one.scored for one in tried])


def _bases(tried: Sequence[Trial]) -> list[Trial]:
    """The nearest singles, one of each kind, of those that are nearer to the server than the healthy replay is.

    The best of many is nearer by luck; it counts where it is by more than the logarithm of how many were tried.
    """
    least = healthy(tried).scored.evidence.disturbed + math.log(len(tried))
    found: dict[str, Trial] = {}
    for one in nearest_first(tried):
        if not one.is_healthy and one.scored.evidence.disturbed > least:
            found.setdefault(one.hypothesis.kind, one)
    return list(found.values())[:_GROWN]


def _adds(one: Trial, base: Trial) -> bool:
    """Whether it says anything else than the ``base`` does: of the server's rounds, or of what the draft was fed."""
    if bool(one.scored.contradicted) != bool(base.scored.contradicted):
        return True
    mine, alone = one.followed, base.followed
    if mine is None or alone is None or len(mine.margin_N) != len(alone.margin_N):
        return True
    return not (mine.margin_N == alone.margin_N).all()


# ---- finer ----


def _refine(case: Case, tried: Sequence[Trial], attempt: Try) -> list[Trial]:
    """Values and wirings next to the nearest ones."""
    found = _refine_wirings(case, tried, attempt)
    kinds: dict[str, Trial] = {}
    for one in nearest_first([*tried, *found]):
        if neighbours(one.hypothesis.kind, one.hypothesis.value, 0):
            kinds.setdefault(one.hypothesis.kind, one)
    return found + _refine_values(case, list(kinds.values())[:_REFINED], [*tried, *found], attempt)


def _refine_wirings(case: Case, tried: Sequence[Trial], attempt: Try) -> list[Trial]:
    """From the nearest wiring on, as long as one next to it is nearer."""
    found: list[Trial] = []
    best = nearest_first(tried)[0]
    for _ in range(_RESTARTS):
        if best.hypothesis.kind != WIRED_OTHERWISE or case.trained is not None:
            break
        names = {one.hypothesis.name for one in (*tried, *found)}
        wiring = best.hypothesis.variant.wiring
        fresh = [item for item in nearby_wirings(case, wiring) if item.name not in names]
        found += attempt("other wirings", fresh) if fresh else []
        leading = nearest_first([best, *found])[0]
        if leading is best:
            break
        best = leading
    return found


def _refine_values(case: Case, bases: Sequence[Trial], tried: Sequence[Trial], attempt: Try) -> list[Trial]:
    """Around the value of each base, closer step by step, and from the best so far."""
    found: list[Trial] = []
    names = {one.hypothesis.name for one in tried}
    for base in bases:
        best = base
        for step in range(_HALVINGS):
            fresh = [item for item in _next_values(case, best.hypothesis, step) if item.name not in names]
            names |= {item.name for item in fresh}
            trials = attempt("finer values", fresh) if fresh else []
            found += trials
            best = nearest_first([best, *trials])[0]
        fresh = [item for item in _round_values(case, base, [*tried, *found], best) if item.name not in names]
        names |= {item.name for item in fresh}
        found += attempt("round values", fresh) if fresh else []
    return found


def _round_values(case: Case, base: Trial, tried: Sequence[Trial], best: Trial) -> list[Hypothesis]:
    """The roundest values between those that explain the server about as well as the best: people wrote a round one.

    They are said from the base, so that they are as likely beforehand as the first step away from it.
    """
    found = []
    for fault in best.hypothesis.variant.faults[len(case.served.faults) :]:
        alike = [number for one in tried if (number := _number_as_good(one, fault, best)) is not None]
        number = number_in(fault.kind, fault.value)
        if number is not None and alike:
            text = rounded(fault.kind, min(*alike, number), number, max(*alike, number))
            item = with_value(case, base.hypothesis, fault.kind, put_number(fault.kind, fault.value, text))
            found += [item] if item is not None else []
    return found


def _number_as_good(one: Trial, fault: Fault, best: Trial) -> float | None:
    """The number of a trial's value of this kind, where it is not clearly worse than the best one."""
    if one.hypothesis.kind != best.hypothesis.kind or one.scored.nearness < best.scored.nearness - AS_GOOD:
        return None
    value = next((other.value for other in one.hypothesis.variant.faults if other.kind == fault.kind), "")
    return number_in(fault.kind, value) if value else None


def _next_values(case: Case, hypothesis: Hypothesis, step: int) -> list[Hypothesis]:
    """The neighbours of a hypothesis in each of its values."""
    given = hypothesis.variant.faults[len(case.served.faults) :]
    proposed = [
        with_value(case, hypothesis, fault.kind, value)
        for fault in given
        for value in neighbours(fault.kind, fault.value, step)
    ]
    return [item for item in proposed if item is not None]
