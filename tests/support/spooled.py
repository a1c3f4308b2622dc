"""How many bytes a recording server writes for a capture: counted by its client, file by file as they come."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from replay.capture.client.spool_reader import SpoolReader
from replay.capture.spool import RowFile


@dataclass
class Spooled:
    """What came of one client's requests, the probe aside: bytes of whole files, of their tensors, and the rows."""

    files: int = 0
    tensors: int = 0
    rows: int = 0
    logits: int = 0
    fed: int = 0
    tap_bytes: int = 0
    row_files: int = 0

    def take(self, file: RowFile) -> None:
        """Count one file."""
        if all("-probe-" in entry.rid for entry in file.entries):
            return
        self.row_files += 1
        self.files += file.layout.size
        self.tensors += file.layout.size - file.layout.data_start
        self.rows += sum(entry.rows for entry in file.entries)
        self.logits += sum(entry.logits for entry in file.entries)
        self.fed += sum(len(entry.fed) for entry in file.entries)
        self.tap_bytes += sum(
            place.stop - place.start
            for name, place in file.layout.tensors.items()
            if name.startswith(("tap.", "scale."))
        )


@contextmanager
def counting_spool() -> Iterator[Spooled]:
    """Count for the captures that run meanwhile."""
    spooled = Spooled()

    class Counting(SpoolReader):
        def _take(self, name: str, file: RowFile) -> None:
            if file.entries and file.entries[0].rid.startswith(self.client):
                spooled.take(file)
            super()._take(name, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay.capture.client.capture.SpoolReader", Counting)
        yield spooled
