"""Results as one flat table: text in one harmless line, numbers as numbers, nothing for what is not known."""

import math
from collections.abc import Mapping
from typing import TypeAlias

from replay.printable import one_line

Cell: TypeAlias = str | int | float | bool | None
FlatRow: TypeAlias = Mapping[str, Cell]


def flat_row(row: Mapping[str, Cell]) -> FlatRow:
    """Text in one harmless line, None for nan."""
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: Cell) -> Cell:
    if isinstance(value, str):
        return one_line(value)
    return None if isinstance(value, float) and math.isnan(value) else value
