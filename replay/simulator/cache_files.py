"""The files of a cache of sweeps (cache.py): which are whole, when they were used, and how many bytes all may have.

An entry is a file and its checksum beside it. Any process may read, write or delete any entry at any time: one that is
not there whole is replayed again.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from replay.errors import TraceError
from replay.traces import files
from replay.traces.sectors import bound, is_at_work, mark_used

_NAME = re.compile(r"([0-9a-f]{64})\.(parquet|npz|sha256)", re.ASCII)  # what else lies there is not ours
# Of a writer, who removes it unless somebody kills it: files.py and rounds_file.py name them so.
_TEMPORARY = re.compile(r"\.?[0-9a-f]{64}\.(parquet|npz|sha256)\.[0-9]+\.[0-9a-f]{8}\.(part|tmp)", re.ASCII)
_NEW = 60.0  # seconds in which whoever wrote an entry's file may not have written its checksum
_PAUSE = 0.1  # seconds, many times what a checksum takes
_SHARE = 20  # of its bound so much (1/20) is written before the entries are counted again


@dataclass
class Entries:
    """Those in ``folder``; how many bytes this process wrote since it counted them, None before that.

    ``on_note`` is told once that an entry is damaged.
    """

    folder: Path
    on_note: Callable[[str], None] = lambda _: None
    written: int | None = None
    told: bool = False

    def holds(self, path: Path) -> bool:
        """Whether an entry's file is there with the bytes that its checksum names: it counts as used now."""
        try:
            whole = _belong(path) or (_is_new(path) and _belong(path))
        except TraceError:
            return False  # not there, or not any more
        if whole:
            mark_used(str(path))
        elif not self.told:
            self.told = True
            self.on_note(f"note: an entry of {self.folder} is damaged, {path.name}; what is damaged is replayed again")
        return whole

    def count(self, path: Path) -> None:
        """This file was written: delete the entries that were used least lately, once there are too many bytes.

        Raises UsageError for a bound that is none.
        """
        most = bound()
        if self.written is not None:
            with suppress(OSError):  # another process has deleted it
                self.written += os.stat(path).st_size
            if self.written * _SHARE < most:
                return
        self.written = 0
        found = sorted(_entries(self.folder))
        held = sum(size for _, size, _ in found)
        for _, size, paths in found:
            if held <= most - most // _SHARE * 2:
                return
            for path in paths:
                with suppress(OSError):  # another process was first
                    os.unlink(path)
            held -= size


def _belong(path: Path) -> bool:
    """Whether an entry's file is that of its checksum. Raises TraceError."""
    expected = files.read_small(path.with_suffix(".sha256"), 64).decode("ascii", "replace")
    return files.sha256_of(path) == expected


def _is_new(path: Path) -> bool:
    """Whether another sweep may be between an entry's file and its checksum; after time enough for it."""
    with suppress(OSError):
        if time.time() - os.stat(path).st_mtime < _NEW:
            time.sleep(_PAUSE)
            return True
    return False


def _entries(folder: Path) -> Iterator[tuple[int, int, list[Path]]]:
    """Of each entry when it was used, its bytes and its files, the checksum first; so of what a killed writer left."""
    found: dict[str, list[tuple[int, int, Path]]] = {}
    for place in folder.glob("[0-9a-f][0-9a-f]"):
        for path in place.iterdir() if place.is_dir() else ():
            with suppress(OSError):  # another process was first
                told = os.lstat(path)
                name = _name_of(path.name, told)
                if name is not None:
                    found.setdefault(name, []).append((told.st_atime_ns, told.st_size, path))
    for parts in found.values():
        times, sizes, paths = zip(*parts, strict=True)
        yield max(times), sum(sizes), sorted(paths, key=lambda path: path.suffix != ".sha256")


def _name_of(name: str, told: os.stat_result) -> str | None:
    """What a file counts to: an entry, or itself if its writer was killed; None for what is not ours to delete."""
    entry = _NAME.fullmatch(name)
    if entry is not None:
        return entry[1]
    return name if _TEMPORARY.fullmatch(name) and not is_at_work(told) else None
