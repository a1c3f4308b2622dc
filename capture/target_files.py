"""A target's files: found or fetched, its config and tokenizer opened, its fingerprint taken; no weights are loaded."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.capture.encode import TargetLimits
from replay.capture.target_check import CONFIG, TransformersCalls, check_folder, refuse_other
from replay.errors import CaptureError, TraceCorruptError
from replay.traces.fields import Fields, is_integer, read_json, show
from replay.traces.files import as_path, read_small
from replay.traces.header import MAX_LAYERS, MAX_VOCAB
from replay.traces.ranges import open_ranges

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_INSTALL = "type pip install '.[local]' in a checkout of replay"
_LAYERS = "num_hidden_layers"
_MOST_JSON = 1 << 24  # bytes of a config.json or generation_config.json
_SAMPLE = 1 << 16  # bytes of weights read from the middle and the end of each file: two fine-tunes differ there


def fingerprint_target(folder: Path) -> str:
    """SHA-256 over config.json and, of each safetensors file, its name, header and two samples of its weights.

    Raises CaptureError where the folder holds no safetensors file or one that is cut short.
    """
    there = os.listdir(folder) if os.path.isdir(folder) else []
    files = sorted(folder / name for name in there if name.endswith(".safetensors"))
    if not files:
        raise CaptureError(f"{folder} holds no safetensors file: save the target's weights as safetensors")
    try:
        digest = hashlib.sha256(read_small(folder / "config.json", _MOST_JSON, follow=True))
        for path in files:
            with open_ranges(path, follow=True) as file:
                length = int.from_bytes(file.read(0, 8), "little")
                size = file.size
                if size < 8 + length:
                    raise CaptureError(f"{path} is cut short ({size} bytes): copy or download it again")
                digest.update(os.fsencode(path.name) + b"\0" + file.read(8, length))
                for start in ((size + 8 + length) // 2, max(8 + length, size - _SAMPLE)):
                    digest.update(file.read(start, _SAMPLE))
    except TraceCorruptError as error:
        raise CaptureError(f"{error}: copy or download it again") from error
    return digest.hexdigest()


def resolve_target(model: str) -> Path:
    """The local folder of a path or hub id (fetched into the hub's own cache when missing). Raises CaptureError."""
    folder = as_path(model).expanduser()
    if os.path.isdir(folder):
        if not os.path.lexists(folder / "config.json"):
            raise CaptureError(
                f"{folder} holds no config.json: --model takes a Transformers checkpoint folder or a hub id"
            )
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CaptureError(f"{model} is no folder, and a hub id needs transformers: {_INSTALL}") from error
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CaptureError(
            f"{model} is neither a folder nor a hub id that can be fetched ({reason}): "
            "give --model a Transformers checkpoint folder or a hub id"
        ) from error


def stated_layers(model: str) -> int | None:
    """The decoder layers that config.json of a path, or of a hub id in the cache, states; None where it does not.

    Nothing is fetched and nothing heavy imported, so that a tap beyond them is refused at once.
    """
    path = as_path(model).expanduser() / CONFIG
    if not os.path.lexists(path):
        cached = _cached_config(model)
        if cached is None:
            return None
        path = cached
    try:
        document = read_json(path, _MOST_JSON, follow=True, constants=True)
    except TraceCorruptError:
        return None  # said when it is opened
    if not isinstance(document, dict):
        return None
    inner = {name: value for name, value in document.items() if isinstance(value, dict) and _LAYERS in value}
    config = inner.get("text_config", {} if inner or "text_config" in document else document)
    layers = config.get(_LAYERS)
    return layers if isinstance(layers, int) and is_integer(layers, 1, MAX_LAYERS) else None


def _cached_config(model: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, CONFIG)
    except (ImportError, ValueError):  # a path is no hub id
        return None
    return Path(found) if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """What is known of a target before its weights are read."""

    name: str
    folder: Path
    config: "PretrainedConfig"  # of the text model
    tokenizer: "PreTrainedTokenizerBase | None"
    eos_ids: frozenset[int]

    @property
    def layers(self) -> int:
        """N, the number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def limits(self) -> TargetLimits:
        """Vocabulary and context of the target."""
        context = getattr(self.config, "max_position_embeddings", None)
        return TargetLimits(int(self.config.vocab_size), None if context is None else int(context))


def open_target(model: str) -> TargetFiles:
    """Config, tokenizer and end-of-sequence ids of a target.

    Raises CaptureError for a head or a trace, and when Transformers cannot read them.
    """
    refuse_other(as_path(model).expanduser())
    try:
        from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
    except ImportError as error:
        raise CaptureError(
            f"capture --model runs the target in Transformers, which is not installed: {_INSTALL}"
        ) from error
    folder = resolve_target(model)
    name = folder.resolve().name if os.path.isdir(Path(model).expanduser()) else model
    check_folder(folder)
    with TransformersCalls(folder):  # never its own code, not even after a question
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if _has_tokenizer(folder) else None
        text_config = config.get_text_config()
        if not isinstance(text_config, PretrainedConfig):
            raise _mend(f"{folder} states the text_config {show(text_config)}, an object was expected")
    return TargetFiles(name, folder, text_config, tokenizer, _eos_ids(folder, config))


def open_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a target's folder. Raises CaptureError without Transformers, or where there is none."""
    if not _has_tokenizer(folder):
        raise CaptureError(f"{folder} holds no tokenizer: name the target's folder with --target")
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerBase
    except ImportError as error:
        raise CaptureError(f"the tokenizer needs transformers, which is not installed: {_INSTALL}") from error
    check_folder(folder)
    with TransformersCalls(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def _mend(said: str) -> CaptureError:
    return CaptureError(f"{said}: mend or remove it")


def _eos_ids(folder: Path, config: "PretrainedConfig") -> frozenset[int]:
    """End-of-sequence ids: generation_config.json where it names any, else config.json, as engines read them."""
    named: Any = None
    path = folder / "generation_config.json"
    if os.path.lexists(path):
        document = read_json(path, _MOST_JSON, _mend, follow=True)
        named = Fields(str(path), document, _mend).values.get("eos_token_id")
    if named is None:
        named = getattr(config.get_text_config(), "eos_token_id", None)
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(is_integer(one, 0, MAX_VOCAB) for one in ids):
        raise _mend(f"{folder} states the eos_token_id {show(named)}, a token id or a list of them was expected")
    return frozenset(ids)
