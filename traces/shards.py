"""Shards: the records that one carries, its tensors against them, and all of a folder in order. See SPEC.md, 5."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from replay.errors import TraceCorruptError, TraceVersionError
from replay.traces.damage import ReadingTrace
from replay.traces.feed import check_layout
from replay.traces.fields import Fields, parse_json
from replay.traces.files import shard_name, shard_number
from replay.traces.header import FP8, OLDEST, VERSION, TraceHeader
from replay.traces.ranges import fetch_ranges
from replay.traces.record_fields import read_record
from replay.traces.records import LATER, PLACE, RequestRecord, check_distinct
from replay.traces.tensors import NAMES, Layout, parse_layout

SHARD_FORMAT = "replay-trace-shard"


def shard_metadata(records: Sequence[RequestRecord], data_sha256: str) -> dict[str, str]:
    """The free-text metadata of the shard that holds ``records``."""
    rows = [
        {name: value for name, value in asdict(record).items() if name not in PLACE and not _is_left_out(name, value)}
        for record in records
    ]
    text = json.dumps(rows, separators=(",", ":"), allow_nan=False)
    version = VERSION if any(one.prefix_rows or one.taps or one.first_row for one in records) else OLDEST
    return {"format": SHARD_FORMAT, "version": str(version), "data_sha256": data_sha256, "requests": text}


def _is_left_out(name: str, value: object) -> bool:
    return name in LATER and value is None


def shard_records(layout: Layout, header: TraceHeader) -> list[RequestRecord]:
    """The records that a shard carries, and its tensors checked against them and against the header.

    Raises TraceVersionError, TraceCorruptError.
    """
    where = str(layout.path)
    metadata = Fields(where, dict(layout.metadata))
    if metadata.values.get("format") != SHARD_FORMAT:
        raise TraceCorruptError(f"{where} is not a shard of a replay trace: it names no format {SHARD_FORMAT}")
    possible = [str(version) for version in range(OLDEST, header.version + 1)]
    if (version := metadata.text("version")) not in possible:
        raise TraceVersionError(f"{where} is of version {version}, possible beside its header: {', '.join(possible)}")
    rows = parse_json(metadata.text("requests"), f"{where}: requests")
    if not isinstance(rows, list) or not rows:
        raise TraceCorruptError(f"{where}: requests must be a list of at least one record")
    sha256 = metadata.sha256("data_sha256")
    place: dict[str, object] = {"token_start": 0, "row_start": 0, "output_start": 0}
    place |= {"shard": layout.path.name, "shard_bytes": layout.size, "shard_sha256": sha256}
    bare: list[RequestRecord] = []
    for index, value in enumerate(rows):
        own = Fields(f"{where}: request {index}", value)
        bare.append(read_record(Fields(own.where, {**own.values, **place}), header))
    records = placed(bare, layout.path.name, layout.size, sha256)
    last = records[-1]
    if odd := next((record for record in records if record.taps != last.taps), None):
        raise TraceCorruptError(f"{where}: {odd.request_id!r} and {last.request_id!r} have other taps, in one shard")
    _check_tensors(layout, header, *ends(last), last.taps)
    check_layout(layout, header)
    return records


def placed(records: Sequence[RequestRecord], shard: str, size: int, data_sha256: str) -> list[RequestRecord]:
    """``records`` with the columns that say where each lies, the rows of one after those of the one before."""
    result: list[RequestRecord] = []
    token, row, output = 0, 0, 0
    for bare in records:
        here = replace(bare, shard=shard, shard_bytes=size, shard_sha256=data_sha256)
        result.append(replace(here, token_start=token, row_start=row, output_start=output))
        token, row, output = ends(result[-1])
    return result


def ends(record: RequestRecord) -> tuple[int, int, int]:
    """Where tokens, rows and outputs of ``record`` end in its shard."""
    token, row = record.token_start - record.shared, record.row_origin
    return token + record.tokens, row + record.rows, record.output_start + record.output_tokens


def expected_tensors(
    header: TraceHeader, tokens: int, rows: int, outputs: int, taps: Sequence[str] | None = None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (torch dtype name, shape) of every tensor of a shard with so many tokens, rows and output tokens, and
    these ``taps`` (None: all of the trace).

    Wider items come first, so that every tensor is aligned.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "tokens": ("int32", (tokens,)),
        "topk_ids": ("int32", (outputs, header.topk)),
        "topk_logprobs": ("float32", (outputs, header.topk)),
        "logsumexp": ("float32", (outputs,)),
    }
    held = {name: tap for name, tap in header.taps.items() if taps is None or name in taps}
    for name, tap in sorted(held.items(), key=lambda item: (item[1].dtype != "float32", item[1].dtype == FP8)):
        tensors[f"tap.{name}"] = (tap.dtype, (rows, tap.width))
    scales = {f"scale.{name}": ("float32", (rows,)) for name, tap in held.items() if tap.dtype == FP8}
    return scales | tensors


def _check_tensors(
    layout: Layout, header: TraceHeader, tokens: int, rows: int, outputs: int, taps: Sequence[str] | None
) -> None:
    for name, (dtype, shape) in expected_tensors(header, tokens, rows, outputs, taps).items():
        place = layout.tensors.get(name)
        if place is None:
            raise TraceCorruptError(f"{layout.path} lacks the tensor {name} that trace.json announces")
        if (place.dtype, place.shape) != (NAMES[dtype], shape):
            raise TraceCorruptError(
                f"{layout.path}: {name} is {place.dtype} {list(place.shape)}, "
                f"trace.json and the requests make it {NAMES[dtype]} {list(shape)}"
            )


@ReadingTrace()
def scan_shards(folder: Path, header: TraceHeader) -> tuple[list[Layout], list[RequestRecord]]:
    """Every shard of ``folder`` in order and the records they carry. Raises TraceCorruptError, TraceVersionError."""
    numbers = sorted(number for name in os.listdir(folder) if (number := shard_number(name)) is not None)
    layouts, records = [], []
    fetch_ranges((folder / shard_name(number), 0, 1) for number in numbers)  # and what is fetched with the first byte
    for expected, number in enumerate(numbers):
        if number != expected:
            raise TraceCorruptError(f"{folder} lacks {shard_name(expected)}, but holds {shard_name(number)}")
        layout = parse_layout(folder / shard_name(number))
        layouts.append(layout)
        records.extend(shard_records(layout, header))
    check_distinct(records, str(folder))
    check_prefixes(records, str(folder))
    return layouts, records


def check_prefixes(records: Sequence[RequestRecord], where: str) -> None:
    """Raises TraceCorruptError where a prefix is of rows that an earlier request does not store."""
    for number, record in enumerate(records):
        start = 0
        for owner, rows in zip(record.prefix_requests or (), record.prefix_rows or (), strict=True):
            stop = start + rows
            if owner < number and not _has_what(records[owner], record):
                raise TraceCorruptError(
                    f"{where}: request {record.request_id!r} is said to share rows of request number {owner}, which "
                    "lacks some of its taps or rows"
                )
            if owner >= number or not records[owner].shared <= start or stop > records[owner].rows:
                raise TraceCorruptError(
                    f"{where}: request {record.request_id!r} is said to share the rows {start} to {stop} of request "
                    f"number {owner}, which " + ("does not come before it" if owner >= number else "stores none such")
                )
            start = stop


def _has_what(owner: RequestRecord, record: RequestRecord) -> bool:
    """Whether ``owner`` has all taps of ``record``, and all their rows."""
    taps = owner.taps is None or (record.taps is not None and set(record.taps) <= set(owner.taps))
    return taps and not owner.first_row


def headers_sha256(layouts: Sequence[Layout]) -> str:
    """One checksum over the headers of all shards, in their order."""
    return hashlib.sha256("".join(layout.head_sha256 for layout in layouts).encode()).hexdigest()
