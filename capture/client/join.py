"""One request's recorded rows and the server's answer, joined into a CapturedRequest. Pure functions.

Shapes: L prompt tokens, n output tokens, T = L + n; rows 0..T-2; k kept logits; H width.

A server may compute a row more than once (retraction, an overlapped verify of a request that has just ended) and may
run beyond the end of the output. So the last recording of a position counts, and what a later forward has overwritten
counts no more. But ``final`` of an output row stays the one whose logits chose the token: a prefill after retraction
computes that row again, in another batch, without logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replay.capture.spool import FEED, Entry, RowFile
from replay.errors import CaptureError
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API returned for one request."""

    output_ids: tuple[int, ...]
    finish_reason: str  # stop, length or abort
    text: str
    counters: ServerCounters
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedRound:
    """A round as the server ran it; ``drafted`` in node order, ``parents`` of a tree's nodes, ``batch`` as in Entry."""

    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    parents: tuple[int, ...] = ()
    batch: int = 0


@dataclass(frozen=True, slots=True)
class JoinedRequest:
    """Rows of one request: taps name -> [T-1, H], kept logits of its n output tokens, rounds, the tail, and the feed
    where a draft was fed."""

    taps: "dict[str, torch.Tensor]"
    topk_ids: "torch.Tensor"
    topk_logprobs: "torch.Tensor"
    logsumexp: "torch.Tensor"
    rounds: tuple[ServedRound, ...]
    tail_ids: tuple[int, ...]
    feed: Feed | None = None


def first_missing(recorded: Sequence[Recorded], rows: int) -> int | None:
    """The first of the positions 0..rows-1 that no entry holds; None where all are there."""
    reach = 0
    for entry in sorted((one.entry for one in recorded), key=lambda entry: entry.start):
        if entry.start > reach:
            break
        reach = max(reach, entry.start + entry.rows)
    return reach if reach < rows else None


def lacks_feed(entries: Sequence[Entry]) -> bool:
    """Whether ``entries``, in the order they were recorded, end before the feed of their last prefill from position 0
    on: it is handed over after the rows of its prefill, so a short answer may come before it."""
    lacking = False
    for entry in entries:
        lacking = entry.kind != "feed" and (lacking or (entry.kind == "prefill" and entry.start == 0))
    return lacking


def rounds_of(entries: Sequence[Entry], tokens: int) -> tuple[ServedRound, ...]:
    """The rounds that count, of ``entries`` in the order they were recorded; T = ``tokens``.

    A verify that a later forward starts over did not count (retraction before its result was taken), nor does one whose
    anchor's token is the last of the output or beyond it (the verify that overlapped the end).
    """
    kept: list[Entry] = []
    prefilled: int | None = None  # last row of the prefill (its last chunk) since the last verify
    for entry in entries:
        if entry.kind == "prefill":
            prefilled = entry.start + entry.rows - 1
        elif entry.kind == "verify":
            kept = [one for one in _before_prefill(kept, prefilled) if one.start < entry.start]
            kept.append(entry)
            prefilled = None
    kept = _before_prefill(kept, prefilled)
    return tuple(
        ServedRound(one.start, tuple(one.drafted), one.accepted, tuple(one.parents), one.batch)
        for one in kept
        if one.start < tokens - 1
    )


def _before_prefill(rounds: Sequence[Entry], last: int | None) -> list[Entry]:
    """Those of ``rounds`` whose result was taken before a prefill up to row ``last`` began anew.

    A prefill after retraction covers all tokens so far: had the round at anchor S been taken, it would reach row S + 1.
    """
    return [one for one in rounds if last is None or one.start < last]


def tail_of(entries: Sequence[Entry], tokens: int) -> tuple[int, ...]:
    """What the target chose after the last output token (position ``tokens`` and on), as far as it is recorded."""
    chosen: dict[int, int] = {}  # by the position of the chosen token
    for entry in entries:
        for position in [position for position in chosen if position > entry.start]:
            del chosen[position]
        chosen |= {entry.start + 1 + i: token for i, token in enumerate(entry.chosen)}
    tail: list[int] = []
    while tokens + len(tail) in chosen:
        tail.append(chosen[tokens + len(tail)])
    return tuple(tail)


