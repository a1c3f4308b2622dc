"""From trials to a verdict with advice: what to type, what it gains, where to look next."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from replay.analysis.diagnosis.breakdown import Profile, profile, separate
from replay.analysis.diagnosis.counted import taken_by_any_cause, taken_likelihood
from replay.analysis.diagnosis.gain import Gain, RoundDraft, RoundKey, accepted_gain, by_anchor
from replay.analysis.diagnosis.limits import limits
from replay.analysis.diagnosis.scored import AS_GOOD, Scored, rank
from replay.analysis.diagnosis.verdict import Diagnosis, judge, without_name
from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.case import Case
from replay.diagnosis.elsewhere import (
    agreement_of_all,
    few_doubts,
    follow_elsewhere,
    held_doubts,
    judge_elsewhere,
    judge_unseen,
    judge_walks,
    requests_of_all,
)
from replay.diagnosis.hypotheses import Hypothesis, nothing_wrong, rewired, singles
from replay.diagnosis.plausible import implausible
from replay.diagnosis.progress import Tell
from replay.diagnosis.reference import Reference
from replay.diagnosis.search import unknowable
from replay.diagnosis.trials import (
    Trial,
    distinct,
    drawn_out,
    healthy,
    own_drafts,
    own_walks,
    run_trials,
)
from replay.diagnosis.value_search import number_in
from replay.diagnosis.views import round_views
from replay.engines.wiring import parse_wiring
from replay.errors import TraceError
from replay.faults.remedies import remedy
from replay.printable import counted
from replay.traces.reader import Trace
from replay.traces.rounds import HEALTHY_NAME

if TYPE_CHECKING:
    from replay.traces.rounds import Rounds

OneOf = TypeVar("OneOf", Scored, Gain)
# Relative half width of the replay's interval beyond which an observed accept length says nothing.
_WIDEST = 0.2


def conclude(
    case: Case,
    reference: Reference | None,
    tried: Sequence[Trial],
    final: Sequence[Trial],
    gains: Sequence[Gain],
    compared: int,
    tell: Tell,
) -> Diagnosis:
    """The verdict on everything that was tried, ``final`` of it on more rounds, and what to do about it.

    ``gains`` are the best of so many variants that were ``compared``.
    """
    mended = _mended(case, tell)
    summary, rounds = own_walks(case, [nothing_wrong(case)], tell)[HEALTHY_NAME]
    scores = _scores(tried, final)
    if mended:
        length = 1 + sum(draft.accepted for draft in mended.values()) / len(mended)
        scores[0] = replace(scores[0], evidence=replace(scores[0].evidence, accept_length=length))
    first_rate = next(iter(summary.position_conditional), math.nan)
    compared = 1 if case.trained is not None else compared
    found = judge(scores, gains=gains, compared=compared, first_rate=first_rate)
    odd = implausible(case.observation, case.served.steps, summary.accept_length)
    if odd is not None and found.verdict not in ("healthy", "head"):
        found = without_name(found, odd)
    elsewhere = None if reference is None else follow_elsewhere(case, reference)
    if reference is not None and elsewhere is not None:
        found = judge_elsewhere(found, reference, elsewhere)
    found = judge_walks(found, case, rounds, summary)
    if found.verdict == "engine" and reference is not None:
        others, taken_by_any = _unknowable(case, reference, tried, final, tell)
        ranked, unknown = rank([*scores, *others], taken_by_any=taken_by_any)
        found = replace(found, ranked=tuple(ranked), unknown=unknown)  # none of them is ever named
    found = judge_unseen(found, case)
    lengths, walked = _lengths(case, _worth_a_walk(case, tried, found), summary.accept_length, tell)
    advised = _advise(case, found, gains, lengths)
    named = [*found.undecided, *filter(None, [found.named])]
    open_gains = bool({gain.label for gain in found.gains} & {*named})
    return replace(
        advised,
        doubts=(*few_doubts(case), *case.every.doubts, *held_doubts(case, walked)),
        separate=tuple(
            separate(
                case.observation.kind, found.verdict, named if found.undecided else (),
                gains=open_gains, steps=case.served.steps,
            )
        ),
        limits=_limits(case, rounds, summary.name) if found.verdict == "head" else (),
        profile=_profile(case, reference) if found.verdict == "engine" and reference is not None else None,
        feeding=case.feeding,
        agreement=agreement_of_all(case, reference, elsewhere),
        mending=_mending(case, found, mended),
        values=_values(found),
    )  # fmt: skip


def _mended(case: Case, tell: Tell) -> dict[RoundKey, RoundDraft]:
    """What a healthy server would draft at the anchors of the server's own rounds; empty where these are not known."""
    rounds = case.observation.rounds
    return {} if rounds is None else own_drafts(case, [nothing_wrong(case)], rounds, tell)[HEALTHY_NAME]


