"""Files of a checkpoint's folder → tensors, as they lie there. Nothing is ever unpickled."""

import pickle
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from replay.checkpoint.config_file import read_object
from replay.errors import CheckpointError
from replay.traces.fields import show, some
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
    struct.error,
)


def weight_files(folder: Path, only: "re.Pattern[str] | None" = None) -> list[Path]:
    """The file or shards that hold a folder's weights; with ``only``, the shards with names that it matches.

    safetensors before a pytorch_model.bin, which stands alone. Raises CheckpointError where there are none, or the
    index of shards cannot be trusted.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return [folder / name for name in _shards(folder / INDEX, only)]
    if (folder / BINARY).is_file():
        return [folder / BINARY]
    raise CheckpointError(
        f"{folder} holds no weights: looked for {SINGLE}, {INDEX} and {BINARY}; give the folder of a draft head"
    )


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

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}; copy or export the head again"
        ) from error


def load_binary(path: Path) -> "dict[str, torch.Tensor]":
    """A pytorch_model.bin, read as weights only, so that a foreign file cannot run code. Raises CheckpointError."""
    import warnings

    try:
        import torch
    except ImportError as error:
        raise CheckpointError(f"{path} takes torch to be read; install it, or save the head as {SINGLE}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about pickle protocols; what matters is refused below
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
    return loaded
