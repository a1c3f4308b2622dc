"""A Ray cluster as workers: the tasks of a sweep (tasks.py) as Ray Core tasks, on whichever node has a core to spare.

Ray hands tasks out and does those of a lost process or node again (https://docs.ray.io, "Fault tolerance": tasks). Each
node opens the trace and the heads at the same path or address as here. Tasks go to nodes that are alike
(cluster_nodes.py): Ray takes them by their labels, and is handed a few tasks at a time, so that the next ones may go
to nodes that joined.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from replay.checkpoint.checkpoint import Checkpoint
from replay.errors import WorkerError
from replay.printable import counted
from replay.simulator.cache_keys import kernels_of, say_unlike
from replay.simulator.cluster_nodes import GPUS, THREADS, Nodes, check_cluster_device, get, needed_for, options_of
from replay.simulator.connection import check_address, connected
from replay.simulator.replayer import HeadSource, Job, Replayer
from replay.simulator.tasks import Result, Task
from replay.traces.reader import Trace

_ALONE = 60.0  # seconds without a node, until nobody is waited for
_PAUSE = 1.0  # seconds between two looks at the nodes
_RETRIES = 3  # of a task whose process or node is lost
_AHEAD = 3  # tasks that Ray has for each core: enough that none waits for this process


@contextmanager
def open_cluster(
    address: str,
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    device: str,
    on_note: Callable[[str], None] = lambda _: None,
) -> Iterator["ClusterWorkers"]:
    """The workers of a Ray cluster while the block runs; its nodes were looked at.

    ``on_note`` is told of nodes that are lost, and of those that join and are unlike the others. Raises UsageError for
    an address that names none, for another cluster than this program is connected to, and without ray; WorkerError
    where the cluster cannot be reached or a node lacks what is to be replayed.
    """
    check_address(address)
    check_cluster_device(device)
    heads = {name: HeadSource.of(one, None) for name, one in checkpoints.items()}
    with connected(address) as ray:
        workers = ClusterWorkers(ray, Job(trace.absolute(), heads, device, THREADS), on_note)
        try:
            yield workers
        finally:
            workers.close()


class ClusterWorkers:
    """Every core of the cluster's nodes, or every GPU."""

    def __init__(self, ray: Any, job: Job, on_note: Callable[[str], None] = lambda _: None) -> None:
        self._ray, self._job = ray, job
        self._nodes = Nodes(ray, needed_for(job), on_note)
        self.count, self.kernels = self._nodes.slots(), self._nodes.kernels

    def close(self) -> None:
        """Wait for no node any more."""
        self._nodes.close()

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's place with its result, as they come. Raises what a task raises, and WorkerError."""
        under_way = _UnderWay(self._ray, self._ray.put(self._job), self.kernels, self._job.device, tasks)
        seen = time.monotonic()
        try:
            while under_way.left:
                nodes = self._nodes.meet()
                under_way.take_back(nodes)
                under_way.hand_out(nodes, _AHEAD * self._nodes.slots())
                done = under_way.wait()
                seen = time.monotonic() if done or nodes else seen
                if time.monotonic() - seen > _ALONE:
                    raise _alone(under_way.left)
                for place, one in done:
                    try:
                        result = self._get(one)
                    except self._ray.exceptions.TaskUnschedulableError as error:  # its nodes are lost
                        under_way.put_back(place, error)
                    else:
                        yield place, result
        finally:
            under_way.cancel()

    def _get(self, reference: Any) -> Any:
        try:
            return get(self._ray, reference)
        except (self._ray.exceptions.RayTaskError, self._ray.exceptions.TaskUnschedulableError):
            raise
        except self._ray.exceptions.RayError as error:
            raise _lost(error) from error


def _lost(error: BaseException) -> WorkerError:
    return WorkerError(
        f"the Ray cluster lost a task {_RETRIES + 1} times ({type(error).__name__}); look at its nodes' memory, and "
        "type --cache DIR to keep what is done"
    )


def _alone(left: int) -> WorkerError:
    return WorkerError(
        "no living node of the Ray cluster that is like those at the beginning has a core any more, with "
        f"{counted(left, 'task')} left to do; add a node by ray start, and type --cache DIR to keep what is done"
    )


