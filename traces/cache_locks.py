"""Locks of the local cache: of all processes and threads that want the same file, one fetches it."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from replay.traces.addresses import remote_folder
from replay.traces.object_store import Entry

LOCKS = "locks"  # a folder of the cache


@contextmanager
def alone(entry: Entry) -> Iterator[None]:
    """No other process or thread is in a block for the same file; one that is killed there leaves it.

    On a disk that has no locks all are in it at once, and each fetches the file for itself.
    """
    path = os.path.join(remote_folder(), LOCKS, hashlib.sha256(os.fsencode(entry.address)).hexdigest()[:32])
    with ExitStack() as stack:
        with suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fcntl.flock(stack.enter_context(open(path, "ab")), fcntl.LOCK_EX)
        yield


def is_held(lock: str) -> bool:
    """Whether somebody is in a block of ``alone``. Who takes the lock in the moment before it is deleted may find
    another one there, and a file is fetched twice."""
    with suppress(OSError), open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two who ask do not meet
        return False
    return True
