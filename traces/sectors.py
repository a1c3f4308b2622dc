"""Files in storage, sector by sector: what was read once lies in the local cache, which keeps a bounded size.

A sector is a file of its own, written whole and then renamed, with a checksum at its end. So any process may read,
write or delete any sector at any time: one that is not there, or not whole, is read from the storage again. Its name
has the version of the file that it is of; what has changed is never taken for what was read before.
"""

import hashlib
import math
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from itertools import groupby

from replay.errors import OutputError, StorageError, UsageError
from replay.printable import one_line
from replay.traces.addresses import remote_folder
from replay.traces.asking import ask_all
from replay.traces.cache_locks import LOCKS, is_held
from replay.traces.object_store import Entry, look, read_range

HEAD = 1 << 16  # bytes of the first sector: more than most headers
SECTOR = 1 << 20  # bytes of a sector
_MOST_AT_ONCE = 32  # sectors of one question
_CHECKSUM = 4
_DEFAULT_GB = 20.0
_SHARE = 20  # of its bound so much (1/20) is written before the cache is counted again
_TEMPORARY = ".tmp"
_MOST_STAMP = (1 << 48) * 1000  # nanoseconds: a stamp is a time of change below this, in the first decade of its clock
_AT_WORK = 3600 * 10**9  # nanoseconds after which a temporary file is nobody's any more


def read_bytes(entry: Entry, start: int, stop: int) -> bytearray:
    """The bytes ``start`` to ``stop`` of a file elsewhere, out of the cache as far as it has them.

    Raises StorageError where the file is gone, has changed since ``entry`` was taken, or cannot be read, OutputError
    where the cache cannot be written.
    """
    if not 0 <= start <= stop <= entry.size:
        raise StorageError(f"{entry.address} holds {entry.size} bytes, {start} to {stop} were asked for")
    found = bytearray(stop - start)
    missing = []
    for number in _numbers(start, stop):
        data = _kept(entry, number)
        if data is None:
            missing.append(number)
        else:
            _put(found, start, _bounds(number, entry.size)[0], data)
    for run in _runs(missing):
        for number, data in _fetch(entry, run):
            _put(found, start, _bounds(number, entry.size)[0], data)
    return found


def fetch_ahead(wanted: Iterable[tuple[Entry, int, int]]) -> None:
    """Bring ranges (file, start, stop) into the cache side by side. Raises as ``read_bytes``, as soon as one fails."""
    missing: dict[Entry, set[int]] = {}
    for entry, start, stop in wanted:
        there = (number for number in _numbers(start, min(stop, entry.size)) if os.path.exists(_path(entry, number)))
        missing.setdefault(entry, set()).update(set(_numbers(start, min(stop, entry.size))).difference(there))
    runs = [(entry, run) for entry, numbers in missing.items() for run in _runs(sorted(numbers))]
    if len(runs) > 1:
        ask_all(lambda each: _keep(*each), runs)


def _keep(entry: Entry, run: list[int]) -> None:
    for _ in _fetch(entry, run):
        pass


def check_same(entry: Entry) -> None:
    """Raises StorageError where a file has changed since ``entry`` was taken, or is gone."""
    now = look(entry.address)
    if now != entry:
        raise StorageError(
            f"{entry.address} has changed while it was read; wait until it is written, then begin anew: nothing of "
            "the other version was used"
        )


def write_file(path: str, parts: Iterable[bytes], *, stamp: int | None = None) -> None:
    """Write a small file of the cache whole, or not at all; ``stamp``: its time of change. Raises OutputError."""
    with new_file(path, stamp=stamp) as file:
        for part in parts:
            file.write(part)


def make_folder(folder: str) -> None:
    """Make a folder of the cache. A file in its way goes, as a page that a web server once gave for the address above.

    Raises OSError.
    """
    above = folder
    while above.startswith(f"{remote_folder()}{os.sep}"):
        if os.path.isfile(above):
            os.unlink(above)
        above = os.path.dirname(above)
    os.makedirs(folder, exist_ok=True)


@contextmanager
def new_file(path: str, *, size: int = 0, stamp: int | None = None, sync: bool = False) -> Iterator[BufferedWriter]:
    """A temporary file that becomes ``path`` at the end of the block, or goes where the block raises.

    ``size``: what the block is going to write, for which room is made before; ``stamp``: its time of change. Raises
    OutputError, also for an OSError of the block.
    """
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}{_TEMPORARY}"
    if size:
        _make_room(size)
    try:
        make_folder(os.path.dirname(path))
        with open(temporary, "wb") as file:
            file.truncate(size)  # from now on other processes count all of it
            yield file
            file.flush()
            told = os.stat(temporary)
            if sync:
                os.fsync(file.fileno())
        # used now: it may have taken long to come
        os.utime(temporary, ns=(time.time_ns(), told.st_mtime_ns if stamp is None else stamp))
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(error) from error
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)
    _count(told.st_size)


def unwritable(error: OSError) -> OutputError:
    """What is said of a local cache that refuses to be written."""
    reason = one_line(error.strerror or str(error))
    return OutputError(
        f"the local cache {remote_folder()} cannot be written ({reason}); make room there, or name another folder with "
        "REPLAY_CACHE"
    )


def mark_used(path: str) -> None:
    """Note that a file of the cache was used now; its time of change stays."""
    with suppress(OSError):  # another process has deleted it, or the cache can only be read
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))


