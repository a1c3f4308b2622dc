"""The footer of a parquet file, read before the file is: a few kilobytes of it can stand for any number of values.

Polars makes room for all of them at once, and names neither beforehand. The layout is that of
https://github.com/apache/parquet-format (README.md, src/main/thrift/parquet.thrift) in Thrift's compact protocol
(https://github.com/apache/thrift, doc/specs/thrift-compact-protocol.md).
"""

import os
from pathlib import Path
from typing import Any

from replay.errors import TraceCorruptError
from replay.traces.files import open_regular

_MAGIC = b"PAR1"
_MOST_FOOTER = 1 << 28  # bytes; that of a rounds file holds its variants and requests as JSON
_MOST_DEPTH = 16
# What a file may hold beyond its own size. Honest tables have one or two values and ten bytes for a byte of the file.
_FREE_VALUES, _VALUES_A_BYTE = 1 << 22, 16
_FREE_BYTES, _BYTES_A_BYTE = 1 << 26, 100
# Fields by number: of the file, of a row group, of a column of it, of that column's metadata.
_ROW_GROUPS, _COLUMNS, _METADATA, _VALUES, _UNPACKED = 4, 1, 3, 5, 6
_LIST, _SET, _STRUCT = 9, 10, 12


def check_parquet(path: Path, data: bytes | None = None) -> None:
    """Raises TraceCorruptError where ``path`` (or ``data``, its bytes) is no parquet file, or stands for far more
    than its size."""
    size, footer = _footer_of(path, data)
    try:
        groups: Any = _Compact(footer).struct(0).get(_ROW_GROUPS, [])
        columns = [column.get(_METADATA, {}) for group in groups for column in group.get(_COLUMNS, [])]
        values = sum(column.get(_VALUES, 0) for column in columns)
        unpacked = sum(column.get(_UNPACKED, 0) for column in columns)
    except (IndexError, AttributeError, TypeError, _OddError) as error:
        raise TraceCorruptError(f"{path} is no readable parquet file: its footer is damaged") from error
    if values > _FREE_VALUES + _VALUES_A_BYTE * size or unpacked > _FREE_BYTES + _BYTES_A_BYTE * size:
        raise TraceCorruptError(
            f"{path} stands for {values} values and {unpacked} bytes in a file of {size} bytes, more than any that "
            "replay writes"
        )


def first_line(error: BaseException) -> str:
    """What polars says, without the lines of its own code that it may add."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _footer_of(path: Path, data: bytes | None) -> tuple[int, bytes]:
    """The size of the file, and the bytes of its footer."""
    if data is not None:
        return len(data), data[slice(*_footer_place(path, len(data), data[-8:]))]
    with open_regular(path, follow=True) as descriptor:
        size = os.fstat(descriptor).st_size
        start, stop = _footer_place(path, size, os.pread(descriptor, 8, max(size - 8, 0)))
        return size, os.pread(descriptor, stop - start, start)


def _footer_place(path: Path, size: int, last: bytes) -> tuple[int, int]:
    length = int.from_bytes(last[:4], "little")
    if last[4:] != _MAGIC or length > min(size - 12, _MOST_FOOTER):
        raise TraceCorruptError(f"{path} is no readable parquet file: its last bytes are none of a footer")
    return size - 8 - length, size - 8


class _OddError(ValueError):
    """What the compact protocol does not have."""


class _Compact:
    """Values of Thrift's compact protocol; structs as dictionaries by field number, texts passed over."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def struct(self, depth: int) -> dict[int, object]:
        if depth > _MOST_DEPTH:
            raise _OddError
        fields: dict[int, object] = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._signed()
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> object:
        if kind in (1, 2, 3):  # in a list a truth value is a byte, as is a number of one
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind in (7, 8):  # a float; a text by its length
            self._skip(8 if kind == 7 else self._unsigned())
            return None
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise _OddError

    def _list(self, depth: int) -> list[object]:
        head = self._byte()
        count = head >> 4 if head >> 4 != 15 else self._unsigned()
        if depth > _MOST_DEPTH or count > len(self._data):  # each takes a byte at least
            raise _OddError
        return [self._value(head & 15, depth + 1) for _ in range(count)]

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise _OddError

    def _byte(self) -> int:
        self._place += 1
        return self._data[self._place - 1]

    def _skip(self, count: int) -> None:
        self._place += count
        if self._place > len(self._data):
            raise _OddError
