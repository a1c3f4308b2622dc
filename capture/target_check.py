"""A target's folder before Transformers reads it, and what may come out of it when it does.

Transformers waits for pipes, counts to any number of layers, offers to run a checkpoint's own code, and fails with
whatever its libraries raise.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from replay.errors import CaptureError, ReplayError, TraceCorruptError
from replay.printable import one_line
from replay.traces.fields import read_json, show, show_name
from replay.traces.files import HEADER, PLAIN, describe_path
from replay.traces.header import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from replay.traces.tensors import parse_layout

CONFIG = "config.json"
_READ = (".json", ".jinja", ".model", ".txt", ".safetensors")  # how the names end of what Transformers looks into
_MOST_CONFIG = 1 << 24  # bytes
_MOST_TEXT = 1 << 28  # bytes of a tokenizer or a template
_MOST_REASON = 300  # characters
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = {"hidden_size": MAX_WIDTH, "intermediate_size": MAX_WIDTH, "vocab_size": MAX_VOCAB, "head_dim": MAX_WIDTH}
_OF_HEADS = {"draft_vocab_size", "eagle_config", "dflash_config", "speculators_model_type"}  # fields
_MOST_PARTS = 1 << 20  # of anything else that a config counts, as attention heads and experts


class TransformersCalls:
    """A block of calls into Transformers, whose errors of all kinds come out as a CaptureError on ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ReplayError):
            reason = one_line(" ".join(f"{error}".split()) or type(error).__name__, _MOST_REASON)
            raise CaptureError(
                f"Transformers cannot load the target in {self._folder} ({reason}): give --model another checkpoint"
            ) from error


def refuse_other(folder: Path) -> None:
    """Raises CaptureError for a draft head or a trace in the place of a target; nothing is loaded."""
    if os.path.lexists(folder / HEADER):
        raise CaptureError(f"{folder} is a trace: give --model the folder of the target, or its hub id")
    if not os.path.isfile(folder / CONFIG):
        return
    document = read_json(folder / CONFIG, _MOST_CONFIG, _mend, follow=True, constants=True)
    named = document.get("architectures") if isinstance(document, dict) else None
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    drafts = any(mark in name.lower() for name in names for mark in ("eagle", "dflash"))
    if drafts or (isinstance(document, dict) and document.keys() & _OF_HEADS):
        kind = f" ({show_name(names[0])})" if names else ""
        raise CaptureError(
            f"{folder} is a draft head{kind}, and --model records the target that it drafts for: give that one's "
            "folder or hub id, and the head to replay simulate --draft"
        )


def check_folder(folder: Path) -> None:
    """Raises CaptureError for what Transformers would wait for or drown in: pipes, devices, counts beyond reason."""
    for path in _read_files(folder):
        if (kind := describe_path(path)) != PLAIN:
            raise CaptureError(f"{path} {kind}: give --model a folder of plain files")
        if path.suffix != ".safetensors" and (size := os.stat(path).st_size) > _MOST_TEXT:
            raise CaptureError(f"{path} holds {size} bytes, at most {_MOST_TEXT} are possible: copy it again")
    document = read_json(folder / CONFIG, _MOST_CONFIG, _mend, follow=True, constants=True)
    tensors = sum(_tensors(path) for path in folder.glob("*.safetensors"))
    for name, value in _numbers(document):
        most = min(MAX_LAYERS, tensors or MAX_LAYERS) if name in _LAYERS else _SIZES.get(name, _MOST_PARTS)
        if (name in _LAYERS or name in _SIZES) and value < 1:
            raise _mend(f"{folder / CONFIG}: {name} is {show(value)}, at least 1 is possible")
        if value > most:
            whose = f", and the weights hold {tensors} tensors" if most == tensors else ""
            raise _mend(f"{folder / CONFIG}: {show_name(name)} is {show(value)}, at most {most} is possible{whose}")


def _tensors(path: Path) -> int:
    """How many a file holds."""
    try:
        return len(parse_layout(Path(os.path.realpath(path))).tensors)
    except TraceCorruptError as error:
        raise CaptureError(f"{error}: copy or download it again") from error


def _read_files(folder: Path) -> Iterator[Path]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise CaptureError(f"{folder} cannot be read: {error.strerror}; mend its permissions") from error
    return (folder / name for name in sorted(names) if name.endswith(_READ))


def _numbers(document: object) -> Iterator[tuple[str, float]]:
    """What a config counts, in all of its objects: such a field is one of those above, or called num_... or n_...."""
    level = [document]
    while level:
        inside = level.pop()
        if isinstance(inside, dict):
            for name, value in inside.items():
                counts = name in _LAYERS or name in _SIZES or name.startswith(("num_", "n_"))
                if counts and isinstance(value, int | float) and not isinstance(value, bool):
                    yield name, value
                level.append(value)


def _mend(said: str) -> CaptureError:
    return CaptureError(f"{said}: mend it, or give --model another checkpoint")
