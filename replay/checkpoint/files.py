"""Files of a checkpoint's folder → tensors, as they lie there. Nothing is ever unpickled."""

import os
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from replay.checkpoint.config_file import read_object
from replay.errors import CheckpointError, TraceCorruptError
from replay.traces.fields import show, show_name, some
from replay.traces.files import PLAIN, describe_path
from replay.traces.ranges import open_ranges
from replay.traces.remote import local_file
from replay.traces.tensors import Layout, parse_layout
from replay.traces.weights import INDEX, SINGLE

if TYPE_CHECKING:
    import torch

BINARY = "pytorch_model.bin"
_MOST_INDEX = 1 << 26
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
# What torch's restricted unpickler meets in broken bytes.
_MALFORMED = (
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    MemoryError,
    struct.error,
    zipfile.BadZipFile,
)


def weight_files(folder: Path, only: "re.Pattern[str] | None" = None) -> list[Path]:
    """The file or shards that hold a folder's weights; with ``only``, the shards with names that it matches.

    safetensors before a pytorch_model.bin, which stands alone. Raises CheckpointError where there are none, or the
    index of shards cannot be trusted.
    """
    for name in (SINGLE, INDEX, BINARY):
        if os.path.lexists(folder / name):  # what is no plain file is refused by its name
            if (kind := describe_path(folder / name)) != PLAIN:
                raise CheckpointError(f"{folder / name} {kind}; copy or export the checkpoint again")
            return [folder / shard for shard in _shards(folder / name, only)] if name == INDEX else [folder / name]
    raise CheckpointError(
        f"{folder} holds no weights: looked for {SINGLE}, {INDEX} and {BINARY}; give the folder of a draft head"
    )


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes by the names that tensors have in safetensors, from headers alone; None of a pytorch_model.bin.

    Raises CheckpointError.
    """
    files = weight_files(folder)
    if files == [folder / BINARY]:
        return None
    return {name: place.shape for file in files for name, place in read_layout(file).tensors.items()}


def read_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """Every tensor of a folder by the name it has there. Raises CheckpointError."""
    files = weight_files(folder)
    if files == [folder / BINARY]:
        return load_binary(files[0])
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        part = _load_safetensors(file)
        twice = sorted(tensors.keys() & part.keys())
        if twice:
            raise CheckpointError(f"{file} holds {some(twice)} again after another shard; keep one of them")
        tensors |= part
    return tensors


def _shards(index: Path, only: "re.Pattern[str] | None") -> list[str]:
    names = read_object(index, _MOST_INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map from tensors to shards; copy or export the checkpoint again")
    wanted = [shard for name, shard in names.items() if only is None or only.fullmatch(name)]
    for shard in wanted:  # foreign text: it must not lead out of the folder
        if not isinstance(shard, str) or _SHARD.fullmatch(shard) is None:
            raise CheckpointError(
                f"{index} names the shard {show(shard)}, the plain name of a .safetensors file was expected; copy or "
                "export the checkpoint again"
            )
    return sorted(set(wanted))


def _load_safetensors(path: Path) -> "dict[str, torch.Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_size(path, read_layout(path).size)  # before the library maps it
    path = local_file(path)
    try:
        return load_file(os.fspath(path))
    except (SafetensorError, OSError, KeyError, RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}; copy or export the head again"
        ) from error


def _check_size(path: Path, size: int) -> None:
    """Raises CheckpointError where a file is larger than the memory that it would be read into."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise CheckpointError(
            f"{path} holds {size / 1e9:,.0f} GB and this machine has {memory / 1e9:,.0f} GB of memory; give the folder "
            "of a draft head, or copy it again"
        )


def read_layout(path: Path) -> Layout:
    """The header of a safetensors file, be it a link. Raises CheckpointError."""
    try:
        return parse_layout(path.resolve())  # hub caches are folders of links
    except TraceCorruptError as error:
        raise CheckpointError(f"{error}; copy or export the checkpoint again") from error


def load_binary(path: Path) -> "dict[str, torch.Tensor]":
    """A pytorch_model.bin, read as weights only, so that a foreign file cannot run code. Raises CheckpointError."""
    import warnings

    try:
        with open_ranges(path, follow=True) as file:
            size = file.size
    except TraceCorruptError as error:
        raise CheckpointError(f"{error}; copy or export the checkpoint again") from error
    _check_size(path, size)
    path = local_file(path)
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(f"{path} takes torch to be read; install it, or save the head as {SINGLE}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about pickle protocols; what matters is refused below
            _check_archive(path, size)
            # weights_only admits tensors and plain containers only.
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except _MALFORMED as error:
        # Its own text is kept back: it advises to load the file without this protection.
        raise CheckpointError(
            f"{path} is not a plain dictionary of tensors: it is damaged, or it holds other Python objects; copy it "
            f"again, or save the head as {SINGLE}"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    ):
        raise CheckpointError(f"{path} is not a plain dictionary of tensors; convert it to safetensors")
    for key, value in loaded.items():
        if not _has_own_values(value):
            raise CheckpointError(
                f"{path}: {show_name(key)} is a tensor without a value for each of its elements; save the head as "
                f"{SINGLE}"
            )
    return loaded


def _check_archive(path: Path, size: int) -> None:
    """Raises BadZipFile where an archive holds more than its ``size``: torch stores tensors uncompressed."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > size:
                raise zipfile.BadZipFile


def _has_own_values(tensor: "torch.Tensor") -> bool:
    """Whether a tensor is plain and its storage as large as its shape says: a few bytes can claim any shape."""
    import torch

    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
