"""The rounds table: what a simulation did, round by round, in one parquet file.

Columns, in this order: ``variant`` (str), ``request_id`` (str), ``round`` (i32, from 0 in each request), ``anchor``
(i32, tokens), ``drafted`` (list of i32, token ids), ``accepted`` (i32, 0..len(drafted), without the bonus token) and
``cut`` (bool: accepted + 1 tokens run past the end of the recorded output). Who the variants and requests are stands as
JSON under the key ``replay`` of the parquet key-value metadata, so that the file needs nothing beside it.
"""

import hashlib
import io
import json
import math
import os
import secrets
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.errors import OutputError, TraceCorruptError, TraceError, TraceVersionError, UsageError
from replay.printable import counted, html_table
from replay.traces.agreement import Agreement, problem, read_agreement
from replay.traces.fields import Fields, is_number, parse_json, show, some
from replay.traces.files import PLAIN, as_path, describe_path
from replay.traces.given import check_given, check_list
from replay.traces.parquet import check_parquet, first_line
from replay.traces.remote import as_source
from replay.traces.taps import parse_tap

if TYPE_CHECKING:
    import polars as pl

FORMAT = "replay-rounds"
VERSION = 1
METADATA_KEY = "replay"
HEALTHY_NAME = "healthy"  # of the hypothesis that nothing is wrong
EXPECTED_COLUMNS = 6  # of ``Expected.sums``
_MOST = 1 << 40  # of any count
_MOST_STEPS = 1 << 12  # a table of counts has a column for each
_MOST_WORDS = 256  # taps or faults of a variant
_MOST_NAME = 4096  # characters of a name

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
    ``expected`` is None under the greedy rule, whose rounds leave nothing to chance, ``agreement`` where the variant
    was not held against a server's own rounds. ``by_request`` has anchors, anchors_accepted and ties of each request in
    the order of ``Rounds.requests``; None in files from before there was it.
    """

    seconds: float
    anchors: int
    anchors_accepted: int
    ties: int
    expected: Expected | None = None
    agreement: Agreement | None = None
    by_request: tuple[tuple[int, int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request of the trace: sizes in tokens, what the server itself reported (None: nothing), where it came from.

    ``observed_histogram[a]`` counts the server's rounds with a accepted tokens. ``source`` is ``generated`` or
    ``forced`` (teacher-forced text), ``temperature`` the one the output was sampled with (0: greedy). ``loop_tokens``
    of the output, in a row, are ``loop_period`` tokens again and again; both are 0 where it does not loop. ``trace``
    names the trace it is of, where there are several. ``tokens_sha256`` is of its token ids, prompt and output, in 32
    bits each, little-endian; None where it was not replayed, and in files from before there was it.
    """

    request_id: str
    category: str | None
    prompt_tokens: int
    output_tokens: int
    observed_rounds: int | None
    observed_histogram: tuple[int, ...] | None
    source: str = "generated"
    temperature: float = 0.0
    loop_tokens: int = 0
    loop_period: int = 0
    trace: str | None = None
    tokens_sha256: str | None = None


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

    def __post_init__(self) -> None:
        """Raises UsageError for what is no table, or no variants and requests of rounds."""
        import polars as pl

        wanted = "rounds are made by replay.simulate or replay.read_rounds"
        check_given("table", self.table, pl.DataFrame, wanted)
        check_list("variants", self.variants, VariantInfo, wanted)
        check_list("requests", self.requests, RequestInfo, wanted)

    def __repr__(self) -> str:
        names = some([variant.name for variant in self.variants])
        held = f"{counted(len(self.table), 'round')} of {counted(len(self.requests), 'request')}"
        return f"Rounds({held}; variants {names or 'none'})"

    def _repr_html_(self) -> str:
        rows = [
            [name, str(rounds), str(drafted), str(accepted), f"{1 + accepted / rounds:.3f}" if rounds else ""]
            for name, rounds, drafted, accepted in self._counts()
        ]
        return html_table(repr(self), ("variant", "rounds", "drafted", "accepted", "accept length"), rows)

    def _counts(self) -> list[tuple[str, int, int, int]]:
        import polars as pl

        drafted, accepted = pl.col("drafted").list.len().sum(), pl.col("accepted").sum()
        counted = self.table.group_by("variant").agg(pl.len(), drafted.alias("d"), accepted)
        found = {name: counts for name, *counts in counted.iter_rows()}
        return [(one.name, *found.get(one.name, (0, 0, 0))) for one in self.variants]

    def with_requests(self) -> "pl.DataFrame":
        """The table, each round with the facts of its request: category, prompt_tokens, output_tokens, source,
        temperature, loop_tokens and trace.

        >>> rounds.with_requests().columns[7:10]
        ['category', 'prompt_tokens', 'output_tokens']
        """
        import polars as pl

        kinds = {
            "request_id": pl.String(), "category": pl.String(), "prompt_tokens": pl.Int64(),
            "output_tokens": pl.Int64(), "source": pl.String(), "temperature": pl.Float64(),
            "loop_tokens": pl.Int64(), "trace": pl.String(),
        }  # fmt: skip
        facts = pl.DataFrame([[getattr(one, name) for name in kinds] for one in self.requests], kinds, orient="row")
        return self.table.join(facts, on="request_id", how="left", maintain_order="left")


