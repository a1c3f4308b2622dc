"""Traces made of traces: several merged into one, or a part of one, request by request and bit for bit."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import TraceError, UsageError
from replay.traces.captured import CapturedRequest, ServerCounters
from replay.traces.fields import some
from replay.traces.header import FP8, OLDEST, ONE_TARGET, VERSION, TraceHeader
from replay.traces.lacking import say_missing
from replay.traces.reader import Trace
from replay.traces.taps import FINAL, sort_taps
from replay.traces.whole import check_output, whole_folder
from replay.traces.writer import TraceWriter

if TYPE_CHECKING:
    import polars as pl

_AT_ONCE = 1 << 28  # bytes of rows that are held before they are written as a shard
# What one trace has one of beside its target. Prompts are of course others.
_ASKED_ALIKE = ("temperature", "top_p", "top_k", "raw")


@dataclass(frozen=True, slots=True)
class Copied:
    """The trace that was written, and how many requests came from each trace, by its path."""

    path: Path
    requests: int
    output_tokens: int
    traces: Mapping[str, int]


def copy_requests(
    traces: Sequence[Trace],
    out: Path,
    *,
    named_by_trace: bool = False,
    force: bool = False,
    on_event: Callable[[int, int], None] = lambda done, total: None,
) -> Copied:
    """Write the requests of ``traces`` (or of parts of them, ``Trace.take``) as one finished trace ``out``.

    Rows, choices, counters, feeds and server rounds are those of the sources. ``named_by_trace`` puts the name of each
    trace's folder and a slash before its ids. Raises TraceError where targets or settings differ, UsageError for
    ids that stand twice, OutputError where something is there (without ``force``) or the disk refuses. Whatever it
    raises, nothing new is at ``out`` then, and what was there is as it was.
    ``on_event`` hears how many requests are written, and of how many.
    """
    check_output(out, force=force)
    header = _common_header(traces)
    names = _ids(traces, named_by_trace)
    if out.exists() and any(out.resolve() == trace.path.resolve() for trace in traces):
        raise UsageError(f"{out} is one of the traces that are read; name another folder")
    with whole_folder(out, force=force) as folder:
        _write(folder, header, traces, names, on_event)
    tokens = sum(record.output_tokens for trace in traces for record in trace.records)
    return Copied(out, sum(map(len, traces)), tokens, {str(trace.path): len(trace) for trace in traces})


def _write(
    folder: Path,
    header: TraceHeader,
    traces: Sequence[Trace],
    names: Sequence[Mapping[str, str]],
    on_event: Callable[[int, int], None],
) -> None:
    with TraceWriter.create(folder, header) as writer:
        if all(trace.header.weights is not None for trace in traces):
            first = traces[0]
            tied = header.target.tie_word_embeddings
            writer.write_target_weights(first.embed_weight(), None if tied else first.lm_head_weight())
        done, total = 0, sum(map(len, traces))
        for trace, new in zip(traces, names, strict=True):
            for count in _copy(trace, new, writer):
                on_event(done := done + count, total)
        writer.finish()


def _copy(trace: Trace, new: Mapping[str, str], writer: TraceWriter) -> Iterator[int]:
    """Batch by batch; how many requests each had."""
    rounds = trace.served_rounds()
    if len(rounds):
        writer.add_rounds(_renamed(rounds, new, writer.next_verify_pass()))
    for batch in _batches(trace):
        writer.add(
            [
                replace(captured_request(trace, index), request_id=new[trace.records[index].request_id])
                for index in batch
            ]
        )
        yield len(batch)


def _renamed(rounds: "pl.DataFrame", new: Mapping[str, str], first_pass: int) -> "pl.DataFrame":
    """Passes are numbered on from those that are there, so that none is taken for another's."""
    import polars as pl

    ids = rounds.filter(pl.col("request_id").is_in(list(new)))
    return ids.with_columns(
        pl.col("request_id").replace_strict(dict(new), return_dtype=pl.String), pl.col("verify_pass") + first_pass
    )


def _batches(trace: Trace) -> Iterator[list[int]]:
    """Indices of as many requests as fill a shard."""
    width = sum(tap.width for tap in trace.header.taps.values()) * 4
    batch: list[int] = []
    size = 0
    for index, record in enumerate(trace.records):
        if batch and size + record.stored_rows * width > _AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += record.stored_rows * width
    if batch:
        yield batch


def captured_request(trace: Trace, index: int) -> CapturedRequest:
    """Request ``index`` as it was captured, bit for bit. Raises TraceCorruptError."""
    import torch

    record = trace.records[index]
    taps = record.taps or tuple(trace.header.taps)
    rows = trace.read(index, taps)  # which looks at all of it
    stored = {tap: trace.stored_rows(index, tap) for tap in taps}
    topk_ids, topk_logprobs, logsumexp = trace.logits(index)
    tokens = rows.tokens.tolist()
    counted = record.server_completion_tokens is not None
    return CapturedRequest(
        request_id=record.request_id, category=record.category, prompt_ids=tokens[: record.prompt_tokens],
        output_ids=tokens[record.prompt_tokens :], finish_reason=record.finish_reason, source=record.source,
        temperature=record.temperature, top_p=record.top_p, top_k=record.top_k,
        taps={tap: values for tap, (values, _) in stored.items()},
        scales={tap: scale for tap, (_, scale) in stored.items() if scale is not None}, first_row=record.rows_left_out,
        topk_ids=topk_ids.to(torch.int32), topk_logprobs=topk_logprobs, logsumexp=logsumexp, tail_ids=record.tail_ids,
        server=ServerCounters(
            completion_tokens=record.server_completion_tokens or 0, verify_rounds=record.server_verify_rounds or 0,
            histogram=record.server_histogram or (), cached_tokens=record.server_cached_tokens or 0,
        ) if counted else None,
        feed=trace.feed(index), pieces=record.pieces or None, cached=record.cached or None,
    )  # fmt: skip


