"""The bytes that a token stands for, by the tokenizer in a target's folder. A character may lie across tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.capture.target_files import open_tokenizer
from replay.errors import CaptureError
from replay.traces.fields import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Spelling = Callable[[int], bytes]


def read_spelling(folder: Path) -> Spelling:
    """What gives a token id's bytes; an id that the tokenizer lacks has none.

    Raises CaptureError without Transformers, or where the folder holds no tokenizer that it can read.
    """
    tokenizer = open_tokenizer(folder)
    decoders = set(_decoders(tokenizer))
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}

    def spell(token_id: int) -> bytes:
        word = tokenizer.convert_ids_to_tokens(token_id)
        return _bytes(word, decoders, special) if isinstance(word, str) else b""

    return spell


def _bytes(word: str, decoders: set[str], special: set[str]) -> bytes:
    """After the decoders of Hugging Face tokenizers 0.22: ByteLevel, ByteFallback, Metaspace, Replace."""
    if word in special:
        return word.encode()
    if "ByteLevel" in decoders:
        return b"".join(_BYTES.get(letter, letter.encode()) for letter in word)
    if "ByteFallback" in decoders and len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    spaced = {"Metaspace", "Replace"} & decoders
    return (word.replace("\u2581", " ") if spaced else word).encode()


def _decoders(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The kinds of its decoders, those within a sequence included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow one: those of SentencePiece
        return ["ByteFallback", "Metaspace"]
    found: Any = (
        {} if backend.decoder is None else parse_json(backend.decoder.__getstate__(), "its decoder", CaptureError)
    )
    parts: list[dict[str, Any]] = [found, *found.get("decoders", [])]
    return [str(part.get("type")) for part in parts]


def _byte_letters() -> dict[str, bytes]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2 encoder.py ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


_BYTES = _byte_letters()
