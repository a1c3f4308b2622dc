"""Folders of draft heads: shards, indices, pickles and garbage."""

import json
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoint_parts import Tensors, assert_same, parts, write_tiny

import replay
from replay.checkpoint.checkpoint import read_checkpoint
from replay.checkpoint.config_file import read_config
from replay.errors import CheckpointError


def test_a_folder_of_safetensors_is_read(tmp_path: Path) -> None:
    config, tensors = parts()
    checkpoint = replay.load_head(write_tiny(tmp_path / "head", tensors))
    assert checkpoint.name == "head" and checkpoint.config == config
    assert_same(checkpoint.tensors, tensors)


def split(folder: Path, tensors: Tensors) -> Path:
    """Two shards and their index, without model.safetensors."""
    write_tiny(folder, tensors)
    (folder / "model.safetensors").unlink()
    keys = list(tensors)
    shards = {"model-00001-of-00002.safetensors": keys[:5], "model-00002-of-00002.safetensors": keys[5:]}
    for shard, held in shards.items():
        save_file({key: tensors[key] for key in held}, folder / shard)
    index = {"metadata": {}, "weight_map": {key: shard for shard, held in shards.items() for key in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_joined(tmp_path: Path) -> None:
    _, tensors = parts()
    assert_same(read_checkpoint(split(tmp_path, tensors)).tensors, tensors)


def test_a_missing_shard_and_a_tensor_in_two_shards_are_refused(tmp_path: Path) -> None:
    _, tensors = parts()
    split(tmp_path, tensors)
    save_file({key: tensors[key] for key in list(tensors)[4:]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=rf"holds {re.escape(list(tensors)[4])} again after another shard"):
        read_checkpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"cannot open .*model-00001-of-00002.safetensors: No such file .*; copy or"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\x00.safetensors", "x.bin", 5, None],
)
def test_shard_names_cannot_lead_out_of_the_folder(tmp_path: Path, shard: Any) -> None:
    _, tensors = parts()
    save_file(tensors, tmp_path / "outside.safetensors")
    folder = write_tiny(tmp_path / "head", tensors)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"names the shard {re.escape(repr(shard))}, the plain name of a"):
        read_checkpoint(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "[" * 100_000, "\xff"])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    write_tiny(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    with pytest.raises(
        CheckpointError, match=r"model.safetensors.index.json .*[;,] (or )?copy or export the checkpoint again"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_truncated_safetensors_are_refused(tmp_path: Path, cut: int) -> None:
    write_tiny(tmp_path, parts()[1])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model.safetensors.* is truncated.*; copy or export"):
        read_checkpoint(tmp_path)


def with_binary(folder: Path, content: bytes) -> Path:
    write_tiny(folder, {})
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_model_bin_is_read(tmp_path: Path, zipped: bool) -> None:
    _, tensors = parts()
    torch.save(tensors, tmp_path / "saved", _use_new_zipfile_serialization=zipped)
    folder = with_binary(tmp_path / "head", (tmp_path / "saved").read_bytes())
    assert_same(read_checkpoint(folder).tensors, tensors)


class Malice:
    """Unpickling this touches a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("by", ["torch", "pickle"])
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path: Path, by: str) -> None:
    _, tensors = parts()
    mark = tmp_path / "ran"
    document = {**tensors, "fc.weight": Malice(mark)}
    if by == "torch":
        torch.save(document, tmp_path / "saved")
    else:
        (tmp_path / "saved").write_bytes(pickle.dumps(document))
    folder = with_binary(tmp_path / "head", (tmp_path / "saved").read_bytes())
    with pytest.raises(CheckpointError, match=r"is not a plain dictionary of tensors: .*; copy it again") as caught:
        read_checkpoint(folder)
    assert "weights_only" not in str(caught.value)
    assert not mark.exists()
    if by == "torch":  # ... and it was armed
        torch.load(tmp_path / "saved", weights_only=False)
        assert mark.exists()


@pytest.mark.parametrize(
    "document", [[torch.ones(1)], {"state_dict": {"fc.weight": torch.ones(1)}}, {"epoch": 3}, {3: torch.ones(1)}]
)
def test_a_binary_that_is_no_dictionary_of_tensors_is_refused(tmp_path: Path, document: Any) -> None:
    torch.save(document, tmp_path / "saved")
    folder = with_binary(tmp_path / "head", (tmp_path / "saved").read_bytes())
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is not a plain dictionary of tensors; convert it"):
        read_checkpoint(folder)


GARBAGE = {
    "empty": b"",
    "text": b"version https://git-lfs.github.com/spec/v1\n",
    "zip header": b"PK\x03\x04" + bytes(40),
    "pickled list": pickle.dumps([1, 2]),
    "pickle without an end": pickle.dumps({"a": 1})[:-1],
    "old magic number": pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2),
    "opcode without stack": b"\x80\x02\x85.",
    "unknown memo": b"\x80\x02h\x07.",
    "noise": struct.pack("<40I", *(2654435761 * i % 2**32 for i in range(40))),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(tmp_path: Path, name: str) -> None:
    folder = with_binary(tmp_path / "head", GARBAGE[name])
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is not a plain dictionary of tensors"):
        read_checkpoint(folder)


def test_a_folder_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config.json; give the folder of a checkpoint"):
        read_config(tmp_path)
    write_tiny(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights: looked for model.safetensors, model.safetensors.ind"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"config.json is a file; give the folder that holds a checkpoint's"):
        read_checkpoint(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"hidden_size": }'])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json (is not valid JSON|holds .+, a JSON object was expected)"):
        read_config(tmp_path)
