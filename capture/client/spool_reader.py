"""The client's side of the spool: which rows have come for which request, and what can be deleted again."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from replay.capture.client.join import Recorded
from replay.capture.spool import RowFile, client_lock, client_of, read_row_file, row_file_names
from replay.errors import TraceCorruptError
from replay.traces.files import take_lock


def rid_of(client: str, request: str, number: int) -> str:
    """The id under which ``client`` asks for ``request`` (hexadecimal digits or a word, and what is kept of it as
    capture/asked.py spells it) the ``number``-th time."""
    return f"{client}-{request}-{number}"


class SpoolReader:
    """Rows of one client's requests, as they come into the launch folder; use it in a ``with`` block.

    ``problems`` holds a sentence for every file that was refused; its rows count as never recorded. A file whose
    rows nobody needs is deleted: when its requests are dropped, when this client ends, and where it belongs to a
    client that has died, or to none.
    """

    def __init__(self, folder: Path, taps: Sequence[str], width: int, client: str) -> None:
        self.folder, self.taps, self.width, self.client = folder, taps, width, client
        self.problems: list[str] = []
        self._seen: set[str] = set()
        self._rows: dict[str, list[Recorded]] = {}
        self._open: dict[str, set[str]] = {}  # file -> requests that still need it
        self._dropped: set[str] = set()
        self._lock = _try_lock(client_lock(folder, client))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def poll(self) -> bool:
        """Look for new files; whether there were any. Raises CaptureError where the folder cannot be read."""
        new = [name for name in row_file_names(self.folder) if name not in self._seen]
        for name in new:
            self._seen.add(name)
            try:
                file = read_row_file(self.folder / name, self.taps, self.width)
            except TraceCorruptError as error:
                if (self.folder / name).exists():  # else its client has just deleted it
                    self.problems.append(str(error))
                continue
            self._take(name, file)
        return bool(new)

    def rows(self, rid: str) -> Sequence[Recorded]:
        """What has come of a request so far, in the order it was recorded."""
        return self._rows.get(rid, ())

    def output_tokens(self, but: Collection[str]) -> int:
        """About how many output tokens have come of requests under way, those of the ids ``but`` left out."""
        return sum(one.entry.logits for rid, rows in self._rows.items() if rid not in but for one in rows)

    def drop(self, rids: Collection[str]) -> None:
        """The requests of these ids need no rows any more, nor do those of their other tries, now or later."""
        self._dropped.update(map(_request_of, rids))
        for rid in [rid for rid in self._rows if _request_of(rid) in self._dropped]:
            del self._rows[rid]
        for name, needed in list(self._open.items()):
            needed -= self._dropped
            if not needed:
                del self._open[name]
                self._delete(name)

    def close(self) -> None:
        """Delete what is left of this client's files; what still comes is then anybody's to delete."""
        for name in self._open:
            self._delete(name)
        self._open.clear()
        self._rows.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self, name: str, file: RowFile) -> None:
        client = client_of(file.entries[0].rid) if file.entries else ""
        if client != self.client:
            if self._is_over(client):
                self._delete(name)
            return
        needed = {_request_of(entry.rid) for entry in file.entries} - self._dropped
        if not needed:  # of a try that was given up, come late
            self._delete(name)
            return
        self._open[name] = needed
        for index, entry in enumerate(file.entries):
            if _request_of(entry.rid) in needed:
                self._rows.setdefault(entry.rid, []).append(Recorded(file, index))

    def _is_over(self, client: str) -> bool:
        """Whether ``client`` has ended: its lock, taken before its first request, is free. So is nobody's."""
        if not client:
            return True
        path = client_lock(self.folder, client)
        lock = _try_lock(path) if path.exists() else None  # without one it could not lock: left to the server's start
        if lock is not None:
            os.close(lock)
        return lock is not None

    def _delete(self, name: str) -> None:
        try:
            os.unlink(self.folder / name)
        except OSError:
            pass  # a folder that this user may only read; the server's next start cleans it


def _request_of(rid: str) -> str:
    """A request's id without the number of the try."""
    return rid.rpartition("-")[0]


def _try_lock(path: Path) -> int | None:
    """The lock, or None where another holds it or there can be none (a folder that this user may only read)."""
    try:
        return take_lock(path)
    except OSError:
        return None
