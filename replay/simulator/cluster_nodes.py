"""Nodes of a Ray cluster: what each of them has, and which of them are alike, so that rounds do not depend on them.

Those that are there at first are looked at before anything is replayed, and one that lacks something ends the command.
Those that join later are looked at while tasks run: they get tasks if they are alike, and else a note says why not.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replay.capture.target_files import fingerprint_target
from replay.checkpoint.headers import fingerprint_head
from replay.errors import CaptureError, CheckpointError, ReplayError, TraceError, UsageError, WorkerError
from replay.simulator.cache_keys import kernels_of, program_sha256, say_unlike
from replay.simulator.product_settings import WAITING, ProductSettings, waiting
from replay.simulator.replayer import HeadSource, Job
from replay.traces import files
from replay.traces.reader import Trace
from replay.traces.remote import as_source

THREADS = 1  # of a task, which has one core
GPUS = "cuda"  # a device of which each task is given its own
# Without it Ray sets CUDA_VISIBLE_DEVICES for each task anew, which torch reads once in a process.
_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
_DISK = "put it on a disk that all nodes have at the same path"
_LOOK = 120.0  # seconds for a node to start replay and look around


@dataclass(frozen=True, slots=True)
class Node:
    """What a node has: which of the paths it ``lacks``, its replay and its kernels, and what its target holds."""

    lacks: str
    program: str
    kernels: tuple[str | int, ...]
    target: str = ""


@dataclass(frozen=True, slots=True)
class Needed:
    """What a node has to have: paths and a device, and the checksum of the trace's header.

    ``heads`` are folders, each with the fingerprint of what it holds, which is empty where it cannot be read here.
    ``target`` is the folder of the target's checkpoint, and ``fingerprint`` what it holds, where a trace has no weights
    of its own. Where it is not here, the fingerprint is empty, and nodes are held against each other. A node rounds as
    ``settings`` say (None: as its own process does).
    """

    trace: Path
    header_sha256: str
    heads: Mapping[str, str]
    device: str
    target: Path | None = None
    fingerprint: str = ""
    settings: ProductSettings | None = None


def needed_for(job: Job) -> Needed:
    """What every node has to have for this job."""
    trace, paths = job.trace, {one.path for one in job.heads.values() if isinstance(one, HeadSource)}
    heads = {path: _fingerprint(fingerprint_head, as_source(path)) for path in sorted(paths)}
    target = _target_of(trace)
    held = "" if target is None else _fingerprint(fingerprint_target, as_source(target))
    return Needed(trace.path, header_sha256(trace.path), heads, job.device, target, held, job.settings)


def _target_of(trace: Trace) -> Path | None:
    """The folder of the target's checkpoint, of which every head needs the embedding: the one that was named, else the
    one that the trace was recorded with. None where the trace has the target's weights itself."""
    if trace.header.weights is not None:
        return None
    return trace.target_folder or Path(trace.header.target.path)


def _fingerprint(take: Callable[[Path], str], folder: Path) -> str:
    """What ``take`` says of a checkpoint; empty where the folder is not here, or holds none. Raises StorageError."""
    try:
        return take(folder)
    except (CaptureError, CheckpointError, TraceError, OSError):
        return ""


def header_sha256(folder: Path) -> str:
    """Of a trace's header."""
    return hashlib.sha256(files.read_small(folder / files.HEADER, 1 << 24)).hexdigest()


def check_cluster_device(device: str) -> None:
    """Raises UsageError for a GPU by its number: Ray chooses one for each task."""
    if device.startswith(f"{GPUS}:"):
        raise UsageError(
            f"a Ray cluster gives each task a GPU of its own, and {device} names one; type --device {GPUS}"
        )


def options_of(device: str) -> dict[str, Any]:
    """What of a node a task asks for: a core, and its own GPU if it runs on one."""
    return {"num_cpus": 1, **({"num_gpus": 1} if device == GPUS else {}), **environment_of(device)}


