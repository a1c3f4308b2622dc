"""Packed rows a block at a time: what a pass over a long request holds then grows by keys and values alone.

A block of rows goes through every layer, sees the keys and values of the blocks before it, and leaves its own. Sums are
those of a pass over all rows at once; where products of other sizes take other kernels, their last bits are not.
"""

from collections.abc import Iterator, Sequence

# Rows of one block. Large enough to fill the matrix units; twice as many are no faster and take a quarter more memory.
BLOCK_ROWS = 2048
# A block that is no whole one has a multiple of so many rows, but for the last, so that few numbers of rows come up:
# a CPU keeps a kernel for each (head/products.py ``filled_rows``).
_STEP = 128


def row_blocks(rows: int) -> list[range]:
    """``rows`` in blocks of at most ``BLOCK_ROWS``, one where they fit. None is tiny: the last two share what is left.

    A product reads all weights, however few its rows are.
    """
    whole = max(0, -(-rows // BLOCK_ROWS) - 2)
    ends = [BLOCK_ROWS * (number + 1) for number in range(whole)]
    rest = rows - BLOCK_ROWS * whole
    if rest > BLOCK_ROWS:
        ends.append(rows - rest + min(BLOCK_ROWS, -(-rest // (2 * _STEP)) * _STEP))
    return [range(start, end) for start, end in zip([0, *ends], [*ends, rows], strict=True)]


def overlaps(counts: Sequence[int], block: range) -> Iterator[tuple[int, range]]:
    """Which parts of so many rows each have rows in a block of all, and which of their own these are."""
    before = 0
    for part, count in enumerate(counts):
        rows = range(max(0, block.start - before), min(count, block.stop - before))
        if rows:
            yield part, rows
        before += count
