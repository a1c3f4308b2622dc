"""What is looked at when a trace is opened: its shards' headers, against the table of requests. See SPEC.md, 8."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from replay.errors import TraceCorruptError, TraceIncompleteError
from replay.traces import files
from replay.traces.damage import AGAIN_OR_AS_IT_IS, ReadingTrace
from replay.traces.header import TraceHeader
from replay.traces.records import RequestRecord
from replay.traces.request_table import check_same, read_table
from replay.traces.server_rounds import MAX_BYTES
from replay.traces.shards import headers_sha256, scan_shards
from replay.traces.tensors import Layout


def find_requests(
    folder: Path, header: TraceHeader, *, allow_incomplete: bool, verify: bool
) -> tuple[list[Layout], list[RequestRecord]]:
    """The shards of the trace in ``folder`` and its requests, in order; of a finished one both as ``finish`` left them.

    Raises TraceIncompleteError where its recording has not ended (unless ``allow_incomplete``), TraceCorruptError.
    """
    layouts, records = scan_shards(folder, header)
    if header.state == "complete":
        _check_table(folder, header, records)
        if verify and header.shard_headers_sha256 not in (None, headers_sha256(layouts)):
            raise TraceCorruptError(
                f"the headers of the shards of {folder} have changed since they were written: {AGAIN_OR_AS_IT_IS}"
            )
    elif not allow_incomplete:
        raise TraceIncompleteError(_say_unfinished(folder, len(records)))
    return layouts, records


def say_no_trace(folder: Path) -> str:
    """Why what lies at ``folder``, without a header in it, is none."""
    if os.path.isdir(folder):
        return f"{folder} holds no {files.HEADER}, so it is no trace: give the folder that a capture wrote"
    return f"{folder} {files.describe_path(folder)}, a trace is a folder: give the one that a capture wrote"


def _say_unfinished(folder: Path, whole: int) -> str:
    if files.is_locked(folder):
        return f"{folder} is being recorded right now, {whole} requests are whole so far: wait until it has ended"
    return (
        f"the recording of {folder} has not ended, {whole} requests are whole: type the capture command again with "
        "--resume"
    )


@ReadingTrace()
def _check_table(folder: Path, header: TraceHeader, records: Sequence[RequestRecord]) -> None:
    """``requests.parquet`` is the finished one and says what the shards say. Raises TraceCorruptError."""
    path = folder / files.REQUESTS
    data = files.read_small(path, MAX_BYTES)
    if hashlib.sha256(data).hexdigest() != header.requests_sha256:
        raise TraceCorruptError(f"{path} is not the file that was finished: its SHA-256 differs from trace.json's")
    table = read_table(data, header, str(path))
    if len(table) != header.requests:
        raise TraceCorruptError(f"{path} lists {len(table)} requests, trace.json says {header.requests}")
    check_same(table, records, str(path))
