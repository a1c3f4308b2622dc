"""Files of a trace folder: names, whole-or-nothing writing, the writers' lock, and opening that follows no links."""

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from replay.errors import OutputError, TraceCorruptError, UsageError
from replay.printable import shorten
from replay.traces.addresses import refuse_address

HEADER = "trace.json"
REQUESTS = "requests.parquet"
ROUNDS = "rounds.parquet"
WEIGHTS = "target.safetensors"
LOCK = ".lock"
SPOOL = "spool"  # a folder, of a server that records here: no part of the trace, left alone
TEMPORARY = ".tmp"

PLAIN = "is a file"  # of ``describe_path``

MAX_SHARDS = 100_000
_SHARD = re.compile(r"shard-(\d{5})\.safetensors", re.ASCII)
_BLOCK = 1 << 22


def shard_name(number: int) -> str:
    """The file name of shard ``number``, counting from 0."""
    return f"shard-{number:05d}.safetensors"


def shard_number(name: str) -> int | None:
    """The number of a shard's file name; None for any other name."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else None


def is_ours(name: str) -> bool:
    """Whether ``name`` is a file that a TraceWriter makes."""
    final = name.removesuffix(TEMPORARY)
    return final in (HEADER, REQUESTS, ROUNDS, WEIGHTS) or shard_number(final) is not None


def write_whole(path: Path, blocks: Iterable[bytes | memoryview], *, apart: str = "") -> None:
    """Write ``blocks`` to ``path`` so that it is there whole or not at all, whenever the process or machine dies.

    A temporary neighbour is written, synced and renamed, then the folder is synced. The old file stays as it was for
    whoever has it mapped. Where several processes may write ``path`` at once, each gives a word of its own that keeps
    their temporary files ``apart``. Raises OSError; the temporary file is removed then, and on Ctrl-C.
    """
    temporary = path.with_name(path.name + apart + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` outlast a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> int:
    """Take the writers' lock of ``folder``: a descriptor that holds it until it is closed or its process dies.

    Raises OutputError where another process writes there.
    """
    try:
        return take_lock(folder / LOCK)
    except BlockingIOError as error:
        raise OutputError(f"another process is writing to {folder}: wait for it or choose another folder") from error
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder} or lock it: {error.strerror}; choose another folder, on a local disk"
        ) from error


def take_lock(path: Path) -> int:
    """The exclusive ``flock`` of the file ``path``, made where it is not there: held until the descriptor is closed.

    Raises BlockingIOError where another holds it, other OSErrors where it cannot be made or locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(folder: Path) -> bool:
    """Whether a writer is at work in ``folder``. It is let be, and no lock file is made."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # nobody can hold what is not there; what cannot be opened a writer refuses with its reason
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two who ask do not meet
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path, *, follow: bool = False) -> Iterator[int]:
    """A read-only descriptor of the regular file ``path``; no pipe or device is waited for, no link followed unless
    ``follow`` (hub caches are folders of links).

    Raises TraceCorruptError, with a sentence that names the file; so does a read in the block that fails.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        if not follow and os.path.islink(path):
            raise TraceCorruptError(f"{path} is a symbolic link; a trace holds plain files only") from error
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            raise TraceCorruptError(f"{path} is a link to nothing") from error
        raise TraceCorruptError(f"cannot open {path}: {_reason(error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TraceCorruptError(f"{path} is not a plain file")
        yield descriptor
    except OSError as error:  # of a failing disk, or of what only looks like a file, as /proc/self/mem
        raise TraceCorruptError(f"cannot read {path}: {_reason(error)}") from error
    finally:
        os.close(descriptor)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        return "it is not a plain file"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def as_path(value: object) -> Path:
    """``value`` as a path of this machine. Raises UsageError for what is none, for an address of storage elsewhere, and
    for a name with a NUL in it."""
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"a path was expected, {type(value).__name__} {shorten(repr(value), 60)} was given")
    refuse_address(value)
    path = value if isinstance(value, Path) else Path(value)
    if "\0" in str(path):
        raise UsageError(f"{path} holds a zero character, which no path has; give another")
    return path


def describe_path(path: Path) -> str:
    """What lies at ``path``, in half a sentence: ``is a folder``, ``does not exist``."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "is a link to nothing" if os.path.islink(path) else "does not exist"
    except (OSError, ValueError) as error:
        return f"cannot be reached ({_reason(error)})"
    if stat.S_ISREG(mode):
        return PLAIN
    return "is a folder" if stat.S_ISDIR(mode) else "is not a plain file"


def read_small(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """The whole of a file of at most ``limit`` bytes; links as ``open_regular`` has it. Raises TraceCorruptError."""
    with open_regular(path, follow=follow) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise TraceCorruptError(f"{path} holds {size} bytes, at most {limit} are possible")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(limit)


def sha256_of(path: Path, start: int = 0) -> str:
    """SHA-256 of a file's bytes from ``start`` on, in lower-case hexadecimal; memory stays flat."""
    digest = hashlib.sha256()
    with open_regular(path) as descriptor:
        position = start
        while block := os.pread(descriptor, _BLOCK, position):
            digest.update(block)
            position += len(block)
    return digest.hexdigest()
