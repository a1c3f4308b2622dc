"""One record per request: what it was, and where its rows lie. See SPEC.md, sections 4 and 5.

A shard carries the records of its own requests (so that one rename makes a batch of them whole); ``requests.parquet``
gathers all of them when the trace is finished. Both say the same, and a reader checks that they do.
"""

import hashlib
import io
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.errors import TraceCorruptError, TraceVersionError
from replay.traces.cached import CACHED, Piece, cached_problem
from replay.traces.damage import ReadingTrace
from replay.traces.feed import check_layout
from replay.traces.fields import Fields, parse_json
from replay.traces.files import shard_name, shard_number
from replay.traces.header import FP8, MAX_COUNT, MAX_VOCAB, OLDEST, VERSION, TraceHeader, canonical_taps
from replay.traces.parquet import check_parquet, first_line
from replay.traces.ranges import fetch_ranges
from replay.traces.taps import FINAL
from replay.traces.tensors import NAMES, Layout, parse_layout

if TYPE_CHECKING:
    import polars as pl

FINISH_REASONS = ("stop", "length", "forced", "abort")
SOURCES = ("generated", "forced")
SHARD_FORMAT = "replay-trace-shard"
MAX_TOKENS = 1 << 31
MAX_STEPS = 1 << 12  # of a draft: a histogram has a column for each
MAX_ID = 1024
_FREE_TEXT, _TEXT_A_BYTE = 1 << 26, 100  # bytes of text that a table may hold, and that for each byte of its file

# Columns that there were not at first: null where a file lacks them, and left out of a shard where null, so
# that what knows nothing of them is written as it always was.
LATER = (
    "server_prefill_rows", "server_prefill_forward_rows", "prefix_requests", "prefix_rows", "taps", "first_row",
    *CACHED,
)  # fmt: skip
MAX_PREFIXES = 1 << 12  # requests of whose rows a prefix is made

# columns that say where a request lies; a shard's own records lack them, since they follow from its order
PLACE = ("shard", "token_start", "row_start", "output_start", "shard_bytes", "shard_sha256")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One row of ``requests.parquet``, in the order of its columns.

    ``token_start``, ``row_start`` and ``output_start`` are the request's first element in the shard's ``tokens``, its
    ``tap.*`` and its logits tensors. Of T = prompt_tokens + output_tokens tokens and T - 1 rows the first ones,
    ``shared``, may be those of earlier requests: ``prefix_rows[i]`` of the one whose number is ``prefix_requests[i]``,
    counting from 0 in the order of the trace. It owns the others, and output_tokens rows of logits.
    ``shard_sha256`` is that of the shard's bytes after its safetensors header. ``taps`` are those that the request has,
    None where it has all of the trace; ``first_row`` the first row that is there of them, None where all are. The two
    ``server_cached_*`` columns say of the rows that came from the server's cache how many forwards of what size made.
    """

    request_id: str
    category: str | None
    shard: str
    token_start: int
    row_start: int
    output_start: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    source: str
    temperature: float
    top_p: float
    top_k: int
    tail_ids: tuple[int, ...]
    server_completion_tokens: int | None
    server_verify_rounds: int | None
    server_histogram: tuple[int, ...] | None
    server_cached_tokens: int | None
    server_prefill_rows: tuple[int, ...] | None
    server_prefill_forward_rows: tuple[int, ...] | None
    prefix_requests: tuple[int, ...] | None
    prefix_rows: tuple[int, ...] | None
    shard_bytes: int
    shard_sha256: str
    taps: tuple[str, ...] | None = None
    first_row: int | None = None
    server_cached_rows: tuple[int, ...] | None = None
    server_cached_forward_rows: tuple[int, ...] | None = None

    @property
    def cached(self) -> tuple[Piece, ...]:
        """Rows of the prompt that came from the server's cache, and of the forward that made them; none: not known."""
        return tuple(zip(self.server_cached_rows or (), self.server_cached_forward_rows or (), strict=True))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces in which the server prefilled the prompt, the first one first; none where that is not known."""
        return tuple(zip(self.server_prefill_rows or (), self.server_prefill_forward_rows or (), strict=True))

    @property
    def tokens(self) -> int:
        """T, the tokens of prompt and output."""
        return self.prompt_tokens + self.output_tokens

    @property
    def rows(self) -> int:
        """The target's rows: one of every position but the last, those that are left out too."""
        return self.tokens - 1

    @property
    def shared(self) -> int:
        """How many of its first tokens and rows lie with earlier requests."""
        return sum(self.prefix_rows or ())

    @property
    def rows_left_out(self) -> int:
        """How many rows, from the first on, are not in the trace."""
        return self.first_row or 0

    @property
    def stored_rows(self) -> int:
        """How many rows are in the trace, those that lie with earlier requests among them."""
        return self.rows - self.rows_left_out

    @property
    def row_origin(self) -> int:
        """Where row 0 would lie in its shard, if the rows before its own did; below 0 where these are more."""
        return self.row_start - self.shared - self.rows_left_out


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
        bare.append(_record(Fields(own.where, {**own.values, **place}), header))
    records = placed(bare, layout.path.name, layout.size, sha256)
    last = records[-1]
    if odd := next((record for record in records if record.taps != last.taps), None):
        raise TraceCorruptError(f"{where}: {odd.request_id!r} and {last.request_id!r} have other taps, in one shard")
    _check_tensors(layout, header, *_ends(last), last.taps)
    check_layout(layout, header)
    return records


