"""Foreign bytes in a head's or a target's folder are refused in one sentence."""

import json
from pathlib import Path

import pytest
from support.check_cases import (
    Case,
    ids,
    outcome,
    target_config,
    write_case,
)

from replay.check.facts import read_facts
from replay.check.run import check
from replay.errors import CheckpointError


def _break(name: str, draft: Path, target: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    weights = draft / "model.safetensors"
    data = weights.read_bytes()
    match name:
        case "no folder":
            (draft / "config.json").unlink()
        case "no weights":
            weights.unlink()
        case "no JSON":
            (draft / "config.json").write_text("{")
        case "a list":
            (draft / "config.json").write_text("[1]")
        case "NaN":
            (draft / "config.json").write_text('{"hidden_size": NaN}')
        case "deep":
            (draft / "config.json").write_text('{"a":' * 100_000)
        case "text for a number":
            (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": "1"}))
        case "number for a flag":
            (draft / "config.json").write_text(json.dumps(config | {"norm_output": 1}))
        case "text ids":
            (draft / "config.json").write_text(json.dumps(config | ids(*"abc")))  # type: ignore[arg-type]
        case "eagle_config is a list":
            (draft / "config.json").write_text(json.dumps(config | {"eagle_config": []}))
        case "negative size":
            (draft / "config.json").write_text(json.dumps(config | {"hidden_size": -32}))
        case "architectures is a word":
            (draft / "config.json").write_text(json.dumps(config | {"architectures": "Llama"}))
        case "byte order mark":
            (draft / "config.json").write_text("\ufeff" + json.dumps(config))
        case "byte order mark of the target":
            (target / "config.json").write_text("\ufeff" + json.dumps(target_config()))
        case "UTF-16":
            (draft / "config.json").write_text(json.dumps(config), encoding="utf-16")
        case "UTF-16 of the target":
            (target / "config.json").write_text(json.dumps(target_config()), encoding="utf-16")
        case "quantisation is a word":
            (draft / "config.json").write_text(json.dumps(config | {"quantization_config": "x"}))
        case "length in quotes":
            (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": "256"}))
        case "scaling is a word":
            (draft / "config.json").write_text(json.dumps(config | {"rope_scaling": "x"}))
        case "truncated":
            weights.write_bytes(data[:-10])
        case "header beyond the file":
            weights.write_bytes((1 << 62).to_bytes(8, "little") + data[8:])
        case "empty":
            weights.write_bytes(b"")
        case "no weight_map":
            weights.unlink()
            (draft / "model.safetensors.index.json").write_text("{}")
        case "shard out of the folder":
            weights.unlink()
            index = {"weight_map": {"fc.weight": "../../etc/passwd"}}
            (draft / "model.safetensors.index.json").write_text(json.dumps(index))
        case "shard that is not there":
            weights.unlink()
            index = {"weight_map": {"fc.weight": "model-1.safetensors"}}
            (draft / "model.safetensors.index.json").write_text(json.dumps(index))
        case "pickle that runs code":
            weights.unlink()
            (draft / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        case "target without layers":
            (target / "config.json").write_text(json.dumps(target_config(num_hidden_layers=None, model_type=None)))


@pytest.mark.parametrize(
    "name",
    [
        "no folder", "no weights", "no JSON", "a list", "NaN", "deep", "text for a number", "number for a flag",
        "text ids", "eagle_config is a list", "negative size", "architectures is a word", "byte order mark",
        "byte order mark of the target", "UTF-16", "UTF-16 of the target", "quantisation is a word",
        "length in quotes", "scaling is a word", "truncated",
        "header beyond the file", "empty", "no weight_map", "shard out of the folder", "shard that is not there",
        "pickle that runs code", "target without layers",
    ],
)  # fmt: skip
def test_foreign_bytes_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    draft, target = write_case(tmp_path, Case())
    _break(name, draft, target)
    with pytest.raises(CheckpointError) as refusal:
        check(read_facts(draft, target))
    assert "\n" not in str(refusal.value)


def test_a_config_that_asks_for_millions_of_layers_is_answered(tmp_path: Path) -> None:
    """Nothing counts to a number that a foreign file names: this would fill the memory."""
    found = outcome(tmp_path, Case({"num_hidden_layers": 10**9})).findings
    assert [finding.fault for finding in found] == ["weights.missing"]
