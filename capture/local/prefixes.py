"""What prompts have in common, computed once: a request goes on from the keys and values that are there.

Prompts that begin alike form a tree. Each place where at least LEAST tokens are shared by two prompts or more is a
prefix; it goes on from the prefix it begins with. The rows of a prefix are the same for all requests that go on from
it, bit for bit, and a trace stores them once. Shapes: P tokens of a prefix, W the width of a tap, B requests.
"""

import copy
import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from replay.capture.local.target import LocalTarget

LEAST = 64  # tokens: as few as a trace shares
MOST_BYTES = 1 << 30  # of prefixes that are held for later requests

Tokens = Sequence[int]
Key = bytes


@dataclass(frozen=True, slots=True)
class Prefix:
    """P computed tokens: keys and values for a batch of one, and rows by tap in parts, together [P, W]."""

    length: int
    cache: Any
    rows: "Mapping[str, tuple[Tensor, ...]]"
    bytes: int  # of its own part of rows, and of its keys and values
    before: "Key | None" = None  # the prefix that it goes on from, which has the other parts of rows


def plan_prefixes(prompts: Sequence[Tokens]) -> list[tuple[int, ...]]:
    """Of each prompt the rising lengths of its prefixes; the last token of a prompt is in none.

    Each length but the first is LEAST tokens or more above the one before, and two prompts at least have it.
    """
    cuts: list[tuple[int, ...]] = [()] * len(prompts)
    alike = [(sorted(range(len(prompts)), key=lambda place: tuple(prompts[place])), 0)]
    while alike:
        places, start = alike.pop()
        for group in _that_go_on_alike(prompts, places, start):
            end = _common(prompts[group[0]], prompts[group[-1]])
            end = min(end, *(len(prompts[place]) - 1 for place in group))
            for place in group:
                cuts[place] = (*cuts[place], end)
            alike.append((group, end))
    return cuts


def _that_go_on_alike(prompts: Sequence[Tokens], places: Sequence[int], start: int) -> Iterator[list[int]]:
    """Of prompts in order with ``start`` tokens in common, those of which two or more share the next LEAST."""
    long = [place for place in places if len(prompts[place]) > start + LEAST]
    for _, found in groupby(long, key=lambda place: tuple(prompts[place][start : start + LEAST])):
        group = list(found)
        if len(group) > 1:
            yield group


def _common(one: Tokens, other: Tokens) -> int:
    """How many first tokens are equal."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Prefixes:
    """Computes prefixes of ``prompts`` (by request) when they are asked for, and holds the last ones.

    These have ``most_bytes`` together, or what one batch goes on from where that is more. A prefix is held for as long
    as one that goes on from it, so that all rows in memory are counted.
    """

    def __init__(self, target: "LocalTarget", prompts: Mapping[str, Tokens], most_bytes: int = MOST_BYTES) -> None:
        self._target, self._most_bytes = target, most_bytes
        sound = _holds_every_row(target.new_cache())
        self._cuts = dict(zip(prompts, plan_prefixes(list(prompts.values())), strict=True)) if sound else {}
        self._held: dict[Key, Prefix] = {}
        self._used: set[Key] = set()  # by the batch that runs

    def of_batch(self, prompts: Mapping[str, Tokens]) -> list[Prefix | None]:
        """Those of some requests, all of which are held until the next batch. As ``of``."""
        self._used.clear()
        return [self.of(name, prompt) for name, prompt in prompts.items()]

    def of(self, name: str, prompt: Tokens) -> Prefix | None:
        """The longest prefix of request ``name``, None where it has none. The target's taps must be recording."""
        keys = [(_key(prompt[:cut]), cut) for cut in self._cuts.get(name, ())]
        prefix, before = None, None
        for key, cut in keys:
            prefix = self._held.pop(key, None) or self._compute(prefix, before, prompt[:cut])
            self._held[key] = prefix  # as the last one that was used
            before = key
        if before is not None:
            self._used.add(before)
            self._let_go()
        return prefix

    def _let_go(self) -> None:
        """Where there are too many, those that were used first; none that the batch or another one goes on from."""
        size = sum(one.bytes for one in self._held.values())
        while size > self._most_bytes:
            needed = self._used | {one.before for one in self._held.values()}
            key = next((key for key in self._held if key not in needed), None)
            if key is None:
                return
            size -= self._held.pop(key).bytes

    def _compute(self, before: Prefix | None, key: Key | None, tokens: Tokens) -> Prefix:
        """``key`` is that of ``before``."""
        import torch

        start = 0 if before is None else before.length
        cache = self._target.new_cache() if before is None else copy.deepcopy(before.cache)
        device = self._target.device
        ids_1S = torch.tensor([list(tokens[start:])], device=device)
        mask_1P = torch.ones((1, len(tokens)), dtype=torch.long, device=device)
        seen = self._target.forward(ids_1S, mask_1P, torch.arange(start, len(tokens), device=device)[None], cache)
        own = {name: rows_1SW[0].cpu() for name, rows_1SW in seen.items()}
        rows = {name: (*(() if before is None else before.rows[name]), part) for name, part in own.items()}
        size = sum(part.nbytes for part in own.values())
        size += sum(kept.nbytes for layer in cache.layers for kept in (layer.keys, layer.values) if kept is not None)
        return Prefix(len(tokens), cache, rows, size, key)


def _key(tokens: Tokens) -> Key:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


def _holds_every_row(cache: Any) -> bool:
    """Whether all layers keep keys and values of every token, so that rows of a batch may have gaps between them.

    Layers with a window count places and not positions; layers with a state have no places at all.
    """
    from transformers.cache_utils import DynamicLayer

    layers = getattr(cache, "layers", ())
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def stack_prefixes(target: "LocalTarget", prefixes: Sequence[Prefix | None]) -> "tuple[Any, Tensor, Tensor]":
    """A cache for a batch that goes on from ``prefixes``, padded on the left; its mask [B, P], and lengths [B, 1]."""
    import torch

    lengths_B = torch.tensor([0 if one is None else one.length for one in prefixes], device=target.device)
    width = int(lengths_B.max())
    cache = target.new_cache()
    known = next((one for one in prefixes if one is not None), None)
    for index, layer in enumerate(() if known is None else known.cache.layers):
        if layer.keys is not None:  # none in a layer that goes by those of another one
            layers = [None if one is None else one.cache.layers[index] for one in prefixes]
            keys = _padded([None if one is None else one.keys for one in layers], width)
            values = _padded([None if one is None else one.values for one in layers], width)
            cache.update(keys, values, index)
    mask_BP = (torch.arange(width, device=target.device) >= width - lengths_B[:, None]).long()
    return cache, mask_BP, lengths_B[:, None]


def _padded(parts: "Sequence[Tensor | None]", width: int) -> "torch.Tensor":
    """[B, heads, width, features] of parts [1, heads, length, features]; zeros where there is none."""
    known = next(part for part in parts if part is not None)
    whole = known.new_zeros((len(parts), known.shape[1], width, known.shape[3]))
    for row, part in enumerate(parts):
        if part is not None:
            whole[row, :, width - part.shape[2] :] = part[0]
    return whole
