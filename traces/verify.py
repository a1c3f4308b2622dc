"""Files of a trace against their checksums, when they are first read; what was found whole is remembered safely.

Only large files are remembered: a small one is read again in less time than asking takes. An entry stands for one file
as it was: its device, inode, size, both times of change and the checksum. Whoever changes a file changes one of these.
What a disk changes by itself does not: `replay inspect --check` reads everything, whatever is remembered.
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from replay.errors import TraceCorruptError
from replay.traces import files
from replay.traces.addresses import cache_folder
from replay.traces.damage import AGAIN_OR_AS_IT_IS
from replay.traces.fields import parse_json
from replay.traces.ranges import sha256_of

LARGE = 1 << 24  # bytes from which on a file is remembered
_FRESH = 2 * 10**9  # nanoseconds: what changed within them may change once more at the same time of its clock
_MOST = 1 << 26  # bytes of a memory

Seen = list[int | str]


class Verifier:
    """Checks each file of the trace in ``folder`` once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: set[str] = set()

    def __getstate__(self) -> dict[str, object]:
        """For another process, which knows what was found whole; where its memory lies it says itself."""
        return {"_folder": self._folder, "_whole": self._whole}

    def check(self, path: Path, start: int, sha256: str) -> None:
        """The bytes of ``path`` from ``start`` on. Raises TraceCorruptError where they are not those of ``sha256``."""
        if path.name in self._whole:
            return
        before = _identity(path, sha256)
        if before is None or self._remembered().get(path.name) != before:
            found = sha256_of(path, start)
            if found != sha256:
                raise TraceCorruptError(
                    f"{path} has changed since it was written (its SHA-256 is {found[:12]}..., not {sha256[:12]}...): "
                    f"{AGAIN_OR_AS_IT_IS}"
                )
            if before is not None and before == _identity(path, sha256):
                self._remember(path.name, before)
        self._whole.add(path.name)

    @cached_property
    def _memory(self) -> Path | None:
        name = hashlib.sha256(os.fsencode(self._folder.resolve())).hexdigest()
        cache = cache_folder()
        return None if cache is None else cache / "verified" / f"{name[:32]}.json"

    def _remembered(self) -> Mapping[str, object]:
        """File name -> identity; nothing where the memory is not there, or not to be read."""
        if self._memory is None:
            return {}
        try:
            found = parse_json(files.read_small(self._memory, _MOST), "the memory")
        except TraceCorruptError:
            return {}
        return found if isinstance(found, dict) else {}

    def _remember(self, name: str, identity: Seen) -> None:
        """Another process may write at once: then the one's entry is lost, and its file is read once more."""
        if self._memory is None:
            return
        try:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            told = json.dumps({**self._remembered(), name: identity}).encode()
            files.write_whole(self._memory, [told], apart=f".{os.getpid()}.{secrets.token_hex(4)}")
        except OSError:
            pass  # a home that cannot be written: every run reads the files then


def _identity(path: Path, sha256: str) -> Seen | None:
    """What tells this very content; None where it cannot be told, or is not worth it."""
    try:
        told = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    if told.st_size < LARGE or time.time_ns() - max(told.st_mtime_ns, told.st_ctime_ns) < _FRESH:
        return None
    return [told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns, sha256]
