"""Weights that are ready to run, each held once for all heads of a sweep that run it alike.

Heads of one checkpoint differ in what is rounded, or in a tensor that a fault changes. What the others have in common
is found here by the tensor it was made of and by how it was made.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Held:
    """What was made so far; give the same one to each head that may share."""

    def __init__(self) -> None:
        self._ready: dict[Hashable, Tensor] = {}
        self._sources: dict[int, Tensor] = {}  # so that no other tensor takes their place in memory

    def ready(self, source: Tensor, how: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` makes of a tensor; ``how`` tells apart what may be made of the same one."""
        self._sources[id(source)] = source
        key = (id(source), how)
        if key not in self._ready:
            self._ready[key] = make()
        return self._ready[key]

    def replace(self, one: Tensor, same: Tensor) -> None:
        """From now on ``same`` is given where ``one`` was, which can then leave memory."""
        for key, ready in self._ready.items():
            if ready is one:
                self._ready[key] = same


def stacked_already(parts: list[Tensor]) -> Tensor | None:
    """The tensor whose rows ``parts`` are, one after the other and all of them; None where they are of no such one."""
    first, columns = parts[0], parts[0].shape[1:]
    storage = first.untyped_storage()
    elements = 0
    for part in parts:
        whole = part.is_contiguous() and part.shape[1:] == columns and part.dtype == first.dtype
        if not whole or part.storage_offset() != elements or part.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        elements += part.numel()
    if elements * first.element_size() != storage.nbytes():
        return None
    rows = sum(len(part) for part in parts)
    return torch.as_strided(first, (rows, *columns), torch.empty((1, *columns), device="meta").stride(), 0)
