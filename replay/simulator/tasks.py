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
from replay.simulator.groups import Plan, plan_groups
from replay.simulator.inputs import plan_packs
from replay.simulator.progress import ReplayProgress
from replay.simulator.results import Played
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import Trace

if TYPE_CHECKING:
    import polars as pl

Result: TypeAlias = list[Played] | list[Followed]  # of each variant of a task

# Tasks for each worker, so that none waits long for the last of another.
_EACH = 4


@dataclass(frozen=True)
class Task:
    """Requests of one pack under ``variants``, which stand at the places ``members`` of their sweep; ``places`` are
    those of the requests in the trace that is replayed, which may be a part of what a worker has open.

    ``rounds`` are followed, as in ``simulate``; with ``scales`` along the server's drafts, as in ``follow_server``.
    """

    variants: tuple[ResolvedVariant, ...]
    members: tuple[int, ...]
    requests: tuple[str, ...]
    places: tuple[int, ...]
    rounds: "pl.DataFrame | None"
    scales: tuple[float, ...] | None
    served_products: bool


@dataclass(frozen=True)
class Planned:
    """The tasks of a sweep, pack by pack; ``total`` requests; ``leading`` is the first variant of each group in order,
    and ``sampled`` says which groups sample their drafts."""

    tasks: list[Task]
    total: int
    leading: list[int]
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
) -> Planned:
    """The tasks of some ``asked`` requests (None: all). Raises as ``plan_groups``."""
    plans = plan_groups(variants, checkpoints, trace)
    places = [tuple(pack) for pack in plan_packs(trace, asked)]
    packs = [tuple(trace.records[place].request_id for place in pack) for pack in places]
    lots = list(_lots(plans, _EACH * workers / max(1, len(packs))))
    tasks = [
        Task(tuple(variants[member] for member in lot), lot, pack, where, _of(rounds, pack), scales, served_products)
        for pack, where in zip(packs, places, strict=True)
        for lot in lots
    ]
    return Planned(tasks, sum(map(len, packs)), [plan.members[0] for plan in plans], [plan.sampled for plan in plans])


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
