"""A target's files: found or fetched, its config and tokenizer opened, its fingerprint taken; no weights are loaded."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.capture.encode import TargetLimits
from replay.errors import CaptureError
from replay.traces.fields import Fields, read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_INSTALL = "type pip install '.[local]' in a checkout of replay"
_MOST_JSON = 1 << 24  # bytes of a generation_config.json
_SAMPLE = 1 << 16  # bytes of weights read from the middle and the end of each file: two fine-tunes differ there


def fingerprint_target(folder: Path) -> str:
    """SHA-256 over config.json and, of each safetensors file, its name, header and two samples of its weights.

    Raises CaptureError where the folder holds no safetensors file or one that is cut short.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CaptureError(f"{folder} holds no safetensors file: save the target's weights as safetensors")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if size < 8 + length:
                raise CaptureError(f"{path} is cut short ({size} bytes): copy or download it again")
            digest.update(path.name.encode() + b"\0" + file.read(length))
            for start in ((size + 8 + length) // 2, max(8 + length, size - _SAMPLE)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def resolve_target(model: str) -> Path:
    """The local folder of a path or hub id (fetched into the hub's own cache when missing). Raises CaptureError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
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
    """Config, tokenizer and end-of-sequence ids of a target. Raises CaptureError when Transformers cannot read them."""
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ImportError as error:
        raise CaptureError(
            f"capture --model runs the target in Transformers, which is not installed: {_INSTALL}"
        ) from error
    folder = resolve_target(model)
    name = folder.resolve().name if Path(model).expanduser().is_dir() else model
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder) if _has_tokenizer(folder) else None
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise transformers_refusal(folder, error) from error
    return TargetFiles(name, folder, config.get_text_config(), tokenizer, _eos_ids(folder, config))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def transformers_refusal(folder: Path, error: Exception) -> CaptureError:
    reason = " ".join(str(error).split())[:300]
    return CaptureError(f"Transformers cannot load the target in {folder} ({reason}): give --model another checkpoint")


def _mend(said: str) -> CaptureError:
    return CaptureError(f"{said}: mend or remove it")


def _eos_ids(folder: Path, config: "PretrainedConfig") -> frozenset[int]:
    """End-of-sequence ids: generation_config.json where it names any, else config.json, as engines read them."""
    named: Any = None
    path = folder / "generation_config.json"
    if path.is_file():
        document = read_json(path, _MOST_JSON, _mend, follow=True)
        named = Fields(str(path), document, _mend).values.get("eos_token_id")
    if named is None:
        named = getattr(config.get_text_config(), "eos_token_id", None)
    return frozenset() if named is None else frozenset([named] if isinstance(named, int) else named)
