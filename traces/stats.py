"""How a trace's requests are spread: sizes by category, and what their server accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from replay.traces.parts import NO_CATEGORY
from replay.traces.reader import Trace
from replay.traces.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Spread:
    """Tokens of prompts or outputs: how many in all, and of one request the fewest, the median and the most."""

    total: int
    fewest: int
    median: float
    most: int


@dataclass(frozen=True, slots=True)
class CategoryStats:
    """Requests of one category. ``observed_rounds`` and ``observed_accepted`` are sums of the server's histograms."""

    name: str
    requests: int
    prompt_tokens: Spread
    output_tokens: Spread
    observed_requests: int
    observed_rounds: int
    observed_accepted: int

    @property
    def observed_accept_length(self) -> float | None:
        """1 + accepted / rounds, as the server counted; None where it counted nothing."""
        return 1 + self.observed_accepted / self.observed_rounds if self.observed_rounds else None


@dataclass(frozen=True, slots=True)
class TraceStats:
    """A trace's requests, all together (called ``all``) and by category in the order of their first requests."""

    path: str
    state: str
    all: CategoryStats
    categories: tuple[CategoryStats, ...]


def trace_stats(trace: Trace) -> TraceStats:
    """Counted from the request table alone. A trace without requests has zeros."""
    members: dict[str, list[RequestRecord]] = {}
    for record in trace.records:
        members.setdefault(record.category or NO_CATEGORY, []).append(record)
    apart = tuple(_stats(name, records) for name, records in members.items())
    return TraceStats(str(trace.path), trace.header.state, _stats("all", trace.records), apart)


def _stats(name: str, records: Sequence[RequestRecord]) -> CategoryStats:
    histograms = [record.server_histogram for record in records if record.server_histogram]
    return CategoryStats(
        name=name,
        requests=len(records),
        prompt_tokens=_spread([record.prompt_tokens for record in records]),
        output_tokens=_spread([record.output_tokens for record in records]),
        observed_requests=len(histograms),
        observed_rounds=sum(map(sum, histograms)),
        observed_accepted=sum(place * count for counts in histograms for place, count in enumerate(counts)),
    )


def _spread(numbers: Sequence[int]) -> Spread:
    if not numbers:
        return Spread(0, 0, 0.0, 0)
    return Spread(sum(numbers), min(numbers), float(median(numbers)), max(numbers))