def _ids(traces: Sequence[Trace], named_by_trace: bool) -> list[dict[str, str]]:
    """Of each trace the new id of each request."""
    prefixes = [f"{trace.path.resolve().name}/" if named_by_trace else "" for trace in traces]
    named = [
        {record.request_id: f"{prefix}{record.request_id}" for record in trace.records}
        for trace, prefix in zip(traces, prefixes, strict=True)
    ]
    counts = Counter(name for ids in named for name in ids.values())
    if twice := [name for name, count in counts.items() if count > 1]:
        mend = (
            "give folders of different names, each once"
            if named_by_trace
            else "type --name-by-trace to put the name of its folder before each"
        )
        raise UsageError(f"{len(twice)} ids of requests stand in more than one trace ({some(twice)}); {mend}")
    return named


def _common_header(traces: Sequence[Trace]) -> TraceHeader:
    """The header of a trace of all. Raises TraceError where they are of different kinds."""
    first, *others = [trace.header for trace in traces]
    for trace, header in zip(traces[1:], others, strict=True):
        pairs = [(f"target.{name}", getattr(first.target, name), getattr(header.target, name)) for name in ONE_TARGET]
        pairs += [(name, getattr(first.capture, name), getattr(header.capture, name)) for name in _ASKED_ALIKE]
        pairs += [
            ("engine", f"{first.engine.name} {first.engine.version}", f"{header.engine.name} {header.engine.version}"),
            ("engine.details", first.engine.details, header.engine.details),
            ("topk", first.topk, header.topk),
            ("embed", first.embed, header.embed),
        ]  # fmt: skip
        for name, one, other in pairs:
            if one != other:
                raise _differing(name, one, other, traces[0], trace)
    _check_stored_alike(traces)
    return _of_records(_joined([first, *others]), traces)


def _check_stored_alike(traces: Sequence[Trace]) -> None:
    """Traces may have other taps; what several have is stored alike, all but ``final`` in fp8 or nothing.

    Raises TraceError.
    """
    rows: dict[str, Trace] = {}
    known: dict[str, tuple[str, Trace]] = {}
    for trace in traces:
        for name, info in trace.header.taps.items():
            if name != FINAL:
                rows.setdefault("fp8" if info.dtype == FP8 else "exact", trace)
            said = f"{info.dtype} x {info.width}"
            stored, first = known.setdefault(name, (said, trace))
            if len(rows) < 2 and stored != said:
                raise _differing(f"tap {name}", stored, said, first, trace)
    if len(rows) > 1:
        (one, first), (other, trace) = rows.items()
        raise _differing("rows", one, other, first, trace)


def _differing(name: str, one: object, other: object, first: Trace, trace: Trace) -> TraceError:
    return TraceError(
        f"the traces differ in {name}, {_say(one)} in {first.path} and {_say(other)} in {trace.path}; give traces that "
        "were recorded alike, or replay each by itself"
    )


def _joined(headers: Sequence[TraceHeader]) -> TraceHeader:
    """The first of ``headers`` that agree, with what is said of all of them."""
    first = replace(headers[0], weights=None)
    if len(headers) == 1:
        return first
    digest = hashlib.sha256("".join(header.capture.prompts_sha256 for header in headers).encode()).hexdigest()
    most = max(header.capture.max_new_tokens for header in headers)
    missing = dict.fromkeys(what for header in headers for what in header.missing)
    seeds = {header.capture.seed for header in headers}
    told = ("the one prompt file: it was merged of several",) + ("the one seed: there are several",) * (len(seeds) > 1)
    rows = {header.capture.prompt_rows for header in headers}
    capture = replace(
        first.capture, prompts_sha256=digest, max_new_tokens=most, taps_for=None, then_taps=(),
        prompt_rows=rows.pop() if len(rows) == 1 else None,
    )  # fmt: skip
    return replace(first, capture=capture, missing=(*missing, *told))


def _of_records(header: TraceHeader, traces: Sequence[Trace]) -> TraceHeader:
    """``header`` with the taps, the choices and the version that the requests have, and what these lack."""
    infos = {name: info for trace in traces for name, info in trace.header.taps.items()}
    records = [
        replace(record, taps=record.taps or tuple(trace.header.taps)) for trace in traces for record in trace.records
    ]
    kinds = {frozenset(record.taps or ()) for record in records}
    held = frozenset().union(*kinds) or infos.keys()
    taps = {name: infos[name] for name in sort_taps([*infos]) if name in held}
    capture = header.capture if len(kinds) > 1 else replace(header.capture, taps_for=None, then_taps=())
    if not any(record.first_row for record in records):
        capture = replace(capture, prompt_rows=None)
    capture = replace(capture, rows="fp8" if any(info.dtype == FP8 for info in taps.values()) else "exact")
    chosen = capture.choices or len(kinds) > 1 or any(record.first_row for record in records)
    header = replace(header, taps=taps, capture=capture, version=VERSION if chosen else OLDEST)
    return replace(header, missing=say_missing(header, records))


def _say(value: object) -> str:
    return some([f"{name} {item}" for name, item in value.items()]) if isinstance(value, Mapping) else str(value)