@dataclass
class _UnderWay:
    """Tasks by their places: those that wait, and those that Ray has, each with the nodes that may do it.

    ``job`` is a reference, which each process of the cluster follows once.
    """

    ray: Any
    job: Any
    kernels: tuple[str | int, ...]
    device: str
    tasks: Sequence[Task]
    _waiting: deque[int] = field(default_factory=deque)
    _handed: dict[Any, tuple[int, frozenset[str]]] = field(default_factory=dict)
    _put_back: dict[int, int] = field(default_factory=dict)
    _remote: Any = None

    def __post_init__(self) -> None:
        self._remote = self.ray.remote(_replay)  # once: Ray sends each that is made to all nodes
        self._waiting.extend(range(len(self.tasks)))

    @property
    def left(self) -> int:
        """How many are not done."""
        return len(self._waiting) + len(self._handed)

    def hand_out(self, nodes: frozenset[str], most: int) -> None:
        """Let Ray have as many as ``most``, for ``nodes``."""
        if not nodes:
            return
        where = {"ray.io/node-id": f"in({','.join(sorted(nodes))})"}
        remote = self._remote.options(
            max_retries=_RETRIES, scheduling_strategy="SPREAD", label_selector=where, **options_of(self.device)
        )
        while self._waiting and len(self._handed) < most:
            place = self._waiting.popleft()
            reference = remote.remote([self.job], self.job.hex(), self.kernels, self.device, self.tasks[place])
            self._handed[reference] = (place, nodes)

    def take_back(self, nodes: frozenset[str]) -> None:
        """What none of ``nodes`` may do: all that might have are lost, and Ray would wait for them."""
        lost = [one for one, (_, allowed) in self._handed.items() if not allowed & nodes]
        self._waiting.extendleft(self._handed.pop(one)[0] for one in reversed(lost))
        self._stop(lost)

    def put_back(self, place: int, error: BaseException) -> None:
        """Another node has to do it. Raises WorkerError where that was so as often as a task is done again."""
        self._put_back[place] = self._put_back.get(place, 0) + 1
        if self._put_back[place] > _RETRIES:
            raise _lost(error) from error
        self._waiting.append(place)

    def wait(self) -> list[tuple[int, Any]]:
        """The places of those that are done, and what they gave back, after a pause at most."""
        if not self._handed:
            time.sleep(_PAUSE)
            return []
        done, _ = self.ray.wait(list(self._handed), timeout=_PAUSE)
        return [(self._handed.pop(one)[0], one) for one in done]

    def cancel(self) -> None:
        """End all that Ray has."""
        self._stop(list(self._handed))

    def _stop(self, references: Sequence[Any]) -> None:
        for one in references:
            with suppress(self.ray.exceptions.RayError):
                self.ray.cancel(one, force=True)


# ---- on a node ----

_replayers: dict[tuple[str, str], Replayer] = {}  # by job and device


def _replay(job: list[Any], key: str, kernels: tuple[str | int, ...], device: str, task: Task) -> Result:
    """``job`` holds a reference, which is followed once in each process. Raises WorkerError for other ``kernels``."""
    import ray

    where = _given_gpu([str(one) for one in ray.get_gpu_ids()]) if device == GPUS else device
    if (key, where) not in _replayers:
        asked: Job = ray.get(job[0])
        _check_kernels(kernels, kernels_of(where, THREADS, asked.settings))
        _replayers.clear()  # of an earlier sweep, or of another GPU
        _replayers[key, where] = Replayer(replace(asked, device=where))
    return _replayers[key, where].replay(task)


def _given_gpu(given: Sequence[str]) -> str:
    """The GPU that Ray gave to a task, by its number among those that the process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"{GPUS}:{seen.split(',').index(given[0]) if seen else given[0]}"


def _check_kernels(expected: tuple[str | int, ...], found: tuple[str | int, ...]) -> None:
    if found != expected:
        raise WorkerError(
            f"workers of the Ray cluster round differently ({say_unlike(expected, found)}), so that rounds would "
            "depend on which of them replays; use nodes and GPUs that are alike"
        )
