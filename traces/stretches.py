"""Where the first rows of a request lie: its own, or those of earlier requests with the same tokens and bits.

See SPEC.md, section 5. A position is counted from the request's first token; rows of a prefix stand at equal positions
in the request that shares them and in the one that stores them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replay.traces.records import RequestRecord

TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Stretch:
    """The positions ``start`` to ``stop`` of a request, stored by the request ``record``."""

    record: RequestRecord
    start: int
    stop: int

    def rows(self, name: str) -> tuple[int, int]:
        """First and last row of the tensor ``name`` in the shard of ``record``: ``tokens``, a tap, or its scales."""
        begin = self.record.token_start - self.record.shared if name == TOKENS else self.record.row_origin
        return begin + self.start, begin + self.stop


def stretches(records: Sequence[RequestRecord], record: RequestRecord, start: int, stop: int) -> list[Stretch]:
    """Where the positions ``start`` to ``stop`` of ``record`` lie, in order; ``records`` are all of the trace."""
    if start >= record.shared:
        return [Stretch(record, start, stop)]
    found, begin = [], 0
    owners = [records[number] for number in record.prefix_requests or ()]
    for owner, length in zip((*owners, record), (*(record.prefix_rows or ()), record.tokens), strict=True):
        low, high = max(begin, start), min(begin + length, stop)
        if low < high:
            found.append(Stretch(owner, low, high))
        begin += length
    return found


def prefix_of(records: Sequence[RequestRecord], number: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``prefix_requests`` and ``prefix_rows`` of a request whose first ``rows`` are those of request ``number``."""
    record = records[number]
    requests, lengths, begin = [], [], 0
    for owner, length in zip(
        (*(record.prefix_requests or ()), number), (*(record.prefix_rows or ()), rows), strict=True
    ):
        if begin < rows:
            requests.append(owner)
            lengths.append(min(length, rows - begin))
        begin += length
    return tuple(requests), tuple(lengths)


def runs(
    records: Sequence[RequestRecord], wanted: Iterable[tuple[RequestRecord, Sequence[int]]], name: str
) -> list[tuple[str, list[int]]]:
    """(shard, rows of its tensor ``name``) for the ``wanted`` positions of requests, in their order, shard by shard.

    Where none is wanted, the shard of the first request with no rows: dtype and width are still those of its tensor.
    """
    found: list[tuple[str, list[int]]] = []
    own: list[tuple[str, list[int]]] = []
    for record, positions in wanted:
        where = stretches(records, record, 0, record.rows)
        own = own or [(record.shard, [])]
        for position in positions:
            one = next(one for one in where if position < one.stop)
            if not found or found[-1][0] != one.record.shard:
                found.append((one.record.shard, []))
            found[-1][1].append(one.rows(name)[0] + position - one.start)
    return found or own
