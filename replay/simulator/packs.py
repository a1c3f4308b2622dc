"""A pack of requests under groups of variants: what every replay does, in this process or in a worker."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.product_sizes import served_spans
from replay.drafting.rows import Span
from replay.errors import UsageError
from replay.simulator.batches import Batches
from replay.simulator.groups import Group
from replay.simulator.inputs import FollowedRounds
from replay.simulator.play import replay_stems
from replay.simulator.results import Tally
from replay.simulator.rounds_table import RoundsTable
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import RequestRows, Trace
from replay.verify.estimator import Estimator

if TYPE_CHECKING:
    import polars as pl


def replay_pack(
    groups: Sequence[Group],
    pack: Sequence[RequestRows],
    led: Mapping[str, FollowedRounds] | None,
    trace: Trace,
    spans: Mapping[str, Sequence[Span]],
    batches: Batches | None,
    tallies: Sequence[Tally],
    table: RoundsTable,
) -> Iterator[Group]:
    """One pack under all groups; each is given when it is done."""
    leads = [FollowedRounds() if led is None else led[rows.request_id] for rows in pack]
    stems = [list(alike) for _, alike in groupby(groups, key=lambda group: group.stem)]
    return replay_stems(stems, pack, leads, trace, spans, batches, tallies, table)


def check_follow(follow: "pl.DataFrame | None", sampled: Iterable[bool]) -> None:
    """Raises UsageError where rounds are followed by a head that samples its drafts."""
    if follow is not None and any(sampled):
        raise UsageError("rounds of a sampled draft are drawn, and follow no other run's; type --verify target-only")


def spans_of(groups: Sequence[Group], trace: Trace) -> Mapping[str, Sequence[Span]]:
    """By request, which rows a server ran together; nothing where products run as large as they fit."""
    exact = any(group.head.execution.product_rows is not None for group in groups)
    crosses = any(group.crosses for group in groups)
    return served_spans((trace.whole if crosses else trace).served_rounds()) if exact else {}


def estimator_of(variant: ResolvedVariant, checkpoint: Checkpoint, trace: Trace) -> Estimator | None:
    """What works out the variant's expected rounds; None under the greedy rule."""
    if variant.verify.name == "greedy":
        return None
    return Estimator(variant.verify, trace, variant.steps, draft_vocab_size=checkpoint.config.draft_vocab_size)


def notes_of(group: Group) -> tuple[str, ...]:
    """What is to be said of the group's head."""
    return (*group.head.notes, *group.head.emulation.notes())
