"""One request's recorded rows and the server's answer, joined into a CapturedRequest. Pure functions.

Shapes: L prompt tokens, n output tokens, T = L + n; R = T - 1 rows 0..T-2; k kept logits; H width.

A server may compute a row more than once (retraction, an overlapped verify of a request that has just ended) and may
run beyond the end of the output. So the last recording of a position counts, and what a later forward has overwritten
counts no more. But ``final`` of an output row stays the one whose logits chose the token: a prefill after retraction
computes that row again, in another batch, without logits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from replay.capture.client.served import ServedRound, pieces_of, rounds_of, tail_of
from replay.capture.spool import FEED, LOGITS, SCALE, TAP, Entry, RowFile, pid_of
from replay.errors import CaptureError, TraceCorruptError
from replay.traces.cached import Piece
from replay.traces.captured import ServerCounters
from replay.traces.feed import Feed
from replay.traces.taps import FINAL
from replay.traces.tensors import map_rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Recorded:
    """One entry and the file that holds its rows."""

    file: RowFile
    index: int

    @property
    def entry(self) -> Entry:
        return self.file.entries[self.index]

    @property
    def place(self) -> tuple[str, int]:
        """Where it stands among what its process recorded: later recordings have higher places."""
        return self.file.layout.path.name, self.index

    @property
    def first_with_logits(self) -> int:
        """Position of its first row with logits: they are its last ones."""
        return self.entry.start + self.entry.rows - self.entry.logits

    def read(self, name: str, low: int, high: int) -> "torch.Tensor":
        """Tensor ``name`` of the positions low..high-1."""
        begin = self.file.first_row[self.index] - self.entry.start
        return map_rows(self.file.layout, name, begin + low, begin + high)

    @property
    def first_kept(self) -> int:
        """Position of its first row that has taps: they are its last ones."""
        return self.entry.start + self.entry.left_out

    def read_kept(self, name: str, low: int, high: int) -> "torch.Tensor":
        """As ``read``, of a tensor that has the rows with taps alone."""
        begin = self.file.first_kept[self.index] - self.first_kept
        return map_rows(self.file.layout, name, begin + low, begin + high)

    def read_logits(self, name: str, low: int, high: int) -> "torch.Tensor":
        """As ``read``, of a tensor that has the rows with logits alone."""
        begin = self.file.first_logit[self.index] - self.first_with_logits
        return map_rows(self.file.layout, name, begin + low, begin + high)


Stretch = tuple[Recorded, int, int]  # the positions low..high-1 of a recording


@dataclass(frozen=True, slots=True)
class Prefix:
    """First rows of a request that the server took from its cache: taps name -> [C, H], and how many of them each
    forward made, with the number of its rows, where that is known."""

    rows: int
    taps: "Mapping[str, torch.Tensor]"
    forwards: tuple[Piece, ...]


NO_PREFIX = Prefix(0, {}, ())


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API returned for one request."""

    output_ids: tuple[int, ...]
    finish_reason: str  # stop, length or abort
    text: str
    counters: ServerCounters
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinedRequest:
    """Rows of one request from ``first_row`` on: taps name -> [T-1-first_row, H], kept logits of its n output tokens,
    rounds, the tail, the feed where a draft was fed, the pieces of its prompt where they are known, the process of the
    server that ran it, and what forwards made the rows that came from the server's cache. ``scales`` name ->
    [T-1-first_row] are those of taps that came in fp8."""

    taps: "dict[str, torch.Tensor]"
    topk_ids: "torch.Tensor"
    topk_logprobs: "torch.Tensor"
    logsumexp: "torch.Tensor"
    rounds: tuple[ServedRound, ...]
    tail_ids: tuple[int, ...]
    feed: Feed | None = None
    pieces: tuple[Piece, ...] | None = None
    pid: int = 0
    cached: tuple[Piece, ...] | None = None
    scales: "Mapping[str, torch.Tensor]" = field(default_factory=dict)
    first_row: int = 0


