"""Which rows of a table a reader wants to see, and in which order."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

SORTS = ("typed", "length")
# A table of more rows than this scrolls its first line away: it is sorted, and the answer comes last as well.
LONG = 12

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class View:
    """``sort``: ``typed`` keeps the order of the command line, ``length`` puts the largest accept length first; None
    is ``length`` above ``LONG`` rows, else ``typed``. ``top`` keeps so many rows, None all."""

    sort: str | None = None
    top: int | None = None

    def rows(self, rows: Sequence[Row], length: Callable[[Row], float]) -> list[Row]:
        """The rows that are shown; those without a ``length`` (nan) come last where it sorts."""
        shown = list(rows)
        if (self.sort or ("length" if len(shown) > LONG else "typed")) == "length":
            shown.sort(key=lambda row: math.inf if math.isnan(length(row)) else -length(row))
        return shown[: self.top]


WHOLE = View()
