"""From trials to a verdict with advice: what accepts more, what to type, where to look next."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from replay.analysis.diagnosis.breakdown import limits, separate, strata
from replay.analysis.diagnosis.evidence import LENGTH, accepted_gain, by_anchor, length_gain
from replay.analysis.diagnosis.scored import Scored
from replay.analysis.diagnosis.verdict import Diagnosis, Gain, Stratum, judge
from replay.analysis.summary import VariantSummary
from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.case import Case
from replay.diagnosis.hypotheses import WIRED_OTHERWISE, Hypothesis
from replay.diagnosis.trials import Trial, drawn_out, healthy, likeliest_first, own_walks
from replay.engines.wiring import parse_wiring
from replay.errors import TraceError
from replay.faults.remedies import remedy
from replay.simulator.binding import bind
from replay.traces.reader import Trace
from replay.traces.rounds import HEALTHY_NAME

if TYPE_CHECKING:
    from replay.traces.rounds import Rounds

OneOf = TypeVar("OneOf", Scored, Gain)
# Relative half width of the replay's interval beyond which an observed accept length says nothing.
_WIDEST = 0.2


def conclude(case: Case, tried: Sequence[Trial], final: Sequence[Trial]) -> Diagnosis:
    """The verdict on everything that was tried, ``final`` of it on more rounds, and what to do about it.

    Raises TraceError where the trace is too small to hold one accept length against it.
    """
    gains = _gains(case, final)
    walks = own_walks(case, _worth_a_walk(final, gains))
    summary, rounds = walks[HEALTHY_NAME]
    if case.observation.kind == LENGTH:
        _check_width(summary)
    found = judge(
        _scores(tried, final),
        gains=gains,
        first_rate=next(iter(summary.position_conditional), math.nan),
        stated=case.trained is not None,
    )
    advised = _advise(case, found, gains, {name: walk.accept_length for name, (walk, _) in walks.items()})
    return replace(
        advised,
        separate=tuple(separate(found, case.served.steps)),
        limits=_limits(case, rounds, summary.name) if found.verdict == "head" else (),
        strata=_strata(case, healthy(final), rounds) if found.verdict == "engine" else (),
        feeding=case.feeding,
    )


def _scores(tried: Sequence[Trial], final: Sequence[Trial]) -> list[Scored]:
    """Of each hypothesis its last score, as of so many rounds as the finalists had."""
    whole = {one.hypothesis.name: one.scored for one in final}
    ends = healthy(tried).scored, healthy(final).scored
    return [whole.get(one.hypothesis.name) or drawn_out(one.scored, *ends) for one in tried]


def _worth_a_walk(final: Sequence[Trial], gains: Sequence[Gain]) -> list[Hypothesis]:
    """Those whose own accept length is shown: the healthy server, the likeliest three, the best gains."""
    best = [one.hypothesis.name for one in likeliest_first(final)[:3]]
    better = [gain.name for gain in (*gains[:1], *[gain for gain in gains if gain.tied][:4])]
    return [one.hypothesis for one in final if one.hypothesis.name in (HEALTHY_NAME, *best, *better)]


def _check_width(summary: VariantSummary) -> None:
    """Refuse to hold one number against a replay that leaves its own open. Raises TraceError."""
    low, high = summary.accept_length_ci95
    if not high - low <= 2 * _WIDEST * summary.accept_length:
        raise TraceError(
            f"{summary.rounds} rounds of {summary.played_requests} requests leave the replay's accept length open "
            f"between {low:.2f} and {high:.2f}, too wide to hold an observed one against; capture more prompts"
        )


# ---- what accepts more ----


def _gains(case: Case, final: Sequence[Trial]) -> list[Gain]:
    """Finalists that accept more than what was served, at the same anchors where these are known, best first."""
    served = healthy(final)
    found: dict[str, tuple[Gain, Trial]] = {}
    for one in final:
        if one.is_healthy or (case.trained is not None and one.hypothesis.value != str(case.trained)):
            continue
        gain, low, high = _over(one, served)
        if gain > 0:
            item = one.hypothesis
            made = Gain(item.name, item.kind, _says(case, item), gain, (low, high), log_prior=item.log_prior)
            found.setdefault(made.label, (made, one))  # several names of one wiring are one gain
    ordered = sorted(found.values(), key=lambda pair: -pair[0].gain)
    return [replace(made, tied=_over(ordered[0][1], one)[1] <= 0) for made, one in ordered]


def _over(one: Trial, other: Trial) -> tuple[float, float, float]:
    """How much more the one accepts than the other, with its interval."""
    return accepted_gain(one.drafts, other.drafts) if one.drafts else length_gain(one.counts, other.counts)


def _says(case: Case, hypothesis: Hypothesis) -> str:
    """Its value, of a layer-id hypothesis the taps that it feeds, however its value says it."""
    if hypothesis.kind != WIRED_OTHERWISE:
        return hypothesis.value
    return str(bind(hypothesis.variant, case.checkpoint, case.trace).wiring)


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
    return remedy(name, wiring, model_type=target.model_type, layers=target.layers)


# ---- where to look ----


def _limits(case: Case, rounds: "Rounds", variant: str) -> tuple[str, ...]:
    return tuple(limits(rounds, variant, unknown_share=_unknown_share(case.trace, case.checkpoint)))


def _strata(case: Case, served: Trial, rounds: "Rounds") -> tuple[Stratum, ...]:
    if case.observation.rounds is None:
        return ()
    cached = {item.request_id: item.server_cached_tokens or 0 for item in case.trace.records}
    return tuple(strata(served.drafts, by_anchor(case.observation.rounds), rounds.requests, cached))


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
