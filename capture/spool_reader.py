"""The client's side of the spool: which rows have come for which request, and what can be deleted again."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from replay.capture.join import Recorded
from replay.capture.spool import Chunk, chunk_names, read_chunk
from replay.errors import TraceCorruptError


class SpoolReader:
    """Rows of the requests whose ids begin with ``prefix``, as they come into the launch folder.

    ``problems`` holds a sentence for every file that was refused; its rows count as never recorded.
    """

    def __init__(self, folder: Path, taps: Sequence[str], width: int, prefix: str) -> None:
        self.folder, self.taps, self.width, self.prefix = folder, taps, width, prefix
        self.problems: list[str] = []
        self._seen: set[str] = set()
        self._rows: dict[str, list[Recorded]] = {}
        self._open: dict[str, set[str]] = {}  # file -> ids of ours that still need it

    def poll(self) -> bool:
        """Look for new files; whether there were any. Raises CaptureError where the folder cannot be read."""
        new = [name for name in chunk_names(self.folder) if name not in self._seen]
        for name in new:
            self._seen.add(name)
            try:
                chunk = read_chunk(self.folder / name, self.taps, self.width)
            except TraceCorruptError as error:
                self.problems.append(str(error))
                continue
            self._take(name, chunk)
        return bool(new)

    def rows(self, rid: str) -> Sequence[Recorded]:
        """What has come of a request so far, in the order it was recorded."""
        return self._rows.get(rid, ())

    def drop(self, rids: Collection[str]) -> None:
        """These requests need their rows no more; files that nobody needs are deleted.

        A file with rows of another client is left to that one.
        """
        for rid in rids:
            self._rows.pop(rid, None)
        for name, needed in list(self._open.items()):
            needed.difference_update(rids)
            if not needed:
                del self._open[name]
                try:
                    os.unlink(self.folder / name)
                except OSError:
                    pass  # a folder that this user may only read; the server's next start cleans it

    def _take(self, name: str, chunk: Chunk) -> None:
        ours = {entry.rid for entry in chunk.entries if entry.rid.startswith(self.prefix)}
        for index, entry in enumerate(chunk.entries):
            if entry.rid in ours:
                self._rows.setdefault(entry.rid, []).append(Recorded(chunk, index))
        if ours and len(ours) == len({entry.rid for entry in chunk.entries}):
            self._open[name] = ours
