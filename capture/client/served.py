"""How a server ran a request, from its entries as they were recorded: rounds, pieces, the tail. Pure functions.

T tokens of a request, its prompt's and its output's. A forward may be begun anew (retraction), and one may run beyond
the end of the output: join.py says which then counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replay.capture.spool import Entry
from replay.traces.cached import Piece


@dataclass(frozen=True, slots=True)
class ServedRound:
    """A round as the server ran it; ``drafted`` in node order, ``parents`` of a tree's nodes, the rest as in Entry."""

    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    parents: tuple[int, ...] = ()
    batch: int = 0
    batch_row: int = 0
    verify_pass: int = 0


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
        ServedRound(
            one.start, tuple(one.drafted), one.accepted, tuple(one.parents), one.batch, one.batch_row, one.verify_pass
        )
        for one in kept
        if one.start < tokens - 1
    )


def pieces_of(entries: Sequence[Entry], prompt_tokens: int, cached: int = 0) -> tuple[Piece, ...] | None:
    """In what pieces the prompt's rows from ``cached`` on were prefilled, of ``entries`` as they were recorded.

    Of a request that was put back, those of its last prefill: they made the rows that are kept. Such a prefill goes on
    over the output so far; a piece ends with the prompt, its forward does not. None where a later prefill computed a
    part of a piece anew, so that no whole pieces make up the prompt.
    """
    kept: list[Entry] = []
    for entry in entries:
        if entry.kind == "prefill" and entry.start < prompt_tokens:
            kept = [*(one for one in kept if one.start + one.rows <= entry.start), entry]
    end = cached
    pieces = []
    for one in kept:
        if one.start != end:
            return None
        end = min(one.start + one.rows, prompt_tokens)
        pieces.append((end - one.start, one.forward_rows))
    return tuple(pieces) if end == prompt_tokens else None


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
