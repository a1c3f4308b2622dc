"""Workers: processes beside this one that replay the tasks of a sweep (tasks.py), with results equal to the last bit.

They are processes of loky (https://loky.readthedocs.io): started anew, so that no thread of this one is torn in two,
and without a second run of the script that asks for them. Trace and heads are opened by path and mapped, so that all
of them share the pages of one file. A worker that is killed loses its task, which another one does again.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from replay.checkpoint.checkpoint import Checkpoint
from replay.errors import UsageError, WorkerError
from replay.simulator.cache_keys import hashed_once, kernels_of
from replay.simulator.cluster import open_cluster
from replay.simulator.cluster_nodes import GPUS
from replay.simulator.heads_folder import hold, open_heads_folder, remove
from replay.simulator.product_settings import WAITING, waiting
from replay.simulator.replayer import AnyHead, HeadSource, Job, Replayer, no_temporary
from replay.simulator.shared_heads import LEAST_BYTES, SharedHead, bytes_of
from replay.simulator.tasks import Result, Task, Workers
from replay.traces.fields import show
from replay.traces.reader import Trace

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

MOST_WORKERS = 1024
_MOST_LOST = 3  # times that workers may end in the midst of tasks
_LEAK = "LOKY_MAX_MEMORY_LEAK_SIZE"  # loky ends workers that grow, and ours map heads and traces


def check_workers(wanted: object) -> int:
    """How many workers were asked for. Raises UsageError for what is no such number."""
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise UsageError(f"workers are {show(wanted)}; give a number from 1 (this process alone) to {MOST_WORKERS}")
    if not 1 <= wanted <= MOST_WORKERS:
        raise UsageError(
            f"{show(wanted)} workers were asked for, possible are 1 (this process alone) to {MOST_WORKERS}; type about "
            "as many as there are cores"
        )
    return wanted


@contextmanager
def use_workers(
    wanted: "int | str | Workers | None",
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    device: str,
    on_note: Callable[[str], None] = lambda _: None,
) -> Iterator[Workers | None]:
    """Workers that are there while the block runs: those given, so many new ones, or those of the Ray cluster at an
    address; None where this process replays. ``on_note`` as in ``open_cluster``.

    Raises UsageError for a number or an address that cannot be, and as ``open_cluster`` and ``open_workers``.
    """
    with hashed_once(checkpoints.values()):
        if isinstance(wanted, str):
            with open_cluster(wanted, trace, checkpoints, device, on_note) as cluster:
                yield cluster
        elif wanted is None or isinstance(wanted, int):
            if wanted is None or check_workers(wanted) == 1:
                yield None
                return
            with open_workers(wanted, trace, checkpoints, device) as workers:
                yield workers
        elif isinstance(wanted, Workers):
            yield wanted
        else:
            raise UsageError(f"workers are {show(wanted)}; give a number, or the address of a Ray cluster")


def threads_of_each(count: int) -> int:
    """The cores of this process, shared out: products do not depend on it, and more threads than cores are slow."""
    return max(1, torch.get_num_threads() // count)


def devices_of(device: str) -> tuple[str, ...]:
    """Where workers run, one after the other: every GPU of this machine, unless one is named by its number.

    Raises UsageError for GPUs of several kinds.
    """
    kinds = (
        [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if device == GPUS else []
    )
    if len(set(kinds)) > 1:
        raise UsageError(
            f"the GPUs here are of several kinds ({', '.join(dict.fromkeys(kinds))}), which round differently; type "
            "--device cuda:N for one of them, or hide the others by CUDA_VISIBLE_DEVICES"
        )
    return tuple(f"{GPUS}:{number}" for number in range(len(kinds))) or (device,)


@contextmanager
def open_workers(
    count: int, trace: Trace, checkpoints: Mapping[str, Checkpoint], device: str
) -> Iterator["LocalWorkers"]:
    """So many processes on this machine, which end with the block however it ends.

    The trace is held against its checksums here, once for all of them. Raises TraceCorruptError, UsageError for GPUs
    that are unlike, and OutputError where no temporary folder can be written.
    """
    devices = devices_of(device)
    trace.check_sums()
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(open_heads_folder())
            turns = folder / "turns"
            turns.mkdir()
        except OSError as error:
            raise no_temporary(error) from error
        every = enumerate(checkpoints.items())
        heads = {name: _found_by_workers(one, folder, place) for place, (name, one) in every}
        workers = LocalWorkers(count, Job(trace, heads, device, threads_of_each(count)), devices, turns)
        try:
            yield workers
        finally:
            workers.close()


def _found_by_workers(checkpoint: Checkpoint, folder: Path, place: int) -> AnyHead:
    """Where workers of this machine find a head; of a large one they share the bytes."""
    source = HeadSource.of(checkpoint, folder / f"{place}.safetensors")
    if isinstance(source, HeadSource) and bytes_of(checkpoint) >= LEAST_BYTES:
        return SharedHead(source, replace(checkpoint, tensors={}), folder, place)
    return source


class LocalWorkers:
    """Processes of this machine, on ``devices`` by turns, which they take by a file each in the folder ``turns``."""

    def __init__(self, count: int, job: Job, devices: Sequence[str], turns: Path) -> None:
        self.count, self._job, self._devices, self._turns = count, job, devices, turns
        self.kernels = kernels_of(job.device, job.threads, job.settings)
        self._pool: ProcessPoolExecutor | None = None
        self._processes = 0

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Each task's place with its result, as they come. Raises what a task raises, and WorkerError."""
        from concurrent.futures import as_completed
        from concurrent.futures.process import BrokenProcessPool

        pending, lost = dict(enumerate(tasks)), 0
        while pending:
            try:
                with start_workers():
                    pool = self._open(len(pending))
                    futures = {pool.submit(_replay, task): place for place, task in pending.items()}
                for future in as_completed(futures):
                    result = future.result()
                    del pending[futures[future]]
                    yield futures[future], result
            except BrokenProcessPool as error:
                lost += 1
                self.close()
                if lost > _MOST_LOST:
                    raise WorkerError(
                        f"workers were ended {lost} times in the midst of their tasks, as by a machine that is out of "
                        f"memory; type fewer than --workers {self.count}, and --cache DIR to keep what is done"
                    ) from error

    def close(self) -> None:
        """End all processes now."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, kill_workers=True)
            self._pool = None

    def _open(self, tasks: int = MOST_WORKERS) -> "ProcessPoolExecutor":
        """As many processes as are asked for, but no more than there are ``tasks``: each takes seconds to start."""
        from loky import ProcessPoolExecutor

        wanted = min(self.count, tasks)
        if self._pool is not None and self._processes < wanted:
            self.close()
        if self._pool is None:
            told: dict[str, Any] = {"OMP_NUM_THREADS": str(self._job.threads), WAITING: waiting(), _LEAK: "1e18"}
            self._processes = wanted
            self._pool = ProcessPoolExecutor(
                wanted,
                initializer=_begin,
                initargs=(self._job, os.getpid(), self._devices, self._turns),
                env=told,
            )
        return self._pool


@contextmanager
def start_workers() -> Iterator[None]:
    """Processes that start in the block inherit that interrupts are held, so that Ctrl-C reaches this one alone; and
    this one is interrupted when they have begun.

    The processes that tidy up behind them start first, because to start one of these lets interrupts through again: see
    the end of ``ensure_running`` in multiprocessing/resource_tracker.py (Python 3.11) and in loky's (3.7).
    """
    from multiprocessing import resource_tracker

    from loky.backend import resource_tracker as loky_tracker

    resource_tracker.ensure_running()
    loky_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _put_off_interrupts():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _put_off_interrupts() -> Iterator[None]:
    """An interrupt that comes in the block is handled at its end: threads that do not hold it take it all the same."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # Python interrupts the main thread alone
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, None)


# ---- in a worker ----

_job: Job | None = None
_replayer: Replayer | None = None


def _begin(job: Job, parent: int, devices: Sequence[str], turns: Path) -> None:
    global _job
    hold(turns.parent)  # until this process ends
    _job = replace(job, device=devices[take_turn(turns) % len(devices)])
    threading.Thread(target=_end_with, args=(parent, turns.parent), daemon=True).start()


def take_turn(folder: Path) -> int:
    """The next number that no other process took."""
    number = 0
    while True:
        try:
            (folder / f"{number}").touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return number


def _end_with(parent: int, folder: Path, pause: float = 1.0, end: Callable[[int], object] = os._exit) -> None:
    """End this process when the one that started it is gone, however it went. One that was killed could not remove the
    ``folder`` of its heads, which then goes here; where this one is killed too, with the next folder."""
    while os.getppid() == parent:
        time.sleep(pause)
    remove(folder)
    end(1)


def _replay(task: Task) -> Result:
    global _replayer
    if _replayer is None:
        assert _job is not None
        _replayer = Replayer(_job)
    return _replayer.replay(task)
