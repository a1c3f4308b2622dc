"""Trials: hypotheses replayed, a few at a time, and how well each explains what was observed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replay.analysis.counts import Counts, per_request
from replay.analysis.diagnosis.evidence import (
    DRAFTED,
    LENGTH,
    Evidence,
    RoundDraft,
    RoundKey,
    accepted_evidence,
    by_anchor,
    drafted_evidence,
    histogram_evidence,
    length_evidence,
)
from replay.analysis.diagnosis.scored import Scored
from replay.analysis.summary import VariantSummary, summarise
from replay.diagnosis.case import Case
from replay.diagnosis.feed import held_against_feed
from replay.diagnosis.hypotheses import Hypothesis, drafts_noise
from replay.diagnosis.observed import count_by_request
from replay.simulator.simulation import simulate
from replay.traces.rounds import HEALTHY_NAME

if TYPE_CHECKING:
    import polars as pl

    from replay.traces.rounds import Rounds

FINALISTS = 6
# Of these single faults every two are tried as a pair.
_PAIRED = 5


@dataclass(frozen=True, slots=True)
class Trying:
    """``done`` of ``total`` hypotheses of this stage replayed."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Trial:
    """A hypothesis that was replayed and its evidence; ``counts`` of its rounds [requests, 4], and of finalists what
    they draft in the server's own rounds."""

    hypothesis: Hypothesis
    scored: Scored
    counts: Counts
    drafts: Mapping[RoundKey, RoundDraft]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong in it."""
        return self.hypothesis.kind == HEALTHY_NAME


# ---- replaying ----


def run_trials(
    case: Case, tell: Callable[[Trying], None], stage: str, hypotheses: Sequence[Hypothesis], *, whole: bool = False
) -> list[Trial]:
    """Every hypothesis with its evidence, in the given order, on the first rounds or requests, or on the ``whole``."""
    found: dict[str, Trial] = {}
    for batch in _batches(hypotheses):
        found |= {trial.hypothesis.name: trial for trial in _run_batch(case, batch, whole)}
        tell(Trying(stage, len(found), len(hypotheses)))
    return [found[item.name] for item in hypotheses]


def own_walks(case: Case, hypotheses: Sequence[Hypothesis]) -> "dict[str, tuple[VariantSummary, Rounds]]":
    """What each of them would do by itself, over the whole trace."""
    found = {}
    for batch in _batches(hypotheses):
        variants = [item.variant for item in batch]
        rounds = simulate(case.trace, {case.served.draft: case.checkpoint}, variants, served_products=False)
        for item, summary in zip(batch, summarise(rounds), strict=True):
            found[item.name] = (summary, rounds)
    return found


def _batches(hypotheses: Sequence[Hypothesis]) -> Iterator[list[Hypothesis]]:
    """Those that share weights at once, the others one by one, so that few copies of the head are in memory."""
    shared = [item for item in hypotheses if not item.changes_weights]
    if shared:
        yield shared
    yield from ([item] for item in hypotheses if item.changes_weights)


def _run_batch(case: Case, batch: Sequence[Hypothesis], whole: bool) -> Iterator[Trial]:
    seen = case.observation
    served = seen.rounds if whole else seen.screening_rounds
    rounds = simulate(
        case.trace,
        {case.served.draft: case.checkpoint},
        [item.variant for item in batch],
        follow=served,
        only=None if whole or seen.kind == DRAFTED else seen.screening_requests,
        served_products=whole,
    )
    counts = per_request(rounds)
    for item, info in zip(batch, rounds.variants, strict=True):
        table = rounds.table.filter(rounds.table["variant"] == info.name)
        evidence = _evidence(case, item, table, counts[info.name], served)
        drafts = by_anchor(table) if whole and seen.kind == DRAFTED else {}
        yield Trial(item, _scored(case, item, evidence), counts[info.name], drafts)


def _evidence(
    case: Case, item: Hypothesis, replayed: "pl.DataFrame", counts: Counts, served: "pl.DataFrame | None"
) -> Evidence:
    """``replayed`` rounds, of ``counts``, held against the ``served`` ones, or against what else was observed."""
    seen, steps = case.observation, case.served.steps
    if seen.given is not None:
        return length_evidence(counts, seen.given.accept_length, seen.given.rounds)
    if served is None:
        return histogram_evidence(count_by_request(replayed, steps), seen.histograms, steps)
    compare = accepted_evidence if drafts_noise(item, case.checkpoint) else drafted_evidence
    return compare(by_anchor(replayed), by_anchor(served), steps)


def _scored(case: Case, item: Hypothesis, evidence: Evidence) -> Scored:
    contradicted, shown = held_against_feed(case, item)
    return Scored(
        item.name, item.kind, item.value, item.log_prior, evidence, contradicted=contradicted, borne_out=shown
    )


# ---- choosing ----


def to_pair(case: Case, trials: Sequence[Trial]) -> list[Hypothesis]:
    """The single faults that are likely to be half of the story; none where the healthy server fits and is likeliest.

    Noise explains every round a little, and leaves no room for a second cause.
    """
    likeliest = likeliest_first(trials)[0]
    if likeliest.is_healthy and likeliest.scored.fits:
        return []
    told = [one for one in trials if not drafts_noise(one.hypothesis, case.checkpoint)]
    return [one.hypothesis for one in likeliest_first(told)[:_PAIRED]]


def to_finish(trials: Sequence[Trial]) -> list[Hypothesis]:
    """The healthy server, the likeliest, and those that accept most."""
    likeliest = likeliest_first(trials)[:FINALISTS]
    most = sorted(trials, key=lambda one: one.scored.evidence.accept_length, reverse=True)
    near = [one for one in most if one.scored.evidence.accept_length >= 0.97 * most[0].scored.evidence.accept_length]
    most = [*most[:2], *sorted(near, key=lambda one: one.scored.log_prior, reverse=True)[:3]]
    return distinct([one.hypothesis for one in (healthy(trials), *likeliest, *most)])


def likeliest_first(trials: Sequence[Trial]) -> list[Trial]:
    """By what is known of each alone, near ties counted in full."""
    return sorted(trials, key=lambda one: one.scored.log_posterior, reverse=True)


def distinct(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Each name once, where it stands first."""
    return list({item.name: item for item in hypotheses}.values())


def healthy(trials: Sequence[Trial]) -> Trial:
    """The one in which nothing is wrong."""
    return next(one for one in trials if one.is_healthy)


def drawn_out(one: Scored, screened: Scored, whole: Scored) -> Scored:
    """A hypothesis that was only screened, its likelihood drawn out to as many rounds as the finalists had.

    The rounds and how many agree stay those that were compared; ``screened`` and ``whole`` are the healthy server's.
    """
    if one.evidence.kind == LENGTH or not screened.evidence.rounds:
        return one
    scale = whole.evidence.rounds / screened.evidence.rounds
    if scale == 1:
        return one
    log_likelihood = one.evidence.log_likelihood * scale
    return replace(one, evidence=replace(one.evidence, log_likelihood=log_likelihood, agrees_R=None, nats_R=None))
