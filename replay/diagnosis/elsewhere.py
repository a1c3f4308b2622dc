"""Beyond what hypotheses are tried on: the requests with fewer taps, and rows that are not exact.

A trace of version 2 may have the neighbours of the taps of its first requests alone (traces/SPEC.md). Hypotheses are
tried on these. What is then said of the server has to hold of the others as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from replay.analysis.bootstrap import FEW_REQUESTS
from replay.analysis.counts import per_request
from replay.analysis.diagnosis.counted import histogram_evidence, length_evidence
from replay.analysis.diagnosis.drafted import MEASURED
from replay.analysis.diagnosis.evidence import HISTOGRAM, LENGTH, outliers_allowed
from replay.analysis.diagnosis.verdict import Diagnosis, without_name
from replay.analysis.followed import Followed, agreement, join, judge_rounds
from replay.diagnosis.case import Case
from replay.diagnosis.hypotheses import unseen
from replay.diagnosis.observed import FINAL_ROUNDS, count_by_request, first_rounds
from replay.diagnosis.reference import Reference, follow
from replay.errors import WiringError
from replay.printable import counted
from replay.simulator.fit import PromptRowsError
from replay.simulator.held import requests_with_taps
from replay.simulator.variant import ResolvedVariant
from replay.traces.agreement import Agreement
from replay.traces.fields import some
from replay.traces.reader import Trace
from replay.traces.rounds import HEALTHY_NAME

if TYPE_CHECKING:
    from replay.analysis.summary import VariantSummary
    from replay.traces.rounds import Rounds

_FEW = 6  # requests of which one alone may decide a verdict


def requests_of_all(case: Case, variants: Sequence[ResolvedVariant]) -> Trace:
    """All requests on which each of these can be played: those that are tried, and others that have as much."""
    try:
        return requests_with_taps(case.every, variants, {case.served.draft: case.checkpoint})
    except PromptRowsError:
        return case.trace


def follow_elsewhere(case: Case, reference: Reference) -> Followed | None:
    """What was served along the server's rounds of the requests that lack taps; None where there are none of them, or
    where they lack what was served."""
    tried = {record.request_id for record in case.trace.records}
    rest = case.every.only([record.request_id for record in case.every.records if record.request_id not in tried])
    try:
        rest = rest.having(case.served.wiring.taps)
    except WiringError:
        return None
    rounds = rest.served_rounds()
    if not len(rounds):
        return None
    few = first_rounds(rest, rounds, FINAL_ROUNDS)
    return follow(replace(case, trace=rest, cache=None), [case.served], few, reference.scales)[0]


def judge_elsewhere(found: Diagnosis, reference: Reference, elsewhere: Followed) -> Diagnosis:
    """A server that is as configured has to be so in the other requests too."""
    unexplained = int(judge_rounds(elsewhere, reference.noise)[1].sum())
    if found.verdict not in ("healthy", "head") or unexplained <= outliers_allowed(elsewhere.rounds):
        return found
    return _unlike_the_rest(found, unexplained, elsewhere.rounds)


def judge_walks(found: Diagnosis, case: Case, rounds: "Rounds", walk: "VariantSummary") -> Diagnosis:
    """Where no drafts are known: what was observed held against the healthy ``walk`` of all requests, whose ``rounds``
    these are, and not only against the requests on which faults are tried."""
    if len(case.trace) == len(case.every) or case.observation.kind not in (LENGTH, HISTOGRAM):
        return found
    if case.observation.given is None:
        return _judge_histograms(found, case, rounds)
    counts, given = per_request(rounds)[walk.name], case.observation.given
    fits = length_evidence(counts, given.accept_length, given.rounds, case.served.steps).fits
    tried = found.healthy.evidence
    if fits == tried.fits:
        return found
    low, high = walk.accept_length_ci95
    why = (
        f"the observed accept length ({given.accept_length:.2f}) is {'' if tried.fits else 'not '}what the healthy "
        f"replay gives on the {counted(len(case.trace), 'request')} with the most taps, on which faults are tried "
        f"({tried.accept_length:.2f}), and it is {'' if fits else 'not '}what this gives on "
        f"{counted(walk.played_requests, 'request')} ({walk.accept_length:.2f}, {low:.2f} to {high:.2f}); record all "
        "taps of requests like those that were observed (--taps-for)"
    )
    left = without_name(found, why)
    undecided = tuple(dict.fromkeys((HEALTHY_NAME, *left.undecided))) if fits else left.undecided
    return replace(left, implausible=found.implausible, undecided=undecided)


def _judge_histograms(found: Diagnosis, case: Case, rounds: "Rounds") -> Diagnosis:
    """A server that is as configured has to be so in the other requests too."""
    tried, steps = {record.request_id for record in case.trace.records}, case.served.steps
    rest = {
        record.request_id: record.server_histogram
        for record in case.every.records
        if record.server_histogram and record.request_id not in tried
    }
    evidence = histogram_evidence(
        count_by_request(rounds.table, steps), rest, steps, discordant=case.observation.discordant
    )
    if found.verdict not in ("healthy", "head") or evidence.fits:
        return found
    return replace(_unlike_the_rest(found, evidence.unexplained, evidence.rounds), implausible=None)


def _unlike_the_rest(found: Diagnosis, unexplained: int, rounds: int) -> Diagnosis:
    return without_name(
        found,
        "the requests with the most taps show nothing wrong, and in the others rounding does not explain "
        f"{unexplained} of {counted(rounds, 'round')}; record all taps of these others too (--taps-for)",
    )


def judge_unseen(found: Diagnosis, case: Case) -> Diagnosis:
    """No fault of the table explains a server only where all of them were tried."""
    if found.verdict != "engine" or not (left_out := unseen(case)):
        return found
    why = (
        f"none of what could be tried explains the server, and {counted(len(left_out), 'likely fault')} could not be: "
        f"the trace has the last {case.trace.prompt_rows} rows of some prompts, and they see more "
        f"({some(left_out)}); capture again with more rows (--prompt-rows)"
    )
    return replace(without_name(found, why), implausible=None)


def agreement_of_all(case: Case, reference: Reference | None, elsewhere: Followed | None) -> Agreement | None:
    """The rounds of the healthy replay counted; None where none were told, or where rows are not exact."""
    if reference is None or _is_rounded(case):
        return None
    every = reference.healthy if elsewhere is None else join([reference.healthy, elsewhere])
    return agreement(every, reference.noise, MEASURED)


def _is_rounded(case: Case) -> bool:
    """Whether the draft was served rows that the trace has in fp8."""
    return not set(case.trace.rounded_taps).isdisjoint(case.served.wiring.taps)


def few_doubts(case: Case) -> Iterator[str]:
    """That few requests decide: what is odd about one of them may look like the server's fault."""
    rounds = case.observation.rounds
    told = len(case.trace.records) if rounds is None else rounds["request_id"].n_unique()
    if told < _FEW:
        yield (
            f"The verdict rests on {counted(told, 'request')}: what is special about them, as a loop in a text or one "
            f"kind of prompt, may look like a fault of the server. Record {FEW_REQUESTS} or more."
        )


def held_doubts(case: Case, walked: int) -> Iterator[str]:
    """What fewer taps, fewer rows of prompts and rows in fp8 mean for the verdict; accept lengths on own walks are of
    so many requests as are ``walked``."""
    tried, every = len(case.trace.records), len(case.every.records)
    if tried < every:
        served = (
            "and the observed accept length, whatever its prompts were, is held against these"
            if case.observation.kind == LENGTH
            else "and the served accept length is theirs"
        )
        yield (
            f"{tried} of {counted(every, 'request')} have the taps {', '.join(case.trace.taps)}: hypotheses are tried "
            f"on these, {served}. Accept lengths on their own walk are of {walked}."
        )
    if left_out := unseen(case):
        yield (
            f"Rows of prompts that the trace lacks keep {counted(len(left_out), 'likely fault')} ({some(left_out)}) "
            "from being tried."
        )
    if _is_rounded(case):
        yield (
            "What fp8 moves counts as rounding here: a fault that moves the drafts less than fp8 does is not seen, and "
            "a number format is told from another one only where it moves them more. What the draft was fed is "
            "compared in fp8 too."
        )
