"""A trace folder that appears under its name when it is whole."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay.errors import OutputError
from replay.traces import files
from replay.traces.place import check_lock, check_writable, no_folder


@contextmanager
def whole_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place at the end, or is gone. Raises OutputError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise OutputError(f"cannot write beside {out}: {error.strerror}; choose another -o") from error
    try:
        yield beside / "trace"
        _put(beside, out, force)
    except OutputError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise OutputError(f"cannot write {out}: {error.__cause__.strerror}; nothing is left of it") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _put(beside: Path, out: Path, force: bool) -> None:
    """Move the finished trace to its name, and the one that it replaces out of the way, or back where that fails."""
    if not (force and out.is_dir()):
        (beside / "trace").rename(out)
        return
    lock = files.lock_folder(out)
    try:
        check_replaceable(out)
        out.rename(beside / "before")
        try:
            (beside / "trace").rename(out)
        except OSError:
            (beside / "before").rename(out)
            raise
    finally:
        os.close(lock)


def check_output(out: Path, *, force: bool) -> None:
    """Refuse, before anything is opened, a place that no trace can be put into. Raises OutputError."""
    if os.path.lexists(out) and not os.path.isdir(out):
        raise no_folder(out)
    if os.path.isdir(out):
        check_lock(out)
        if any(out.iterdir()):
            if not force:
                raise OutputError(f"{out} exists already: type --force to replace its trace, or another -o")
            check_replaceable(out)
    check_writable(out)
    if os.path.isdir(out):
        check_writable(out.parent)  # it is put beside its place first


def check_replaceable(out: Path) -> None:
    """Refuse a folder that holds anything but a trace. Raises OutputError."""
    names = sorted(set(os.listdir(out)) - {files.LOCK})
    foreign = next((name for name in names if not files.is_ours(name)), None)
    if names and (foreign is not None or files.HEADER not in names):
        raise OutputError(
            f"{out} holds {foreign or 'no ' + files.HEADER}, so it is not only a trace and --force spares it: choose "
            "another folder"
        )
