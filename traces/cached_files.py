"""Files elsewhere, or long ranges of them, as one file each of the local cache: whole there, or not at all.

Unlike sectors they can be mapped, and processes that map one share its memory.
"""

import hashlib
import os
from collections.abc import Callable

from replay.traces.addresses import remote_folder
from replay.traces.asking import ask_all
from replay.traces.cache_locks import alone
from replay.traces.object_store import Entry, read_range
from replay.traces.sectors import check_room, check_same, mark_used, new_file

_PART = 1 << 23  # bytes of one question


def fetch_file(
    path: str,
    entry: Entry,
    start: int,
    stop: int,
    is_there: Callable[[], bool],
    *,
    stamp: int | None = None,
    sync: bool = True,
) -> None:
    """Write the bytes ``start`` to ``stop`` of a file elsewhere to ``path``, of one version, unless it ``is_there``.

    Of all processes and threads that want it at once one does, and asks for its parts side by side. ``stamp`` is its
    time of change. Raises StorageError, and OutputError where the cache has no room for it.
    """
    check_room(entry, stop - start)
    with alone(entry):
        if is_there():
            return
        with new_file(path, size=stop - start, stamp=stamp, sync=sync) as file:

            def fetch(low: int) -> None:
                data = read_range(entry, low, min(low + _PART, stop))
                with open(file.name, "r+b") as own:  # after a failure elsewhere this writes to nothing that is used
                    own.seek(low - start)
                    own.write(data)

            ask_all(fetch, range(start, stop, _PART))
            check_same(entry)


def range_file(entry: Entry, start: int, stop: int) -> str:
    """The place in the cache of a range of a file elsewhere. Its name has the version of the file."""
    name = hashlib.sha256(repr((entry.address, entry.size, entry.version)).encode()).hexdigest()[:32]
    return os.path.join(remote_folder(), "ranges", name, f"{start}-{stop}")


def keep_range(entry: Entry, start: int, stop: int) -> None:
    """Bring a range into the cache as one file. Raises as ``fetch_file``."""
    path = range_file(entry, start, stop)

    def is_there() -> bool:
        try:
            return os.stat(path).st_size == stop - start
        except OSError:
            return False

    if not is_there():
        fetch_file(path, entry, start, stop, is_there)
    mark_used(path)
