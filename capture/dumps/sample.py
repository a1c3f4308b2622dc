"""One text of a dump: its tokens and the target's states, as the dump's own form has them, and what every form shares.

Shapes: S tokens of a text, C = slots x H columns, H the target's hidden size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import CaptureError
from replay.traces.fields import some

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 35  # of one file: five times what a text of a million tokens of a small target takes
MOST_TOKENS = 1 << 24  # of one text

ROUNDED = "the taps' last bits: the dump holds them in fp8"


@dataclass(frozen=True, slots=True)
class Sample:
    """``tokens_S`` int64; ``slots_SC`` the taps side by side; ``last_SH`` the last state, before or after the norm.

    The last row of states may be missing.
    ``mask_S`` is true where the text was trained on, None where the dump does not say. ``where`` names it in messages,
    ``rounded`` says that the states were kept in fp8.
    """

    name: str
    where: str
    tokens_S: "Tensor"
    slots_SC: "Tensor"
    last_SH: "Tensor"
    mask_S: "Tensor | None" = None
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class Dump:
    """What was found: ``form`` is its name, ``taps`` those that it names itself, in the order of its slots."""

    form: str
    samples: Iterable[Sample]
    count: int
    taps: tuple[str, ...] | None = None


def checked_sample(sample: Sample) -> Sample:
    """``sample`` where its parts fit together. Raises CaptureError, naming the file and the two numbers."""
    import torch

    rows = len(sample.tokens_S)
    if not 2 <= rows <= MOST_TOKENS:
        raise CaptureError(f"{sample.where} holds {rows} tokens, 2 to {MOST_TOKENS} are possible")
    for what, tensor in (("taps", sample.slots_SC), ("last states", sample.last_SH)):
        if tensor.ndim != 2 or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise CaptureError(
                f"{sample.where}: the {what} are {tensor.dtype} {list(tensor.shape)}, must be rows of numbers"
            )
        if len(tensor) != rows:
            raise CaptureError(
                f"{sample.where} holds {rows} tokens and {len(tensor)} rows of {what}: write the dump again"
            )
    if sample.mask_S is not None and sample.mask_S.shape != (rows,):
        raise CaptureError(f"{sample.where}: the loss mask has the shape {list(sample.mask_S.shape)}, not [{rows}]")
    return sample


def ids_of(tensor: "Tensor", where: str) -> "Tensor":
    """Token ids [S] or [1, S] as int64 [S]. Raises CaptureError for anything else."""
    import torch

    if tensor.dtype not in (torch.int64, torch.int32):
        raise CaptureError(f"{where}: the token ids are {tensor.dtype}, must be whole numbers")
    return flat(tensor, where, "token ids").to(torch.int64)


def mask_of(tensor: "Tensor | None", where: str) -> "Tensor | None":
    """A loss mask [S] or [1, S] of zeros and ones as truth values [S]. Raises CaptureError for anything else."""
    if tensor is None:
        return None
    mask = flat(tensor, where, "loss mask")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise CaptureError(f"{where}: the loss mask holds values other than 0 and 1")
    return mask == 1


def flat(tensor: "Tensor", where: str, what: str) -> "Tensor":
    """[S] of a tensor [S] or [1, S]. Raises CaptureError."""
    if tensor.ndim == 2 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.ndim != 1:
        raise CaptureError(f"{where}: the {what} have the shape {list(tensor.shape)}, must be those of one text")
    return tensor


def rows_of(tensor: "Tensor") -> "Tensor":
    """[S, C] of a tensor [S, C] or [1, S, C]; anything else as it is, for ``checked_sample`` to refuse."""
    return tensor[0] if tensor.ndim == 3 and len(tensor) == 1 else tensor


def widened(tensor: "Tensor") -> "tuple[Tensor, bool]":
    """``tensor``, its fp8 values as bfloat16, which holds each of them exactly; whether they were fp8."""
    import torch

    eighths = (torch.float8_e4m3fn, torch.float8_e5m2)
    return (tensor.to(torch.bfloat16), True) if tensor.dtype in eighths else (tensor, False)


def lacking(where: Path, form: str, missing: list[str], there: list[str]) -> CaptureError:
    """The refusal of a file that lacks tensors of its form."""
    return CaptureError(f"{where} is no dump of {form}: it lacks {some(missing)}, and holds {some(there) or 'nothing'}")
