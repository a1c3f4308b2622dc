"""What workers replay: a sweep cut into tasks, at the borders that one process has as well.

A task is one pack of requests (inputs.py) under some of the variants that share their first pass. One process replays
the same packs under the same groups of variants, so that every product has the same rows, and the results are equal to
the last bit whoever replays a task. Where that makes few tasks, groups of one stem are taken apart, and the first pass
is made once more.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from replay.analysis.followed import Followed
from replay.checkpoint.checkpoint import Checkpoint
from replay.simulator.anchors import AnchorDrafts
from replay.simulator.groups import Plan, plan_groups
from replay.simulator.inputs import plan_packs
from replay.simulator.progress import ReplayProgress
from replay.simulator.results import Played
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import Trace

if TYPE_CHECKING:
    import polars as pl

# Of each variant of a task.
Result: TypeAlias = list[Played] | list[Followed] | list[tuple[AnchorDrafts, ...]]

# Tasks for each worker, so that none waits long for the last of another.
_EACH = 4
# Large heads that workers of a machine lay out for each other at a time (shared_heads.py).
MOST_LAID_OUT = 4


@dataclass(frozen=True)
class Task:
    """Requests of one pack under ``variants``, which stand at the places ``members`` of their sweep; ``places`` are
    those of the requests in the trace that is replayed, which may be a part of what a worker has open.

    ``rounds`` are followed, as in ``simulate``; with ``scales`` along the server's drafts, as in ``follow_server``.
    With ``confidence`` there is a draft at every anchor, as in ``draft_anchors``.
    """

    variants: tuple[ResolvedVariant, ...]
    members: tuple[int, ...]
    requests: tuple[str, ...]
    places: tuple[int, ...]
    rounds: "pl.DataFrame | None"
    scales: tuple[float, ...] | None
    served_products: bool
    confidence: bool = False


@dataclass(frozen=True)
class Planned:
    """The tasks of a sweep; ``total`` requests; ``sampled`` says which groups sample their drafts."""

    tasks: list[Task]
    total: int
    sampled: list[bool]


def plan_tasks(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[ResolvedVariant],
    asked: Collection[str] | None,
    workers: int,
    *,
    rounds: "pl.DataFrame | None" = None,
    scales: tuple[float, ...] | None = None,
    served_products: bool = True,
    confidence: bool = False,
) -> Planned:
    """The tasks of some ``asked`` requests (None: all). Raises as ``plan_groups``."""
    plans = plan_groups(variants, checkpoints, trace)
    places = [tuple(pack) for pack in plan_packs(trace, asked)]
    packs = [tuple(trace.records[place].request_id for place in pack) for pack in places]
    followed = [_of(rounds, pack) for pack in packs]
    lots = _by_head(list(_lots(plans, _EACH * workers / max(1, len(packs)))), variants)
    asked_of = [tuple(variants[member] for member in lot) for lot in lots]
    tasks = [
        Task(asked_of[lot], lots[lot], packs[pack], places[pack], followed[pack], scales, served_products, confidence)
        for pack, lot in _turns(len(packs), len(lots), _at_once(len(packs), variants, workers))
    ]
    return Planned(tasks, sum(map(len, packs)), [plan.sampled for plan in plans])


def _by_head(lots: list[tuple[int, ...]], variants: Sequence[ResolvedVariant]) -> list[tuple[int, ...]]:
    """Those of one head side by side, in the order in which heads come first."""
    first = {variants[lot[0]].draft: place for place, lot in reversed(list(enumerate(lots)))}
    return sorted(lots, key=lambda lot: first[variants[lot[0]].draft])


def _at_once(packs: int, variants: Sequence[ResolvedVariant], workers: int) -> int:
    """How many packs go under every lot before the next packs: all of them, where the heads of all lots are more than
    lie ready at a time, because these would be laid out again and again."""
    heads = len({variant.draft for variant in variants})
    return max(1, packs) if heads > MOST_LAID_OUT else _EACH * workers


def _turns(packs: int, lots: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Packs with lots in the order of their tasks: some packs under one lot after the other, then the next packs.

    A worker has the heads of its last lots at hand, and the rows of a few packs stay in the system's memory.
    """
    for start in range(0, packs, at_once):
        for lot in range(lots):
            for pack in range(start, min(packs, start + at_once)):
                yield pack, lot


def _lots(plans: Sequence[Plan], least: float) -> Iterator[tuple[int, ...]]:
    """The variants of each task on one pack: those of a stem, or some of them where stems are fewer than ``least``."""
    stems = [list(alike) for _, alike in groupby(plans, key=lambda plan: plan.stem)]
    pieces = max(1, -int(-least // len(stems)))
    for stem in stems:
        size = -(-len(stem) // pieces)
        for start in range(0, len(stem), size):
            yield tuple(member for plan in stem[start : start + size] for member in plan.members)


def _of(rounds: "pl.DataFrame | None", pack: tuple[str, ...]) -> "pl.DataFrame | None":
    import polars as pl

    return None if rounds is None else rounds.filter(pl.col("request_id").is_in(list(pack)))


@runtime_checkable
class Workers(Protocol):
    """Whoever replays tasks of one trace and its heads, ``count`` of them at a time."""

    @property
    def count(self) -> int:
        """How many tasks are replayed side by side."""
        ...

    @property
    def kernels(self) -> tuple[str | int, ...]:
        """What tells how they round (cache_keys.py)."""
        ...

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's place with its result, as they come. Raises what a task raises, and WorkerError."""
        ...


def replay_tasks(
    workers: Workers, planned: Planned, on_event: Callable[[ReplayProgress], None]
) -> list[tuple[Task, Result]]:
    """All tasks with their results, in order. Raises as ``Workers.replay``."""
    found: dict[int, Result] = {}
    every = sum(len(task.requests) * len(task.members) for task in planned.tasks)
    done = 0
    for place, result in workers.replay(planned.tasks):
        found[place] = result
        task = planned.tasks[place]
        done += len(task.requests) * len(task.members)
        whole, rest = divmod(done * planned.total, every)
        on_event(ReplayProgress(whole, planned.total, part=rest / every))
    return [(task, found[place]) for place, task in enumerate(planned.tasks)]