def environment_of(device: str) -> dict[str, Any]:
    """In which environment its process starts."""
    told = {WAITING: waiting()} | (_ALL_GPUS if device == GPUS else {})
    return {"runtime_env": {"env_vars": told}}


class Nodes:
    """The nodes of a cluster that have what is ``needed``, and their ``kernels``.

    Raises WorkerError where no node can take a task, or one lacks something.
    """

    def __init__(self, ray: Any, needed: Needed, on_note: Callable[[str], None]) -> None:
        self._ray, self._needed, self._note = ray, needed, on_note
        self._program = program_sha256()
        self._unit = "GPU" if needed.device == GPUS else "CPU"
        self._looks: dict[str, Any] = {}
        self._known: dict[str, str] = {}  # names of those that were looked at, or are
        self._alike: set[str] = set()
        living = self._living()
        if not living:
            raise WorkerError(_say_none(self._unit))
        self._first, self._like = self._look_first(living)
        self.kernels = self._like.kernels

    def slots(self) -> int:
        """How many tasks those that are alike take side by side."""
        return sum(int(node["Resources"][self._unit]) for node in self._living() if node["NodeID"] in self._alike)

    def meet(self) -> frozenset[str]:
        """Those that are alike and live; whoever has joined is looked at, and nobody is waited for."""
        living = {node["NodeID"]: node for node in self._living()}
        for lost in self._alike - living.keys():
            self._alike.discard(lost)
            self._note(f"note: node {self._known[lost]} of the Ray cluster was lost; what it had to do is done again")
        for identity in living.keys() - self._known.keys():
            self._known[identity] = _name(living[identity])
            self._looks[identity] = self._begin_look(identity)
        for identity, look in list(self._looks.items()):
            if identity not in living:
                del self._looks[identity]
            elif self._ray.wait([look], timeout=0)[0]:
                self._take_look(identity, self._looks.pop(identity))
        return frozenset(self._alike)

    def close(self) -> None:
        """Wait for no node any more."""
        self._cancel(self._looks.values())

    def _living(self) -> list[Mapping[str, Any]]:
        """Those that live and can take a task."""
        return [
            node
            for node in self._ray.nodes()
            if node["Alive"] and all(node["Resources"].get(one, 0) >= 1 for one in ("CPU", self._unit))
        ]

    def _take_look(self, identity: str, look: Any) -> None:
        name = self._known[identity]
        try:
            why = why_unlike(self._first, self._like, name, self._seen(name, look))
        except ReplayError as error:
            why = str(error)
        if why:
            self._note(f"note: a node joined and is given no task: {why}")
        else:
            self._alike.add(identity)

    def _look_first(self, nodes: Sequence[Mapping[str, Any]]) -> tuple[str, Node]:
        """The name of a node, and what it and all others have. Raises WorkerError."""
        self._known = {node["NodeID"]: _name(node) for node in nodes}
        looks = {name: self._begin_look(identity) for identity, name in self._known.items()}
        self._await(looks)
        like = check_alike({name: self._seen(name, look) for name, look in looks.items()}, self._program)
        self._alike = set(self._known)
        return next(iter(looks)), like

    def _begin_look(self, identity: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(identity, soft=False)
        asked = environment_of(self._needed.device)
        # It asks for no core, because all may be taken.
        remote = self._ray.remote(look_around).options(num_cpus=0, scheduling_strategy=where, **asked)
        return remote.remote(self._needed)

    def _await(self, looks: Mapping[str, Any]) -> None:
        """Raises WorkerError that names the nodes which do not answer."""
        _, silent = self._ray.wait(list(looks.values()), num_returns=len(looks), timeout=_LOOK)
        if silent:
            self._cancel(silent)
            names = ", ".join(name for name, one in looks.items() if one in silent)
            raise WorkerError(
                f"within {_LOOK:.0f} seconds nothing was heard of node {names} of the Ray cluster; look at its memory "
                "and load by ray status, or take workers of this machine alone"
            )

    def _seen(self, name: str, look: Any) -> Node:
        """What a look has seen. Raises WorkerError where the node cannot look, and StorageError."""
        try:
            seen: Node = get(self._ray, look)
        except (self._ray.exceptions.RayError, ImportError) as error:
            raise WorkerError(
                f"node {name} of the Ray cluster cannot run replay ({type(error).__name__}); install the same "
                "replay there"
            ) from error
        return seen

    def _cancel(self, looks: Collection[Any]) -> None:
        for one in looks:
            self._ray.cancel(one, force=True)


def get(ray: Any, reference: Any) -> Any:
    """What a task gave back. Raises what it raised in our words, and RayError."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ReplayError | ImportError) else error) from None


def check_alike(nodes: Mapping[str, Node], program: str) -> Node:
    """What all nodes have. Raises WorkerError that names the first node that cannot do what the others do."""
    first = next(iter(nodes))
    like = Node("", program, nodes[first].kernels, nodes[first].target)
    for name, node in nodes.items():
        if why := why_unlike(first, like, name, node):
            raise WorkerError(why)
    return like


def why_unlike(first: str, like: Node, name: str, node: Node) -> str:
    """Why the node called ``name`` cannot do what the ``first`` one does, in a sentence; empty where it can."""
    if node.lacks:
        return f"node {name} of the Ray cluster {node.lacks}"
    if node.program != like.program:
        return f"node {name} of the Ray cluster has another replay than this; install the same there"
    if node.target != like.target:
        return f"node {name} of the Ray cluster has another target than node {first}; {_DISK}"
    if node.kernels != like.kernels:
        differ = say_unlike(like.kernels, node.kernels)
        return (
            f"nodes {first} and {name} of the Ray cluster round differently ({differ}), so that rounds would "
            "depend on which of them replays; use nodes that are alike"
        )
    return ""


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def _say_none(unit: str) -> str:
    if unit == "GPU":
        return (
            "no living node of the Ray cluster has a GPU for tasks; add a node with one by ray start, or type "
            "--device cpu"
        )
    return (
        "no living node of the Ray cluster has a core for tasks; add a node by ray start, or take workers of this "
        "machine alone"
    )


# ---- on a node ----


def look_around(needed: Needed) -> Node:
    """What this node has."""
    lacks = lacking(needed)
    target = "" if lacks or needed.target is None else _fingerprint(fingerprint_target, as_source(needed.target))
    return Node(lacks, program_sha256(), () if lacks else kernels_of(needed.device, THREADS, needed.settings), target)


def lacking(needed: Needed) -> str:
    """What is not there and how to mend that, as a sentence goes on; empty where all is there. Raises StorageError."""
    try:
        if header_sha256(needed.trace) != needed.header_sha256:
            return f"has another trace at {needed.trace}; {_DISK}"
    except TraceError:
        return f"has no trace at {needed.trace}; {_DISK}"
    if lacks := _lacking_head(needed) or _lacking_target(needed):
        return lacks
    try:
        torch.empty(1, device=needed.device)
    except (RuntimeError, AssertionError):
        return f"has no device {needed.device} for torch; install one for its GPUs there, or type --device cpu"
    return ""


def _lacking_head(needed: Needed) -> str:
    for path, fingerprint in needed.heads.items():
        head = as_source(path)
        if not head.is_dir():
            return f"has no draft head at {path}; {_DISK}"
        found = _fingerprint(fingerprint_head, head)
        if fingerprint and found != fingerprint:
            which = "another draft head" if found else "no whole draft head"
            return f"has {which} at {path}; copy this one there"
    return ""


def _lacking_target(needed: Needed) -> str:
    if needed.target is None:
        return ""
    target = as_source(needed.target)
    if not target.is_dir():
        return f"has no target at {needed.target}; {_DISK}"
    if needed.fingerprint and _fingerprint(fingerprint_target, target) != needed.fingerprint:
        return f"has another target at {needed.target}; {_DISK}"
    return ""