def _scores(tried: Sequence[Trial], final: Sequence[Trial]) -> list[Scored]:
    """Of each hypothesis its last score, as of so many rounds as the finalists had."""
    whole = {one.hypothesis.name: one.scored for one in final}
    ends = healthy(tried).scored, healthy(final).scored
    return [whole.get(one.hypothesis.name) or drawn_out(one.scored, *ends) for one in tried]


def _unknowable(
    case: Case, reference: Reference, tried: Sequence[Trial], final: Sequence[Trial], tell: Tell
) -> tuple[list[Scored], float]:
    """The hypotheses whose drafts nobody can know, with how well they say how many tokens are taken; and how well any
    cause at all says it."""
    items = unknowable(case)
    trials = run_trials(case, reference, tell, "what nobody can know", items)
    drafts = own_drafts(case, items, reference.screening)
    accepted = reference.screening["accepted"].to_list()
    steps, ends = case.served.steps, (healthy(tried).scored, healthy(final).scored)
    scores = []
    for one in trials:
        ours = [draft.accepted for draft in drafts[one.hypothesis.name].values()]
        taken = taken_likelihood(ours, accepted, steps)
        scores.append(replace(drawn_out(one.scored, *ends), taken=taken))
    return scores, taken_by_any_cause(accepted, steps)


def _mending(case: Case, found: Diagnosis, mended: Mapping[RoundKey, RoundDraft]) -> tuple[float, float, float]:
    """What a server without the named fault accepts more in a round, at the same anchors, with its interval."""
    rounds = case.observation.rounds
    if found.verdict != "fault" or rounds is None or any(gain.label == found.named for gain in found.gains):
        return math.nan, math.nan, math.nan
    return accepted_gain(mended, by_anchor(rounds))


def _values(found: Diagnosis) -> tuple[str, str] | None:
    """The lowest and the highest value of the named kind that explains as well; None where it has no scale."""
    named = next((item for item in found.ranked if item.name == found.named), None)
    if named is None or number_in(named.kind, named.value) is None:
        return None
    told = {
        item.value: number
        for item in found.ranked
        if item.kind == named.kind and item.fits and item.log_posterior >= named.log_posterior - AS_GOOD
        if (number := number_in(item.kind, item.value)) is not None
    }
    return (min(told, key=lambda one: told[one]), max(told, key=lambda one: told[one])) if len(told) > 1 else None


def _profile(case: Case, reference: Reference) -> Profile:
    """Where the server parts from the healthy replay."""
    rounds = case.observation.rounds
    assert rounds is not None
    return profile(reference.healthy, reference.noise, round_views(case, rounds))


def _worth_a_walk(case: Case, tried: Sequence[Trial], found: Diagnosis) -> list[Hypothesis]:
    """Those whose own accept length is shown beside the healthy server's: what is named, else what comes nearest."""
    ranked = [item.name for item in found.ranked if item.kind != HEALTHY_NAME]
    names = {found.named, *[gain.name for gain in found.gains if gain.label == found.named]} - {None}
    names = names or set(ranked[:1])
    items = [item for item in distinct([*(one.hypothesis for one in tried), *singles(case)]) if item.name in names]
    # A wiring beside the best of these was only tried for what it accepts.
    left = [gain for gain in found.gains if gain.label == found.named and gain.name not in {one.name for one in items}]
    return items + [rewired(case, parse_wiring(gain.value), gain.log_prior) for gain in left]


