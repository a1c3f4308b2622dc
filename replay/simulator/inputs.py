"""Requests of a trace, a pack of them at a time: as many as fill a pass, and never more in memory."""

from collections.abc import Iterator, Sequence

from replay.traces.reader import RequestRows, Trace

# Rows packed into one pass, unless one request alone has more. Large enough to fill the matrix units; twice as many are
# no faster and take a quarter more memory.
PACK_ROWS = 2048


def read_packs(trace: Trace, taps: Sequence[str]) -> Iterator[list[RequestRows]]:
    """Requests in trace order with ``taps``, a few thousand rows at a time. Raises WiringError, TraceCorruptError."""
    pack: list[RequestRows] = []
    rows = 0
    for index in range(len(trace.requests)):
        request = trace.read(index, tuple(taps))
        if pack and rows + len(request.tokens) > PACK_ROWS:
            yield pack
            pack, rows = [], 0
        pack.append(request)
        rows += len(request.tokens)
    if pack:
        yield pack