def first_missing(recorded: Sequence[Recorded], rows: int, first_row: int = 0, cached: int = 0) -> int | None:
    """The first of the positions cached..rows-1 that no entry holds; None where all are there.

    Before ``first_row`` an entry need not have their taps: nobody asked for them.
    """
    reach = cached
    for low, high in sorted(span for one in recorded for span in _spans(one.entry, first_row)):
        if low > reach:
            break
        reach = max(reach, high)
    return reach if reach < rows else None


def _spans(entry: Entry, first_row: int) -> Iterator[tuple[int, int]]:
    """The positions low..high-1 of which an entry holds what is asked for: tokens first, then taps too."""
    end = entry.start + entry.rows
    for low, high in ((entry.start, min(end, first_row)), (entry.start + entry.left_out, end)):
        if low < high:
            yield low, high


def join(
    name: str,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    recorded: Sequence[Recorded],
    taps: Sequence[str],
    first_row: int = 0,
    prefix: Prefix = NO_PREFIX,
) -> JoinedRequest:
    """Gather the rows of one request from ``first_row`` on from ``recorded``, in the order they were recorded, behind
    those of ``prefix``, which takes all rows in the dtype of the target.

    Raises CaptureError, naming the request, where a position has no row or lacks a tap, or a row consumed another token
    than the one at its position; TraceCorruptError where a file is not what it was.
    """
    tokens = [*prompt_ids, *output_ids]
    rows, first_output = len(tokens) - 1, len(prompt_ids) - 1
    missing = first_missing(recorded, rows, first_row, prefix.rows)
    if missing is not None:
        raise CaptureError(f"{name}: the server recorded no row for position {missing} of {rows}")
    stretches = list(_stretches(recorded, rows))
    kept = [(one, max(low, first_row, one.first_kept), high) for one, low, high in stretches]
    kept = [(one, low, high) for one, low, high in kept if low < high]
    _check_taps(name, kept, taps)
    with_logits = list(_stretches_with_logits(recorded, first_output, rows))
    consumed_R = _gather("input_ids", stretches, rows)
    before = prefix.taps
    gathered = {
        tap: _gather_kept(f"{TAP}{tap}", kept, first_row, rows, before.get(tap)) for tap in taps if tap != FINAL
    }
    scales = {
        tap: _gather_kept(f"{SCALE}{tap}", kept, first_row, rows)
        for tap, values in gathered.items()
        if values.element_size() == 1
    }
    if FINAL in taps:
        of_final = _stretches_of_final(kept, first_output)
        gathered[FINAL] = _gather_kept(f"{TAP}{FINAL}", of_final, first_row, rows, before.get(FINAL))
    logits = {key: _gather_logits(key, with_logits, first_output, len(output_ids)) for key in LOGITS}
    _check_consumed(name, consumed_R.tolist(), tokens, prefix.rows)
    _check_logits(name, with_logits, first_output, len(output_ids))
    entries = [one.entry for one in recorded if one.entry.kind != "feed"]
    pieces = pieces_of(entries, len(prompt_ids), prefix.rows)
    return JoinedRequest(
        {tap: gathered[tap] for tap in taps},
        logits["topk_ids"],
        logits["topk_logprobs"],
        logits["logsumexp"],
        rounds_of(entries, len(tokens)),
        tail_of(entries, len(tokens)),
        feed_of(recorded, rows),
        pieces,
        pid_of(recorded[-1].file.layout.path.name),
        (prefix.forwards or None) if pieces is not None else None,
        scales,
        first_row,
    )


def _stretches(recorded: Sequence[Recorded], rows: int) -> Iterator[Stretch]:
    """What each recording holds of the positions 0..rows-1."""
    for one in recorded:
        low, high = one.entry.start, min(one.entry.start + one.entry.rows, rows)
        if low < high:
            yield one, low, high


def _stretches_with_logits(recorded: Sequence[Recorded], first_output: int, rows: int) -> Iterator[Stretch]:
    """What each recording holds of the output rows with their logits."""
    for one, _, high in _stretches(recorded, rows):
        low = max(one.first_with_logits, first_output)
        if low < high:
            yield one, low, high


