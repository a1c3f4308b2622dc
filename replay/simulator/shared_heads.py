"""A large head, laid out once for all workers of a machine as they run it.

What is one product in a server, as q, k and v, lies side by side in one file, so that nobody has to make a copy of it
(``stack`` in head/parts.py). The first worker that needs a head writes the file, and all of them map it.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replay.checkpoint.checkpoint import Checkpoint
from replay.simulator.replayer import HeadSource
from replay.traces.fields import parse_json
from replay.traces.tensors import tensor_bytes

LEAST_BYTES = 256 << 20  # of a head; a smaller one is copied by each worker before a file were written
_MOST_FILES = 4  # of heads at a time: workers go through a sweep's heads one after the other
_LINE = 64  # bytes that torch aligns its own tensors to
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
        """Raises CheckpointError, as where it changed since the sweep began."""
        with _alone(self.folder):
            if not self._index.exists():
                found = self.source.read(name)
                if shutil.disk_usage(self.folder).free < 2 * bytes_of(found):
                    return found  # each worker has its own copies then
                self._lay_out(found.tensors)
            return replace(self.shell, tensors=_map_all(self._index, self._data))

    @property
    def _index(self) -> Path:
        return self.folder / f"{self.place}.json"

    @property
    def _data(self) -> Path:
        return self.folder / f"{self.place}.tensors"

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        """The index comes last: where it is, the tensors are whole. What others have mapped is never written to."""
        index: dict[str, tuple[str, list[int], int]] = {}
        data_part, index_part = self._data.with_suffix(".part"), self._index.with_suffix(".index-part")
        with open(data_part, "wb") as file:
            for group in side_by_side(tensors):
                file.seek(-(-file.tell() // _LINE) * _LINE + _line_offset(tensors, group))
                for name in group:
                    one = tensors[name].contiguous()
                    index[name] = (str(one.dtype).removeprefix("torch."), list(one.shape), file.tell())
                    file.write(tensor_bytes(one))
        index_part.write_text(json.dumps(index))
        _make_room(self.folder)
        os.replace(data_part, self._data)
        os.replace(index_part, self._index)


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

    A tensor lies as its file was mapped, what is joined at the beginning, as torch would make it.
    """
    return tensors[group[0]].data_ptr() % _LINE if len(group) == 1 else 0


def _map_all(index: Path, data: Path) -> dict[str, Tensor]:
    """Tensors of one storage, which is the mapped file; to write to them would change this process alone."""
    told: Any = parse_json(index.read_text(), str(index))  # our own, written by another process of this run
    storage = torch.UntypedStorage.from_file(str(data), shared=False, nbytes=data.stat().st_size)
    found = {}
    for name, (dtype, shape, offset) in told.items():
        empty: Any = torch.empty(0, dtype=getattr(torch, dtype))  # torch's types know no set_ of three
        found[name] = empty.set_(storage, offset // empty.element_size(), torch.Size(shape))
    return found


def _make_room(folder: Path) -> None:
    """The oldest files go; who has mapped one keeps it."""
    kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    for index in kept[: max(0, len(kept) + 1 - _MOST_FILES)]:
        index.unlink()
        index.with_suffix(".tensors").unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other worker is in the block; one that is killed there leaves it."""
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
