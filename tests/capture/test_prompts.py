"""Prompt files: every row kind is read as written, and every wrong one is refused with its line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from replay.capture.encode import EncodedRequest, TargetLimits, encode_prompts
from replay.capture.prompts import read_prompts
from replay.errors import PromptError


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def encode(path: Path, limits: TargetLimits, max_new_tokens: int = 4) -> list[EncodedRequest]:
    return list(encode_prompts(read_prompts(path), None, limits, raw=False, max_new_tokens=max_new_tokens).requests)


def test_row_kinds_are_read_as_written(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Grüß Gott"}]
    path = write(
        tmp_path,
        {"prompt": " two  spaces ", "category": "a"},
        "",
        {"messages": chat, "id": "chat", "response": "Hallo", "source": "left alone"},
        {"input_ids": [5, 0], "id": None, "output_ids": [7]},
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    prompts = read_prompts(path)
    assert [(row.line, row.request_id, row.category) for row in prompts.rows] == [
        (1, "0", "a"),
        (3, "chat", None),
        (4, "2", None),
    ]
    assert prompts.rows[0].prompt == " two  spaces "
    assert prompts.rows[1].messages == tuple(chat)
    assert prompts.rows[1].response == "Hallo"
    assert (prompts.rows[2].input_ids, prompts.rows[2].output_ids) == ((5, 0), (7,))
    assert prompts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


GOOD = {"prompt": "Hello"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{'prompt': 1}", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('["prompt"]', "is ['prompt']: a row is an object"),
        ({"promt": "x"}, "has none of them (its keys: promt)"),
        ({"prompt": "x", "input_ids": [1]}, "has prompt and input_ids"),
        ({"prompt": "x", "response": "y", "output_ids": [1]}, "has response and output_ids"),
        ({"prompt": 7}, "prompt is 7, it must be a string"),
        ({"prompt": ["x"]}, "prompt is ['x'], it must be a string"),
        ({"prompt": " \n"}, "prompt is empty"),
        ('{"prompt": "\\ud800"}', "half a surrogate pair"),
        ({"prompt": "x", "id": 3}, "id is 3, it must be a string"),
        ({"prompt": "x", "id": ""}, "id is empty"),
        ({"prompt": "x", "id": "i" * 1025}, "the id has 1025 characters"),
        ({"prompt": "x", "category": 1}, "category is 1"),
        ({"prompt": "x", "response": ""}, "response is empty"),
        ({"prompt": "x", "output_ids": []}, "output_ids must be a list of one or more integers"),
        ({"input_ids": [1, True]}, "input_ids must be a list of one or more integers"),
        ({"input_ids": "1 2"}, "input_ids must be a list"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "user"}]}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": ""}]}, "content is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is"),
        ({"prompt": "again", "id": "0"}, "id '0' is taken by line 1"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(tmp_path: Path, row: Any, says: str) -> None:
    path = write(tmp_path, GOOD, row)
    with pytest.raises(PromptError) as refusal:
        read_prompts(path)
    assert f"{path} line 2" in str(refusal.value)
    assert says in str(refusal.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(PromptError, match="line 1 is not valid JSON: it is not UTF-8"):
        read_prompts(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match="holds no rows"):
        read_prompts(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none.jsonl", "cannot open .*No such file"), (tmp_path, "is not a plain file")):
        with pytest.raises(PromptError, match=said):
            read_prompts(path)


def test_ids_and_lengths_are_held_against_the_target(tmp_path: Path) -> None:
    limits = TargetLimits(vocab_size=10, context=6)
    for row, says in [
        ({"input_ids": [1, 10]}, "prompt token id 10 is outside the target's vocabulary, 0 to 9"),
        ({"input_ids": [-1]}, "prompt token id -1 is outside"),
        ({"input_ids": [1], "output_ids": [2, 99]}, "output token id 99 is outside"),
        ({"prompt": "x"}, "the target folder has no tokenizer"),
        ({"input_ids": [1], "response": "x"}, "the target folder has no tokenizer"),
    ]:
        path = write(tmp_path, {"input_ids": [1]}, row)
        with pytest.raises(PromptError) as refusal:
            encode(path, limits)
        assert f"{path} line 2" in str(refusal.value)
        assert says in str(refusal.value)


TOO_LONG = [
    ({"input_ids": [1] * 6}, "the prompt has 6 tokens and the target's context is 6"),
    ({"input_ids": [1] * 4, "output_ids": [2] * 3}, "have 4 + 3 tokens and the target's context is 6"),
]


@pytest.mark.parametrize(("row", "says"), TOO_LONG)
def test_a_row_that_is_too_long_is_left_out_by_name(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    limits = TargetLimits(vocab_size=10, context=6)
    prompts = read_prompts(write(tmp_path, {"input_ids": [1]}, {**row, "id": "long"}, {"input_ids": [2]}))
    encoded = encode_prompts(prompts, None, limits, raw=False, max_new_tokens=4)
    assert [one.request_id for one in encoded.requests] == ["0", "2"]
    assert list(encoded.left_out) == ["long"] and says in encoded.left_out["long"]
    (note,) = encoded.notes()
    assert note.startswith("left out as too long: 1 of 3 prompts (long); ") and "line 2" in note
    with pytest.raises(PromptError, match="line 1"):
        encode(write(tmp_path, row, row), limits)


def test_output_is_cut_to_the_context(tmp_path: Path) -> None:
    path = write(tmp_path, {"input_ids": [1] * 2}, {"input_ids": [1] * 5}, {"input_ids": [1], "output_ids": [2] * 5})
    assert [one.max_new_tokens for one in encode(path, TargetLimits(10, 6))] == [4, 1, 5]
    assert [one.max_new_tokens for one in encode(path, TargetLimits(10, None))] == [4, 4, 5]


def test_chat_template_raw_text_and_messages(tmp_path: Path, target_dir: Path) -> None:
    """Golden text: the ChatML form that SmolLM2's model card states, with the system turn its template adds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    path = write(
        tmp_path,
        {"prompt": "Hi", "response": "Hello<|im_end|>"},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]},
    )
    limits = TargetLimits(len(tokenizer), 8192)
    one, chat = encode_prompts(read_prompts(path), tokenizer, limits, raw=False, max_new_tokens=4).requests
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(one.prompt_ids) == turns.format(system)
    assert tokenizer.decode(chat.prompt_ids) == turns.format("S")
    assert tokenizer.decode(one.forced_ids) == "Hello<|im_end|>"
    raw = encode_prompts(read_prompts(path), tokenizer, limits, raw=True, max_new_tokens=4).requests[0]
    assert tokenizer.decode(raw.prompt_ids) == "Hi"