def _lengths(
    case: Case, shown: Sequence[Hypothesis], healthy_length: float, tell: Tell
) -> tuple[dict[str, float], int]:
    """The accept lengths of what is ``shown`` and of the healthy server by themselves, all over the same requests; and
    how many these are.

    ``healthy_length`` is that of the healthy server over all requests.
    """
    items = [nothing_wrong(case), *shown]
    same = requests_of_all(case, [item.variant for item in items])
    if len(same) == len(case.every):
        items = list(shown)
    walks = own_walks(replace(case, every=same), items, tell)
    lengths = {name: walk.accept_length for name, (walk, _) in walks.items()}
    return {HEALTHY_NAME: healthy_length} | lengths, len(same)


def check_width(case: Case, tell: Tell) -> None:
    """Refuse to hold one number against a trace whose healthy replay leaves its own open. Raises TraceError.

    One replay tells, before the many that a search takes.
    """
    tried = replace(case, every=case.trace)  # the requests on which it is held against hypotheses
    summary, _ = own_walks(tried, [nothing_wrong(case)], tell)[HEALTHY_NAME]
    low, high = summary.accept_length_ci95
    if not high - low <= 2 * _WIDEST * summary.accept_length:
        spread = f" between {low:.2f} and {high:.2f}" if high >= low else ""  # one request has no interval
        fewer = len(case.trace) < len(case.every)
        mend = "record all taps of more requests (--taps-for)" if fewer else "capture more prompts"
        raise TraceError(
            f"{counted(summary.rounds, 'round')} of {counted(summary.played_requests, 'request')} leave the replay's "
            f"accept length open{spread}, too wide to hold an observed one against; {mend}"
        )


# ---- what to do ----


def _advise(case: Case, found: Diagnosis, gains: Sequence[Gain], lengths: Mapping[str, float]) -> Diagnosis:
    """With remedies, and the accept ``lengths`` that hypotheses have by themselves."""
    wirings = {gain.value for gain in gains}

    def advised(item: OneOf, name: str) -> OneOf:
        length = lengths.get(item.name, item.accept_length)
        return replace(item, accept_length=length, fix=_fix(case, item, name, wirings))

    ranked = tuple(advised(item, item.name) for item in found.ranked)
    better = tuple(advised(gain, gain.label) for gain in found.gains)
    named = next((item for item in ranked if item.name == found.named), None)
    as_other = next((gain for gain in better if gain.label == found.named), None)
    return replace(
        found,
        healthy=next(item for item in ranked if item.kind == HEALTHY_NAME),
        ranked=ranked,
        gains=better,
        expected=lengths[HEALTHY_NAME] if as_other is None else as_other.accept_length,
        fix=as_other.fix if as_other else named.fix if named else "",
    )


def _fix(case: Case, item: Scored | Gain, name: str, wirings: set[str]) -> str:
    """The remedy of a hypothesis; for one of ``wirings`` it is that wiring."""
    target = case.trace.header.target
    if item.kind == HEALTHY_NAME:
        return ""
    whole = item.value in wirings and "," in item.value
    wiring = parse_wiring(item.value, layers=target.layers) if whole else case.right_wiring
    blocks = case.checkpoint.config.block is not None
    return remedy(name, wiring, architecture=target.architecture, layers=target.layers, blocks=blocks)


# ---- where to look ----


def _limits(case: Case, rounds: "Rounds", variant: str) -> tuple[str, ...]:
    return tuple(limits(rounds, variant, unknown_share=_unknown_share(case.every, case.checkpoint)))


def _unknown_share(trace: Trace, checkpoint: Checkpoint) -> float:
    """Share of the output tokens that the head cannot draft."""
    import torch

    d2t_W = checkpoint.tensors.get("d2t")
    if d2t_W is None:
        return 0.0
    known_V = torch.zeros(checkpoint.config.vocab_size, dtype=torch.bool)
    known_V[torch.arange(len(d2t_W)) + d2t_W.long()] = True
    total = unknown = 0
    for index in range(len(trace.records)):
        rows = trace.read(index, ())
        output = rows.tokens[rows.prompt_tokens :]
        total += len(output)
        unknown += int((~known_V[output.clamp_max(len(known_V) - 1)]).sum())
    return unknown / total if total else 0.0
