"""What is no file, where a command looks for one: refused at once, in one sentence, by every command that reads it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.check_cases import Case, write_case
from support.heads import INVENTED, write_head
from support.hostile import KINDS, put, run
from support.trace_maker import make_requests, write_trace

Made = dict[str, Path]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A head, a target, a trace, its rounds and prompts; every command below works on them."""
    folder = tmp_path_factory.mktemp("sound")
    draft, target = write_case(folder, Case())
    head, trace = write_head(folder / "head", INVENTED), write_trace(folder / "trace", [make_requests(3)])
    (folder / "prompts.jsonl").write_text('{"input_ids": [1, 2]}\n')
    assert run("simulate", trace, "--draft", head, "-o", folder / "r.parquet").code == 0
    return {"draft": draft, "target": target, "head": head, "trace": trace, "r.parquet": folder / "r.parquet",
            "prompts.jsonl": folder / "prompts.jsonl"}  # fmt: skip


# The file that is replaced, and the commands that read it.
READ: dict[str, Callable[[Made], list[list[Any]]]] = {
    "draft/config.json": lambda at: [["check", "--draft", at["draft"], "--target", at["target"]]],
    "draft/model.safetensors": lambda at: [["check", "--draft", at["draft"], "--target", at["target"]]],
    "draft/model.safetensors.index.json": lambda at: [["check", "--draft", at["draft"], "--target", at["target"]]],
    "draft/pytorch_model.bin": lambda at: [["check", "--draft", at["draft"], "--target", at["target"]]],
    "target/config.json": lambda at: [
        ["check", "--draft", at["draft"], "--target", at["target"]],
        ["capture", "--model", at["target"], "--prompts", at["prompts.jsonl"], "-o", at["target"] / "out"],
    ],
    "head/config.json": lambda at: [["inspect", at["head"]], ["simulate", at["trace"], "--draft", at["head"]]],
    "head/model.safetensors": lambda at: [["inspect", at["head"]], ["simulate", at["trace"], "--draft", at["head"]]],
    "head/model.safetensors.index.json": lambda at: [["inspect", at["head"]]],
    "head/pytorch_model.bin": lambda at: [["inspect", at["head"]]],
    "trace/trace.json": lambda at: [["inspect", at["trace"]], ["simulate", at["trace"], "--draft", at["head"]]],
    "trace/requests.parquet": lambda at: [["inspect", at["trace"]]],
    "trace/shard-00000.safetensors": lambda at: [["inspect", at["trace"]]],
    "trace/target.safetensors": lambda at: [["simulate", at["trace"], "--draft", at["head"]]],
    "r.parquet": lambda at: [["report", at["r.parquet"]], ["compare", at["r.parquet"]]],
    "prompts.jsonl": lambda at: [
        ["capture", "--server", "127.0.0.1:9", "--prompts", at["prompts.jsonl"], "-o", at["trace"].with_name("out")]
    ],
    "observed": lambda at: [
        ["diagnose", at["trace"], "--draft", at["head"], "--observed", at["trace"].with_name("observed")]
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", READ)
def test_what_is_no_file_is_refused(sound: Made, tmp_path: Path, file: str, kind: str) -> None:
    at = {name: tmp_path / name for name in sound}
    for name in {file.partition("/")[0], *at}:
        if name in sound:
            (shutil.copytree if sound[name].is_dir() else shutil.copy)(sound[name], at[name])  # type: ignore[operator]
    if file.endswith((".index.json", ".bin")):
        (tmp_path / file).with_name("model.safetensors").unlink()
    put(tmp_path / file, kind)
    for arguments in READ[file](at):
        refusal = run(*arguments).refusal
        assert refusal.startswith("replay: ") and "output cannot be written" not in refusal


@pytest.mark.parametrize("kind", ["pipe", "endless device", "terabyte of nothing"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json", "extra.json"])
def test_a_target_for_transformers_is_looked_at_first(sound: Made, tmp_path: Path, name: str, kind: str) -> None:
    target = tmp_path / "target"
    shutil.copytree(sound["target"], target)
    put(target / name, kind)
    arguments = ["capture", "--model", target, "--prompts", sound["prompts.jsonl"], "-o", tmp_path / "out"]
    assert str(target / name) in run(*arguments).refusal


def test_weights_that_may_not_be_read_are_said_to_be(
    sound: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root reads everything, so that the refusal of the system is made here."""
    shutil.copytree(sound["head"], tmp_path / "head")
    opened = os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith("model.safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    for arguments in (["inspect", tmp_path / "head"], ["simulate", sound["trace"], "--draft", tmp_path / "head"]):
        assert "model.safetensors: Permission denied" in run(*arguments).refusal


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pipe", "is not a plain file"), ("link to nothing", "is a link to nothing"),
        ("byte order mark", "begins with a byte order mark; save it as UTF-8 without one"),
        ("UTF-16", "it is UTF-16; save it as UTF-8"), ("zero bytes", "it holds a zero byte, first at byte 0"),
        ("nested lists", "nests deeper than 64 levels"), ("a very long number", "a number has 10000 digits"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_config_is_said_plainly(sound: Made, tmp_path: Path, kind: str, said: str) -> None:
    shutil.copytree(sound["head"], tmp_path / "head")
    put(tmp_path / "head" / "config.json", kind)
    assert said in run("inspect", tmp_path / "head").refusal