def check_rounds(name: str, value: object) -> None:
    """Raises UsageError for what is no Rounds."""
    check_given(name, value, Rounds, "rounds were expected: what replay.simulate or replay.read_rounds returns")


def tokens_sha256(tokens: Sequence[int]) -> str:
    """The checksum of token ids that ``RequestInfo`` keeps.

    >>> tokens_sha256([])[:8]
    'e3b0c442'
    """
    return hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest()


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
    check_rounds("rounds", rounds)
    path = as_path(path)
    _check(rounds, path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise OutputError(f"{path} is no regular file and would be replaced: name another after -o")
    if os.path.exists(path) and not force:
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
    rounds.table.write_parquet(buffer, metadata={METADATA_KEY: _text(head)})
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")  # also on a disk of many machines
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


def is_rounds_file(path: Path) -> bool:
    """Whether ``path`` is a rounds file of any version; its table is not read."""
    import polars as pl
    from polars.exceptions import PanicException, PolarsError

    try:
        check_parquet(path)
        return METADATA_KEY in pl.read_parquet_metadata(path)
    except (OSError, TraceCorruptError, PolarsError, PanicException):
        return False


def read_rounds(path: Path) -> Rounds:
    """Read a rounds file, refusing whatever does not hold together.

    Raises TraceError when there is no such file, TraceVersionError when it is of another format or version,
    TraceCorruptError when its bytes, columns or values disagree with its metadata.
    """
    import polars as pl
    from polars.exceptions import PanicException, PolarsError

    path = as_source(path)
    if (seen := describe_path(path)) != PLAIN:
        raise TraceError(f"{path} {seen}, rounds are one parquet file: type replay simulate TRACE -o ROUNDS.parquet")
    try:
        check_parquet(path)
        metadata = pl.read_parquet_metadata(path)
        if METADATA_KEY not in metadata:
            raise TraceVersionError(
                f"{path} is a parquet file but not one of rounds: type the file that replay simulate -o wrote"
            )
        table = pl.read_parquet(path, glob=False, hive_partitioning=False)
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror or error}): name a file that you may read") from error
    except TraceCorruptError as error:
        raise TraceCorruptError(f"{error}: simulate again with -o") from error
    except (PolarsError, PanicException) as error:
        raise TraceCorruptError(
            f"{path} is no readable parquet file ({first_line(error)}): simulate again with -o"
        ) from error
    head = _head(metadata[METADATA_KEY], path)
    rounds = Rounds(
        table=table,
        variants=tuple(map(_variant, head.objects("variants"))),
        requests=tuple(map(_request, head.objects("requests"))),
        trace=head.object("trace").values,
        drafts=head.object("drafts").values,
    )
    _check(rounds, path)
    return rounds


def _text(head: dict[str, Any]) -> str:
    """As JSON. A path that is no UTF-8 has a question mark for each odd byte: half characters are no text."""
    return json.dumps(head, allow_nan=False, ensure_ascii=False).encode(errors="replace").decode()


def _head(text: str, path: Path) -> Fields:
    """The metadata as an object of our format and version."""
    refusal = partial(_corrupt, path)
    head = parse_json(text, "its metadata", refusal)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TraceVersionError(
            f"{path} is a parquet file but not one of rounds: type the file that replay simulate -o wrote"
        )
    if head.get("version") != VERSION:
        raise TraceVersionError(
            f"{path} holds rounds of version {show(head.get('version'))}, this replay reads version {VERSION}: "
            "simulate again, or use the replay that wrote it"
        )
    root = Fields("its metadata", head, refusal)
    root.only(("format", "version", "variants", "requests", "trace", "drafts"))
    return root


