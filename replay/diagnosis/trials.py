"""Trials: hypotheses replayed, a few at a time, and how well each explains what was observed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replay.analysis.counts import Counts, per_request
from replay.analysis.diagnosis.counted import histogram_evidence, length_evidence
from replay.analysis.diagnosis.drafted import followed_evidence
from replay.analysis.diagnosis.evidence import DRAFTED, Evidence, scale_up
from replay.analysis.diagnosis.gain import RoundDraft, RoundKey, by_anchor
from replay.analysis.diagnosis.scored import Scored
from replay.analysis.followed import Followed, Noise
from replay.analysis.summary import VariantSummary, summarise
from replay.diagnosis.case import Case
from replay.diagnosis.feed import held_against_feed
from replay.diagnosis.hypotheses import Hypothesis, drafts_noise
from replay.diagnosis.observed import count_by_request
from replay.diagnosis.progress import Tell, Told, Trying, say_nothing, within
from replay.diagnosis.reference import Reference, follow, noise_of
from replay.faults.table import Fault
from replay.simulator.cache import simulate_kept
from replay.traces.rounds import HEALTHY_NAME

if TYPE_CHECKING:
    import polars as pl

    from replay.traces.rounds import Rounds


# The extents to which hypotheses are tried.
GLANCE, SCREENING, WHOLE = "glance", "screening", "whole"
# How much more than the healthy replay rounding may move another one: a quantised cache, whose steps are 2^-4 where
# bf16 has 2^-9, turns a deviation d into about sqrt(d * step), sqrt(32) times as much.
_MORE_NOISE = 32**0.5


@dataclass(frozen=True, slots=True)
class Trial:
    """A hypothesis that was replayed and its evidence.

    ``followed`` is its replay along the server's drafts where these are known, ``counts`` [requests, 4] those of its
    own rounds where they are not.
    """

    hypothesis: Hypothesis
    scored: Scored
    followed: Followed | None = None
    counts: Counts | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong in it."""
        return self.hypothesis.kind == HEALTHY_NAME


def run_trials(
    case: Case,
    reference: Reference | None,
    tell: Tell,
    stage: str,
    hypotheses: Sequence[Hypothesis],
    *,
    extent: str = SCREENING,
) -> list[Trial]:
    """Every hypothesis with its evidence, in the given order, on the rounds or requests of an ``extent``.

    ``reference`` is there where the server's drafts are known.
    """
    found: dict[str, Trial] = {}
    for batch in _batches(hypotheses):
        told = within(tell, stage, len(found), len(batch), len(hypotheses))
        if reference:
            trials = _follow(case, reference, batch, extent, told)
        else:
            trials = _walk(case, batch, extent == WHOLE, told)
        found |= {trial.hypothesis.name: trial for trial in trials}
        tell(Trying(stage, len(found), len(hypotheses)))
    return [found[item.name] for item in hypotheses]


def own_walks(
    case: Case, hypotheses: Sequence[Hypothesis], tell: Tell = say_nothing
) -> "dict[str, tuple[VariantSummary, Rounds]]":
    """What each of them would do by itself, over all requests that have its taps."""
    found: dict[str, tuple[VariantSummary, Rounds]] = {}
    for batch in _batches(hypotheses):
        variants = [item.variant for item in batch]
        told = within(tell, "what it does by itself", len(found), len(batch), len(hypotheses))
        heads = {case.served.draft: case.checkpoint}
        rounds = simulate_kept(
            case.cache, case.every, heads, variants, served_products=False, workers=case.workers, on_event=told
        )
        for item, summary in zip(batch, summarise(rounds), strict=True):
            found[item.name] = (summary, rounds)
    return found


def own_drafts(
    case: Case, hypotheses: Sequence[Hypothesis], rounds: "pl.DataFrame", tell: Tell = say_nothing
) -> dict[str, dict[RoundKey, RoundDraft]]:
    """What each of them would draft, and how much of it the target takes, at the anchors of the server's ``rounds``."""
    found: dict[str, dict[RoundKey, RoundDraft]] = {}
    for batch in _batches(hypotheses):
        played = simulate_kept(
            case.cache,
            case.trace,
            {case.served.draft: case.checkpoint},
            [item.variant for item in batch],
            follow=rounds,
            served_products=False,
            workers=case.workers,
            on_event=within(tell, "at the server's anchors", len(found), len(batch), len(hypotheses)),
        )
        for item, info in zip(batch, played.variants, strict=True):
            found[item.name] = by_anchor(played.table.filter(played.table["variant"] == info.name))
    return found


