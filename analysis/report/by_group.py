"""The accept length apart by category or by trace: each group's requests by themselves, each variant in each group."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from replay.analysis import wording
from replay.analysis.bootstrap import FEW_REQUESTS
from replay.analysis.json_document import JsonObject, interval_json
from replay.analysis.summary import VariantSummary, summarise
from replay.analysis.tables import Fitted, column
from replay.errors import UsageError
from replay.printable import one_line
from replay.traces.fields import show
from replay.traces.parts import NO_CATEGORY
from replay.traces.rounds import RequestInfo, Rounds, check_are_rounds
from replay.traces.rounds_sets import keep_requests

if TYPE_CHECKING:
    from rich.console import RenderableType

CATEGORY, TRACE = "category", "trace"
_LEAST = 5  # requests of an interval that is shown
_MOST_NAME = 60  # characters of a group's name


@dataclass(frozen=True, slots=True)
class Group:
    """The requests of one category or trace, and every variant's summary over them alone."""

    name: str
    requests: int
    summaries: tuple[VariantSummary, ...]


def summarise_by(rounds: Rounds, what: str) -> tuple[Group, ...]:
    """One group for each category or trace, in the order of their first requests.

    Raises UsageError for another word than these, TraceError for rounds from before sums by request.
    """
    check_are_rounds("rounds", rounds)
    if what not in (CATEGORY, TRACE):
        raise UsageError(
            f"{show(what)} was asked for, requests are told apart by {CATEGORY} or {TRACE}; type one of them"
        )
    members: dict[str, set[str]] = {}
    for request in rounds.requests:
        members.setdefault(_group(rounds, request, what), set()).add(request.request_id)
    return tuple(Group(name, len(ids), tuple(summarise(keep_requests(rounds, ids)))) for name, ids in members.items())


def _group(rounds: Rounds, request: RequestInfo, what: str) -> str:
    """Its category or its trace; of rounds of one trace the name of its folder."""
    if what == CATEGORY:
        return request.category or NO_CATEGORY
    return request.trace or PurePath(str(rounds.trace.get("path") or "")).name or NO_CATEGORY


def groups_json(groups: Sequence[Group]) -> list[JsonObject]:
    """One object for each group, with the counts of each variant."""
    return [
        {"name": group.name, "requests": group.requests, "variants": [_counts(row) for row in group.summaries]}
        for group in groups
    ]


def _counts(row: VariantSummary) -> JsonObject:
    return {
        "name": row.name, "rounds": row.rounds, "drafted": row.drafted, "accepted": row.accepted,
        "accept_length": row.accept_length, "accept_length_ci95": interval_json(row.accept_length_ci95),
    }  # fmt: skip


def render_groups(groups: Sequence[Group], what: str, *, joined: bool = False) -> "RenderableType":
    """A row for each variant of each group, variants of one group together.

    ``joined``: of several files, which the names of the variants begin with.
    """
    from rich.console import Group as Together
    from rich.text import Text

    rows = [(group, row) for group in groups for row in group.summaries]
    names = [one_line(group.name, _MOST_NAME) for group, _ in rows]
    firsts = ["" if before == name else name for before, name in zip([None, *names], names, strict=False)]
    facts = (wording.joined if joined else wording.varying)(groups[0].summaries) if groups else ()
    several = bool(groups) and len(groups[0].summaries) > 1
    labels = tuple(f"{name} {row.name}" for name, (_, row) in zip(names, rows, strict=True))
    titles = [column(what, firsts, left=True)]
    titles += [column("variant", [wording.label(row, facts) for _, row in rows], left=True)] * several
    numbers = (
        column("accept\nlength", [wording.decimal(row.accept_length) for _, row in rows]),
        column("95 %\ninterval", [_interval(row) for _, row in rows]),
        column("accept\nrate", [wording.percent(row.accept_rate) for _, row in rows]),
        column("rounds", [wording.count(row.rounds) for _, row in rows]),
        column("requests", [wording.count(group.requests) for group, _ in rows]),
    )
    table = Fitted(tuple(titles), (numbers,), labels)
    few = any(group.requests < FEW_REQUESTS for group in groups)
    legend = f"an interval from fewer than {FEW_REQUESTS} requests is often too narrow, below {_LEAST} none is shown"
    return Together(Text(), Text(f"By {what}", style="bold"), table, *([Text(legend, style="dim")] if few else []))


def _interval(row: VariantSummary) -> str:
    return wording.interval(row.accept_length_ci95) if row.played_requests >= _LEAST else wording.NOTHING
