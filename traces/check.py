"""Self-check of a trace, before anyone draws a verdict from it. See SPEC.md, section 9.

Findings come one by one while the trace streams by: a request's rows are mapped, looked at and let go, logits are made
in slices of the vocabulary. What stays for the whole trace is 20 bytes per row (to find rows that requests share).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from replay.errors import TraceCorruptError
from replay.printable import counted
from replay.traces import files
from replay.traces.check_lm_head import lm_head_findings
from replay.traces.ranges import sha256_of
from replay.traces.reader import Trace
from replay.traces.records import RequestRecord
from replay.traces.self_check import tap_doubts
from replay.traces.shared_rows import SharedRows, shared_sentences
from replay.traces.taps import EMBED, FINAL

ERROR = "error"
WARNING = "warning"
NOTE = "note"

_MAX_PROBABILITY = 1.001  # of k tokens together: float32 log-probabilities add up to 1 within far less


@dataclass(frozen=True, slots=True)
class TraceFinding:
    """One thing seen. ``severity`` is "error" (do not trust the trace), "warning" or "note"; ``what`` one sentence.

    ``request_id`` is None where the finding is about the whole trace or one of its files.
    """

    severity: str
    request_id: str | None
    what: str


def check_trace(
    trace: Trace,
    *,
    device: str = "cpu",
    rows: int | None = None,
    on_event: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[TraceFinding]:
    """Checksums, finiteness, logits summaries, rows shared between requests, and lm_head(final) against the record.

    ``rows`` bounds how many output positions go through lm_head, evenly spread over the requests (a CPU core makes
    some tens a second for a vocabulary of 160,000); by default all. What is wrong inside the trace comes as a finding,
    never as an exception; the last findings, of severity "note", say how much was checked. ``on_event`` hears of how
    many requests the rows were looked at, and of how many.
    """
    yield from _checksums(trace)
    yield from _uncovered(trace)
    trace = trace.unverified()  # its shards have just been read
    shared = SharedRows()
    whole = []
    widths: set[int] = set()
    for index, record in enumerate(trace.records):
        problems = list(_request_problems(trace, index, shared))
        if not problems:
            whole.append(index)
        yield from (TraceFinding(ERROR, record.request_id, what) for what in problems)
        doubts = (*_counter_doubts(trace, record), *_feed_doubts(trace, index))
        yield from (TraceFinding(WARNING, record.request_id, what) for what in doubts)
        widths |= _feed_width(trace, index)
        on_event(index + 1, len(trace.records))
    if len(widths) > 1:
        wide = ", ".join(map(str, sorted(widths)))
        yield TraceFinding(ERROR, None, f"feeds of one server have features of {wide} columns; capture it again")
    for request_id, what in shared_sentences(shared, [record.request_id for record in trace.records]):
        yield TraceFinding(ERROR, request_id, what)
    yield from (TraceFinding(ERROR, None, what) for what in tap_doubts(trace))
    for severity, owner, what in lm_head_findings(trace, whole, device, rows):
        yield TraceFinding(severity, owner, what)


def _checksums(trace: Trace) -> Iterator[TraceFinding]:
    """Of shards and sidecar; requests.parquet and rounds.parquet are compared whenever they are read."""
    wanted = {layout.path: (layout.data_start, layout.metadata["data_sha256"]) for layout in trace.layouts}
    if trace.header.weights is not None:
        wanted[trace.path / files.WEIGHTS] = (0, trace.header.weights.sha256)
    bad = 0
    for path, (start, sha256) in wanted.items():
        for what in _checksum_problem(path, start, sha256):
            bad += 1
            yield TraceFinding(ERROR, None, what)
    try:
        trace.served_rounds()
    except TraceCorruptError as error:
        yield TraceFinding(ERROR, None, str(error))
    yield TraceFinding(
        NOTE, None, f"{len(wanted) - bad} of {counted(len(wanted), 'file')} have the bytes that their checksums name"
    )


def _uncovered(trace: Trace) -> Iterator[TraceFinding]:
    """What no checksum holds, of a trace that an earlier replay wrote."""
    if what := trace.header.uncovered:
        yield TraceFinding(NOTE, None, f"it lacks {what}")


def _checksum_problem(path: Path, start: int, sha256: str) -> Iterator[str]:
    try:
        found = sha256_of(path, start)
    except TraceCorruptError as error:
        yield str(error)
        return
    if found != sha256:
        yield f"{path} has changed since it was written: its SHA-256 is {found[:12]}..., not {sha256[:12]}..."


def _request_problems(trace: Trace, index: int, shared: SharedRows) -> Iterator[str]:
    """Tap by tap, so that one tap of one request is the most that is in memory."""
    for tap in trace.records[index].taps or trace.header.taps:
        try:
            rows = trace.read(index, [tap])
        except TraceCorruptError as error:
            yield str(error)
            continue
        values = rows.taps[tap][rows.first_row :]
        zero = (values == 0).all(dim=1)
        if tap != EMBED and bool(zero.any()):
            first = rows.first_row + int(zero.nonzero()[0, 0])
            yield f"{int(zero.sum())} of {counted(len(zero), 'row')} of {tap} are all zero, first row {first}"
        if tap == FINAL:
            shared.add(index, rows.tokens, values, rows.first_row)
    try:
        trace.feed(index)
    except TraceCorruptError as error:
        yield str(error)
    try:
        ids_nk, logprobs_nk, _ = trace.logits(index)
    except TraceCorruptError as error:
        yield str(error)
        return
    if bool((ids_nk.sort(dim=1).values.diff(dim=1) == 0).any()):
        yield "topk_ids names one token twice for one position"
    if bool((logprobs_nk.diff(dim=1) > 0).any()):
        yield "topk_logprobs rise within a row, though the most likely token comes first"
    most = float(logprobs_nk.exp().sum(dim=1).max())
    if most > _MAX_PROBABILITY:
        yield f"the recorded probabilities of the top {ids_nk.shape[1]} tokens add up to {most:.4g}"


def _feed_width(trace: Trace, index: int) -> set[int]:
    """Columns of the request's feed, where it has one that can be read."""
    try:
        feed = trace.feed(index)
    except TraceCorruptError:
        return set()  # said among the problems
    return set() if feed is None else {feed.features_FW.shape[1]}


def _feed_doubts(trace: Trace, index: int) -> Iterator[str]:
    """NaN and Inf that a draft was fed are its server's fault, not the trace's."""
    try:
        feed = trace.feed(index)
    except TraceCorruptError:
        return  # said among the problems
    if feed is not None and not bool(feed.features_FW.isfinite().all()):
        bad = int((~feed.features_FW.isfinite().all(dim=1)).sum())
        yield f"{bad} of {len(feed)} recorded rows that the draft was fed hold NaN or Inf"


def _counter_doubts(trace: Trace, record: RequestRecord) -> Iterator[str]:
    """What the server counted, against itself and against the rows that are there."""
    limit = trace.header.capture.max_new_tokens
    if record.source == "generated" and record.output_tokens > limit:
        yield f"{record.output_tokens} output tokens, though max_new_tokens was {limit}"
    completion = record.server_completion_tokens
    if completion is not None and completion != record.output_tokens:
        yield f"the server counted {completion} output tokens, the trace holds {record.output_tokens}"
    rounds, histogram = record.server_verify_rounds, record.server_histogram
    if rounds is not None and histogram is not None and sum(histogram) != rounds:
        yield f"the server counted {rounds} verify rounds, its histogram adds up to {sum(histogram)}"
