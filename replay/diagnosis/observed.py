"""What was observed of a server: its rounds, its histograms by request, or one accept length from elsewhere."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay.analysis.diagnosis.evidence import DRAFTED, HISTOGRAM, LENGTH, OUTLIER_ROUNDS
from replay.capture.observed_number import refuse_beyond
from replay.errors import TraceError, UsageError
from replay.traces.reader import Trace

if TYPE_CHECKING:
    import polars as pl

    from replay.capture.observed_number import Observed

FINAL_ROUNDS = 1200  # served rounds on which the likeliest hypotheses are tried
SCREENING_TOKENS = 2500  # output tokens, where no rounds were recorded


@dataclass(frozen=True, slots=True)
class Observation:
    """What a server showed, in the best ``kind`` that there is (analysis/diagnosis/evidence.py).

    ``rounds`` (``drafted`` only) are those that finalists are held against; without rounds hypotheses are screened on
    ``screening_requests``. ``histograms`` [steps + 1] count all rounds of each request by accepted tokens; ``given`` is
    the accept length from elsewhere (``length`` only). ``discordant`` is the share of rounds that rounding may set
    apart from a replay's (``histogram`` only).
    """

    kind: str
    screening_requests: frozenset[str]
    histograms: Mapping[str, Sequence[int]]
    rounds: "pl.DataFrame | None" = None
    given: "Observed | None" = None
    discordant: float = OUTLIER_ROUNDS

    @property
    def accepted(self) -> float | dict[str, list[int]]:
        """What the ladder ends at: an accept length, or rounds by accepted tokens of each request."""
        if self.given is not None:
            return self.given.accept_length
        return {name: list(counts) for name, counts in self.histograms.items()}


def observe(trace: Trace, steps: int, given: "Observed | None") -> Observation:
    """What was ``given`` from elsewhere, else what the trace's own server did in ``steps`` steps.

    Raises TraceError where there is nothing, UsageError for an accept length that ``steps`` cannot give.
    """
    histograms = {item.request_id: item.server_histogram for item in trace.records if item.server_histogram}
    told = histograms.keys() if given is None and histograms else {item.request_id for item in trace.records}
    some = frozenset(_first_requests(trace, SCREENING_TOKENS, told))
    if given is not None:
        _check_steps(given, steps)
        return Observation(LENGTH, some, {}, given=given)
    rounds = trace.served_rounds()
    if len(rounds):
        return Observation(DRAFTED, some, count_by_request(rounds, steps), first_rounds(trace, rounds, FINAL_ROUNDS))
    if not histograms:
        raise TraceError(
            f"{trace.path} says nothing of what a server accepted; give --observed with an accept length or "
            "a file that has one, or capture from a server that `replay serve` started"
        )
    return Observation(HISTOGRAM, some, histograms)


def count_by_request(rounds: "pl.DataFrame", steps: int) -> dict[str, list[int]]:
    """Rounds by accepted tokens [steps + 1] of each request."""
    accepted: dict[str, Counter[int]] = {}
    for request, number in rounds.select("request_id", "accepted").iter_rows():
        accepted.setdefault(request, Counter())[number] += 1
    return {request: [counted[number] for number in range(steps + 1)] for request, counted in accepted.items()}


def _check_steps(given: "Observed", steps: int) -> None:
    refuse_beyond(given, steps)
    if given.num_steps is not None and given.num_steps != steps:
        raise UsageError(
            f"{given.source} says {given.num_steps} steps, {steps} are replayed; type --steps {given.num_steps}"
        )


def first_rounds(trace: Trace, rounds: "pl.DataFrame", most: int) -> "pl.DataFrame":
    """Whole requests of the served rounds, in trace order, up to about ``most`` rounds."""
    counts = dict(rounds.group_by("request_id").len().iter_rows())
    kept: list[str] = []
    for record in trace.records:
        if sum(counts[name] for name in kept) >= most:
            break
        if record.request_id in counts:
            kept.append(record.request_id)
    return rounds.filter(rounds["request_id"].is_in(kept))


def _first_requests(trace: Trace, most: int, told: Container[str]) -> set[str]:
    """Requests of ``told`` in trace order up to about ``most`` output tokens, and at least two."""
    kept: set[str] = set()
    total = 0
    for record in trace.records:
        if total >= most and len(kept) > 1:
            break
        if record.request_id not in told:
            continue
        kept.add(record.request_id)
        total += record.output_tokens
    return kept
