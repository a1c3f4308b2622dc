"""A Ray cluster as workers: the tasks of a sweep (tasks.py) as Ray Core tasks, on whichever node has a core to spare.

Ray hands tasks out and does those of a lost process or node again (https://docs.ray.io, "Fault tolerance": tasks). Each
node opens the trace and the heads at the same path or address as here; that, its replay and its kernels are looked at
first.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replay.checkpoint.checkpoint import Checkpoint
from replay.errors import ReplayError, TraceError, WorkerError
from replay.printable import counted
from replay.simulator.cache_keys import kernels_of, program_sha256
from replay.simulator.connection import check_address, connected
from replay.simulator.replayer import HeadSource, Job, Replayer
from replay.simulator.tasks import Result, Task
from replay.traces import files
from replay.traces.reader import Trace
from replay.traces.remote import as_source

_LOOK = 120.0  # seconds for a node to start replay and look around
_ALONE = 60.0  # seconds without a node, until nobody is waited for
_RETRIES = 3  # of a task whose process or node is lost
_THREADS = 1  # of a task, which has one core


@contextmanager
def open_cluster(
    address: str, trace: Trace, checkpoints: Mapping[str, Checkpoint], device: str
) -> Iterator["ClusterWorkers"]:
    """The workers of a Ray cluster while the block runs; its nodes were looked at.

    Raises UsageError for an address that names none, for another cluster than this program is connected to, and without
    ray; WorkerError where the cluster cannot be reached or a node lacks what is to be replayed.
    """
    check_address(address)
    heads = {name: HeadSource.of(one, None) for name, one in checkpoints.items()}
    with connected(address) as ray:
        yield ClusterWorkers(ray, Job(trace.absolute(), heads, device, _THREADS))


class ClusterWorkers:
    """Every core of the cluster's nodes."""

    def __init__(self, ray: Any, job: Job) -> None:
        self._ray, self._job = ray, job
        nodes = self._nodes()
        self.count = int(sum(node["Resources"]["CPU"] for node in nodes))
        if not self.count:
            raise WorkerError(
                "no living node of the Ray cluster has a core for tasks; add a node by ray start, or "
                "take workers of this machine alone"
            )
        self.kernels = self._look(nodes)

    def _nodes(self) -> list[Mapping[str, Any]]:
        """Those that live and have a core."""
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's place with its result, as they come. Raises what a task raises, and WorkerError."""
        ray = self._ray
        job = ray.put(self._job)
        remote = ray.remote(_replay).options(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")
        pending = {remote.remote([job], job.hex(), task): place for place, task in enumerate(tasks)}
        seen = time.monotonic()
        try:
            while pending:
                done, _ = ray.wait(list(pending), timeout=1.0)
                seen = time.monotonic() if done or self._nodes() else seen
                if time.monotonic() - seen > _ALONE:
                    raise WorkerError(
                        f"no living node of the Ray cluster has a core any more, with {counted(len(pending), 'task')} "
                        "left to do; add a node by ray start, and type --cache DIR to keep what is done"
                    )
                for one in done:
                    place = pending.pop(one)
                    yield place, self._get(one)
        finally:
            for one in pending:
                with suppress(ray.exceptions.RayError):
                    ray.cancel(one, force=True)

    def _get(self, reference: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, ReplayError) else error) from None
        except exceptions.RayError as error:
            raise WorkerError(
                f"the Ray cluster lost a task {_RETRIES + 1} times ({type(error).__name__}); look at its nodes' "
                "memory, and type --cache DIR to keep what is done"
            ) from error

    def _look(self, nodes: Sequence[Mapping[str, Any]]) -> tuple[str | int, ...]:
        """The kernels of all nodes. Raises WorkerError where one lacks something, or is unlike the others."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        needed = needed_for(self._job)
        seen = {}
        for node in nodes:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            remote = self._ray.remote(_look_around).options(num_cpus=0, scheduling_strategy=where)  # cores may be taken
            seen[f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"] = remote.remote(needed)
        self._await(seen)
        found = {}
        for name, reference in seen.items():
            try:
                found[name] = self._get(reference)
            except (self._ray.exceptions.RayError, ImportError) as error:
                raise WorkerError(
                    f"node {name} of the Ray cluster cannot run replay ({type(error).__name__}); install the same "
                    "replay there"
                ) from error
        return check_alike(found, program_sha256())

    def _await(self, looks: Mapping[str, Any]) -> None:
        """Raises WorkerError that names the nodes which do not answer."""
        _, silent = self._ray.wait(list(looks.values()), num_returns=len(looks), timeout=_LOOK)
        if silent:
            for one in silent:
                self._ray.cancel(one, force=True)
            names = ", ".join(name for name, one in looks.items() if one in silent)
            raise WorkerError(
                f"within {_LOOK:.0f} seconds nothing was heard of node {names} of the Ray cluster; look at its memory "
                "and load by ray status, or take workers of this machine alone"
            )


@dataclass(frozen=True, slots=True)
class Node:
    """What a node has: which of the paths it ``lacks``, its replay and its kernels."""

    lacks: str
    program: str
    kernels: tuple[str | int, ...]


def check_alike(nodes: Mapping[str, Node], program: str) -> tuple[str | int, ...]:
    """The kernels of all nodes. Raises WorkerError that names the first node that cannot do what the others do."""
    first, like = next(iter(nodes.items()))
    for name, node in nodes.items():
        if node.lacks:
            raise WorkerError(
                f"node {name} of the Ray cluster {node.lacks}; put it on a disk that all nodes have at the same path"
            )
        if node.program != program:
            raise WorkerError(f"node {name} of the Ray cluster has another replay than this; install the same there")
        if node.kernels != like.kernels:
            differ = ", ".join(f"{a} and {b}" for a, b in zip(like.kernels, node.kernels, strict=False) if a != b)
            raise WorkerError(
                f"nodes {first} and {name} of the Ray cluster round differently ({differ}), so that rounds would "
                "depend on which of them replays; use nodes that are alike"
            )
    return like.kernels


@dataclass(frozen=True, slots=True)
class Needed:
    """What a node has to have: paths and a device, and the checksum of the trace's header."""

    trace: Path
    header_sha256: str
    heads: tuple[str, ...]
    device: str


