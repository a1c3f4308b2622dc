"""A large head, laid out once for all workers of a machine as they run it.

What is one product in a server, as q, k and v, lies side by side in one file, so that nobody has to make a copy of it
(``stack_rows`` in head/held.py). The first worker that needs a head writes the file, and all of them map it.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replay.checkpoint.checkpoint import Checkpoint
from replay.simulator.replayer import HeadSource
from replay.simulator.tasks import MOST_LAID_OUT
from replay.traces.fields import parse_json
from replay.traces.tensors import tensor_bytes

LEAST_BYTES = 256 << 20  # of a head; a smaller one is copied by each worker before a file were written
_LINE = 64  # bytes that torch aligns its own tensors to
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


@dataclass(frozen=True)
class SharedHead:
    """Where a worker finds a large head: ``source``, until a file in ``folder`` has it laid out.

    ``shell`` is the head without its tensors. Each head of a folder has another ``place``.
    """

    source: HeadSource
    shell: Checkpoint
    folder: Path
    place: int

    def read(self, name: str) -> Checkpoint:
        """Raises CheckpointError, as where it changed since the sweep began. Where no file can be written or mapped, as
        on a disk that is full, it is the head as it was found, and each worker has its own copies then."""
        found = None
        try:
            with _alone(self._lock):
                if not self._index.exists():
                    found = self.source.read(name)
                    if shutil.disk_usage(self.folder).free < 2 * bytes_of(found):
                        return found
                    self._lay_out(found.tensors)
                return replace(self.shell, tensors=_map_all(self._index, self._data))
        except OSError:
            return found or self.source.read(name)

    @property
    def _index(self) -> Path:
        return self.folder / f"{self.place}.json"

    @property
    def _data(self) -> Path:
        return self.folder / f"{self.place}.tensors"

    @property
    def _lock(self) -> Path:
        return self.folder / f"{self.place}.lock"

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        """The index comes last: where it is, the tensors are whole. What others have mapped is never written to.

        Raises OSError, and leaves no part of a file then.
        """
        data_part, index_part = self._data.with_suffix(".part"), self._index.with_suffix(".index-part")
        try:
            index_part.write_text(json.dumps(_write_all(tensors, data_part)))
            _make_room(self.folder)
            os.replace(data_part, self._data)
            os.replace(index_part, self._index)
        except OSError:
            for part in (data_part, index_part):
                part.unlink(missing_ok=True)
            raise


def _write_all(tensors: Mapping[str, Tensor], path: Path) -> dict[str, tuple[str, list[int], int]]:
    """Dtype, shape and place in the file of each."""
    index: dict[str, tuple[str, list[int], int]] = {}
    with open(path, "wb") as file:
        for group in side_by_side(tensors):
            file.seek(-(-file.tell() // _LINE) * _LINE + _line_offset(tensors, group))
            for name in group:
                one = tensors[name].contiguous()
                index[name] = (str(one.dtype).removeprefix("torch."), list(one.shape), file.tell())
                file.write(tensor_bytes(one))
    return index


def bytes_of(checkpoint: Checkpoint) -> int:
    """Of all its tensors."""
    return sum(one.numel() * one.element_size() for one in checkpoint.tensors.values())


def side_by_side(tensors: Mapping[str, Tensor]) -> Iterator[Sequence[str]]:
    """The names of all tensors: of those that are one product together, and of every other one alone."""
    taken: set[str] = set()
    for name in tensors:
        group = next(([name.replace(parts[0], part) for part in parts] for parts in _TOGETHER if parts[0] in name), [])
        if group and all(one in tensors and tensors[one].dtype == tensors[name].dtype for one in group):
            taken.update(group)
            yield group
    yield from ([name] for name in tensors if name not in taken)


def _line_offset(tensors: Mapping[str, Tensor], group: Sequence[str]) -> int:
    """Where in a line of memory one process has it, because some kernels sum in another order elsewhere.

    A tensor of 16 bits lies as its file was mapped. What is joined lies at the beginning, and so does fp32: as a head
    has them (head/held.py).
    """
    alone = tensors[group[0]]
    return alone.data_ptr() % _LINE if len(group) == 1 and alone.dtype.itemsize < 4 else 0


def _map_all(index: Path, data: Path) -> dict[str, Tensor]:
    """Tensors of one storage, which is the mapped file; to write to them would change this process alone.

    Raises OSError.
    """
    told: Any = parse_json(index.read_text(), str(index))  # our own, written by another process of this run
    size = data.stat().st_size
    try:
        storage = torch.UntypedStorage.from_file(str(data), shared=False, nbytes=size)
    except RuntimeError as error:  # torch has this alone for a file that cannot be mapped
        raise OSError(f"{data} cannot be mapped") from error
    found = {}
    for name, (dtype, shape, offset) in told.items():
        empty: Any = torch.empty(0, dtype=getattr(torch, dtype))  # torch's types know no set_ of three
        found[name] = empty.set_(storage, offset // empty.element_size(), torch.Size(shape))
    return found


def _make_room(folder: Path) -> None:
    """The oldest files go, but for those that somebody reads just now; who has mapped one keeps it."""
    kept = sorted(folder.glob("*.json"), key=_age)
    for index in kept[: max(0, len(kept) + 1 - MOST_LAID_OUT)]:
        with suppress(BlockingIOError), _alone(index.with_suffix(".lock"), fcntl.LOCK_NB):
            index.unlink(missing_ok=True)
            index.with_suffix(".tensors").unlink(missing_ok=True)


def _age(path: Path) -> int:
    """When it was written; another worker may have removed it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@contextmanager
def _alone(path: Path, more: int = 0) -> Iterator[None]:
    """No other worker is in a block of this lock; one that is killed there leaves it. Raises BlockingIOError instead of
    waiting where ``more`` is LOCK_NB."""
    with open(path, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | more)
        yield
