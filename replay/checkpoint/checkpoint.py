"""A draft head's folder or tensors → Checkpoint, strict both ways.

Nothing is skipped in silence: a tensor is used, is on the list of deliberate drops, or is an error that names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from replay.checkpoint import nextn
from replay.checkpoint.config import HeadConfig, parse_config
from replay.checkpoint.config_file import CONFIG, read_config
from replay.checkpoint.dflash import check_folder
from replay.checkpoint.files import read_shapes, read_tensors
from replay.checkpoint.hub import head_folder, spoken_name
from replay.checkpoint.tensor_table import expected_tensors, optional_tensors, spell
from replay.errors import CheckpointError, UsageError
from replay.printable import counted
from replay.traces.fields import show, show_name, some
from replay.traces.remote import as_source

if TYPE_CHECKING:
    import torch

_VALUES_AT_ONCE = 1 << 22
_Held = TypeVar("_Held")  # what is known of a tensor: itself, or its shape


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head as it lies on disk or came in memory: names already in SGLang's spelling, nothing cast.

    ``path`` is the folder that it was read from; None in memory.
    """

    name: str
    config: HeadConfig
    tensors: "Mapping[str, torch.Tensor]"
    notes: tuple[str, ...]
    path: str | None = None

    def __repr__(self) -> str:
        counts = (self.config.num_layers, "layer"), (self.config.num_taps, "tap")
        size = ", ".join(counted(*each) for each in counts)
        size += f", {self.config.draft_vocab_size} draft tokens"
        return f"Checkpoint({self.name!r}: {size})"


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a draft head's folder. Raises CheckpointError naming the field or tensor."""
    document, where, name = read_config(path), str(path / CONFIG), spoken_name(path)
    stated = parse_config(document, name=where)  # what a config says wrong comes before what the tensors do
    if stated.block is not None:
        check_folder(path)
    if (shapes := read_shapes(path)) is None:
        tensors = read_tensors(path)
        found = check_checkpoint(name, parse_config(document, name=where, shapes=_shapes_of(tensors)), tensors)
        return replace(found, path=str(path))
    config = parse_config(document, name=where, shapes=shapes)
    _check_table(name, config, _rename(name, shapes, config))  # before anything is loaded
    return replace(check_checkpoint(name, config, read_tensors(path)), path=str(path))


def _shapes_of(tensors: "Mapping[str, torch.Tensor]") -> dict[str, tuple[int, ...]]:
    """By the names in the file; what is no tensor is refused later (``check_checkpoint``)."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def check_checkpoint(name: str, config: HeadConfig, tensors: "Mapping[str, torch.Tensor]") -> Checkpoint:
    """Rename ``tensors`` and hold them against the table that ``config`` implies, both ways.

    Raises CheckpointError for a missing, unexpected, misshapen or non-finite tensor, and for a vocabulary map that
    leaves the target's vocabulary.
    """
    renamed = _rename(name, tensors, config)
    for key, tensor in renamed.items():
        _check_kind(name, key, tensor)
    _check_table(name, config, {key: tuple(tensor.shape) for key, tensor in renamed.items()})
    for key, tensor in renamed.items():
        _check_tensor(name, key, tensor)
    notes = _check_vocabulary_map(name, config, renamed)
    return Checkpoint(name, config, renamed, notes)


def _check_table(name: str, config: HeadConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError where ``shapes`` by SGLang's names are not those that ``config`` calls for."""
    expected = expected_tensors(config)
    known = expected | optional_tensors(config)
    missing = [key for key in expected if key not in shapes]
    unexpected = [key for key in shapes if key not in known]
    if missing:
        raise CheckpointError(
            f"draft head {name} lacks {some(missing)}, which its config calls for"
            + (f" (it has the unexpected {some(unexpected)})" if unexpected else "")
            + "; export it again with all tensors, or mend config.json"
        )
    if unexpected:
        raise CheckpointError(
            f"draft head {name} has {some(unexpected)}, which its config does not call for and a server would "
            "drop in silence; state the matching field in config.json or remove the tensor"
        )
    for key, shape in shapes.items():
        if shape != known[key]:
            raise CheckpointError(
                f"draft head {name}: {key} has shape {list(shape)}, its config calls for {list(known[key])}; "
                "mend config.json or export the head again"
            )


