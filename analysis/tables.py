"""Tables that fit the console: whole columns move to a second table before any text is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2
# As rich's SIMPLE_HEAD on every terminal: it would draw other lines, and wider, where the encoding is not UTF-8.
_LINES = box.Box(str(box.SIMPLE_HEAD), ascii=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A heading (lines split by newline) over one cell for each row."""

    heading: str
    cells: tuple[Text, ...]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """Cells of a terminal that the widest line takes."""
        lines = [*self.heading.split("\n"), *(cell.plain for cell in self.cells)]
        return max(map(cell_len, lines))


def column(title: str, cells: Sequence[str], *, left: bool = False) -> Column:
    """A column of plain text, numbers to the right."""
    return Column(title, tuple(map(Text, cells)), "left" if left else "right")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Rows that the ``names`` columns tell apart, in one table, or where that is too wide in one for each group.

    Where the names leave no room for the widest group, rows are numbered and the ``labels`` stand in a list above.
    """

    names: tuple[Column, ...]
    groups: tuple[tuple[Column, ...], ...]
    labels: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        every = [column for group in self.groups for column in group]
        names, room = self.names, options.max_width
        if self.labels and max(_width([*names, *group]) for group in self.groups) > room:
            numbers = tuple(Text(str(row)) for row in range(1, len(self.labels) + 1))
            names = (Column("", numbers),)
            digits = len(str(len(self.labels)))
            for number, label in zip(numbers, self.labels, strict=True):
                yield Text(f"{number.plain:>{digits}}  {label}", overflow="fold")
            yield Text()
        tables = [every] if _width([*names, *every]) <= room else self._packed(room - _width(names) - _GAP)
        for index, columns in enumerate(tables):
            if index:
                yield Text()
            yield _table([*names, *columns])

    def _packed(self, room: int) -> list[list[Column]]:
        """Columns in as many tables as they need: a table for each group, a further one where a group is too wide."""
        tables: list[list[Column]] = []
        for group in self.groups:
            tables.append([])
            for column in group:
                if tables[-1] and _width([*tables[-1], column]) > room:
                    tables.append([])
                tables[-1].append(column)
        return tables

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=_LINES, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.heading, justify=column.justify, overflow="fold", vertical="bottom")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def heading(text: str) -> Text:
    """The heading of a part of a report."""
    return Text(text, style="bold")


def bullet(text: str) -> RenderableType:
    """A paragraph that hangs from a bullet."""
    return _grid([("•", text)], style="yellow")


def pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    """Words and what is said of each."""
    return _grid(rows, style="dim")


def _grid(rows: Sequence[tuple[str, str]], *, style: str) -> RenderableType:
    """Hanging paragraphs: a first column as wide as its words, a second that folds."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=style, no_wrap=True)
    grid.add_column(overflow="fold")
    for left, right in rows:
        grid.add_row(Text(left), Text(right))
    return Padding(grid, (0, 0, 0, 2))
