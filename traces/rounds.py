"""The rounds table: what a simulation did, round by round, in one parquet file.

Columns, in this order: ``variant`` (str), ``request_id`` (str), ``round`` (i32, from 0 in each request), ``anchor``
(i32, tokens), ``drafted`` (list of i32, token ids), ``accepted`` (i32, 0..len(drafted), without the bonus token) and
``cut`` (bool: accepted + 1 tokens run past the end of the recorded output). Who the variants and requests are stands as
JSON under the key ``replay`` of the parquet key-value metadata, so that the file needs nothing beside it.
"""

import io
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from replay.errors import OutputError, TraceCorruptError, TraceError, TraceVersionError

if TYPE_CHECKING:
    import polars as pl

FORMAT = "replay-rounds"
VERSION = 1
METADATA_KEY = "replay"

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a rule takes on average, made from probabilities instead of one draw.

    ``sums[request]`` in the order of ``Rounds.requests``: expected rounds and expected accepted tokens, then both again
    with every probability that the trace leaves open at its lower bound, and both at its upper bound. ``exact``: the
    estimate has no error but the choice of the recorded text and what is left open; ``note`` says what it rests on.
    """

    rule: str
    exact: bool
    note: str
    sums: tuple[tuple[float, ...], ...]


EXPECTED_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class VariantSettings:
    """A variant as files and reports spell it."""

    name: str
    draft: str
    wiring: tuple[str, ...]
    steps: int
    topk: int
    num_draft_tokens: int
    precision: str
    numerics: str
    kv: str
    verify: str
    temperature: float
    engine: str
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VariantInfo(VariantSettings):
    """One variant and what belongs to it as a whole.

    ``anchors`` positions were tried in the all-anchors pass and had ``anchors_accepted`` drafted tokens accepted in
    sum; ``ties`` drafted tokens were chosen between exactly equal logits; ``seconds`` is wall-clock time.
    ``expected`` is None under the greedy rule, whose rounds leave nothing to chance.
    """

    seconds: float
    anchors: int
    anchors_accepted: int
    ties: int
    expected: Expected | None = None


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request of the trace: sizes in tokens, what the server itself reported (None: nothing), where it came from.

    ``observed_histogram[a]`` counts the server's rounds with a accepted tokens. ``source`` is ``generated`` or
    ``forced`` (teacher-forced text), ``temperature`` the one the output was sampled with (0: greedy).
    """

    request_id: str
    category: str | None
    prompt_tokens: int
    output_tokens: int
    observed_rounds: int | None
    observed_histogram: tuple[int, ...] | None
    source: str = "generated"
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """The table and all that is needed to read it without the trace.

    ``trace`` says which trace it was (path, target, engine, engine_version, taps, dtype, missing ...), ``drafts``
    which heads, by name. Both hold JSON values only.
    """

    table: "pl.DataFrame"
    variants: tuple[VariantInfo, ...]
    requests: tuple[RequestInfo, ...]
    trace: JsonObject
    drafts: JsonObject


def table_schema() -> "dict[str, pl.DataType]":
    """Column names and polars dtypes of the table, in order."""
    import polars as pl

    return {
        "variant": pl.String(),
        "request_id": pl.String(),
        "round": pl.Int32(),
        "anchor": pl.Int32(),
        "drafted": pl.List(pl.Int32),
        "accepted": pl.Int32(),
        "cut": pl.Boolean(),
    }