def _rename(name: str, tensors: Mapping[str, _Held], config: HeadConfig) -> dict[str, _Held]:
    latent, apart = config.latent is not None, config.family == "nextn"
    renamed: dict[str, _Held] = {}
    for original, tensor in tensors.items():
        if apart and original.endswith(nextn.LM_HEAD):
            continue  # a copy of the target's, which servers read instead
        if latent and not apart and original.startswith("model.") and not original.endswith((".d2t", ".t2d")):
            raise CheckpointError(
                f"draft head {name} has {original}, and of a latent head a server skips every name that begins with "
                f"model.; export it as {original.removeprefix('model.')}"
            )
        # lm_head behind model. is taken here: that a server misses it there is `replay check`'s to say.
        key = original.removeprefix("model.") if original.startswith("model.lm_head.") else original
        key = nextn.spell(key) if apart else spell(key, latent=latent)
        if key in renamed:
            raise CheckpointError(f"draft head {name} has the tensor {key} twice, once as {original}; keep one of them")
        renamed[key] = tensor
    return renamed


def _check_kind(name: str, key: str, tensor: object) -> None:
    """Raises CheckpointError for what is no tensor, or one without plain values of its own."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"draft head {name}: {show_name(key)} is {show(tensor)}, a tensor was expected; give a mapping from names "
            "to tensors"
        )
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "a meta tensor, without values" if tensor.is_meta else "sparse, nested or quantised"
        raise CheckpointError(
            f"draft head {name}: {show_name(key)} is {kind}; give dense tensors with their values, as a state_dict has"
        )


def _check_tensor(name: str, key: str, tensor: "torch.Tensor") -> None:
    import torch

    if key in ("d2t", "t2d"):
        integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if tensor.dtype not in (integers if key == "d2t" else (*integers, torch.bool)):
            wanted = "integers" if key == "d2t" else "bool or integers"
            raise CheckpointError(
                f"draft head {name}: {key} is {tensor.dtype}, {wanted} were expected; export it again"
            )
    elif tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise CheckpointError(
            f"draft head {name}: {key} is {tensor.dtype}, possible are float32, float16 and bfloat16; "
            "export the head unquantised"
        )
    elif not _is_finite(tensor):
        raise CheckpointError(f"draft head {name}: {key} holds NaN or Inf; export the head again")


def _is_finite(tensor: "torch.Tensor") -> bool:
    """Some rows at a time: to ask at once takes more memory than a large tensor itself."""
    import torch

    rows = max(1, _VALUES_AT_ONCE * max(1, len(tensor)) // max(1, tensor.numel())) if tensor.dim() else 1
    return all(bool(torch.isfinite(part).all()) for part in torch.atleast_1d(tensor).split(rows))


def _check_vocabulary_map(name: str, config: HeadConfig, tensors: "Mapping[str, torch.Tensor]") -> tuple[str, ...]:
    """d2t holds offsets: target id = draft id + d2t[draft id] (SGLang 0.5.23 models/llama_eagle3.py)."""
    import torch

    d2t_W = tensors.get("d2t")
    if d2t_W is None:
        return ()
    ids_W = torch.arange(config.draft_vocab_size) + d2t_W.long().cpu()
    wrong = ((ids_W < 0) | (ids_W >= config.vocab_size)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise CheckpointError(
            f"draft head {name}: d2t maps draft id {row} to target id {int(ids_W[row])}, outside of the vocabulary of "
            f"{config.vocab_size} ({len(wrong)} such rows); d2t must hold offsets (target id = draft id + d2t)"
        )
    notes = []
    twice = config.draft_vocab_size - len(torch.unique(ids_W))
    if twice:
        notes.append(f"d2t maps {twice} draft ids to target ids that another draft id has already")
    t2d_V = tensors.get("t2d")
    if t2d_V is not None:
        mask_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask_V[ids_W] = True
        if not torch.equal(mask_V, t2d_V.bool().cpu()):
            notes.append("t2d disagrees with d2t; engines use d2t")
    return tuple(notes)


def load_head(folder: Path | str) -> Checkpoint:
    """Read a draft head's folder: config.json with safetensors or pytorch_model.bin.

    Raises CheckpointError naming the field or tensor that is missing, unexpected or misshapen, UsageError for what is
    no path.

    >>> head = replay.load_head(DRAFT)
    >>> head.config.num_taps
    3
    """
    return read_checkpoint(head_folder(as_source(folder)))


def head_from_tensors(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, name: str = "in-memory head"
) -> Checkpoint:
    """A head from a config dictionary and tensors in memory, checked as strictly as one from disk.

    Raises CheckpointError as ``load_head`` does, UsageError where ``config`` or ``tensors`` is no mapping from names.

    >>> same = replay.head_from_tensors(config, tensors, name="step 1000")
    >>> same.name
    'step 1000'
    """
    for what, value in (("config", config), ("tensors", tensors)):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise UsageError(
                f"the {what} of a head must be a mapping from names, {type(value).__name__} {show(value)} was given"
            )
    if not isinstance(name, str):
        raise UsageError(f"the name of a head must be a string, {show(name)} was given")
    return check_checkpoint(name, parse_config(config, shapes=_shapes_of(tensors)), tensors)
