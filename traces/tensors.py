"""safetensors files, mapped: the header parsed and distrusted, rows read without touching their neighbours.

The layout is that of https://github.com/huggingface/safetensors#format: 8 bytes little-endian header length, a JSON
header, the tensors' bytes without holes. Own code rather than the library's because a reader here must name the file,
the tensor and the numbers it refuses, and map single rows.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import StorageError, TraceCorruptError
from replay.traces.fields import Fields, parse_json, show_name, some
from replay.traces.ranges import fetch_ranges, open_ranges
from replay.traces.remote import entry_of

if TYPE_CHECKING:
    import torch

MAX_HEADER = 100_000_000  # the limit of the safetensors library
MAX_SIZE = 1 << 50

# safetensors' name of each torch dtype that is written or mapped here, and its size in bytes
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "float8_e4m3fn": "F8_E4M3"}
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "F8_E4M3": 1}
# and of all others that a file may hold, whose shapes have to be true as well
_BYTES = SIZES | {"F64": 8, "F8_E5M2": 1, "I64": 8, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
                  "U8": 1, "BOOL": 1}  # fmt: skip
_MOST_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: ``dtype`` as safetensors names it, ``start`` and ``stop`` counted from the file's begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A parsed header: tensors by name, the free-text metadata, where data begins, and the file's size in bytes.

    ``head_sha256`` is that of the bytes before the data, ``version`` that of a file elsewhere (ranges.py).
    """

    path: Path
    tensors: Mapping[str, Place]
    metadata: Mapping[str, str]
    data_start: int
    size: int
    head_sha256: str
    version: str = ""


def pack_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with ``tensors`` (name -> torch dtype name, shape) in that order.

    Space-padded to a multiple of 8, so that tensors sorted by falling item size are aligned.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * SIZES[NAMES[dtype]]
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def joined_shapes(parts: "Mapping[str, Sequence[torch.Tensor]]") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (torch dtype name, shape) of tensors whose ``parts`` are joined by rows; wider items first, as
    ``pack_header`` wants them."""
    return {
        name: (str(some[0].dtype).removeprefix("torch."), (sum(map(len, some)), *some[0].shape[1:]))
        for name, some in sorted(parts.items(), key=lambda item: -item[1][0].element_size())
    }


def tensor_bytes(tensor: "torch.Tensor") -> memoryview:
    """The bytes of a tensor in row order, bit for bit; no copy where it is contiguous and on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def parse_layout(path: Path) -> Layout:
    """Read and check the header of a safetensors file, none of its data.

    Raises TraceCorruptError: truncated, holes or overlaps, offsets beyond the file, sizes that disagree with shapes.
    """
    with open_ranges(path) as file:
        size, version = file.size, file.version
        first = file.read(0, 8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size - 8, MAX_HEADER):
            raise TraceCorruptError(f"{path} is truncated or no safetensors file: {size} bytes, header of {length}")
        text = file.read(8, length)
    root = Fields(str(path), parse_json(text, str(path)))
    metadata = root.object("__metadata__") if "__metadata__" in root.values else Fields(str(path), {})
    places = {name: _place(root.object(name), 8 + length, size) for name in root.values if name != "__metadata__"}
    _check_no_holes(path, places, 8 + length, size)
    return Layout(path, places, {name: metadata.text(name) for name in metadata.values}, 8 + length, size,
                  hashlib.sha256(first + text).hexdigest(), version)  # fmt: skip


def _place(fields: Fields, data_start: int, size: int) -> Place:
    dtype = fields.text("dtype")
    shape = fields.integers("shape", 0, MAX_SIZE)
    offsets = fields.integers("data_offsets", 0, MAX_SIZE)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fields.refuse("data_offsets", "two rising offsets")
    start, stop = (data_start + offset for offset in offsets)
    if stop > size:
        raise TraceCorruptError(f"{fields.where} ends at byte {stop}, the file holds {size}: it is truncated")
    if len(shape) > _MOST_DIMENSIONS:
        raise fields.refuse("shape", f"at most {_MOST_DIMENSIONS} sizes")
    if dtype in _BYTES and math.prod(shape) * _BYTES[dtype] != stop - start:
        raise TraceCorruptError(f"{fields.where}: {dtype} of shape {list(shape)} does not fill {stop - start} bytes")
    return Place(dtype, shape, start, stop)