def write_rounds(rounds: Rounds, path: Path, *, force: bool = False) -> None:
    """Write ``rounds`` to ``path``: the whole file appears at once, or nothing does.

    Raises OutputError when the file exists (without ``force``) or cannot be written, TraceCorruptError when the
    table is not one that ``read_rounds`` would read back.
    """
    _check(rounds, path)
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} is no regular file and would be replaced: name another after -o")
    if path.exists() and not force:
        raise OutputError(f"{path} exists already: type --force to replace it, or another path after -o")
    head: JsonObject = {
        "format": FORMAT,
        "version": VERSION,
        "variants": [asdict(variant) for variant in rounds.variants],
        "requests": [asdict(request) for request in rounds.requests],
        "trace": rounds.trace,
        "drafts": rounds.drafts,
    }
    buffer = io.BytesIO()
    rounds.table.write_parquet(buffer, metadata={METADATA_KEY: json.dumps(head, allow_nan=False)})
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}): name a file in a folder that exists and has room"
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def read_rounds(path: Path) -> Rounds:
    """Read a rounds file, refusing whatever does not hold together.

    Raises TraceError when there is no such file, TraceVersionError when it is of another format or version,
    TraceCorruptError when its bytes, columns or values disagree with its metadata.
    """
    import polars as pl
    from polars.exceptions import PanicException, PolarsError

    if not path.is_file():
        seen = "is a folder" if path.is_dir() else "does not exist"
        raise TraceError(f"{path} {seen}, rounds are one parquet file: type replay simulate TRACE -o ROUNDS.parquet")
    try:
        metadata = pl.read_parquet_metadata(path)
        if METADATA_KEY not in metadata:
            raise TraceVersionError(
                f"{path} is a parquet file but not one of rounds: type the file that replay simulate -o wrote"
            )
        table = pl.read_parquet(path, glob=False, hive_partitioning=False)
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror or error}): name a file that you may read") from error
    except (PolarsError, PanicException) as error:
        raise TraceCorruptError(
            f"{path} is no whole parquet file ({str(error).splitlines()[0]}): simulate again with -o"
        ) from error
    rounds = _from_head(_head(metadata[METADATA_KEY], path), table, path)
    _check(rounds, path)
    return rounds


def _head(text: str, path: Path) -> JsonObject:
    """The metadata as an object of our format and version."""
    try:
        head = json.loads(text)
    except json.JSONDecodeError as error:
        raise _corrupt(path, f"its metadata is not JSON ({error})") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TraceVersionError(
            f"{path} is a parquet file but not one of rounds: type the file that replay simulate -o wrote"
        )
    if head.get("version") != VERSION:
        raise TraceVersionError(
            f"{path} holds rounds of version {head.get('version')}, this replay reads version {VERSION}: "
            "simulate again, or use the replay that wrote it"
        )
    expected = {"format", "version", "variants", "requests", "trace", "drafts"}
    if set(head) != expected:
        raise _corrupt(path, f"its metadata differs from the format in {', '.join(sorted(set(head) ^ expected))}")
    for key, kind in (("variants", list), ("requests", list), ("trace", dict), ("drafts", dict)):
        if not isinstance(head[key], kind):
            raise _corrupt(path, f"{key} in its metadata is not a JSON {'array' if kind is list else 'object'}")
    return head


def _from_head(head: JsonObject, table: "pl.DataFrame", path: Path) -> Rounds:
    return Rounds(
        table=table,
        variants=tuple(_decode(VariantInfo, row, f"variants[{i}]", path) for i, row in enumerate(head["variants"])),
        requests=tuple(_decode(RequestInfo, row, f"requests[{i}]", path) for i, row in enumerate(head["requests"])),
        trace=head["trace"],
        drafts=head["drafts"],
    )


_Record = TypeVar("_Record", VariantInfo, RequestInfo)


def _decode(kind: type[_Record], row: object, where: str, path: Path) -> _Record:
    """``row`` as a ``kind``: every field there, of its annotated type, and no other.

    Only ``expected`` may be absent: files from before there was one are of the same version.
    """
    names = [field.name for field in fields(kind)]
    if not isinstance(row, dict) or set(row) | {"expected"} & set(names) != set(names):
        raise _corrupt(path, f"{where} in its metadata does not have exactly the fields {', '.join(names)}")
    hints = get_type_hints(kind)
    values: JsonObject = {}
    for name, value in row.items():
        if not _fits(value, hints[name]):
            raise _corrupt(path, f"{where}.{name} in its metadata is {value!r}, which is not {hints[name]}")
        values[name] = Expected(**_frozen(value)) if isinstance(value, dict) else _frozen(value)
    return kind(**values)


