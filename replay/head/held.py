"""Weights that are ready to run, each held once for all heads of a sweep that run it alike.

Heads of one checkpoint differ in what is rounded, or in a tensor that a fault changes. What the others have in common
is found here by the tensor it was made of and by how it was made.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

_LINE = 64  # bytes that torch aligns to what it joins; kernels may sum in another order where something lies otherwise
_ALIGNED = 16  # bytes to which fp32 has to be aligned for the same sums everywhere
_Key: TypeAlias = tuple[int, Hashable]  # the address of a source, and how it was made ready


class Held:
    """What was made so far; give the same one to each head that may share."""

    def __init__(self) -> None:
        self._ready: dict[_Key, Tensor] = {}
        self._sources: dict[int, Tensor] = {}  # so that no other tensor takes their place in memory
        self._keys: dict[int, _Key] = {}  # of what is ready, by its own place
        self._stacks: dict[tuple[_Key, ...], Tensor] = {}

    def ready(self, source: Tensor, how: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` makes of a tensor; ``how`` tells apart what may be made of the same one."""
        self._sources[id(source)] = source
        key = (id(source), how)
        if key not in self._ready:
            self._put(key, make())
        return self._ready[key]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all parts, one after the other: where they lie so already, or one copy for all heads that join
        the same ones. Of a part that was made for this, the copy is from now on the only one."""
        known = [self._keys.get(id(part)) for part in parts]
        keys = tuple(key for key in known if key is not None)
        if len(keys) < len(parts):
            return stack_rows(parts)
        if keys not in self._stacks:
            joined, rows = stack_rows(parts), {key for stack in self._stacks for key in stack}
            for key, row in zip(keys, split_rows(joined, parts), strict=True):
                if key not in rows and not self._is_source(key):
                    self._put(key, row)
            self._stacks[keys] = joined
        return self._stacks[keys]

    def keep(self, addresses: Collection[int]) -> None:
        """Forget what lies in no storage at one of these addresses. What is a row of a stack there, lies there."""
        self._stacks = {keys: one for keys, one in self._stacks.items() if address_of(one) in addresses}
        for keys, joined in self._stacks.items():
            for key, row in zip(keys, split_rows(joined, [self._ready[key] for key in keys]), strict=True):
                if not self._is_source(key) and address_of(self._ready[key]) not in addresses:
                    self._put(key, row)
        parts = {key for keys in self._stacks for key in keys}
        for key, one in list(self._ready.items()):
            if key not in parts and address_of(one) not in addresses:
                del self._ready[key]
                self._keys.pop(id(one), None)
        used = {source for source, _ in self._ready}
        self._sources = {source: one for source, one in self._sources.items() if source in used}

    def _put(self, key: _Key, one: Tensor) -> None:
        """From now on this is what is ready; what it was before can leave memory."""
        if key in self._ready:
            self._keys.pop(id(self._ready[key]), None)
        self._ready[key], self._keys[id(one)] = one, key

    def _is_source(self, key: _Key) -> bool:
        return self._ready[key] is self._sources[key[0]]


def aligned(weight: Tensor) -> Tensor:
    """A weight that is summed as where torch would have made it. fp32 products of one row sum in another order where it
    begins amid 16 bytes (MKL, as in torch 2.13 on an AVX2 CPU), which a mapped file may do; then it is a copy."""
    elsewhere = weight.device.type == "cpu" and weight.dtype.itemsize >= 4 and weight.data_ptr() % _ALIGNED
    return weight.clone() if elsewhere else weight


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """Their rows, one after the other; no copy where they lie so already."""
    joined = _side_by_side(parts)
    return torch.cat(list(parts)) if joined is None else joined


def _side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """The rows of all, where each begins in memory where the one before it ends: in a stack of these, and in a file
    that was laid out so (simulator/shared_heads.py)."""
    first, end = parts[0], parts[0].data_ptr()
    if end % _LINE:
        return None
    for one in parts:
        alike = one.dtype == first.dtype and one.shape[1:] == first.shape[1:] and one.is_contiguous()
        if not (alike and address_of(one) == address_of(first) and one.data_ptr() == end) or one.requires_grad:
            return None
        end += one.numel() * one.element_size()
    shape = (sum(map(len, parts)), *first.shape[1:])
    return first.as_strided(shape, torch.empty(shape, device="meta").stride())


def split_rows(joined: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The rows of each part in what was joined of all."""
    rows: tuple[Tensor, ...] = joined.split([len(part) for part in parts])
    return rows


def address_of(tensor: Tensor) -> int:
    """Of the storage that it lies in."""
    return tensor.untyped_storage().data_ptr()
