"""Which earlier request a new one shares its first rows with: found by its tokens, held against the bits on disk.

A table of digests says which requests begin with the same tokens: one for each block of tokens, made of the block and
of the digest of the block before it. That only finds whom to compare. A prefix is shared as far as the tokens are equal
and the rows of every tap are bit for bit those that are stored. What stays in memory is a digest and some numbers for
each block, never a row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from replay.traces.block_digests import digests_by_block
from replay.traces.record_fields import MAX_PREFIXES
from replay.traces.records import RequestRecord
from replay.traces.stretches import TOKENS, prefix_of, stretches
from replay.traces.tensors import Layout, map_rows, parse_layout

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64  # tokens; a shorter prefix is not worth that its request lies in two places
_MOST_ALIKE = 8  # requests with the same tokens and other bits that are compared
_ROWS_AT_ONCE = 1024  # that are compared, so that little is read of a request whose bits are others

Tensors = Mapping[str, "Tensor"]  # ``tokens`` [T] int32, each tap [T-1, width] and their scales [T-1] of one request


@dataclass(slots=True)
class _Stored:
    """The requests of a trace's shards, then those that are about to be added."""

    folder: Path
    layouts: dict[str, Layout]
    records: Sequence[RequestRecord]
    added: Sequence[Tensors] = ()

    def rows(self, number: int) -> int:
        """T - 1 of a request."""
        before = len(self.records)
        return self.records[number].rows if number < before else len(self.added[number - before][TOKENS]) - 1

    def has(self, number: int, names: Iterable[str]) -> bool:
        """Whether a request stores all of these tensors."""
        if number >= len(self.records):
            return set(names) <= set(self.added[number - len(self.records)])
        taps = self.records[number].taps
        return taps is None or {name.partition(".")[2] for name in names if name != TOKENS} <= set(taps)

    def read(self, number: int, name: str, start: int, stop: int) -> "Tensor":
        """Positions ``start`` to ``stop`` of its ``tokens`` or of a tap."""
        import torch

        if number >= len(self.records):
            return self.added[number - len(self.records)][name][start:stop]
        places = stretches(self.records, self.records[number], start, stop)
        return torch.cat([map_rows(self._layout(one.record.shard), name, *one.rows(name)) for one in places])

    def _layout(self, shard: str) -> Layout:
        if shard not in self.layouts:
            self.layouts[shard] = replace(parse_layout(self.folder / shard), metadata={})
        return self.layouts[shard]


class Sharing:
    """Finds the prefixes of requests that are added to the trace in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begins: dict[bytes, tuple[int, ...]] = {}  # digest of tokens -> requests that begin so, bits apart
        self._layouts: dict[str, Layout] = {}
        self._known = 0

    def prefixes(self, records: Sequence[RequestRecord], added: Sequence[Tensors]) -> list[tuple[int, int]]:
        """For each of the requests ``added`` behind ``records``: an earlier request's number, and how many first rows
        it has of it; 0 where none. One that lacks its own first rows is given empty. Nothing is remembered of
        ``added``, which may never come to the disk.

        Raises TraceCorruptError where a shard is not what it was.
        """
        stored = _Stored(self._folder, self._layouts, records, added)
        self._remember_stored(stored)
        found: list[tuple[int, int]] = []
        new: dict[bytes, tuple[int, ...]] = {}
        for number, tensors in enumerate(added, len(records)):
            if not tensors:
                found.append((0, 0))
                continue
            digests = _digests(tensors[TOKENS])
            owner, rows = _longest(self._alike(digests, new), tensors, stored)
            _remember(new, digests, number, rows, self._begins)
            found.append((owner, rows))
        return found

    def rows_on_disk(
        self, records: Sequence[RequestRecord], number: int, tap: str, start: int, stop: int
    ) -> "Tensor | None":
        """The rows ``start`` to ``stop`` of a tap of request ``number`` [.., width]; None where it has not all.

        Raises TraceCorruptError.
        """
        stored = _Stored(self._folder, self._layouts, records)
        lacks = records[number].rows_left_out > start or not stored.has(number, [f"tap.{tap}"])
        return None if lacks else stored.read(number, f"tap.{tap}", start, stop)

    def _remember_stored(self, stored: _Stored) -> None:
        """What came to the disk since the last time, or before this process."""
        for number, record in enumerate(stored.records[self._known :], self._known):
            if record.first_row:
                continue
            tokens_T = stored.read(number, TOKENS, 0, record.tokens)
            _remember(self._begins, _digests(tokens_T), number, record.shared)
        self._known = len(stored.records)

    def _alike(self, digests: Sequence[bytes], new: Mapping[bytes, tuple[int, ...]]) -> list[int]:
        """Requests that begin with the same blocks of tokens, those with most of them first."""
        found: dict[int, None] = {}
        for digest in reversed(digests):
            found |= dict.fromkeys((*self._begins.get(digest, ()), *new.get(digest, ())))
        return list(found)[:_MOST_ALIKE]


def shared_record(bare: RequestRecord, before: Sequence[RequestRecord], owner: int, rows: int) -> RequestRecord:
    """``bare`` with its first ``rows`` those of request ``owner`` of ``before``; as it is where that saves little."""
    if rows < BLOCK:
        return bare
    requests, lengths = prefix_of(before, owner, rows)
    return bare if len(requests) > MAX_PREFIXES else replace(bare, prefix_requests=requests, prefix_rows=lengths)


def _digests(tokens_T: "Tensor") -> list[bytes]:
    """One for each whole block of tokens that rows follow, of all tokens up to its end."""
    return list(digests_by_block(tokens_T[:-1].numpy().tobytes(), BLOCK * tokens_T.element_size()))


def _remember(
    begins: dict[bytes, tuple[int, ...]],
    digests: Sequence[bytes],
    number: int,
    shared: int,
    others: Mapping[bytes, tuple[int, ...]] | None = None,
) -> None:
    """Request ``number`` under the blocks in which it has rows of its own, behind its first ``shared`` ones."""
    for digest in digests[shared // BLOCK :]:
        known = begins.get(digest, ())
        if len(known) + len((others or {}).get(digest, ())) < _MOST_ALIKE:
            begins[digest] = (*known, number)


def _longest(alike: Sequence[int], tensors: Tensors, stored: _Stored) -> tuple[int, int]:
    """Which of the requests ``alike`` has most first rows of that with ``tensors``, and how many."""
    best = (0, 0)
    for number in alike:
        if not stored.has(number, tensors):
            continue
        rows = min(len(tensors[TOKENS]) - 1, stored.rows(number))
        for name, tensor in tensors.items():
            rows = _equal(number, name, tensor, stored, rows)
            if rows <= best[1]:
                break
        else:
            best = (number, rows)
    return best


def _equal(number: int, name: str, tensor: "Tensor", stored: _Stored, most: int) -> int:
    """How many first rows of ``tensor``, ``most`` at most, are bit for bit those of request ``number``."""
    import torch

    for start in range(0, most, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, most)
        own, other = _bits(tensor[start:stop]), _bits(stored.read(number, name, start, stop))
        if not torch.equal(own, other):
            return start + int((own != other).reshape(stop - start, -1).any(1).nonzero()[0, 0])
    return most


def _bits(tensor: "Tensor") -> "Tensor":
    """Values as integers: -0.0 is not 0.0."""
    import torch

    return (
        tensor.detach().cpu().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    )