def needed_for(job: Job) -> Needed:
    """What every node has to have for this job."""
    heads = tuple(one.path for one in job.heads.values() if isinstance(one, HeadSource))
    return Needed(job.trace.path, _header_sha256(job.trace.path), heads, job.device)


def _header_sha256(folder: Path) -> str:
    return hashlib.sha256(files.read_small(folder / files.HEADER, 1 << 24)).hexdigest()


# ---- on a node ----

_replayers: dict[str, Replayer] = {}


def _look_around(needed: Needed) -> Node:
    return Node(lacking(needed), program_sha256(), kernels_of(needed.device, _THREADS))


def lacking(needed: Needed) -> str:
    """What is not there, as a sentence goes on; empty where all is. Raises StorageError where a storage refuses."""
    try:
        if _header_sha256(needed.trace) != needed.header_sha256:
            return f"has another trace at {needed.trace}"
    except TraceError:
        return f"has no trace at {needed.trace}"
    missing = next((head for head in needed.heads if not as_source(head).is_dir()), None)
    if missing is not None:
        return f"has no draft head at {missing}"
    try:
        torch.empty(1, device=needed.device)
    except (RuntimeError, AssertionError):
        return f"has no device {needed.device}"
    return ""


def _replay(job: list[Any], key: str, task: Task) -> Result:
    """``job`` holds a reference, which is followed once in each process."""
    import ray

    if key not in _replayers:
        _replayers.clear()  # of an earlier sweep
        _replayers[key] = Replayer(ray.get(job[0]))
    return _replayers[key].replay(task)
