"""How many bytes a capture will take, before it begins: what is free there, and which taps to leave out."""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from replay.capture.encode import EncodedRequest
from replay.capture.kept import Kept
from replay.traces.files import is_ours
from replay.traces.taps import EMBED, FINAL, sort_taps, tap_name

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOKEN_BYTES, _CHOICE_BYTES, _SCALE_BYTES = 4, 8, 4  # an int32 id; an id with its float32 log-probability; a float32
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True)
class RowSize:
    """What decides how large a recorded row is: ``width`` values of ``item_bytes`` for each of the stored ``taps``, or
    of one byte and a scale where ``rows`` is fp8, but for ``final``."""

    taps: tuple[str, ...]
    width: int
    item_bytes: int
    topk: int
    rows: str = "exact"

    @property
    def row_bytes(self) -> int:
        """Of one row: its taps, and the token that it consumed."""
        return self._tap_bytes + _TOKEN_BYTES

    @property
    def _tap_bytes(self) -> int:
        exact = self.width * self.item_bytes
        other = self.width + _SCALE_BYTES if self.rows == "fp8" else exact
        return sum(exact if tap == FINAL else other for tap in self.taps)

    @property
    def output_bytes(self) -> int:
        """What an output token takes beside its row: the target's choices, and their log-sum-exp."""
        return self.topk * _CHOICE_BYTES + 4

    def of(self, tokens: int, outputs: int, left_out: int = 0) -> int:
        """Bytes of so many tokens, ``outputs`` of them output, and the rows of all but ``left_out`` of them."""
        return tokens * self.row_bytes - left_out * self._tap_bytes + outputs * self.output_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """At most ``needed`` bytes are still to be written into ``folder``, where ``free`` are free.

    ``fewer``: the taps to record instead where that is too much, which take ``needed_by_fewer``.
    """

    folder: Path
    needed: int
    free: int
    fewer: tuple[str, ...] = ()
    needed_by_fewer: int = 0

    @property
    def fits(self) -> bool:
        """Whether there is room for all of it."""
        return self.needed <= self.free

    def sentence(self) -> str:
        """What to tell before the capture begins."""
        told = f"up to {spell_bytes(self.needed)} will be recorded, {spell_bytes(self.free)} are free in {self.folder}"
        if self.fits:
            return told
        if not self.fewer:
            return f"{told}: record fewer prompts or new tokens, or on another disk"
        less = f"with --taps {','.join(self.fewer)} it is up to {spell_bytes(self.needed_by_fewer)}"
        return f"{told}: {less}; else record fewer prompts or new tokens, or on another disk"


def expect(
    folder: Path,
    size: RowSize,
    requests: Sequence[EncodedRequest],
    *,
    kept: Kept,
    layers: int,
    beside: int = 0,
    needed_taps: Collection[str] = (),
    replaces: bool = False,
) -> Room:
    """What ``requests`` take at most, less what is there of them already (or with ``replaces`` makes room).

    ``kept``: what of each request; ``beside``: bytes that are written besides, such as the target's weights;
    ``needed_taps`` are never left out.
    """
    there = _bytes_of(folder)
    free = free_bytes(folder) + (there if replaces else 0)

    def needed(taps: tuple[str, ...]) -> int:
        whole = sum(
            replace(size, taps=tuple(tap for tap in of_tier if tap in taps)).of(*_tokens(alike, kept.prompt_rows))
            for of_tier, alike in kept.tiers(requests)
        )
        return max(0, whole + beside - (0 if replaces else there))

    room = Room(folder, needed(size.taps), free)
    if room.fits:
        return room
    fewer = fewer_taps(size.taps, layers, needed_taps)
    if fewer == size.taps:
        return room
    return Room(folder, room.needed, free, sort_taps([EMBED, *fewer]), needed(fewer))


def _tokens(requests: Sequence[EncodedRequest], prompt_rows: int | None) -> tuple[int, int, int]:
    """Tokens, those of them that are output, and those whose rows are not kept."""
    outputs = sum(one.max_new_tokens if one.forced_ids is None else len(one.forced_ids) for one in requests)
    lengths = [len(one.prompt_ids) for one in requests]
    left_out = 0 if prompt_rows is None else sum(max(0, length - prompt_rows) for length in lengths)
    return outputs + sum(lengths), outputs, left_out


def fewer_taps(taps: Sequence[str], layers: int, needed: Collection[str]) -> tuple[str, ...]:
    """Without the neighbours of what engines feed by default, which only tell wrong layer ids apart later."""
    kept = {EMBED, FINAL, *needed, *(tap_name(index) for index in (2, layers // 2, layers - 3) if index >= 0)}
    return tuple(tap for tap in taps if tap in kept)


def free_bytes(folder: Path) -> int:
    """What may be written into ``folder``, or where it will be made. Raises OSError."""
    place = folder.absolute()
    while not os.path.lexists(place) and place.parent != place:
        place = place.parent
    return shutil.disk_usage(place).free


def _bytes_of(folder: Path) -> int:
    """Of the files of a trace that lie there already."""
    if not os.path.isdir(folder):
        return 0
    return sum(file.stat().st_size for file in os.scandir(folder) if is_ours(file.name) and file.is_file())


def spell_bytes(count: float) -> str:
    """A size as people read it: ``512 bytes``, ``3.2 GB`` (of 1000 MB)."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"
