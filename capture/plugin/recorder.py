"""From tensors of a running forward to files of the spool, without making the forward wait for a disk.

Everything handed over must be private to the recorder: a copy, not a view of a buffer that the engine uses again.
On an accelerator it is copied to pinned memory on a stream of its own; a thread waits for the copy, lets the caller's
function turn it into entries, and writes. What is under way is bounded: beyond ``most_bytes`` the forward waits, and
beyond ``longest_wait`` (a disk that hangs) it goes on without being recorded, before the server's watchdog ends it.
Once something fails nothing is recorded any more, nothing waits any more, and the reason is kept.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.capture.plugin.split import File, split_by_file
from replay.capture.spool import Entry, write_row_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_BYTES = 1 << 30  # of rows under way: on the device, in pinned memory or waiting to be written
FILE_BYTES = 1 << 26  # a file is written when it has so much,
FILE_SECONDS = 0.2  # or when its first row is so old
_BLOCK = 64  # logits that are looked at together
LONGEST_WAIT = 30.0  # seconds that a forward waits for the disk; SGLang 0.5.23's watchdog ends a server after 300

# entries and, by name, their rows on the CPU (spool.py), made in the writing thread from what was handed over
Build = Callable[["Mapping[str, Tensor]"], "tuple[Sequence[Entry], Mapping[str, Tensor]]"]


@dataclass(slots=True)
class _Job:
    tensors: "dict[str, Tensor]"  # on the CPU; whole once ``ready`` has happened
    ready: Any | None  # an event of the device; None on a CPU
    build: "Build"
    bytes: int


class RowRecorder:
    """Writes rows to ``folder`` in a thread.

    ``on_failure`` is called once with the reason, in a thread of its own: it may touch the very disk that hangs.
    """

    def __init__(
        self,
        folder: Path,
        pid: int,
        on_failure: Callable[[str], None],
        *,
        most_bytes: int = MOST_BYTES,
        longest_wait: float = LONGEST_WAIT,
    ) -> None:
        self.folder, self.pid = folder, pid
        self.failure: str | None = None
        self._on_failure = on_failure
        self._failing: threading.Thread | None = None
        self._most_bytes, self._longest_wait = most_bytes, longest_wait
        self._jobs: deque[_Job] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._number = 0
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="replay-recorder", daemon=True)
        self._thread.start()

    def submit(self, tensors: "Mapping[str, Tensor]", build: "Build") -> None:
        """Record ``tensors``; waits while too much is under way. Does nothing after a failure."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if not self._make_room(size):
            return
        try:
            job = self._to_cpu(tensors, build, size)
        except RuntimeError as error:  # no pinned memory, or the device's is full
            self.fail(f"rows could not be copied off the device: {_first_line(error)}")
            return
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _make_room(self, size: int) -> bool:
        """Wait until ``size`` more bytes may be under way; False where nothing is recorded any more."""
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self.failure is not None or not self._bytes or self._bytes + size <= self._most_bytes,
                self._longest_wait,
            )
            if in_time and self.failure is None and not self._closing:
                self._bytes += size
                return True
        if not in_time:
            self.fail(
                f"{self.folder} took no rows for {self._longest_wait:.0f} s while {self._bytes} bytes were waiting"
            )
        return False

    def fail(self, reason: str) -> None:
        """Stop recording for this reason; only the first one counts."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure = reason
            self._jobs.clear()
            self._bytes = 0
            self._changed.notify_all()
            self._failing = threading.Thread(
                target=self._on_failure, args=(reason,), name="replay-recorder-failed", daemon=True
            )
            self._failing.start()

    def close(self) -> None:
        """Write what was handed over and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._failing is not None:
            self._failing.join()

    def _to_cpu(self, tensors: "Mapping[str, Tensor]", build: "Build", size: int) -> _Job:
        import torch

        device = next(iter(tensors.values())).device
        if device.type == "cpu":
            return _Job(dict(tensors), None, build, size)
        module = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream(device=device)
        self._stream.wait_stream(module.current_stream(device))
        copies = {}
        with module.stream(self._stream):
            for name, tensor in tensors.items():
                copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            ready = module.Event()
            ready.record(self._stream)
        return _Job(copies, ready, build, size)

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
        except OSError as error:
            self.fail(f"cannot write to {self.folder}: {error.strerror or error}")
        except RuntimeError as error:  # torch: a copy failed on the device
            self.fail(f"rows could not be read back: {_first_line(error)}")
        finally:
            if not self._closing:
                self.fail("the writing thread ended; the server's log has its traceback")

    def _write_next(self) -> bool:
        """Gather a file's worth of rows and write it, a file for each client and for what it keeps (split.py).

        False when closed and nothing is left.
        """
        gathered: dict[File, tuple[list[Entry], dict[str, list[Tensor]]]] = {}
        size = begun = 0.0
        while True:
            job = self._take(None if not begun else begun + FILE_SECONDS - time.monotonic())
            if job is None:
                break
            begun = begun or time.monotonic()
            if job.ready is not None:
                job.ready.synchronize()
            made, tensors = job.build(job.tensors)
            size += job.bytes
            for file, (entries, rows) in (split_by_file(made, tensors) if made else {}).items():
                known, parts = gathered.setdefault(file, ([], {}))
                known.extend(entries)
                for name, tensor in rows.items():
                    parts.setdefault(name, []).append(tensor)
            if size >= FILE_BYTES:
                break
        for (_, taps, _), (known, parts) in gathered.items():
            write_row_file(self.folder, self.pid, self._number, known, parts, partial=taps is not None)
            self._number += 1
        with self._changed:
            self._bytes = max(0, self._bytes - int(size))
            self._changed.notify_all()
            return not (self._closing and not self._jobs)

    def _take(self, timeout: float | None) -> _Job | None:
        """The next job; None after ``timeout`` seconds, or where closing and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._closing, timeout)
            return self._jobs.popleft() if self._jobs else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def summarise_rows(logits: "Tensor", k: int) -> "dict[str, torch.Tensor]":
    """``topk_ids`` [n, k], ``topk_logprobs`` [n, k] and ``logsumexp`` [n] of logits [n, V], on their device.

    As logits.summarise_logits has it (most likely first, equal ones by rising id, column 0 the argmax), without
    a synchronisation.
    """
    import torch

    wide = logits.float()
    logsumexp = wide.logsumexp(-1)
    among = _candidates(wide, k)
    values = wide.gather(-1, among)
    ids = among.gather(-1, values.topk(min(k, wide.shape[-1])).indices.sort().values)
    best = among.gather(-1, values.argmax(-1, keepdim=True))
    values, order = wide.gather(-1, ids).sort(descending=True, stable=True)
    ids = ids.gather(-1, order)
    ids[:, :1] = best
    return {
        "topk_ids": ids.to(torch.int32),
        "topk_logprobs": values - logsumexp[:, None],
        "logsumexp": logsumexp,
    }


def _candidates(wide: "Tensor", k: int) -> "Tensor":
    """Rising ids [n, C] among which are the k largest of each row [n, V], and the first of the largest.

    One look at every value, instead of one for each thing wanted: no more than k blocks hold the k largest, and those
    with the largest values are they.
    """
    import torch

    vocabulary = wide.shape[-1]
    blocks, rest = divmod(vocabulary, _BLOCK)
    if blocks <= k:
        return torch.arange(vocabulary, device=wide.device).expand(len(wide), -1)
    largest = wide[:, : vocabulary - rest].unflatten(-1, (blocks, _BLOCK)).amax(-1)
    chosen = largest.sort(descending=True, stable=True).indices[:, :k].sort().values
    ids = (chosen[..., None] * _BLOCK + torch.arange(_BLOCK, device=wide.device)).flatten(1)
    tail = torch.arange(vocabulary - rest, vocabulary, device=wide.device).expand(len(wide), -1)
    return torch.cat([ids, tail], dim=-1)