def _frozen(value: Any) -> Any:
    """JSON arrays as tuples, however deep."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value is of an annotated type: str, int, float, tuple[X, ...], Expected, or a union with None."""
    if isinstance(hint, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if hint is Expected:
        hints = get_type_hints(Expected)
        return isinstance(value, dict) and set(value) == set(hints) and all(_fits(value[k], hints[k]) for k in hints)
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def _check(rounds: Rounds, path: Path) -> None:
    """Raise TraceCorruptError unless columns, dtypes and values are those of the format."""
    import polars as pl

    schema, table = table_schema(), rounds.table
    if lost := [name for name in schema if name not in table.columns]:
        raise _corrupt(path, f"it has no column {', '.join(lost)}")
    if table.columns != list(schema):
        raise _corrupt(path, f"its columns are {', '.join(table.columns)} where {', '.join(schema)} belong")
    for name, dtype in schema.items():
        if table.schema[name] != dtype:
            raise _corrupt(path, f"column {name} is {table.schema[name]} where {dtype} belongs")
    _distinct([variant.name for variant in rounds.variants], "variant", path)
    _distinct([request.request_id for request in rounds.requests], "request", path)
    steps = {variant.name: variant.steps for variant in rounds.variants}
    _known(table["variant"], set(steps), "variant", path)
    for variant in rounds.variants:
        if variant.expected is not None:
            _check_expected(variant.name, variant.expected, len(rounds.requests), path)
    _known(table["request_id"], {request.request_id for request in rounds.requests}, "request", path)

    drafted = pl.col("drafted").list.len()
    limit = pl.col("variant").replace_strict(steps, return_dtype=pl.Int64) if steps else pl.lit(0)
    hole = pl.col("drafted").list.eval(pl.element().is_null()).list.any()
    broken = {
        "an empty cell": pl.any_horizontal(pl.all().is_null()) | hole,
        "a negative round, anchor or accepted": pl.min_horizontal("round", "anchor", "accepted") < 0,
        "more accepted than drafted tokens": pl.col("accepted") > drafted,
        "more accepted tokens than its variant has steps": pl.col("accepted") > limit,
        "a round that stands there twice": pl.struct("variant", "request_id", "round").is_duplicated(),
    }
    for what, rows in broken.items():
        if count := table.select(rows.fill_null(False).sum()).item():
            raise _corrupt(path, f"{count} of its {table.height} rounds have {what}")


def _check_expected(name: str, expected: Expected, requests: int, path: Path) -> None:
    if len(expected.sums) != requests or any(len(row) != EXPECTED_COLUMNS for row in expected.sums):
        raise _corrupt(path, f"variant {name!r} expects sums of {len(expected.sums)} requests where {requests} belong")
    if any(not (math.isfinite(value) and value >= 0) for row in expected.sums for value in row):
        raise _corrupt(path, f"variant {name!r} expects a negative or endless number of tokens")


def _distinct(names: Sequence[str], what: str, path: Path) -> None:
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise _corrupt(path, f"its metadata names {what} {name!r} {times} times")


def _known(column: "pl.Series", names: set[str], what: str, path: Path) -> None:
    if strange := sorted(set(column.drop_nulls().unique().to_list()) - names):
        raise _corrupt(path, f"it has rounds of {what} {strange[0]!r}, which its metadata does not name")


def _corrupt(path: Path, what: str) -> TraceCorruptError:
    return TraceCorruptError(f"{path} cannot be trusted, {what}: simulate again with -o")


HEALTHY_NAME = "healthy"  # of the hypothesis that nothing is wrong
