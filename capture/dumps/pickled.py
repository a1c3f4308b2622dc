"""Files of torch.save, read without running anything in them: tensors and plain values, or a refusal."""

import gzip
import io
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from replay.capture.dumps.sample import MOST_BYTES
from replay.errors import CaptureError, TraceCorruptError
from replay.traces.fields import show_name
from replay.traces.files import open_regular

if TYPE_CHECKING:
    from torch import Tensor

MOST_UNPACKED = 1 << 33  # bytes of a .gz file, unpacked in memory
_SKEW = 1 << 16  # bytes by which tensors may exceed the file: they share its storage

# Whatever torch.load raises for a file that is none of its own. A pickle can make it raise nearly anything.
_UNREADABLE = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, RuntimeError, ValueError, TypeError, AttributeError,
    LookupError, ArithmeticError, AssertionError, EOFError, MemoryError,
)  # fmt: skip
_NAMED = re.compile(r"GLOBAL ([\w.]+)")


def load_pickled(path: Path) -> object:
    """The value in a file of torch.save: dictionaries, lists, plain values and tensors on the CPU.

    A ``.ckpt`` is mapped, a ``.gz`` unpacked in memory. Raises CaptureError where the file is none, is cut short, is
    larger than is possible, or holds anything else: its pickle is then not run.
    """
    try:
        with open_regular(path.resolve()) as descriptor, open(descriptor, "rb", closefd=False) as file:
            if path.name.endswith(".gz"):
                return _load(path, io.BytesIO(_unpacked(path, file)), mapped=False)
            return _load(path, file, mapped=True)
    except TraceCorruptError as error:
        raise CaptureError(f"{error}: name a dump's file or folder") from error


def _unpacked(path: Path, file: IO[bytes]) -> bytes:
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            data = packed.read(MOST_UNPACKED + 1)
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise _broken(path) from error
    if len(data) > MOST_UNPACKED:
        raise CaptureError(f"{path} unpacks to more than {MOST_UNPACKED} bytes: unpack it yourself and name the .ckpt")
    return data


def _load(path: Path, file: IO[bytes], *, mapped: bool) -> object:
    import torch

    size = _check_archive(path, file)
    file.seek(0)
    source: Any = str(path.resolve()) if mapped else file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about pickles of other protocols: they are read or refused
            loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except _UNREADABLE as error:
        raise _refusal(path, error) from error
    _check_tensors(path, loaded, size)
    return loaded


def _check_archive(path: Path, file: IO[bytes]) -> int:
    """The size of the file, where it is an archive whose parts are stored as they are: nothing grows in reading."""
    size = file.seek(0, io.SEEK_END)
    if size > MOST_BYTES:
        raise CaptureError(f"{path} holds {size} bytes, at most {MOST_BYTES} are possible")
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, struct.error, NotImplementedError) as error:
        raise _broken(path) from error
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise CaptureError(f"{path} is packed in a way that torch.save does not pack: write the dump again")
    return size


def _broken(path: Path) -> CaptureError:
    return CaptureError(f"{path} is cut short, or is no file that torch.save wrote: write the dump again")


def _refusal(path: Path, error: BaseException) -> CaptureError:
    if not isinstance(error, pickle.UnpicklingError):
        return _broken(path)
    found = _NAMED.search(str(error))
    named = f" ({show_name(found[1])})" if found else ""
    return CaptureError(
        f"{path} holds more than tensors and plain values{named}, so it was not read and nothing "
        "in it was run: name a dump that holds only tensors"
    )


def _check_tensors(path: Path, loaded: object, size: int) -> None:
    """Plain tensors in memory of their own: none that is larger than the file, sparse, or only a shape."""
    import torch

    for tensor in _inside(loaded):
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_quantized or tensor.numel() * tensor.element_size() > size + _SKEW:
            raise CaptureError(f"{path} holds a tensor that is no plain one: write the dump again")


def _inside(loaded: object) -> "list[Tensor]":
    import torch

    values = loaded.values() if isinstance(loaded, dict) else loaded if isinstance(loaded, list | tuple) else [loaded]
    return [value for value in values if isinstance(value, torch.Tensor)]
