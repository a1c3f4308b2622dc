"""Folders and files elsewhere as paths of this machine: a file is fetched when the operating system is asked for it.

The place of a folder in the cache has a file for each that lies there. Small ones are fetched whole. Those with tensors
are empty there, so that whoever reads them as plain files finds nothing and says so: their bytes come by ranges
(ranges.py), or with ``local_file`` whole. A file's time of change stands for its version, not for a time.
"""

import hashlib
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PosixPath, PurePath
from typing import Any

from replay.errors import StorageError
from replay.traces.addresses import address_of, is_address, parse_address, place_of
from replay.traces.cached_files import fetch_file
from replay.traces.files import as_path
from replay.traces.object_store import Entry, list_folder
from replay.traces.sectors import is_half_written, make_folder, mark_used, unwritable, write_file

_TENSORS = (".safetensors", ".bin")  # of files that are read by ranges, or whole when they are loaded
_FILES = (".json", ".parquet", ".lock", *_TENSORS)


class RemotePath(PosixPath):
    """A path in the cache of what lies elsewhere: a reader sees its address, the operating system its place."""

    def __str__(self) -> str:
        return address_of(super().__str__()) or super().__str__()

    def __fspath__(self) -> str:
        place = super().__str__()
        _provide(place)
        return place

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, or another machine with a local cache elsewhere."""
        address = address_of(super().__str__())
        return (Path, (super().__str__(),)) if address is None else (_at, (address,))


def _at(address: str) -> RemotePath:
    return RemotePath(place_of(address))


class _Folder:
    """What lies at one address, as it was when it was first asked for."""

    def __init__(self, place: str, address: str) -> None:
        self.place, self.address = place, address
        self._entries: dict[str, Entry] | None = None

    def entries(self) -> dict[str, Entry]:
        """By the places of the files. Raises StorageError where nothing lies there, OutputError."""
        if self._entries is None:
            listed = list_folder(self.address).values()
            found = {place_of(entry.address): entry for entry in listed}
            self._clear(found)
            self._entries = found
            for place in found:
                if _has_tensors(place):
                    self.provide(place)
        return self._entries

    def provide(self, place: str) -> None:
        """Bring one of its files; nothing where it has none that is called so."""
        entry = self.entries().get(place)
        if entry is None:
            return
        try:
            told = os.lstat(place)
        except OSError:
            told = None
        sizes = (0, entry.size) if _has_tensors(place) else (entry.size,)
        if told is not None and told.st_size in sizes and told.st_mtime_ns == _stamp(entry):
            mark_used(place)
        elif _has_tensors(place):
            write_file(place, (), stamp=_stamp(entry))
        else:
            _fetch_whole(place, entry)

    def _clear(self, kept: Collection[str]) -> None:
        """Make the folder, without files that do not lie there any more."""
        try:
            if self.place in kept:  # one file
                if os.path.isdir(self.place):
                    raise StorageError(
                        f"{self.address} is a file, and {self.place} has what lies below that address; give the folder "
                        "of a trace or a head"
                    )
                make_folder(os.path.dirname(self.place))
                return
            make_folder(self.place)
            for place in (os.path.join(self.place, name) for name in os.listdir(self.place)):
                with suppress(FileNotFoundError):  # another process was first
                    if place not in kept and os.path.isfile(place) and not is_half_written(place):
                        os.unlink(place)
        except OSError as error:
            raise unwritable(error) from error


_folders: dict[str, _Folder] = {}  # by their places: one view of each for as long as this process lives


def as_source(value: object) -> Path:
    """``value`` as a path that is read from: of this machine, or an address in storage elsewhere.

    Nothing is asked yet. Raises UsageError for what is neither, OutputError where there is no place for a cache.
    """
    if not is_address(value):
        return as_path(value)
    address = parse_address(value)
    place = place_of(address)
    _folders[place] = _Folder(place, address)  # seen anew by who types it anew
    return RemotePath(place)


def entry_of(path: "str | os.PathLike[str]") -> Entry | None:
    """The file elsewhere that is read by ranges and has its place at ``path``; None of any other file.

    Raises StorageError.
    """
    place = PurePath.__str__(path) if isinstance(path, Path) else os.fspath(path)
    if address_of(place) is None or not _has_tensors(place):
        return None
    return _folder_of(place).entries().get(place)


def local_file(path: Path) -> Path:
    """``path`` itself, or the whole of a file elsewhere in the cache. Raises StorageError, and OutputError where the
    cache has no room for it."""
    entry = entry_of(path)
    if entry is None:
        return path
    place = place_of(entry.address)
    os.fspath(path)
    if not _is_whole(place, entry):
        _fetch_whole(place, entry, sync=True)
    mark_used(place)
    return path


def local_folder(folder: Path) -> Path:
    """``folder`` itself, or the place of one elsewhere with all its files that hold no tensors, for who reads plain
    files. Raises StorageError, OutputError."""
    if not isinstance(folder, RemotePath):
        return folder
    for name in os.listdir(folder):
        os.fspath(folder / name)
    return Path(os.fspath(folder))


def is_whole(path: Path) -> bool:
    """Whether all of a file elsewhere lies in the cache, as one file."""
    entry = entry_of(path)
    return entry is not None and _is_whole(place_of(entry.address), entry)


def size_of(path: Path) -> int:
    """Bytes of a file, here or elsewhere. Raises OSError, StorageError."""
    entry = entry_of(path)
    return os.stat(path).st_size if entry is None else entry.size


def _is_whole(place: str, entry: Entry) -> bool:
    try:
        told = os.lstat(place)
    except OSError:
        return False
    return told.st_size == entry.size and told.st_mtime_ns == _stamp(entry)


def _fetch_whole(place: str, entry: Entry, *, sync: bool = False) -> None:
    """Bring a file that is not whole in the cache, past the sectors."""
    fetch_file(place, entry, 0, entry.size, lambda: _is_whole(place, entry), stamp=_stamp(entry), sync=sync)


def _provide(place: str) -> None:
    if address_of(place) is not None:
        folder = _folder_of(place)
        if place == folder.place:
            folder.entries()
        folder.provide(place)


def _folder_of(place: str) -> _Folder:
    """The folder that ``place`` is or lies in: one that was asked for, else, in another process, what its name says."""
    parent = os.path.dirname(place)
    for known in (place, parent):
        if known in _folders:
            return _folders[known]
    own = parent if place.endswith(_FILES) and address_of(parent) else place
    return _folders.setdefault(own, _Folder(own, address_of(own) or ""))


def _has_tensors(place: str) -> bool:
    return place.endswith(_TENSORS)


def _stamp(entry: Entry) -> int:
    """A time of change, in nanoseconds, that stands for the version of a file: in the first decade of its clock."""
    digest = hashlib.sha256(repr((entry.address, entry.size, entry.version)).encode()).digest()
    return int.from_bytes(digest[:6], "big") * 1000  # a clock may count microseconds
