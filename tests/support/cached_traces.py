"""Traces of one real server that keeps prefixes: requests that begin alike, and a conversation of two turns."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rig.server import start_server

import replay
from replay.capture.client import spool_reader
from replay.capture.client.capture import capture_server
from replay.capture.events import Event
from replay.capture.options import ServerOptions
from replay.capture.plugin.launch import ServeOptions, prepare
from replay.capture.plugin.recording import RECORD_VARIABLE
from replay.capture.spool import RowFile
from replay.traces.sample_files import sample_head

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace, the bytes of rows that came through the spool for it, and what was told on the way."""

    trace: replay.Trace
    spooled: int
    events: list[Event]


@dataclass(frozen=True, slots=True)
class CachingServer:
    """A server that keeps prefixes and records into ``folder``/recording."""

    url: str
    folder: Path

    def record(self, name: str, rows: Sequence[Row], **options: Any) -> Recording:
        """Ask for prompts, into a trace of this name."""
        asked = self.folder / f"{name}.jsonl"
        asked.write_text("\n".join(map(json.dumps, rows)))
        spooled = 0
        read = spool_reader.read_row_file

        def counted(path: Path, taps: Sequence[str], width: int) -> RowFile:
            nonlocal spooled
            spooled += path.stat().st_size
            return read(path, taps, width)

        events: list[Event] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spool_reader, "read_row_file", counted)
            capture_server(ServerOptions(self.url, asked, self.folder / name, **options), events.append)
        return Recording(replay.Trace.open(self.folder / name), spooled, events)


@contextmanager
def caching_server(target_dir: Path, folder: Path, steps: int, *extra_args: str) -> Iterator[CachingServer]:
    """It drafts with the sample head."""
    head = sample_head()
    arguments = ["--model-path", str(target_dir), "--speculative-algorithm", "EAGLE3",
                 "--speculative-draft-model-path", str(head)]  # fmt: skip
    made = prepare(ServeOptions(folder / "recording", arguments, taps="embed,3,16", wiring="embed,3,16"), {})
    with start_server(
        target_dir, head, log=folder / "log", steps=steps, num_draft_tokens=steps + 1, extra_args=extra_args,
        env={RECORD_VARIABLE: made.environment[RECORD_VARIABLE]}, radix_cache=True,
    ) as server:  # fmt: skip
        yield CachingServer(server.url, folder)
