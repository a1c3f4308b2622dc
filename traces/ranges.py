"""One file as those see it who read parts of it: here by its descriptor, elsewhere by ranges of its bytes."""

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from replay.errors import TraceCorruptError
from replay.traces import files
from replay.traces.cached_files import keep_range, range_file
from replay.traces.object_store import Entry
from replay.traces.remote import entry_of, is_whole
from replay.traces.sectors import fetch_ahead, read_bytes

_PIECE = 1 << 22


@dataclass(frozen=True, slots=True)
class LocalRanges:
    """A file of this machine, opened. ``version`` is for files elsewhere."""

    descriptor: int
    size: int
    version: str = ""

    def read(self, start: int, length: int) -> bytes:
        """At most ``length`` bytes from ``start`` on."""
        return os.pread(self.descriptor, length, start)

    def buffer(self, start: int, length: int) -> tuple[mmap.mmap | bytearray, int]:
        """Memory that holds these bytes, and where in it they begin: private, so that writing changes no file."""
        page = start - start % mmap.ALLOCATIONGRANULARITY
        return mmap.mmap(self.descriptor, start - page + length, access=mmap.ACCESS_COPY, offset=page), start - page


@dataclass(frozen=True, slots=True)
class RemoteRanges:
    """A file elsewhere. Reading raises StorageError where it is gone or has changed."""

    entry: Entry

    @property
    def size(self) -> int:
        return self.entry.size

    @property
    def version(self) -> str:
        """What changes with its content."""
        return self.entry.version

    def read(self, start: int, length: int) -> bytes:
        """At most ``length`` bytes from ``start`` on."""
        return bytes(read_bytes(self.entry, min(start, self.size), min(start + length, self.size)))

    def buffer(self, start: int, length: int) -> tuple[mmap.mmap | bytearray, int]:
        """Memory that holds these bytes, and where in it they begin: of a range that is kept as a file, that file's."""
        try:
            descriptor = os.open(range_file(self.entry, start, start + length), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return read_bytes(self.entry, start, start + length), 0
        try:
            if os.fstat(descriptor).st_size == length:
                return mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY), 0
        finally:
            os.close(descriptor)
        return read_bytes(self.entry, start, start + length), 0


@contextmanager
def open_ranges(path: Path, *, follow: bool = False) -> Iterator[LocalRanges | RemoteRanges]:
    """A file to read parts of; links as ``files.open_regular`` has it, whose errors it raises, and StorageError."""
    entry = entry_of(path)
    if entry is not None and not is_whole(path):
        yield RemoteRanges(entry)
        return
    with files.open_regular(path, follow=follow) as descriptor:
        size = os.fstat(descriptor).st_size
        yield LocalRanges(descriptor, size, "" if entry is None else entry.version)


def fetch_ranges(wanted: Iterable[tuple[Path, int, int]]) -> None:
    """Fetch ranges (file, start, stop) of files elsewhere side by side into the local cache; nothing of files here.

    Raises StorageError, OutputError.
    """
    entries = [(entry_of(path), start, stop) for path, start, stop in wanted]
    fetch_ahead([(entry, start, stop) for entry, start, stop in entries if entry is not None])


def share_range(path: Path, start: int, stop: int) -> None:
    """Fetch a long range of a file elsewhere into one file of the local cache, so that processes which ask for its
    ``buffer`` share its memory; nothing of files here, or whole there.

    Raises StorageError, and OutputError where the cache has no room for it.
    """
    entry = entry_of(path)
    if entry is not None and not is_whole(path) and start < stop:
        keep_range(entry, start, stop)


def sha256_of(path: Path, start: int = 0) -> str:
    """SHA-256 of a file's bytes from ``start`` on, in lower-case hexadecimal; memory stays flat.

    Raises TraceCorruptError, StorageError.
    """
    if entry_of(path) is None:
        return files.sha256_of(path, start)
    digest = hashlib.sha256()
    with open_ranges(path) as file:
        for at in range(start, file.size, _PIECE):
            piece = file.read(at, _PIECE)
            if not piece:
                raise TraceCorruptError(f"{path} ends at byte {at}, {file.size} were expected")
            digest.update(piece)
    return digest.hexdigest()