def check_room(entry: Entry, size: int) -> None:
    """Raises OutputError for a file, or ``size`` bytes of it, that the cache would have to delete as soon as all of
    it is there."""
    room = _room(bound())
    if size > room:
        what = "is needed whole" if size == entry.size else f"{size / 1e9:.3g} GB of it are needed in one piece"
        raise OutputError(
            f"{entry.address} holds {entry.size / 1e9:.3g} GB and {what}, and the local cache keeps "
            f"{room / 1e9:.3g} GB at most; set REPLAY_CACHE_GB to {size * 1.15 / 1e9:.3g} or more"
        )


def is_at_work(told: os.stat_result) -> bool:
    """Whether another process may be writing a temporary file still.

    One that gets its name next has a stamp in the place of its time already: then the time of that change counts.
    """
    stamped = told.st_mtime_ns < _MOST_STAMP
    return time.time_ns() - (told.st_ctime_ns if stamped else told.st_mtime_ns) < _AT_WORK


def is_half_written(path: str) -> bool:
    """Whether a file of the cache is one that another process may be writing still. Raises OSError."""
    return path.endswith(_TEMPORARY) and is_at_work(os.lstat(path))


def bound() -> int:
    """Bytes that the cache may hold: $REPLAY_CACHE_GB, or 20 GB. Raises UsageError for no such number."""
    text = os.environ.get("REPLAY_CACHE_GB") or str(_DEFAULT_GB)
    try:
        most = float(text)
    except ValueError:
        most = math.nan
    if not 0 < most < 1e9:
        raise UsageError(f"REPLAY_CACHE_GB is {text}; set a number of GB above 0, such as 20")
    return int(most * 1e9)


def _fetch(entry: Entry, run: list[int]) -> Iterator[tuple[int, bytes]]:
    start, stop = _bounds(run[0], entry.size)[0], _bounds(run[-1], entry.size)[1]
    data = read_range(entry, start, stop)
    check_same(entry)  # after the bytes came: they are of this version
    for number in run:
        low, high = _bounds(number, entry.size)
        sector = data[low - start : high - start]
        write_file(_path(entry, number), (sector, zlib.crc32(sector).to_bytes(_CHECKSUM, "little")))
        yield number, sector


def _kept(entry: Entry, number: int) -> bytes | None:
    path = _path(entry, number)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    sector, told = data[:-_CHECKSUM], data[-_CHECKSUM:]
    low, high = _bounds(number, entry.size)
    if len(sector) != high - low or zlib.crc32(sector).to_bytes(_CHECKSUM, "little") != told:
        return None
    mark_used(path)
    return sector


def _path(entry: Entry, number: int) -> str:
    name = hashlib.sha256(repr((entry.address, entry.size, entry.version)).encode()).hexdigest()[:32]
    return os.path.join(remote_folder(), "sectors", name[:2], name, f"{number:06d}")


def _bounds(number: int, size: int) -> tuple[int, int]:
    """First byte of a sector, and the one behind its last."""
    if number == 0:
        return 0, min(HEAD, size)
    return (HEAD if number == 1 else (number - 1) * SECTOR), min(number * SECTOR, size)


def _numbers(start: int, stop: int) -> range:
    if start == stop:
        return range(0)
    return range(_number(start), _number(stop - 1) + 1)


def _number(place: int) -> int:
    return 0 if place < HEAD else place // SECTOR + 1


def _runs(numbers: list[int]) -> Iterator[list[int]]:
    """Neighbours together, at most so many at once."""
    for _, grouped in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in grouped]
        yield from (run[at : at + _MOST_AT_ONCE] for at in range(0, len(run), _MOST_AT_ONCE))


def _put(found: bytearray, start: int, low: int, data: bytes) -> None:
    """Copy what of ``data``, which begins at byte ``low`` of the file, lies in ``found``, which begins at ``start``."""
    at = low - start
    cut = max(0, -at)
    piece = data[cut : cut + len(found) - max(0, at)]
    found[max(0, at) : max(0, at) + len(piece)] = piece


# ---- the bound ----


class _Cache:
    """How much this process has written since the cache was counted."""

    written = 0
    counted = ""  # the folder that was


def _count(size: int) -> None:
    """Delete what was used least lately, once enough was written since the last time."""
    _Cache.written += size
    _make_room(0)


def _make_room(size: int) -> None:
    """As ``_count``, for bytes that are going to be written."""
    most, folder = bound(), remote_folder()
    if (_Cache.written + size) * _SHARE < most and _Cache.counted == folder:
        return
    _Cache.written, _Cache.counted = 0, folder
    found = sorted(_files(folder))
    held = size + sum(size for _, _, size, _ in found)
    for in_use, _, size, path in found:
        if held <= _room(most) or in_use:
            return
        with suppress(OSError):  # another process was first
            os.unlink(path)
        held -= size


def _room(most: int) -> int:
    """What may stay of ``most`` bytes, so that several processes can write before they count again."""
    return most - most // _SHARE * 2


def _files(folder: str) -> Iterator[tuple[bool, int, int, str]]:
    """Of each file whether it is in use now, when it was used, its bytes and its path."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            try:
                told = os.lstat(path)
            except OSError:
                continue
            at_work = name.endswith(_TEMPORARY) and is_at_work(told)
            locked = place == os.path.join(folder, LOCKS) and is_held(path)
            yield at_work or locked, told.st_atime_ns, told.st_size, path