def _check_no_holes(path: Path, places: Mapping[str, Place], position: int, size: int) -> None:
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)):
        if place.start != position:
            raise TraceCorruptError(
                f"{path}: {show_name(name)} begins at byte {place.start}, the one before ends at {position}"
            )
        position = place.stop
    if position != size:
        raise TraceCorruptError(f"{path} holds {size} bytes, its tensors end at byte {position}")


def map_rows(layout: Layout, name: str, start: int = 0, stop: int | None = None) -> "torch.Tensor":
    """Rows ``start`` to ``stop`` of tensor ``name``, mapped: their pages are read when they are used, no others.

    The mapping is private: writing to the tensor changes no file. Raises TraceCorruptError.
    """
    import torch

    if name not in layout.tensors:
        raise TraceCorruptError(
            f"{layout.path} holds no tensor {name}; it holds {some(list(layout.tensors)) or 'none'}"
        )
    place = layout.tensors[name]
    if place.dtype not in SIZES:
        raise TraceCorruptError(f"{layout.path}: {name} is {show_name(place.dtype)}, readable are {', '.join(SIZES)}")
    item = SIZES[place.dtype]
    rows = place.shape[0]
    stop = rows if stop is None else stop
    if not 0 <= start <= stop <= rows:
        raise TraceCorruptError(f"{layout.path}: rows {start} to {stop} of {name} asked for, it has {rows}")
    dtype = getattr(torch, next(key for key, value in NAMES.items() if value == place.dtype))
    shape = (stop - start, *place.shape[1:])
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    begin = place.start + start * math.prod(place.shape[1:]) * item
    if begin % item:
        raise TraceCorruptError(f"{layout.path}: {name} begins at byte {place.start}, no multiple of {item}")
    with open_ranges(layout.path) as file:
        if file.size != layout.size:  # mapping beyond the end would kill the process when read
            raise TraceCorruptError(f"{layout.path} holds {file.size} bytes now, {layout.size} when it was opened")
        if file.version != layout.version:
            raise StorageError(f"{layout.path} has changed since it was opened; begin anew")
        buffer, offset = file.buffer(begin, math.prod(shape) * item)
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=offset).reshape(shape)


def fetch_rows(wanted: Iterable[tuple[Layout, str, int, int]]) -> None:
    """Fetch rows (layout, tensor, start, stop) side by side that ``map_rows`` is about to be asked for.

    Nothing is done for files here, nor for rows that are not there. Raises StorageError, OutputError.
    """
    pieces = []
    for layout, name, start, stop in wanted:
        place = layout.tensors.get(name)
        if place is not None and place.shape and place.shape[0]:
            row = (place.stop - place.start) // place.shape[0]
            pieces.append((layout.path, place.start + start * row, place.start + stop * row))
    fetch_ranges(pieces)


def take_rows(layout: Layout, name: str, places: Sequence[int]) -> "torch.Tensor":
    """Some rows of tensor ``name``, in their order: a copy. Of a file elsewhere no others are fetched, for no places
    none.

    Raises TraceCorruptError, StorageError.
    """
    import torch

    if not places:
        return map_rows(layout, name, 0, 0)
    if entry_of(layout.path) is not None:
        return torch.cat([map_rows(layout, name, run[0], run[-1] + 1) for run in _runs(places)])
    values = map_rows(layout, name)
    if values.element_size() > 1:
        return values[list(places)]
    return values.view(torch.uint8)[list(places)].view(values.dtype)  # torch cannot index fp8


def _runs(places: Sequence[int]) -> Iterator[list[int]]:
    """Neighbours that rise by one."""
    for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        yield [place for _, place in run]