def _batches(hypotheses: Sequence[Hypothesis]) -> Iterator[list[Hypothesis]]:
    """Those that share weights at once, so that few copies of the head are in memory."""
    shared: dict[tuple[Fault, ...], list[Hypothesis]] = {}
    for item in hypotheses:
        shared.setdefault(item.weights, []).append(item)
    yield from shared.values()


def _follow(case: Case, reference: Reference, batch: Sequence[Hypothesis], extent: str, told: Told) -> Iterator[Trial]:
    """Along the server's drafts. On the whole, what may be named is judged by its own noise, unless all is well."""
    rounds = {GLANCE: reference.glance, SCREENING: reference.screening, WHOLE: case.observation.rounds}[extent]
    assert rounds is not None
    whole = extent == WHOLE
    variants = [item.variant for item in batch]
    served = served_length(rounds)
    for item, followed in zip(
        batch,
        follow(case, variants, rounds, reference.scales, served_products=whole, on_event=told),
        strict=True,
    ):
        noise = reference.noise
        if whole and not reference.healthy_fits and item.kind != HEALTHY_NAME and _may_fit(followed, noise, served):
            noise = noise_of(case, item.variant, followed, rounds)
        evidence = followed_evidence(followed, noise, served)
        yield Trial(item, _scored(case, item, evidence), followed)


def _may_fit(followed: Followed, noise: Noise, served: float) -> bool:
    """Whether it would fit if rounding moved it far more than the healthy replay."""
    wide = replace(noise, largest=tuple(_MORE_NOISE * most for most in noise.largest))
    return followed_evidence(followed, wide, served).fits


def served_length(rounds: "pl.DataFrame") -> float:
    """Accept length of a server's rounds; nan without any."""
    return 1 + float(rounds["accepted"].sum()) / len(rounds) if len(rounds) else math.nan


def _walk(case: Case, batch: Sequence[Hypothesis], whole: bool, told: Told) -> Iterator[Trial]:
    """By itself, over the same text or another one."""
    seen, steps = case.observation, case.served.steps
    played = simulate_kept(
        case.cache,
        case.trace,
        {case.served.draft: case.checkpoint},
        [item.variant for item in batch],
        only=None if whole else seen.screening_requests,
        served_products=whole,
        workers=case.workers,
        on_event=told,
    )
    counts = per_request(played)
    for item, info in zip(batch, played.variants, strict=True):
        if seen.given is not None:
            evidence = length_evidence(counts[info.name], seen.given.accept_length, seen.given.rounds, steps)
        else:
            table = played.table.filter(played.table["variant"] == info.name)
            evidence = histogram_evidence(
                count_by_request(table, steps), seen.histograms, steps, discordant=seen.discordant
            )
        yield Trial(item, _scored(case, item, evidence), counts=counts[info.name])


def _scored(case: Case, item: Hypothesis, evidence: Evidence) -> Scored:
    contradicted, shown = held_against_feed(case, item)
    return Scored(
        item.name, item.kind, item.value, item.log_prior, evidence,
        contradicted=contradicted, borne_out=shown, unknowable=drafts_noise(item, case.checkpoint),
    )  # fmt: skip


# ---- choosing ----


def nearest_first(trials: Sequence[Trial]) -> list[Trial]:
    """By how near each is to the truth, whatever else may be wrong; those that explain all come first."""
    return sorted(trials, key=lambda one: max(one.scored.log_posterior, one.scored.nearness), reverse=True)


def distinct(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Each name once, where it stands first."""
    return list({item.name: item for item in hypotheses}.values())


def healthy(trials: Sequence[Trial]) -> Trial:
    """The one in which nothing is wrong."""
    return next(one for one in trials if one.is_healthy)


def left_behind(one: Trial, times: float) -> Trial:
    """A hypothesis that was only glanced at, its likelihoods as of so many ``times`` as many rounds."""
    evidence = replace(scale_up(one.scored.evidence, times), most=-1)  # it was not seen to fit
    return replace(one, scored=replace(one.scored, evidence=evidence))


def drawn_out(one: Scored, screened: Scored, whole: Scored) -> Scored:
    """A hypothesis that was only screened, its likelihoods drawn out to as many rounds as the finalists had.

    The rounds and how many agree stay those that were compared; ``screened`` and ``whole`` are the healthy server's.
    """
    if one.evidence.kind != DRAFTED or not screened.evidence.rounds:
        return one
    return replace(one, evidence=scale_up(one.evidence, whole.evidence.rounds / screened.evidence.rounds))
