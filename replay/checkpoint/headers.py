"""Tensor names, shapes and dtypes of a checkpoint, from its headers alone; small tensors and single rows on request."""

import hashlib
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replay.checkpoint.config import parse_config
from replay.checkpoint.config_file import CONFIG, read_config
from replay.checkpoint.files import BINARY, load_binary, read_layout, weight_files
from replay.checkpoint.tensor_table import spell
from replay.errors import CheckpointError, TraceCorruptError
from replay.traces.ranges import fetch_ranges, open_ranges
from replay.traces.remote import size_of
from replay.traces.tensors import Layout, Place
from replay.traces.weights import INDEX, SINGLE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_MAP = 1 << 26  # bytes of a vocabulary map
_SAMPLE = 1 << 12  # bytes of each of the two places where a tensor is looked at
_END = 1 << 16  # bytes at the end of an archive, where it lists its parts with their checksums
_INTEGERS = {"I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "B"}
# Of each float dtype: the array code of its bits, and the exponent that only NaN and Inf have.
_EXPONENT = {"F32": ("I", 0x7F800000), "F16": ("H", 0x7C00), "BF16": ("H", 0x7F80)}
_TORCH_NAMES = {
    "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.int64": "I64",
    "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8", "torch.bool": "BOOL",
    "torch.float64": "F64", "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorFact:
    """``dtype`` as safetensors names it, and ``original``, the name before it was spelled SGLang's way."""

    dtype: str
    shape: tuple[int, ...]
    original: str


@dataclass(frozen=True, slots=True)
class Extent:
    """One tensor's values, read whole: how many are not finite, how many would overflow fp16, the largest that is
    finite, and whether all are equal."""

    values: int
    unfinite: int
    beyond_fp16: int
    largest: float
    constant: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by name. ``twice``: names that two tensors claim. ``d2t``, ``t2d``: their values where they are integers.

    ``blank``, ``unfinite``: tensors that are zero throughout, or hold NaN or Inf, in a sample of two small places.
    ``extents`` is None unless the values were asked for.
    """

    file: str
    tensors: Mapping[str, TensorFact]
    twice: tuple[str, ...]
    d2t: tuple[int, ...] | None
    t2d: tuple[int, ...] | None
    blank: tuple[str, ...]
    unfinite: tuple[str, ...]
    extents: Mapping[str, Extent] | None
    layouts: Mapping[str, Layout]  # by SGLang's spelling; empty for a pytorch_model.bin

    def row(self, name: str, row: int) -> list[float] | None:
        """Values of one row of a matrix in fp32, fp16 or bf16; None for another dtype or where rows cannot be read."""
        layout = self.layouts.get(name)
        if layout is None:
            return None
        place = layout.tensors[self.tensors[name].original]
        size = {"F32": 4, "F16": 2, "BF16": 2}.get(place.dtype)
        if size is None or len(place.shape) != 2 or not 0 <= row < place.shape[0]:
            return None
        length = place.shape[1] * size
        data = _bytes_at(layout.path, place.start + row * length, length)
        if place.dtype == "BF16":  # the upper half of an fp32
            data = b"".join(b"\0\0" + data[index : index + 2] for index in range(0, length, 2))
        return list(struct.unpack(f"<{place.shape[1]}{'e' if place.dtype == 'F16' else 'f'}", data))


def read_weights(folder: Path, *, whole: bool, only: "re.Pattern[str] | None" = None) -> Weights:
    """Headers of the checkpoint in ``folder``; with ``only``, of the tensors whose names it matches, in their shards.

    A pytorch_model.bin is loaded whole even so.

    Raises CheckpointError where there are no weights, or a header cannot be trusted.
    """
    files = weight_files(folder, only)
    if files == [folder / BINARY]:
        return _read_binary(files[0], whole, only)
    facts: list[TensorFact] = []
    layouts: dict[str, Layout] = {}
    for file in files:
        layout = read_layout(file)
        for name, place in layout.tensors.items():
            if only is None or only.fullmatch(name):
                facts.append(TensorFact(place.dtype, place.shape, name))
                layouts.setdefault(spell(name), layout)
    tensors, twice = _by_name(facts)
    maps = {name: _integers(layouts[name], tensors[name]) for name in ("d2t", "t2d") if name in tensors}
    floats = {name: fact for name, fact in tensors.items() if fact.dtype in _EXPONENT}
    extents = {name: _extent(layouts[name], fact) for name, fact in floats.items()} if whole else None
    looks = {name: _look(layouts[name], fact) for name, fact in floats.items()} if only is None else {}
    blank = tuple(name for name, (zero, _) in looks.items() if zero)
    unfinite = tuple(name for name, (_, odd) in looks.items() if odd)
    name = f"{folder.name}/{SINGLE if len(files) == 1 else INDEX}"
    return Weights(name, tensors, twice, maps.get("d2t"), maps.get("t2d"), blank, unfinite, extents, layouts)


def fingerprint_head(folder: Path) -> str:
    """SHA-256 over what a head's config means, and of each tensor its name, dtype, shape and two samples of its bytes.

    Of a pytorch_model.bin the samples are the middle and the end. Raises CheckpointError, StorageError.
    """
    files, document, where = weight_files(folder), read_config(folder), str(folder / CONFIG)
    if files == [folder / BINARY]:
        path = files[0].resolve()
        size = size_of(path)
        told = repr((parse_config(document, name=where), size))
        pieces = [(path, start, min(size, start + _END)) for start in (size // 2, max(0, size - _END))]
    else:
        layouts = {name: layout for layout in map(read_layout, files) for name in layout.tensors}
        places = {name: layouts[name].tensors[name] for name in sorted(layouts)}
        config = parse_config(document, name=where, shapes={name: place.shape for name, place in places.items()})
        told = repr((config, [(name, place.dtype, place.shape) for name, place in places.items()]))
        pieces = [(layouts[name].path, *part) for name, place in places.items() for part in _samples_of(place)]
    fetch_ranges(pieces)
    digest = hashlib.sha256(told.encode())
    for path, start, stop in pieces:
        digest.update(_bytes_at(path, start, stop - start))
    return digest.hexdigest()


def _samples_of(place: Place) -> tuple[tuple[int, int], tuple[int, int]]:
    """From where to where a tensor's beginning and its middle lie."""
    size = place.stop - place.start
    middle = place.start + size // 2 - size // 2 % 8
    return (place.start, place.start + min(size, _SAMPLE)), (middle, min(place.stop, middle + min(size, _SAMPLE)))


def _by_name(facts: list[TensorFact]) -> tuple[dict[str, TensorFact], tuple[str, ...]]:
    tensors: dict[str, TensorFact] = {}
    twice = []
    for fact in facts:
        if spell(fact.original) in tensors:
            twice.append(spell(fact.original))
        tensors.setdefault(spell(fact.original), fact)
    return tensors, tuple(twice)


def _bytes_at(path: Path, start: int, length: int) -> bytes:
    try:
        with open_ranges(path) as file:
            data = file.read(start, length)
    except TraceCorruptError as error:
        raise CheckpointError(f"{error}; copy or export the checkpoint again") from error
    if len(data) != length:
        raise CheckpointError(f"{path} ends at {len(data)} of {length} bytes: it is truncated; copy it again")
    return data


def _integers(layout: Layout, fact: TensorFact) -> tuple[int, ...] | None:
    """A vector of integers or flags; None for another dtype or shape, which rules name."""
    place = layout.tensors[fact.original]
    code = _INTEGERS.get(fact.dtype)
    size = place.stop - place.start
    if code is None or len(fact.shape) != 1 or size != fact.shape[0] * struct.calcsize(f"<{code}") or size > _MOST_MAP:
        return None
    values = array(code)
    values.frombytes(_bytes_at(layout.path, place.start, size))
    return tuple(values)


def _look(layout: Layout, fact: TensorFact) -> tuple[bool, bool]:
    """Whether the beginning and the middle of a tensor are zero, and whether they hold NaN or Inf."""
    place = layout.tensors[fact.original]
    code, exponent = _EXPONENT[fact.dtype]
    data = b"".join(_bytes_at(layout.path, start, stop - start) for start, stop in _samples_of(place))
    bits = array(code)
    bits.frombytes(data)
    return bool(data) and not any(data), any(value & exponent == exponent for value in bits)


def _extent(layout: Layout, fact: TensorFact) -> Extent:
    """Reads the tensor."""
    import numpy as np

    dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[fact.dtype]
    place = layout.tensors[fact.original]
    raw = np.frombuffer(_bytes_at(layout.path, place.start, place.stop - place.start), dtype=dtype)
    values = (raw.astype(np.uint32) << 16).view(np.float32) if fact.dtype == "BF16" else raw.astype(np.float32)
    return _extent_of(values)


def _extent_of(values: "NDArray[np.float32]") -> Extent:
    import numpy as np

    finite = np.isfinite(values)
    size = np.abs(values[finite])
    return Extent(
        values.size,
        int(values.size - finite.sum()),
        int((size > 65504).sum()),
        float(size.max(initial=0.0)),
        bool(values.size > 1 and (values == values.flat[0]).all()),
    )


def _read_binary(path: Path, whole: bool, only: "re.Pattern[str] | None") -> Weights:
    loaded = {name: value for name, value in load_binary(path).items() if only is None or only.fullmatch(name)}
    facts = [
        TensorFact(_TORCH_NAMES.get(str(value.dtype), str(value.dtype)), tuple(value.shape), name)
        for name, value in loaded.items()
    ]
    tensors, twice = _by_name(facts)
    maps = {
        name: tuple(int(item) for item in loaded[tensors[name].original].tolist())
        for name in ("d2t", "t2d")
        if name in tensors and tensors[name].dtype in _INTEGERS and len(tensors[name].shape) == 1
    }
    extents = None
    if whole:
        floats = {name: fact for name, fact in tensors.items() if fact.dtype in ("F32", "F16", "BF16")}
        extents = {name: _extent_of(loaded[fact.original].float().numpy()) for name, fact in floats.items()}
    return Weights(path.parent.name + "/" + path.name, tensors, twice, maps.get("d2t"), maps.get("t2d"), (), (),
                   extents, {})  # fmt: skip
