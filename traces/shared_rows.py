"""Rows that two requests share though their tokens differ: the mark of a capture that mixed up its batch."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class SharedRows:
    """Remembers 20 bytes per row: a hash of its bits, a hash of the tokens up to it, and whose it is.

    Equal tokens up to a position make equal rows (a system prompt, say), so only rows that follow different tokens
    count. Rows of one request are not compared: a text that repeats itself can bring a model to the same bits again.
    """

    def __init__(self) -> None:
        self._rows = array("Q")
        self._prefixes = array("Q")
        self._owners = array("I")

    def add(self, owner: int, tokens_T: "torch.Tensor", rows_RW: "torch.Tensor", first: int = 0) -> None:
        """Row i of ``rows_RW`` follows the tokens 0 to ``first`` + i of ``tokens_T``; ``owner`` numbers the request."""
        import torch

        size = rows_RW.shape[1] * rows_RW.element_size()
        data = rows_RW.contiguous().reshape(-1).view(torch.uint8).numpy().data
        prefix = hashlib.blake2b(digest_size=8)
        for index, token in enumerate(tokens_T[: first + len(rows_RW)].tolist(), start=-first):
            prefix.update(token.to_bytes(4, "little"))
            if index < 0:
                continue
            row = hashlib.blake2b(data[index * size : (index + 1) * size], digest_size=8)
            self._rows.append(int.from_bytes(row.digest(), "little"))
            self._prefixes.append(int.from_bytes(prefix.copy().digest(), "little"))
            self._owners.append(owner)

    def pairs(self) -> Iterator[tuple[int, int, int]]:
        """(one request, another, rows they share), in the order of the first."""
        import numpy as np

        rows, prefixes = np.frombuffer(self._rows, np.uint64), np.frombuffer(self._prefixes, np.uint64)
        order = np.lexsort((np.frombuffer(self._owners, np.uint32), rows))
        one, other = order[:-1], order[1:]
        owners = np.frombuffer(self._owners, np.uint32).astype(np.int64)
        same = (rows[one] == rows[other]) & (prefixes[one] != prefixes[other]) & (owners[one] != owners[other])
        if same.any():
            found = np.stack([owners[one][same], owners[other][same]], axis=1)
            for pair, count in zip(*np.unique(found, axis=0, return_counts=True), strict=True):
                yield int(pair[0]), int(pair[1]), int(count)


def shared_sentences(shared: SharedRows, request_ids: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(request_id, sentence) for every pair of requests that share rows."""
    for one, other, count in shared.pairs():
        yield (
            request_ids[other],
            f"{count} rows of final are bit for bit those of request {request_ids[one]!r}, though the tokens before "
            "them differ",
        )
