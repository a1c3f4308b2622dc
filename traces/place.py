"""Whether a trace can be written at a place, asked before anything is loaded for it. Nothing there changes."""

import operator
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from replay.errors import OutputError, TraceCorruptError, TraceError
from replay.traces import files
from replay.traces.fields import read_json
from replay.traces.header import FORMAT, MAX_HEADER_FILE, CaptureSettings, TraceHeader

NEW, FORCE, RESUME = "new", "force", "resume"  # the ways to begin: where nothing is, in place of a trace, going on
_MAY_CHANGE = {("target", "name"), ("target", "path"), ("engine", "details")}


def check_place(folder: Path, way: str, *, beside: Collection[str] = (), resumable: Collection[str] = ()) -> None:
    """Refuse what a writer that begins in ``way`` would refuse, and what it could not write. It looks again itself.

    What is called as in ``beside`` may lie there; with what is called as in ``resumable`` --resume goes on as with a
    trace. Raises OutputError: a file, a folder of something else, another
    writer at work, or one that cannot be written.
    """
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise no_folder(folder)
    if os.path.isdir(folder):
        check_lock(folder)
        names = names_in(folder) - set(beside)
        refuse_foreign(folder, names, way, resumable=not names.isdisjoint(resumable))
    check_writable(folder)


def no_folder(path: Path) -> OutputError:
    """What is said of a file, pipe or device where a trace belongs."""
    return OutputError(f"{path} {files.describe_path(path)}, a trace is a folder: choose another name")


def check_lock(folder: Path) -> None:
    """Refuse a folder in which a writer is at work. Raises OutputError."""
    if files.is_locked(folder):
        raise OutputError(f"another process is writing to {folder}: wait for it or choose another folder")


def check_writable(folder: Path) -> None:
    """Try the writing itself in ``folder``, or in the nearest folder above that is there: rights alone say too little.

    Raises OutputError.
    """
    place = folder
    while not os.path.lexists(place) and place.parent != place:
        place = place.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".replay-", dir=place))
        most = os.pathconf(place, "PC_NAME_MAX")
        if any(len(os.fsencode(name)) > most for name in folder.relative_to(place).parts):
            raise OSError(f"a name in it has more than {most} bytes")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to {folder}: {error.strerror or error}; choose another folder")


def names_in(folder: Path) -> set[str]:
    """What lies there and belongs to a trace, or to somebody else."""
    return set(os.listdir(folder)) - {files.LOCK, files.SPOOL, files.HEADER + files.TEMPORARY}


def refuse_foreign(folder: Path, names: Collection[str], way: str, *, resumable: bool = False) -> None:
    """Raises OutputError where what lies in ``folder`` may be neither replaced nor gone on with."""
    if not names or (resumable and way != NEW):
        return
    if way == NEW and not (resumable or is_trace(folder)):
        raise OutputError(f"{folder} exists already, is not empty and is no trace: choose another folder")
    if way == NEW:
        raise OutputError(
            f"{folder} exists already and is not empty: type --resume to go on with its trace, --force to replace it, "
            "or another -o"
        )
    if way == FORCE and not is_trace(folder):
        raise OutputError(f"{folder} is not empty and is no trace, so --force spares it: choose another folder")
    if way == RESUME and files.HEADER not in names:
        raise OutputError(f"{folder} is not empty and holds no {files.HEADER}: choose another folder")


def is_trace(folder: Path) -> bool:
    """Whether ``folder`` holds a trace of any version."""
    try:
        header = read_json(folder / files.HEADER, MAX_HEADER_FILE)
    except TraceCorruptError:
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def check_agreement(begun: TraceHeader, now: TraceHeader, path: Path) -> None:
    """What a resumed capture must share with its beginning; the target may have moved (name, path).

    Raises TraceError naming both values.
    """
    for place in ("target", "engine", "capture"):
        for item in fields(getattr(begun, place)):
            if (place, item.name) not in _MAY_CHANGE:
                name = f"{place}.{item.name}"
                check_equal(name, operator.attrgetter(name)(begun), operator.attrgetter(name)(now), path)
    for name in ("taps", "topk", "embed"):
        check_equal(name, getattr(begun, name), getattr(now, name), path)


def check_settings(begun: TraceHeader, now: CaptureSettings, path: Path) -> None:
    """The part of ``check_agreement`` that is known before a target is. Raises TraceError naming both values."""
    for item in fields(now):
        check_equal(f"capture.{item.name}", getattr(begun.capture, item.name), getattr(now, item.name), path)


def check_equal(name: str, begun: object, now: object, path: Path) -> None:
    """Raises TraceError naming both values of ``name`` where they differ."""
    if begun != now:
        raise TraceError(
            f"{path} was begun with {name} {_say(begun)}, now it is {_say(now)}: resume with the former, or type "
            "--force to begin anew"
        )


def _say(value: object) -> str:
    """A setting as a message shows it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} ({tap.dtype} x {tap.width})" for name, tap in value.items())
    if isinstance(value, str) or not isinstance(value, Iterable):
        return str(value)
    return ",".join(map(str, value))
