"""DeepSpec's target cache: one folder with manifest.json, samples.idx and shards of plain bytes.

The layout is version 2 of deepspec/data/target_cache_dataset.py (github.com/deepseek-ai/DeepSpec): each record of the
index is little-endian ``<QIIQQQQQ``: number, shard, tokens S, and where in the shard begin int32 ``input_ids`` [S],
uint8 ``attention_mask`` [S], uint8 ``loss_mask`` [S], ``target_hidden_states`` [S, C], ``target_last_hidden_states``
[S, H]. Layer ids count outputs of layers from 0; -1 is the embedding (modeling/target_extract.py).
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replay.capture.dumps.sample import MOST_TOKENS, Dump, Sample, checked_sample, mask_of, widened
from replay.errors import CaptureError, TraceCorruptError
from replay.traces.fields import Fields, read_json
from replay.traces.files import open_regular, read_small
from replay.traces.header import MAX_LAYERS, MAX_WIDTH
from replay.traces.taps import tap_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEEPSPEC = "deepspec"
MANIFEST, INDEX = "manifest.json", "samples.idx"
VERSION = 2
_RECORD = struct.Struct("<QIIQQQQQ")
_MOST_MANIFEST, _MOST_INDEX, _MOST_SHARDS = 1 << 24, 1 << 30, 1 << 20
_HIDDEN = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}  # bytes of a value


@dataclass(frozen=True, slots=True)
class _Cache:
    folder: Path
    dtype: str
    width: int
    slots: int
    shards: tuple[Path, ...]


def open_cache(folder: Path) -> Dump:
    """The texts of a cache, read one by one as they are asked for. Raises CaptureError."""
    fields = Fields(str(folder / MANIFEST), read_json(folder / MANIFEST, _MOST_MANIFEST, _refuse), _refuse)
    version = fields.integer("version", 0, 1 << 30)
    if version != VERSION:
        raise CaptureError(f"{folder / MANIFEST} is of version {version}, replay reads version {VERSION}")
    ids = fields.integers("target_layer_ids", -1, MAX_LAYERS - 1)
    shards = tuple(folder / _plain(item.text("file_name"), folder) for item in fields.objects("shards"))
    dtype = fields.choice("hidden_dtype", tuple(_HIDDEN))
    cache = _Cache(folder, dtype, fields.integer("hidden_size", 1, MAX_WIDTH), len(ids), shards)
    index = _index(folder, fields.integer("num_samples", 0, _MOST_INDEX))
    taps = tuple(tap_name(number + 1) for number in ids)
    return Dump(DEEPSPEC, _samples(cache, index), len(index) // _RECORD.size, taps)


def _refuse(said: str) -> CaptureError:
    return CaptureError(f"{said}: write the target cache again")


def _plain(name: str, folder: Path) -> str:
    if Path(name).name != name:
        raise _refuse(f"{folder / MANIFEST} names the shard {name!r}, which is no file name")
    return name


def _index(folder: Path, count: int) -> bytes:
    try:
        data = read_small(folder / INDEX, _MOST_INDEX)
    except TraceCorruptError as error:
        raise _refuse(str(error)) from error
    if len(data) != count * _RECORD.size:
        raise _refuse(f"{folder / INDEX} holds {len(data)} bytes, {count} texts take {count * _RECORD.size}")
    return data


def _samples(cache: _Cache, index: bytes) -> Iterator[Sample]:
    for number, shard, tokens, *starts in _RECORD.iter_unpack(index):
        where = f"{cache.folder}, text {number}"
        if shard >= len(cache.shards) or not 2 <= tokens <= MOST_TOKENS:
            raise _refuse(f"{where} lies in shard {shard} with {tokens} tokens; there are {len(cache.shards)} shards")
        yield _sample(cache, cache.shards[shard], tokens, starts, where, f"text-{number}")


def _sample(cache: _Cache, shard: Path, tokens: int, starts: list[int], where: str, name: str) -> Sample:
    import torch

    size, hidden = _HIDDEN[cache.dtype], getattr(torch, cache.dtype)
    wide = tokens * cache.width * size
    ids = _values(shard, starts[0], 4 * tokens, torch.int32, where)
    mask = _values(shard, starts[2], tokens, torch.uint8, where)
    slots, rounded = widened(_values(shard, starts[3], wide * cache.slots, hidden, where).view(tokens, -1))
    last, _ = widened(_values(shard, starts[4], wide, hidden, where).view(tokens, -1))
    return checked_sample(Sample(name, where, ids.long(), slots, last, mask_of(mask, where), rounded))


def _values(shard: Path, start: int, size: int, dtype: "torch.dtype", where: str) -> "Tensor":
    import torch

    try:
        with open_regular(shard) as descriptor:
            if start + size > os.fstat(descriptor).st_size:
                raise _refuse(f"{where} ends beyond the end of {shard.name}")
            data = bytearray(size)
            with open(descriptor, "rb", closefd=False) as file:
                file.seek(start)
                file.readinto(data)
    except TraceCorruptError as error:
        raise _refuse(str(error)) from error
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)