def placed(records: Sequence[RequestRecord], shard: str, size: int, data_sha256: str) -> list[RequestRecord]:
    """``records`` with the columns that say where each lies, the rows of one after those of the one before."""
    result: list[RequestRecord] = []
    token, row, output = 0, 0, 0
    for bare in records:
        here = replace(bare, shard=shard, shard_bytes=size, shard_sha256=data_sha256)
        result.append(replace(here, token_start=token, row_start=row, output_start=output))
        token, row, output = _ends(result[-1])
    return result


def _ends(record: RequestRecord) -> tuple[int, int, int]:
    """Where its tokens, rows and outputs end in its shard."""
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


def _record(given: Fields, header: TraceHeader) -> RequestRecord:
    values = Fields(given.where, {**dict.fromkeys(LATER), **given.values})
    if shard_number(values.text("shard")) is None:
        raise values.refuse("shard", "a file name like shard-00000.safetensors")
    if not 0 < len(values.text("request_id")) <= MAX_ID:
        raise values.refuse("request_id", f"1 to {MAX_ID} characters")
    record = RequestRecord(
        request_id=values.text("request_id"),
        category=values.optional_text("category"),
        shard=values.text("shard"),
        token_start=values.integer("token_start", 0, MAX_COUNT),
        row_start=values.integer("row_start", 0, MAX_COUNT),
        output_start=values.integer("output_start", 0, MAX_COUNT),
        prompt_tokens=values.integer("prompt_tokens", 1, MAX_TOKENS),
        output_tokens=values.integer("output_tokens", 1, MAX_TOKENS),
        finish_reason=values.choice("finish_reason", FINISH_REASONS),
        source=values.choice("source", SOURCES),
        temperature=values.number("temperature", 0.0, 1e6),
        top_p=values.number("top_p", 0.0, 1.0),
        top_k=values.integer("top_k", -MAX_COUNT, MAX_COUNT),
        tail_ids=values.integers("tail_ids", 0, min(MAX_VOCAB, header.target.vocab_size - 1)),
        server_completion_tokens=values.optional_integer("server_completion_tokens", 0, MAX_COUNT),
        server_verify_rounds=values.optional_integer("server_verify_rounds", 0, MAX_COUNT),
        server_histogram=values.optional_integers("server_histogram", 0, MAX_COUNT, MAX_STEPS + 1),
        server_cached_tokens=values.optional_integer("server_cached_tokens", 0, MAX_COUNT),
        server_prefill_rows=values.optional_integers("server_prefill_rows", 1, MAX_TOKENS),
        server_prefill_forward_rows=values.optional_integers("server_prefill_forward_rows", 1, MAX_COUNT),
        prefix_requests=values.optional_integers("prefix_requests", 0, MAX_COUNT, MAX_PREFIXES),
        prefix_rows=values.optional_integers("prefix_rows", 1, MAX_TOKENS, MAX_PREFIXES),
        shard_bytes=values.integer("shard_bytes", 8, MAX_COUNT),
        shard_sha256=values.sha256("shard_sha256"),
        taps=_taps(values, header),
        first_row=values.optional_integer("first_row", 1, values.integer("prompt_tokens", 1, MAX_TOKENS) - 1),
        server_cached_rows=values.optional_integers("server_cached_rows", 1, MAX_TOKENS),
        server_cached_forward_rows=values.optional_integers("server_cached_forward_rows", 1, MAX_COUNT),
    )
    problem = pieces_problem(record.server_prefill_rows, record.server_prefill_forward_rows, record.prompt_tokens)
    problem = problem or _prefix_problem(record, header) or _choice_problem(record, header)
    problem = problem or cached_problem(
        record.server_cached_rows, record.server_cached_forward_rows, record.pieces, record.prompt_tokens
    )
    if problem is not None:
        raise TraceCorruptError(f"{values.where}: {problem}")
    return record