def histogram_of(rounds: Sequence[ServedRound]) -> tuple[int, ...]:
    """Rounds by accepted tokens, as long as the most accepted needs."""
    counts = [0] * (1 + max((one.accepted for one in rounds), default=-1))
    for one in rounds:
        counts[one.accepted] += 1
    return tuple(counts)


def same_histogram(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two histograms agree, zeros at the end aside."""
    length = max(len(left), len(right))
    return [*left, *[0] * (length - len(left))] == [*right, *[0] * (length - len(right))]


def join(
    name: str, prompt_ids: Sequence[int], output_ids: Sequence[int], recorded: Sequence[Recorded], taps: Sequence[str]
) -> JoinedRequest:
    """Gather the rows of one request from ``recorded``, in the order they were recorded.

    Raises CaptureError, naming the request, where a position has no row or a row consumed another token than the one at
    its position; TraceCorruptError where a file is not what it was.
    """
    import torch

    tokens = torch.tensor([*prompt_ids, *output_ids], dtype=torch.int32)
    rows, outputs = len(tokens) - 1, len(output_ids)
    missing = first_missing(recorded, rows)
    if missing is not None:
        raise CaptureError(f"{name}: the server recorded no row for position {missing} of {rows}")
    consumed = torch.full((rows,), -1, dtype=torch.int32)
    gathered: dict[str, torch.Tensor] = {}
    logits: dict[str, torch.Tensor] = {}
    have_logits = torch.zeros(outputs, dtype=torch.bool)
    first_output = len(prompt_ids) - 1
    for one in recorded:
        entry, layout = one.entry, one.file.layout
        count = min(entry.rows, rows - entry.start)
        if count <= 0:
            continue
        begin, here = one.file.first_row[one.index], slice(entry.start, entry.start + count)
        consumed[here] = map_rows(layout, "input_ids", begin, begin + count)
        first = entry.start + entry.rows - entry.logits  # position of its first row with logits
        for tap in taps:
            part = map_rows(layout, f"tap.{tap}", begin, begin + count)
            if tap not in gathered:
                gathered[tap] = torch.empty((rows, *part.shape[1:]), dtype=part.dtype)
            if tap != FINAL:
                gathered[tap][here] = part
                continue
            for low, high in ((entry.start, min(first, first_output)), (first, entry.start + count)):
                if low < high:
                    gathered[tap][low:high] = part[low - entry.start : high - entry.start]
        low, high = max(first, first_output), min(entry.start + entry.rows, rows)
        if low < high:
            place = one.file.first_logit[one.index] + low - first
            there = slice(low - first_output, high - first_output)
            have_logits[there] = True
            for key in ("topk_ids", "topk_logprobs", "logsumexp"):
                part = map_rows(layout, key, place, place + high - low)
                if key not in logits:
                    logits[key] = torch.empty((outputs, *part.shape[1:]), dtype=part.dtype)
                logits[key][there] = part
    wrong = (consumed != tokens[:-1]).nonzero()
    if len(wrong):
        at = int(wrong[0, 0])
        raise CaptureError(
            f"{name}: the row of position {at} consumed token {int(consumed[at])}, the request has "
            f"{int(tokens[at])} there"
        )
    if not bool(have_logits.all()):
        at = int((~have_logits).nonzero()[0, 0])
        raise CaptureError(f"{name}: the server recorded no logits for output token {at} of {outputs}")
    entries = [one.entry for one in recorded if one.entry.kind != "feed"]
    return JoinedRequest(
        gathered,
        logits["topk_ids"],
        logits["topk_logprobs"],
        logits["logsumexp"],
        rounds_of(entries, len(tokens)),
        tail_of(entries, len(tokens)),
        feed_of(recorded, rows),
    )


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
