"""The bytes of tokens against what the same tokenizer decodes: byte-level and SentencePiece vocabularies."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from replay.capture.token_bytes import read_spelling
from replay.errors import CaptureError

TEXT = "Grüße, 日本語 😀\n\tdone <s> &"


def write_target(folder: Path, tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["one done, all done"] * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "d", "o", "n", "e"]
    tokenizer = Tokenizer(
        models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path: Path, make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    spelling = read_spelling(write_target(tmp_path / "target", tokenizer))
    ids = tokenizer.encode(TEXT).ids
    assert any(b"\x9f" in spelling(one) and len(spelling(one)) < 4 for one in ids)  # the emoji lies across tokens
    assert b"".join(map(spelling, ids)).decode() == TEXT
    assert spelling(100_000) == b""


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="holds no tokenizer: name the target's folder with --target"):
        read_spelling(tmp_path)