def _stretches_of_final(stretches: Sequence[Stretch], first_output: int) -> Iterator[Stretch]:
    """Of ``stretches``, the prompt's rows and those with logits: an output row without them is a prefill's."""
    for one, start, end in stretches:
        first = one.first_with_logits
        for low, high in ((start, min(first, first_output)), (max(start, first), end)):
            if low < high:
                yield one, low, high


def _gather(name: str, stretches: Iterable[Stretch], rows: int) -> "torch.Tensor":
    """Tensor ``name`` [rows, ...] from its ``stretches``, of which the last counts; [0] where there is none."""
    return _assemble(((low, one.read(name, low, high)) for one, low, high in stretches), rows)


def _gather_kept(
    name: str, stretches: Iterable[Stretch], first_row: int, rows: int, before: "torch.Tensor | None" = None
) -> "torch.Tensor":
    """As ``_gather``, of the rows with taps from ``first_row`` on: [rows - first_row, ...], and the rows ``before``."""
    parts = ((low - first_row, one.read_kept(name, low, high)) for one, low, high in stretches)
    return _assemble(parts if before is None else chain([(0, before)], parts), rows - first_row)


def _gather_logits(name: str, stretches: Iterable[Stretch], first_output: int, outputs: int) -> "torch.Tensor":
    """As ``_gather``, of the rows with logits: [outputs, ...]."""
    return _assemble(((low - first_output, one.read_logits(name, low, high)) for one, low, high in stretches), outputs)


def _assemble(parts: "Iterable[tuple[int, torch.Tensor]]", rows: int) -> "torch.Tensor":
    import torch

    whole = torch.empty(0)
    for low, part in parts:
        if len(whole) != rows:
            whole = torch.empty((rows, *part.shape[1:]), dtype=part.dtype)
        if part.dtype != whole.dtype:
            raise TraceCorruptError(f"the server recorded rows of one request in {whole.dtype} and in {part.dtype}")
        whole[low : low + len(part)] = part
    return whole


def _check_taps(name: str, stretches: Iterable[Stretch], taps: Sequence[str]) -> None:
    for one, low, _ in stretches:
        lacking = [tap for tap in taps if tap not in one.file.taps]
        if lacking:
            raise CaptureError(
                f"{name}: the server recorded {', '.join(one.file.taps)} of position {low}, and not {lacking[0]}: "
                "start it anew by replay serve, and type the same command with --resume"
            )


def _check_consumed(name: str, consumed: Sequence[int], tokens: Sequence[int], first: int) -> None:
    for at, (seen, token) in enumerate(zip(consumed[first:], tokens[first:-1], strict=True), first):
        if seen != token:
            raise CaptureError(f"{name}: the row of position {at} consumed token {seen}, the request has {token} there")


def _check_logits(name: str, stretches: Iterable[Stretch], first_output: int, outputs: int) -> None:
    held = {row - first_output for _, low, high in stretches for row in range(low, high)}
    for at in range(outputs):
        if at not in held:
            raise CaptureError(f"{name}: the server recorded no logits for output token {at} of {outputs}")


def feed_of(recorded: Sequence[Recorded], rows: int) -> Feed | None:
    """What the draft was fed in those of the request's ``rows`` that no later forward computed again; None: nothing.

    So that each stands beside the taps it was made of: a prefill after retraction makes other bits.
    """
    import torch

    kept: dict[int, tuple[Recorded, int]] = {}
    for one in recorded:
        first = one.entry.start
        kept = {row: place for row, place in kept.items() if not first <= row < first + one.entry.rows}
        kept |= {row: (one, one.file.first_fed[one.index] + at) for at, row in enumerate(one.entry.fed) if row < rows}
    if not kept:
        return None
    places = [kept[row] for row in sorted(kept)]
    token_F, position_F, features_FW = (
        torch.cat([map_rows(one.file.layout, name, at, at + 1) for one, at in places]) for name in FEED
    )
    return Feed(torch.tensor(sorted(kept), dtype=torch.int32), token_F, position_F, features_FW)
