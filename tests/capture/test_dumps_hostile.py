"""Dump files that are broken, mislabelled or made to harm: one sentence each, and nothing in them runs."""

import gzip
import io
import os
import pickle
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.dump_cases import HIDDEN, TAPS, imported, make_target
from torch import Tensor

from replay.errors import CaptureError

S = 12


class Harmful:
    """Unpickled, it makes a file."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def sound() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.arange(S), "loss_mask": torch.ones(S), "hidden_state": torch.ones(1, S, HIDDEN),
            "aux_hidden_state": torch.randn(1, S, 3 * HIDDEN, generator=generator)}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "tiny")


def refused(path: Path, target: Path, **more: Any) -> str:
    """The one sentence; nothing is left beside the dump."""
    before = sorted(one.name for one in path.parent.iterdir())
    with pytest.raises(CaptureError) as refusal:
        imported(path, path.parent / "trace", target, **{"taps": TAPS, **more})
    assert sorted(one.name for one in path.parent.iterdir()) == before
    said = str(refusal.value)
    assert "\n" not in said and len(said) < 600
    return said


@pytest.mark.parametrize("ending", [".ckpt", ".ckpt.gz", ".pt"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_in_a_pickle_runs(tmp_path: Path, target: Path, ending: str, protocol: int) -> None:
    made = tmp_path / "made"
    buffer = io.BytesIO()
    torch.save({**sound(), "more": Harmful(f"touch {made}")}, buffer, pickle_protocol=protocol)
    path = tmp_path / f"data{ending}"
    path.write_bytes(gzip.compress(buffer.getvalue()) if ending.endswith(".gz") else buffer.getvalue())
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert made.exists()  # so it does harm where it is unpickled
    made.unlink()
    assert "nothing in it was run" in refused(path, target)
    assert not made.exists()


def test_a_bare_pickle_is_not_read(tmp_path: Path, target: Path) -> None:
    made = tmp_path / "made"
    for legacy in (False, True):
        path = tmp_path / f"data{legacy}.ckpt"
        if legacy:
            torch.save({"x": Harmful(f"touch {made}")}, path, _use_new_zipfile_serialization=False)
        else:
            path.write_bytes(pickle.dumps({"x": Harmful(f"touch {made}")}))
        assert "no file that torch.save wrote" in refused(path, target)
        assert not made.exists()


def saved(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


def test_a_tensor_larger_than_its_file_is_not_made(tmp_path: Path, target: Path) -> None:
    body = sound()
    body["aux_hidden_state"] = torch.zeros(1).expand(1, S, 1 << 40)
    assert "no plain one" in refused(saved(tmp_path / "data.ckpt", body), target)
    body["aux_hidden_state"] = torch.zeros(1, S, 3 * HIDDEN).to_sparse()
    assert "no plain one" in refused(saved(tmp_path / "other.ckpt", body), target)


def test_an_archive_that_grows_is_not_read(tmp_path: Path, target: Path) -> None:
    plain, packed = saved(tmp_path / "data.pt", sound()), tmp_path / "packed.ckpt"
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    plain.unlink()
    assert "packed in a way" in refused(packed, target)


def test_a_gz_that_grows_is_not_read(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.capture.dumps.pickled.MOST_UNPACKED", 1 << 20)
    path = tmp_path / "data.ckpt.gz"
    path.write_bytes(gzip.compress(bytes(1 << 21)))
    assert "unpacks to more than" in refused(path, target)
    path.write_bytes(gzip.compress(bytes(range(256)) * 100)[:-40])
    assert "cut short" in refused(path, target)
    path.write_bytes(b"\x1f\x8b" + bytes(40))
    assert "cut short" in refused(path, target)


def without(name: str) -> Callable[[], dict[str, Any]]:
    return lambda: {key: value for key, value in sound().items() if key != name}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (without("aux_hidden_state"), "lacks aux_hidden_state"),
        (lambda: sound() | {"input_ids": torch.arange(S - 1)}, "holds 11 tokens and 12 rows"),
        (lambda: sound() | {"input_ids": torch.ones(S)}, "must be whole numbers"),
        (lambda: sound() | {"input_ids": torch.arange(S) + 90}, "token ids from 90 to 101"),
        (lambda: sound() | {"input_ids": torch.arange(2 * S).view(2, S)}, "must be those of one text"),
        (lambda: sound() | {"loss_mask": torch.full((S,), 2)}, "values other than 0 and 1"),
        (lambda: sound() | {"loss_mask": torch.ones(S + 1)}, r"shape \[13\], not \[12\]"),
        (lambda: sound() | {"loss_mask": torch.zeros(S)}, "are empty"),
        (lambda: sound() | {"hidden_state": torch.ones(1, S, 16)}, "last states of 16"),
        (lambda: sound() | {"hidden_state": torch.ones(1, S, HIDDEN).long()}, "must be rows of numbers"),
        (lambda: sound() | {"aux_hidden_state": torch.full((1, S, 3 * HIDDEN), torch.nan)}, "NaN or Inf"),
        (lambda: [sound()], "as TensorRT-LLM dumps do"),
        (lambda: 3, "must be tensors by name"),
        (lambda: {"target_hiddens": torch.ones(1), **without("hidden_state")()}, "a dump of AngelSlim"),
        (lambda: {"input_ids": torch.arange(S), "aux_hidden_states": torch.ones(S, 96),
                  "hidden_states": torch.ones(S, 32)}, "type --format modelopt"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, target: Path, body: Callable[[], Any], said: str
) -> None:
    assert re.search(said, refused(saved(tmp_path / "data.ckpt", body()), target))


def test_safetensors_that_are_none_are_refused(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    states, ids = torch.randn(S, 4, HIDDEN), torch.arange(S)
    save_file({"hidden_states": states, "token_ids": ids}, path)
    path.write_bytes(path.read_bytes()[:-8])
    assert "truncated" in refused(path, target)
    save_file({"hidden_states": states}, path)
    assert "lacks token_ids" in refused(path, target)
    save_file({"hidden_states": states[:, 0].contiguous(), "token_ids": ids}, path)
    assert "must be [tokens, 2 layers or more, hidden size]" in refused(path, target)
    eighths = states.to(torch.float8_e4m3fn)
    save_file({"hidden_states": eighths, "token_ids": ids}, path)
    assert "no hidden_states_scales" in refused(path, target)
    save_file({"hidden_states": eighths, "token_ids": ids, "hidden_states_scales": torch.ones(S)}, path)
    assert "must be float32 [12, 1, 1]" in refused(path, target)
    save_file({"hidden_states": states, "token_ids": ids}, path)
    masks = tmp_path / "masks.jsonl"
    masks.write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n')
    assert "has tokens that no row of" in refused(path, target, loss_masks=masks)
    masks.write_text('{"input_ids": [1, 2], "loss_mask": [0]}\n')
    assert "has 2 input_ids and a loss_mask of 1" in refused(path, target, loss_masks=masks)
    masks.write_text("[1]\n")
    assert "no JSON object" in refused(path, target, loss_masks=masks)


def test_files_of_other_kinds_are_refused_by_name(tmp_path: Path, target: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    assert "holds no dump that replay reads" in refused(folder, target)
    (folder / "manifest.json").write_text("{}")
    assert "NeMo Automodel" in refused(folder, target)
    (folder / "samples.idx").write_bytes(b"")
    assert "lacks the field version" in refused(folder, target)
    (folder / "manifest.json").write_text('{"version": 1}')
    assert "is of version 1, replay reads version 2" in refused(folder, target)
    assert "is not there" in refused(tmp_path / "none.ckpt", target)
    (tmp_path / "x.bin").write_bytes(b"")
    assert "ends in none of" in refused(tmp_path / "x.bin", target)
    os.mkfifo(tmp_path / "pipe.ckpt")
    assert "not a plain file" in refused(tmp_path / "pipe.ckpt", target)
    with pytest.raises(CaptureError, match="several forms"):
        imported([saved(tmp_path / "a.ckpt", {}), saved(tmp_path / "b.pt", {})], tmp_path / "trace", target, taps=TAPS)


def test_a_killed_import_leaves_no_trace(tmp_path: Path, target: Path) -> None:
    """Not even one that looks unfinished: its name is free for the next try."""
    for number in range(400):
        saved(tmp_path / f"data_{number:03}.ckpt", sound() | {"input_ids": torch.arange(S) + number % 80})
    typed = [sys.executable, "-c", "from replay.cli.app import main; main()", "import", str(tmp_path), "-o",
             str(tmp_path / "trace"), "--target", str(target), "--taps", TAPS]  # fmt: skip
    process = subprocess.Popen(typed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".trace-*/trace/trace.json")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "trace").exists()
