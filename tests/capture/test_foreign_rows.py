"""Prompt rows as others write them: the first lines of ShareGPT, MT-Bench and OpenAI's own example of a batch file."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from replay.capture.prompts import read_prompts
from replay.errors import PromptError

# anon8231489123/ShareGPT_Vicuna_unfiltered: one array of objects
SHAREGPT: list[dict[str, Any]] = [
    {"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "Summarize"}, {"from": "gpt", "value": "Here"},
                                          {"from": "human", "value": "More"}, {"from": "gpt", "value": "There"}]},
    {"id": "silent", "conversations": [{"from": "gpt", "value": "Hello"}]},
    {"id": "empty", "conversations": []},
    {"conversations": [{"from": "system", "value": "Be short"}, {"from": "human", "value": "Hi"}]},
]  # fmt: skip
# lm-sys/FastChat llm_judge/data/mt_bench/question.jsonl
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite your answer."]}
# SpecForge's own conversations
SPECFORGE = {"id": 5, "conversations": [{"role": "user", "content": "Add"}, {"role": "assistant", "content": "3"}]}
# The Batch page of OpenAI's documentation
BATCH = {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {
    "model": "gpt-4o-mini", "max_tokens": 1000, "messages": [
        {"role": "system", "content": "Be helpful."}, {"role": "user", "content": "Hello world!"}]}}  # fmt: skip


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sharegpt_is_asked_its_first_turns(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT, indent=2))
    prompts = read_prompts(path)
    assert [(row.request_id, row.messages) for row in prompts.rows] == [
        ("QWJhYvA_0", ({"role": "user", "content": "Summarize"},)),
        ("1", ({"role": "system", "content": "Be short"}, {"role": "user", "content": "Hi"})),
    ]
    assert prompts.notes == (
        "1 row with later turns, which are not asked: only the first user turn is (QWJhYvA_0)",
        "2 rows without a user turn, left out (silent, empty)",
    )
    assert [row.line for row in read_prompts(lines(tmp_path / "l", *SHAREGPT)).rows] == [1, 4]


def test_later_turns_of_whoever_refuse_nothing(tmp_path: Path) -> None:
    """As in glaive's rows of tool calls: function_call and observation are no roles that are asked."""
    turns = [("human", "Hi"), ("function_call", "{}"), ("observation", [1]), ("gpt", "Hello"), ("human", "More")]
    row = {"conversations": [{"from": who, "value": what} for who, what in turns]}
    prompts = read_prompts(lines(tmp_path / "tools", row))
    assert [one.messages for one in prompts.rows] == [({"role": "user", "content": "Hi"},)]
    assert prompts.notes[0].startswith("1 row with later turns")
    first = {"conversations": [{"from": "observation", "value": "x"}, {"from": "human", "value": "Hi"}]}
    with pytest.raises(PromptError, match="a turn is said by 'observation'"):
        read_prompts(lines(tmp_path / "first", first))


def test_rows_without_ids_are_numbered_in_one_way(tmp_path: Path) -> None:
    """The first is left out, so that line and number part."""
    rows = [{"conversations": [{"from": "gpt", "value": "Hello"}]}, {"turns": ["a"]}, {"prompt": "b"}, {"turns": ["c"]}]
    assert [row.request_id for row in read_prompts(lines(tmp_path / "rows", *rows)).rows] == ["0", "1", "2"]


def test_turns_batch_files_and_specforge_are_taken(tmp_path: Path) -> None:
    own = {"prompt": "ours", "turns": ["not looked at"], "id": "own"}
    prompts = read_prompts(lines(tmp_path / "mixed", MT_BENCH, SPECFORGE, BATCH, own))
    assert [(row.request_id, row.category, row.prompt) for row in prompts.rows] == [
        ("81", "writing", "Compose a post."), ("5", None, None), ("request-1", None, None), ("own", None, "ours"),
    ]  # fmt: skip
    assert prompts.rows[1].messages == ({"role": "user", "content": "Add"},)
    assert prompts.rows[2].messages == tuple(BATCH["body"]["messages"])  # type: ignore[index]
    assert prompts.notes == (
        "1 row with later turns, which are not asked: only the first user turn is (81)",
        "1 row of a batch file with settings of sampling, not read: the command's options count (request-1)",
    )


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ({"prompt": "as it stands"}, ("as it stands", None, None)),
        ({"prompt": [3, 4]}, (None, None, (3, 4))),
        ({"input": "say"}, ("say", None, None)),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]},
         (None, ({"role": "user", "content": "a\nb"},), None)),
    ],
)  # fmt: skip
def test_bodies_of_a_batch_file(body: dict[str, Any], read: tuple[object, ...], tmp_path: Path) -> None:
    (row,) = read_prompts(lines(tmp_path / "b", {"custom_id": "x", "body": body})).rows
    assert (row.prompt, row.messages, row.input_ids) == read


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"conversations": "Hi"}, "conversations is 'Hi', a list of"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "a turn is said by 'narrator', possible are human"),
        ({"conversations": [{"from": "human", "value": 3}]}, "a turn holds 3, only text can be asked"),
        (
            {"conversations": [{"from": "human", "value": [{"type": "image_url", "image_url": "x"}]}]},
            "only text can be",
        ),
        ({"turns": []}, "turns is [], a list of user turns"),
        ({"turns": [" "]}, "prompt is empty"),
        ({"body": {"model": "m"}}, "the body of a batch row holds no prompt: it has exactly one of messages, prompt"),
        ({"body": {"prompt": ["a", "b"]}}, "prompt of a batch row is ['a', 'b'], one text was expected"),
        ({"body": 3}, "the body of a batch row holds no prompt"),
    ],
)
def test_what_does_not_hold_together_is_refused_with_its_line(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(PromptError) as refused:
        read_prompts(lines(tmp_path / "rows", {"prompt": "good"}, row))
    assert f"{tmp_path / 'rows'} line 2" in str(refused.value) and says in str(refused.value)


def test_ids_that_stand_twice_are_refused_in_every_form(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="line 2: id '81' is taken by line 1"):
        read_prompts(lines(tmp_path / "rows", MT_BENCH, {"prompt": "x", "id": "81"}))


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b'{"prompt": "piped"}\n')

    monkeypatch.setattr(sys, "stdin", Stdin)
    prompts = read_prompts(Path("-"))
    (row,) = prompts.rows
    assert row.prompt == "piped" and prompts.where(row) == "standard input line 1"