def _taps(values: Fields, header: TraceHeader) -> tuple[str, ...] | None:
    if values.values["taps"] is None:
        return None
    taps = canonical_taps(values, "taps", header.target.layers)
    if FINAL not in taps or not set(taps) <= set(header.taps):
        raise values.refuse("taps", f"{FINAL} and others of {', '.join(header.taps)}")
    return taps


def _prefix_problem(record: RequestRecord, header: TraceHeader) -> str | None:
    """Why its prefix cannot be; None where it can. Whether the requests have such rows ``check_prefixes`` says."""
    requests, rows = record.prefix_requests, record.prefix_rows
    if requests is None and rows is None:
        return None
    if header.version < 2:
        return f"it has a prefix of rows of other requests, which a trace of version {header.version} has not"
    if record.first_row:
        return f"it has a prefix, and its rows from row {record.first_row} on alone: of these it can have one only"
    if not requests or not rows or len(requests) != len(rows):
        return (
            f"prefix_requests names {len(requests or ())} requests, prefix_rows {len(rows or ())} numbers of rows, "
            "both must be null or hold as many, one at least"
        )
    if sum(rows) > record.rows:
        return f"prefix_rows adds up to {sum(rows)}, the request has {record.rows} rows"
    return None


def _choice_problem(record: RequestRecord, header: TraceHeader) -> str | None:
    if header.version < 2 and (record.taps or record.first_row):
        return f"it lacks taps or rows, which a request of a trace of version {header.version} has"
    return None


def pieces_problem(rows: Sequence[int] | None, forward: Sequence[int] | None, prompt_tokens: int) -> str | None:
    """Why these cannot be the pieces of a prompt and their forwards; None where they can, or where both are None."""
    if rows is None and forward is None:
        return None
    if not rows or not forward or len(rows) != len(forward):
        return (
            f"server_prefill_rows holds {len(rows or ())} pieces, server_prefill_forward_rows {len(forward or ())}, "
            "both must be null or hold as many, one at least"
        )
    small = next(((own, whole) for own, whole in zip(rows, forward, strict=True) if not 0 < own <= whole), None)
    if small is not None:
        return f"server_prefill_rows holds a piece of {small[0]} rows in a forward of {small[1]}"
    if sum(rows) > prompt_tokens:
        return f"server_prefill_rows adds up to {sum(rows)}, the prompt has {prompt_tokens} tokens"
    return None