def _variant(values: Fields) -> VariantInfo:
    values.only([field.name for field in fields(VariantInfo)])
    return VariantInfo(
        name=values.text("name", _MOST_NAME),
        draft=values.text("draft", _MOST_NAME),
        wiring=tuple(_tap(values, tap) for tap in values.texts("wiring", _MOST_WORDS)),
        steps=values.integer("steps", 0, _MOST_STEPS),
        topk=values.integer("topk", 0, _MOST),
        num_draft_tokens=values.integer("num_draft_tokens", 0, _MOST),
        precision=values.text("precision"),
        numerics=values.text("numerics"),
        kv=values.text("kv"),
        verify=values.text("verify"),
        temperature=values.number("temperature", 0.0, 1e6),
        engine=values.text("engine"),
        faults=values.texts("faults", _MOST_WORDS),
        seconds=values.number("seconds", 0.0, 1e12),
        anchors=values.integer("anchors", 0, _MOST),
        anchors_accepted=values.integer("anchors_accepted", 0, _MOST),
        ties=values.integer("ties", 0, _MOST),
        # files from before there were these are of the same version
        expected=_expected(values.object("expected")) if values.values.get("expected") is not None else None,
        agreement=read_agreement(values.object("agreement")) if values.values.get("agreement") is not None else None,
        by_request=_by_request(values) if values.values.get("by_request") is not None else None,
    )


def _by_request(values: Fields) -> tuple[tuple[int, int, int], ...]:
    rows = values.get("by_request")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 3 and all(type(item) is int and 0 <= item <= _MOST for item in row)
        for row in rows
    ):
        raise values.refuse("by_request", "a list of three counts for each request")
    return tuple((row[0], row[1], row[2]) for row in rows)


def _tap(values: Fields, name: str) -> str:
    try:
        return parse_tap(name)
    except UsageError as error:
        raise values.refuse("wiring", "a list of taps, such as embed, 3 and 16") from error


def _expected(values: Fields) -> Expected:
    values.only([field.name for field in fields(Expected)])
    rows = values.get("sums")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(is_number(item, -math.inf, math.inf) for item in row) for row in rows
    ):
        raise values.refuse("sums", "a list of lists of numbers")
    sums = tuple(tuple(map(float, row)) for row in rows)
    return Expected(values.text("rule"), values.flag("exact"), values.text("note"), sums)


def _request(values: Fields) -> RequestInfo:
    values.only([field.name for field in fields(RequestInfo)])
    return RequestInfo(
        request_id=values.text("request_id"),
        category=values.optional_text("category"),
        prompt_tokens=values.integer("prompt_tokens", 0, _MOST),
        output_tokens=values.integer("output_tokens", 0, _MOST),
        observed_rounds=values.optional_integer("observed_rounds", 0, _MOST),
        observed_histogram=values.optional_integers("observed_histogram", 0, _MOST, _MOST_STEPS + 1),
        source=values.text("source"),
        temperature=values.number("temperature", 0.0, 1e6),
        # files from before there were these are of the same version
        loop_tokens=values.integer("loop_tokens", 0, _MOST) if "loop_tokens" in values.values else 0,
        loop_period=values.integer("loop_period", 0, _MOST) if "loop_period" in values.values else 0,
        trace=values.optional_text("trace") if "trace" in values.values else None,
        tokens_sha256=values.optional_sha256("tokens_sha256") if "tokens_sha256" in values.values else None,
    )


def _check(rounds: Rounds, path: Path) -> None:
    """Raise TraceCorruptError unless columns, dtypes and values are those of the format."""
    import polars as pl

    schema, table = table_schema(), rounds.table
    if lost := [name for name in schema if name not in table.columns]:
        raise _corrupt(path, f"it has no column {', '.join(lost)}")
    if table.columns != list(schema):
        raise _corrupt(path, f"its columns are {some(table.columns)} where {', '.join(schema)} belong")
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
        if variant.by_request is not None and len(variant.by_request) != len(rounds.requests):
            raise _corrupt(path, f"variant {variant.name!r} has sums of {len(variant.by_request)} requests")
        if variant.agreement is not None and (wrong := problem(variant.agreement)):
            raise _corrupt(path, f"variant {variant.name!r} has {wrong}")
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
        raise _corrupt(
            path, f"variant {name!r} expects sums of {counted(len(expected.sums), 'request')} where {requests} belong"
        )
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
