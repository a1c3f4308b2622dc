"""The temporary folder in which workers of a machine find heads: it goes with the command, or with the next one.

The process that makes a folder holds a lock in it, and so does each of its workers. Where all of them are killed at
once, nobody is left to remove it. The lock is free then, and whoever makes the next folder removes what was left.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_NAME = "replay-heads-"
_NEW = "replay-new-"  # of a folder whose lock nobody holds yet, which is nobody's to remove
_LOCK = "lock"
_MOST_NAME = 1 << 10  # bytes of a machine's name


@contextmanager
def open_heads_folder() -> Iterator[Path]:
    """A folder that is there while the block runs; those that killed commands left are removed. Raises OSError."""
    _sweep()
    with ExitStack() as stack:
        new = Path(tempfile.mkdtemp(prefix=_NEW))
        folder = new.with_name(new.name.replace(_NEW, _NAME, 1))
        stack.callback(shutil.rmtree, new, ignore_errors=True)
        (new / _LOCK).write_text(socket.gethostname())
        stack.callback(os.close, hold(new))
        stack.callback(remove, folder)
        new.rename(folder)
        yield folder


def hold(folder: Path) -> int:
    """Keep a folder from being removed by others, until this process ends or closes the descriptor that this gives.

    On a disk without locks nobody removes what others left. Raises OSError.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def remove(folder: Path) -> None:
    """As far as that can be. The lock goes last, so that what is left by one that is killed here is found again."""
    with suppress(OSError):
        for one in folder.iterdir():
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            elif one.name != _LOCK:
                one.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove this user's folders that no process of this machine holds."""
    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{_NAME}*"):
            with suppress(OSError), _alone_in(folder):
                remove(folder)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Nobody else holds it. Raises OSError where somebody does, or it is a link, another user's or another machine's:
    a disk that machines share may keep locks for each of them apart."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=inside)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(inside).st_uid == os.getuid()
            if not mine or os.pread(lock, _MOST_NAME, 0) != socket.gethostname().encode():
                raise PermissionError(f"{folder} is another's")
            yield
        finally:
            os.close(lock)
    finally:
        os.close(inside)
