"""A Ray cluster as workers: the tasks of a sweep (tasks.py) as Ray Core tasks, on whichever node has a core to spare.

Ray hands tasks out and does those of a lost process or node again (https://docs.ray.io, "Fault tolerance": tasks). Each
node opens the trace and the heads at the same path or address as here; that, its replay and its kernels are looked at
first.
"""

import hashlib
import logging
import re
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replay.checkpoint.checkpoint import Checkpoint
from replay.errors import ReplayError, TraceError, UsageError, WorkerError
from replay.simulator.cache_keys import checkpoint_sha256, kernels_of, program_sha256
from replay.simulator.replayer import HeadSource, Job, Replayer, StoredHead
from replay.simulator.tasks import Result, Task
from replay.traces import files
from replay.traces.fields import show
from replay.traces.reader import Trace
from replay.traces.remote import as_source

AUTO, LOCAL = "auto", "local"
_ADDRESS = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:]{2,45}\]):([0-9]{1,5})", re.ASCII)
_PATIENCE = 5.0  # seconds for a cluster to answer
_RETRIES = 3  # of a task whose process or node is lost
_THREADS = 1  # of a task, which has one core


def check_address(address: str) -> None:
    """Raises UsageError for what names no cluster."""
    found = _ADDRESS.fullmatch(address)
    if address not in (AUTO, LOCAL) and (found is None or not 0 < int(found[2]) < 1 << 16):
        raise UsageError(
            f"{show(address)} is not the address of a Ray cluster, so there are no workers; name the "
            "one of this machine by auto, another one by HOST:PORT, or one that is started here by local"
        )


@contextmanager
def open_cluster(
    address: str, trace: Trace, checkpoints: Mapping[str, Checkpoint], device: str
) -> Iterator["ClusterWorkers"]:
    """The workers of a Ray cluster while the block runs; its nodes were looked at.

    Raises UsageError for an address that names none and without ray, WorkerError where the cluster cannot be reached or
    a node lacks what is to be replayed.
    """
    check_address(address)
    heads = {name: _source(one) for name, one in checkpoints.items()}
    with _connected(address) as ray:
        yield ClusterWorkers(ray, Job(trace.absolute(), heads, device, _THREADS))


def _source(checkpoint: Checkpoint) -> HeadSource | StoredHead:
    if checkpoint.path is not None:
        return HeadSource(str(as_source(checkpoint.path).absolute()), checkpoint_sha256(checkpoint))
    return StoredHead.carry(checkpoint)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """ray, connected; a program that is connected already stays so."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs ray; type pip install 'eagle-replay[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    if found := _ADDRESS.fullmatch(address):
        _knock(found[1].strip("[]"), int(found[2]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings of ray's own that are to change
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise WorkerError(
            f"no Ray cluster can be reached at {address} ({type(error).__name__}); start one by ray start --head and "
            "name the address that it says, or take workers of this machine alone"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(host: str, port: int) -> None:
    """Whether anybody answers: ray itself waits for minutes."""
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError as error:
        raise WorkerError(
            f"nothing answers at {host}:{port} ({error.strerror or error}); name the address that ray start "
            "--head said, or take workers of this machine alone"
        ) from error


class ClusterWorkers:
    """Every core of the cluster's nodes."""

    def __init__(self, ray: Any, job: Job) -> None:
        self._ray, self._job = ray, job
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        self.count = int(sum(node["Resources"]["CPU"] for node in nodes))
        if not self.count:
            raise WorkerError("the Ray cluster has no core for tasks; add a node, or type --workers N")
        self.kernels = self._look(nodes)

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's place with its result, as they come. Raises what a task raises, and WorkerError."""
        ray = self._ray
        job = ray.put(self._job)
        remote = ray.remote(_replay).options(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")
        pending = {remote.remote([job], job.hex(), task): place for place, task in enumerate(tasks)}
        try:
            while pending:
                done, _ = ray.wait(list(pending), timeout=1.0)
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

        asked = asked_of(self._job)
        seen = {}
        for node in nodes:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            remote = self._ray.remote(_look_around).options(num_cpus=1, scheduling_strategy=where)
            seen[f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"] = remote.remote(asked)
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
class Asked:
    """Paths and a device, and the checksum of the trace's header."""

    trace: Path
    header_sha256: str
    heads: tuple[str, ...]
    device: str


def asked_of(job: Job) -> Asked:
    """What every node has to have for this job."""
    heads = tuple(one.path for one in job.heads.values() if isinstance(one, HeadSource))
    return Asked(job.trace.path, _header_sha256(job.trace.path), heads, job.device)


def _header_sha256(folder: Path) -> str:
    return hashlib.sha256(files.read_small(folder / files.HEADER, 1 << 24)).hexdigest()


# ---- on a node ----

_replayers: dict[str, Replayer] = {}


def _look_around(asked: Asked) -> Node:
    return Node(lacking(asked), program_sha256(), kernels_of(asked.device, _THREADS))


def lacking(asked: Asked) -> str:
    """What is not there, as a sentence goes on; empty where all is. Raises StorageError where a storage refuses."""
    try:
        if _header_sha256(asked.trace) != asked.header_sha256:
            return f"has another trace at {asked.trace}"
    except TraceError:
        return f"has no trace at {asked.trace}"
    missing = next((head for head in asked.heads if not as_source(head).is_dir()), None)
    if missing is not None:
        return f"has no draft head at {missing}"
    try:
        torch.empty(1, device=asked.device)
    except (RuntimeError, AssertionError):
        return f"has no device {asked.device}"
    return ""


def _replay(job: list[Any], key: str, task: Task) -> Result:
    """``job`` holds a reference, which is followed once in each process."""
    import ray

    if key not in _replayers:
        _replayers.clear()  # of an earlier sweep
        _replayers[key] = Replayer(ray.get(job[0]))
    return _replayers[key].replay(task)