def check_distinct(records: Sequence[RequestRecord], where: str) -> None:
    """Raises TraceCorruptError where two records bear one request_id."""
    seen: set[str] = set()
    for record in records:
        if record.request_id in seen:
            raise TraceCorruptError(f"{where} holds the request_id {record.request_id!r} twice")
        seen.add(record.request_id)


def table_schema() -> "pl.Schema":
    """Columns of ``requests.parquet``."""
    import polars as pl

    kinds: dict[Any, pl.DataType] = {str: pl.String(), int: pl.Int64(), float: pl.Float64()}
    kinds |= {str | None: pl.String(), int | None: pl.Int64()}
    lists = (
        "server_histogram", "server_prefill_rows", "server_prefill_forward_rows", *CACHED,
        "prefix_requests", "prefix_rows",
    )  # fmt: skip
    special: dict[str, pl.DataType] = {"tail_ids": pl.List(pl.Int32), **dict.fromkeys(lists, pl.List(pl.Int64))}
    special["taps"] = pl.List(pl.String)
    return pl.Schema({item.name: special.get(item.name) or kinds[item.type] for item in fields(RequestRecord)})


def to_frame(records: Sequence[RequestRecord]) -> "pl.DataFrame":
    """One row per record, in their order."""
    import polars as pl

    return pl.DataFrame([asdict(record) for record in records], schema=table_schema(), orient="row")


def read_table(data: bytes, header: TraceHeader, where: str) -> list[RequestRecord]:
    """The records of a ``requests.parquet`` with the bytes ``data``. Raises TraceCorruptError."""
    import polars as pl

    check_parquet(Path(where), data)
    try:
        frame = pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise TraceCorruptError(f"{where} is no readable parquet file: {first_line(error)}") from error
    for name, kind in table_schema().items():
        if name not in frame.columns and name in LATER:
            continue
        if name not in frame.columns:
            raise TraceCorruptError(f"{where} lacks the column {name}")
        if frame.schema[name] != kind:
            raise TraceCorruptError(f"{where}: the column {name} is {frame.schema[name]}, must be {kind}")
    texts = int(frame.select(pl.col(pl.String).str.len_bytes().sum()).sum_horizontal().sum() or 0)
    if texts > _FREE_TEXT + _TEXT_A_BYTE * len(data):  # one long text can stand for every row
        raise TraceCorruptError(f"{where} holds texts of {texts} bytes, more than any that replay writes")
    records = [_record(Fields(f"{where}: row {index}", row), header) for index, row in enumerate(frame.to_dicts())]
    check_distinct(records, where)
    _check_places(records, where)
    return records


def _check_places(records: Sequence[RequestRecord], where: str) -> None:
    """Shards in order from 0, each request's rows right after those of the one before it in the shard."""
    for number, (shard, group) in enumerate(itertools.groupby(records, key=lambda record: record.shard)):
        if shard_number(shard) != number:
            raise TraceCorruptError(
                f"{where}: shard number {number} is called {shard}; shards stand in order from 00000"
            )
        expected = (0, 0, 0)
        for record in group:
            places = (record.token_start, record.row_start, record.output_start)
            if places != expected:
                raise TraceCorruptError(
                    f"{where}: request {record.request_id!r} is said to begin at token, row and output {places} of "
                    f"{shard}, the requests before it end at {expected}"
                )
            expected = _ends(record)


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


def check_same(table: Sequence[RequestRecord], shards: Sequence[RequestRecord], where: str) -> None:
    """Raises TraceCorruptError where ``requests.parquet`` and the shards disagree, naming the first difference."""
    for one, other in zip(table, shards, strict=False):
        for item in fields(one):
            told, held = getattr(one, item.name), getattr(other, item.name)
            if told != held:
                raise TraceCorruptError(
                    f"{where}: {item.name} of request {one.request_id!r} is {told!r}, its shard says {held!r}"
                )
    if len(table) != len(shards):
        raise TraceCorruptError(f"{where} lists {len(table)} requests, the shards hold {len(shards)}")
