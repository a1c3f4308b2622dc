"""Starts of recording servers in one folder: each locks its own launch folder, and clears what dead ones left."""

import os
from pathlib import Path

from replay.capture.spool import SPOOL, is_launch, is_spooled, names_in
from replay.traces import files


def lock_launch(folder: Path) -> int:
    """The lock of a launch folder: while the descriptor is open, no other start deletes it.

    Raises FileNotFoundError where another start has just deleted it, BlockingIOError where it does so now, OSError.
    """
    lock = files.take_lock(folder / files.LOCK)
    try:
        if os.path.samestat(os.fstat(lock), os.stat(folder / files.LOCK)):
            return lock
        raise FileNotFoundError(folder)
    except OSError:
        os.close(lock)
        raise


def drop_launches(folder: Path, keep: str) -> None:
    """Delete what earlier starts left in ``folder``: files of ours in launch folders, nothing else. Raises OSError.

    Launches whose lock is held stay: their servers record.
    """
    spool = folder / SPOOL
    for name in names_in(spool):
        if is_launch(name) and name != keep and not (spool / name).is_symlink():
            try:
                lock = lock_launch(spool / name)
            except (BlockingIOError, FileNotFoundError, NotADirectoryError):
                continue
            try:
                _drop_launch(spool / name)
            finally:
                os.close(lock)


def _drop_launch(folder: Path) -> None:
    """Delete a launch folder whose lock is held here, the lock last; what is not ours stays."""
    for file in names_in(folder):
        if is_spooled(file):
            (folder / file).unlink(missing_ok=True)
    (folder / files.LOCK).unlink(missing_ok=True)
    if not names_in(folder):
        folder.rmdir()
