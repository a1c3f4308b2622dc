"""A worker's own part: it opens the trace and heads once, and replays one task after the other."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from replay.analysis.followed import Followed, join
from replay.checkpoint.checkpoint import Checkpoint, read_checkpoint
from replay.drafting.rows import Span
from replay.errors import CheckpointError, OutputError
from replay.head.held import Held
from replay.simulator.along import Served, follow_pack
from replay.simulator.anchors import AnchorDrafts, draft_pack
from replay.simulator.batches import batches_for
from replay.simulator.cache_keys import checkpoint_sha256
from replay.simulator.groups import Group, Made, group_variants, taps_of
from replay.simulator.inputs import followed_rounds, read_packs
from replay.simulator.packs import estimator_of, notes_of, replay_pack, spans_of
from replay.simulator.product_settings import ProductSettings
from replay.simulator.results import Played, Tally
from replay.simulator.rounds_table import RoundsTable
from replay.simulator.tasks import Result, Task
from replay.simulator.variant import ResolvedVariant
from replay.traces.reader import Trace
from replay.traces.remote import as_source

_KEPT = 2  # sweeps' groups of which the heads stay in memory


@dataclass(frozen=True)
class HeadSource:
    """Where a worker finds a head: in its folder, mapped, if it still is what ``sha256`` says."""

    path: str
    sha256: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, store: Path | None) -> "HeadSource | StoredHead":
        """Where workers find a head. One that came in memory is written to ``store``; without one it goes along."""
        if checkpoint.path is not None:
            return cls(str(as_source(checkpoint.path).absolute()), checkpoint_sha256(checkpoint))
        return StoredHead.carry(checkpoint) if store is None else StoredHead.store(checkpoint, store)

    def read(self, name: str) -> Checkpoint:
        """Raises CheckpointError."""
        found = read_checkpoint(as_source(self.path))
        if checkpoint_sha256(found) != self.sha256:
            raise CheckpointError(
                f"draft head {name} in {self.path} changed while it was replayed, or its tensors did in memory; "
                "replay it again, or give it with path=None (dataclasses.replace)"
            )
        return found


@dataclass(frozen=True)
class StoredHead:
    """A head that came in memory: ``shell`` is it without tensors, which lie in a file and are mapped from there, or
    come along as the bytes of one."""

    shell: Checkpoint
    tensors: Path | bytes

    @classmethod
    def store(cls, checkpoint: Checkpoint, file: Path) -> "StoredHead":
        """Write the tensors, as far as they share memory each by itself. Raises OutputError."""
        tensors = _own_tensors(checkpoint)
        try:
            save_file(tensors, file)
        except (SafetensorError, OSError) as error:  # the library has its own for a disk that is full
            raise no_temporary(error) from error
        return cls(replace(checkpoint, tensors={}), file)

    @classmethod
    def carry(cls, checkpoint: Checkpoint) -> "StoredHead":
        """For machines that share no disk."""
        return cls(replace(checkpoint, tensors={}), save(_own_tensors(checkpoint)))

    def read(self, name: str) -> Checkpoint:
        """The head again."""
        tensors = load(self.tensors) if isinstance(self.tensors, bytes) else load_file(self.tensors)
        return replace(self.shell, tensors=tensors)


def no_temporary(error: SafetensorError | OSError) -> OutputError:
    """What is said where no temporary folder can be made, or nothing can be written there."""
    return OutputError(
        f"the temporary folder for several workers cannot be written ({error}); make room there, name another folder "
        "with TMPDIR, or type --workers 1"
    )


def _own_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    alone = {name: one.detach().cpu().clone() for name, one in checkpoint.tensors.items()}
    return {name: one.contiguous() for name, one in alone.items()}


class AnyHead(Protocol):
    """Where a worker finds a head."""

    def read(self, name: str) -> Checkpoint:
        """The head that is called so. Raises CheckpointError."""
        ...


@dataclass(frozen=True)
class Job:
    """What all tasks have in common: a trace, its heads and where they run, in how many threads, with the settings of
    the process that asks for them."""

    trace: Trace
    heads: Mapping[str, AnyHead]
    device: str
    threads: int
    settings: ProductSettings = field(default_factory=ProductSettings.here)


class Replayer:
    """Replays tasks of one job, with the heads of the last ones at hand."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        job.settings.apply()
        self._job = job
        self._heads: dict[str, Checkpoint] = {}
        self._groups: OrderedDict[tuple[tuple[ResolvedVariant, ...], bool], list[Group]] = OrderedDict()
        self._made: dict[Hashable, Made] = {}
        self._held = Held()
        self._spans: dict[Hashable, Mapping[str, Sequence[Span]]] = {}

    def replay(self, task: Task) -> Result:
        """Of each variant of the task what it did. Raises as ``simulate``."""
        with torch.inference_mode():
            groups = self._group(task)
            for group in groups:  # what a head did in other tasks is theirs to say
                group.head.emulation.forget_passes()
            if task.confidence:
                return [self._draft(task, group) for group in groups]
            return self._simulate(task, groups) if task.scales is None else self._follow(task, groups, task.scales)

    def _draft(self, task: Task, group: Group) -> tuple[AnchorDrafts, ...]:
        steps, spans = max(size.steps for size in group.sizes), self._spans_of([group])
        packs = read_packs(self._job.trace, group.wiring.taps, task.requests)
        return tuple(one for pack in packs for one in draft_pack(group.head, group.wiring, steps, pack, spans))

    def _simulate(self, task: Task, groups: Sequence[Group]) -> list[Played]:
        trace = self._job.trace
        tallies = [
            Tally(estimator=estimator_of(variant, self._head(variant.draft), trace)) for variant in task.variants
        ]
        table = RoundsTable(["" for _ in task.variants])
        led = None if task.rounds is None else followed_rounds(task.rounds)
        spans, batches = self._spans_of(groups), batches_for(groups, trace)
        notes: list[tuple[str, ...]] = [() for _ in task.variants]
        for pack in read_packs(trace, taps_of(groups), task.requests):
            for group in replay_pack(groups, pack, led, trace, spans, batches, tallies, table):
                for member in group.members:
                    notes[member] = notes_of(group)
        return [
            Played(
                tally.seconds,
                tally.by_request,
                {} if tally.estimator is None else tally.estimator.found,
                table.of(member),
                notes[member],
            )
            for member, tally in enumerate(tallies)
        ]

    def _follow(self, task: Task, groups: Sequence[Group], scales: tuple[float, ...]) -> list[Followed]:
        assert task.rounds is not None
        trace = self._job.trace
        served = Served.of(trace, groups, task.rounds, self._spans_of(groups))
        served = replace(served, places=dict(zip(task.requests, task.places, strict=True)))
        found: list[list[Followed]] = [[] for _ in task.variants]
        for pack in read_packs(trace, taps_of(groups), served.drafts):
            for group, followed in follow_pack(groups, pack, served, scales):
                for member in group.members:
                    found[member] += followed
        return [join(parts) for parts in found]

    def _spans_of(self, groups: Sequence[Group]) -> Mapping[str, Sequence[Span]]:
        """``spans_of``, which reads all rounds of the trace, once."""
        key = (any(group.head.execution.product_rows for group in groups), any(group.crosses for group in groups))
        if key not in self._spans:
            self._spans[key] = spans_of(groups, self._job.trace)
        return self._spans[key]

    def _group(self, task: Task) -> list[Group]:
        key = (task.variants, task.served_products)
        if key not in self._groups:
            while len(self._groups) >= _KEPT:
                self._groups.popitem(last=False)
            self._forget_heads([*task.variants, *(variant for variants, _ in self._groups for variant in variants)])
            heads = {variant.draft: self._head(variant.draft) for variant in task.variants}
            self._groups[key] = group_variants(
                task.variants, heads, self._job.trace, self._job.device,
                served_products=task.served_products, made=self._made, held=self._held,
            )  # fmt: skip
        self._groups.move_to_end(key)
        return self._groups[key]

    def _forget_heads(self, variants: Sequence[ResolvedVariant]) -> None:
        """All but those of ``variants``, and what was made for no group that is left: a head shares its emulation with
        its variations."""
        used = {variant.draft for variant in variants}
        self._heads = {name: head for name, head in self._heads.items() if name in used}
        running = {id(group.head.emulation) for groups in self._groups.values() for group in groups}
        self._made = {key: one for key, one in self._made.items() if id(one.head.emulation) in running}
        self._held.keep({address for one in self._made.values() for address in one.head.storages})

    def _head(self, name: str) -> Checkpoint:
        if name not in self._heads:
            self._heads[name] = self._job.heads[name].read(name)
        return self._heads[name]
