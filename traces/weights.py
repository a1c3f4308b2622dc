"""The target's embedding and output rows: from the trace's sidecar, or from the checkpoint it was captured with."""

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import TraceCorruptError, TraceError
from replay.traces import files
from replay.traces.damage import ReadingTrace
from replay.traces.fields import read_json, show
from replay.traces.header import TraceHeader, WeightsInfo
from replay.traces.ranges import share_range
from replay.traces.remote import entry_of, is_whole, local_file
from replay.traces.taps import EMBED
from replay.traces.tensors import Layout, map_rows, pack_header, parse_layout, tensor_bytes
from replay.traces.verify import Verifier

if TYPE_CHECKING:
    import torch

# a text model by itself, and as the language part of a model that also sees
EMBED_NAMES = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_JSON = 1 << 26


class TargetWeights:
    """The target's embedding and output rows of a trace, mapped when they are first asked for.

    ``target`` is as in ``find_weight``; ``verifier`` holds the sidecar against its checksum.
    """

    def __init__(self, folder: Path, header: TraceHeader, target: Path | None, verifier: Verifier | None) -> None:
        self._folder, self._header, self._target, self._verifier = folder, header, target, verifier

    @cached_property
    def embed(self) -> "torch.Tensor":
        """[V, H]. Raises TraceError where no sidecar or checkpoint is here, TraceCorruptError."""
        return self._load("embed")

    @cached_property
    def lm_head(self) -> "torch.Tensor":
        """[V, H], ``embed`` where they are tied. Raises as ``embed``."""
        return self.embed if self._header.target.tie_word_embeddings else self._load("lm_head")

    def can_look_up(self) -> bool:
        """Whether the tap ``embed`` can be looked up. Raises TraceCorruptError for a damaged sidecar or checkpoint."""
        if self._header.embed != "lookup":
            return False
        try:
            find_weight(self._folder, self._header, EMBED, self._target)
        except TraceCorruptError:
            raise
        except TraceError:
            return False
        return True

    def check_sums(self) -> None:
        """Hold the sidecar against its checksum, where there is one; one elsewhere once it is fetched, which is done
        when it is needed. Raises TraceCorruptError."""
        path = self._folder / files.WEIGHTS
        if self._header.weights is not None and (entry_of(path) is None or is_whole(path)):
            self._verify(path, self._header.weights)

    def _verify(self, path: Path, told: WeightsInfo) -> None:
        if self._verifier is not None:
            self._verifier.check(path, 0, told.sha256)

    @ReadingTrace()
    def _load(self, which: str) -> "torch.Tensor":
        if self._header.weights is not None:
            path = local_file(self._folder / files.WEIGHTS)  # all of it is used
            self._verify(path, self._header.weights)
        return load_weight(self._folder, self._header, which, self._target)


def find_weight(folder: Path, header: TraceHeader, which: str, target: Path | None = None) -> tuple[Layout, str]:
    """The file and tensor that hold ``which`` ("embed" or "lm_head"); the tied lm_head is the embedding.

    ``target``: where the checkpoint lies now, if elsewhere than the header says; a sidecar goes before it. Only headers
    are read. Raises TraceError, saying what to do, where neither sidecar nor checkpoint has it.
    """
    wanted = "embed" if header.target.tie_word_embeddings else which
    if header.weights is not None:
        layout = parse_layout(folder / files.WEIGHTS)
        if layout.size != header.weights.bytes:
            raise TraceCorruptError(f"{layout.path} holds {layout.size} bytes, trace.json says {header.weights.bytes}")
        return _checked(layout, wanted, header)
    checkpoint = Path(header.target.path) if target is None else target
    if not os.path.isdir(checkpoint):
        raise TraceError(
            f"{folder} holds no {files.WEIGHTS} and the target's folder {checkpoint} is not here: name the folder of "
            "its checkpoint with --target DIR"
        )
    found = find_tensor(checkpoint, EMBED_NAMES if wanted == "embed" else LM_HEAD_NAMES)
    if found is not None:
        return _checked(*found, header)
    raise TraceError(
        f"{checkpoint} holds no tensor {wanted} under any known name: name the folder of the target's checkpoint with "
        "--target DIR, or capture without --no-weights"
    )


def find_tensor(checkpoint: Path, names: Sequence[str]) -> tuple[Layout, str] | None:
    """The file of a checkpoint's folder that holds the first of ``names`` that is there, and that name.

    Only headers are read. Raises TraceError for an index that cannot be read, TraceCorruptError for a file.
    """
    for name in names:
        path = _file_of(checkpoint, name)
        if path is not None:
            layout = parse_layout(path.resolve())  # hub caches are folders of links
            if name in layout.tensors:
                return layout, name
    return None


def load_weight(folder: Path, header: TraceHeader, which: str, target: Path | None = None) -> "torch.Tensor":
    """``which`` ("embed" or "lm_head") [V, H], mapped, found as by ``find_weight``; of a file elsewhere the local cache
    has what is mapped.

    Raises TraceError, TraceCorruptError, StorageError, OutputError.
    """
    layout, name = find_weight(folder, header, which, target)
    share_range(layout.path, layout.tensors[name].start, layout.tensors[name].stop)
    return map_rows(layout, name)


def write_weights(folder: Path, embed: "torch.Tensor", lm_head: "torch.Tensor | None") -> WeightsInfo:
    """Write the sidecar of a trace, all of it or nothing: ``embed`` [V, H] and, unless tied, ``lm_head`` [V, H].

    Raises OSError.
    """
    tensors = {"embed": embed} | ({} if lm_head is None else {"lm_head": lm_head})
    shapes = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()}
    blocks: list[bytes | memoryview] = [pack_header(shapes, {})]
    blocks += [tensor_bytes(tensor) for tensor in tensors.values()]
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    files.write_whole(folder / files.WEIGHTS, blocks)
    return WeightsInfo(files.WEIGHTS, sum(len(block) for block in blocks), digest.hexdigest())


def _file_of(checkpoint: Path, tensor: str) -> Path | None:
    """The file of a checkpoint that should hold ``tensor``."""
    index = checkpoint / INDEX
    if not os.path.lexists(index):
        single = checkpoint / SINGLE
        return single if os.path.lexists(single) else None
    document = read_json(index, _MAX_JSON, _index_refusal, follow=True)
    shards = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(shards, dict):
        raise _index_refusal(f"{index} has no weight_map from tensors to shards")
    name = shards.get(tensor)
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name:
        raise _index_refusal(f"{index} places {tensor} in {show(name)}, which is no file name")
    return checkpoint / name


def _index_refusal(said: str) -> TraceError:
    return TraceError(f"{said}: fetch the checkpoint again")


def _checked(layout: Layout, name: str, header: TraceHeader) -> tuple[Layout, str]:
    shape = (header.target.vocab_size, header.target.hidden_size)
    if name not in layout.tensors:
        raise TraceCorruptError(f"{layout.path} lacks the tensor {name}")
    if layout.tensors[name].shape != shape:
        raise TraceCorruptError(
            f"{layout.path}: {name} is {list(layout.tensors[name].shape)}, the trace's target makes it {list(shape)}"
        )
    return layout, name
