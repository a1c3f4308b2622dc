"""A request's record as a file holds it: each field checked for type and size, and against the others."""

from collections.abc import Sequence

from replay.errors import TraceCorruptError
from replay.traces.cached import cached_problem
from replay.traces.fields import Fields
from replay.traces.files import shard_number
from replay.traces.header import MAX_COUNT, MAX_VOCAB, OLDEST, TraceHeader
from replay.traces.records import FINISH_REASONS, LATER, MAX_ID, MAX_STEPS, MAX_TOKENS, SOURCES, RequestRecord
from replay.traces.taps import FINAL, canonical_taps

MAX_PREFIXES = 1 << 12  # requests of whose rows a prefix is made


def read_record(given: Fields, header: TraceHeader) -> RequestRecord:
    """The record in an object of a shard, or in a row of the table. Raises TraceCorruptError."""
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
    if header.version == OLDEST:
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
    if header.version == OLDEST and (record.taps or record.first_row):
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
