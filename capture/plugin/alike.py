"""What is copied of a forward's rows: for each of its requests no more than its client keeps (capture/asked.py).

Requests that keep the same are copied together. K rows that are kept, C captured columns of width H, of which T taps
are kept, M = T*H their columns, S rows of a piece, B of these that are rounded at once, N = B*T; a piece says which
rows, as a slice or as their numbers on the device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay.capture.asked import Asked, asked_of
from replay.capture.plugin.columns import Columns
from replay.capture.spool import RID_PREFIX
from replay.traces.fp8 import quantise

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Piece = slice | Tensor

_BLOCK = 1 << 24  # values that are rounded at once: in float32 they take 64 MiB, and some times that beside


@dataclass(frozen=True, slots=True)
class Alike:
    """Requests of a forward that keep the same ``taps``, in fp8 where ``rounded``: ``members`` are their numbers among
    its requests, rising, and ``first_rows`` the position from which each keeps its rows.

    ``places`` of the taps among the captured columns, in the columns' order.
    """

    taps: tuple[str, ...]
    places: tuple[int, ...]
    rounded: bool
    members: tuple[int, ...]
    first_rows: tuple[int, ...]

    def left_out(self, at: int, start: int, rows: int) -> int:
        """How many of ``rows`` from position ``start`` on its member number ``at`` does not keep."""
        return min(rows, max(0, self.first_rows[at] - start))


def group_alike(rids: Sequence[str], columns: Columns) -> list[Alike]:
    """The requests of ours among ``rids``, those together that keep the same.

    An id that asks for nothing, or for a tap that is not captured, keeps everything.
    """
    groups: dict[tuple[tuple[str, ...], bool], list[tuple[int, int]]] = {}
    for member, rid in enumerate(rids):
        if rid.startswith(RID_PREFIX):
            asked = asked_of(rid)
            if asked is None or not set(asked.taps) <= set(columns.taps):
                asked = Asked(tuple(columns.taps))
            taps = tuple(tap for tap in columns.taps if tap in asked.taps)
            groups.setdefault((taps, asked.rounded), []).append((member, asked.first_row))
    return [
        Alike(
            taps,
            tuple(columns.taps.index(tap) for tap in taps),
            rounded,
            tuple(member for member, _ in members),
            tuple(first for _, first in members),
        )
        for (taps, rounded), members in groups.items()
    ]


def copy_kept(
    hidden_RC: "Tensor", final_RH: "Tensor", pieces: "Sequence[Piece]", alike: Alike, width: int
) -> "dict[str, Tensor]":
    """``final`` [K, H] and ``hidden`` [K, M] of the rows of ``pieces``, which are K; copies, made where they lie.

    In fp8 ``values`` [K, M], the bytes of float8_e4m3fn, and ``scales`` [K, T] in place of ``hidden``.
    """
    import torch

    copied = {"final": torch.cat([final_RH[piece] for piece in pieces])}
    if not alike.places:
        return copied
    parts_SM = (_columns_of(hidden_RC, piece, alike.places, width) for piece in pieces)
    if not alike.rounded:
        return copied | {"hidden": torch.cat(list(parts_SM))}
    return copied | _rounded(parts_SM, len(alike.places), width)


def runs_of(numbers: Sequence[int]) -> list[slice]:
    """Rising ``numbers``, neighbours as one slice."""
    runs: list[slice] = []
    for number in numbers:
        begin = runs.pop().start if runs and runs[-1].stop == number else number
        runs.append(slice(begin, number + 1))
    return runs


def _columns_of(hidden_RC: "Tensor", piece: "Piece", places: Sequence[int], width: int) -> "Tensor":
    """The columns of ``places`` of some rows; a view where they stand together and the rows are a slice."""
    import torch

    # Slices of columns, not a list of indices: that would be copied to the device, and the forward would wait for it.
    parts_SM = [hidden_RC[:, run.start * width : run.stop * width][piece] for run in runs_of(places)]
    return parts_SM[0] if len(parts_SM) == 1 else torch.cat(parts_SM, dim=1)


def _rounded(parts_SM: "Iterable[Tensor]", taps: int, width: int) -> "dict[str, torch.Tensor]":
    """As traces/fp8.py rounds them, some rows at a time: of all at once the float32 would take more than the rows."""
    import torch

    values_BM, scales_BT = [], []
    for block_BM in _blocks(parts_SM, max(1, _BLOCK // (taps * width))):
        value_NH, scale_N = quantise(block_BM.reshape(-1, width))
        values_BM.append(value_NH.view(torch.uint8).view(len(block_BM), taps * width))
        scales_BT.append(scale_N.view(len(block_BM), taps))
    return {"values": torch.cat(values_BM), "scales": torch.cat(scales_BT)}


def _blocks(parts_SM: "Iterable[Tensor]", rows: int) -> "Iterator[Tensor]":
    """``parts_SM`` in pieces of at most so many rows."""
    for part_SM in parts_SM:
        yield from part_SM.split(rows)
