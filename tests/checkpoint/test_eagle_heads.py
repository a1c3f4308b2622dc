"""EAGLE-1 and EAGLE-2 heads on disk: told from EAGLE-3 by their tensors, read strictly, refused where both could be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.eagle_heads import eagle_checkpoint, eagle_config
from support.heads import SPECULATORS, random_tensors, tiny_config, write_head
from support.trace_maker import make_requests, write_trace

import replay
from replay.checkpoint.config import parse_config
from replay.cli.app import cli
from replay.engines.behaviour import HEALTHY
from replay.engines.precision import PLAIN
from replay.engines.profiles import ENGINES
from replay.engines.wiring import Wiring
from replay.errors import CheckpointError
from replay.faults.change import Subject
from replay.faults.table import apply_faults, parse_faults
from replay.head.model import Head, TargetTables

SHARED = {"architectures": ["LlamaForCausalLM"]}
ATTENTION = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def test_it_has_the_tensors_of_its_class() -> None:
    table = eagle_checkpoint().tensors
    assert set(table) == ATTENTION | MLP | {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"}
    assert table["fc.weight"].shape == (32, 64) and table["layers.0.self_attn.q_proj.weight"].shape == (48, 32)
    assert "layers.1.input_layernorm.weight" in eagle_checkpoint(num_hidden_layers=2).tensors
    assert "fc.bias" not in eagle_checkpoint(bias=False).tensors


def test_qkv_bias_is_of_q_k_and_v_alone() -> None:
    """SafeAILab/EAGLE eagle/model/cnets1.py ``LlamaAttention``: its o_proj never has a bias."""
    biases = {name for name in eagle_checkpoint(qkv_bias=True).tensors if name.endswith("_proj.bias")}
    assert biases == {f"layers.0.self_attn.{name}_proj.bias" for name in "qkv"}
    both = eagle_checkpoint(qkv_bias=True, attention_bias=True).tensors
    assert "layers.0.self_attn.o_proj.bias" in both
    with pytest.raises(CheckpointError, match=r"o_proj\.bias"):
        replay.head_from_tensors(eagle_config(qkv_bias=True), both)


@pytest.mark.parametrize(
    ("engine", "changes", "notes"),
    [
        ("sglang", {}, []),
        ("sglang", {"attention_bias": True}, []),
        ("sglang", {"qkv_bias": True}, ["sglang builds q, k and v without the bias"]),
        ("sglang", {"bias": True}, ["sglang builds q, k, v and o_proj with biases that this head lacks"]),
        ("sglang", {"bias": True, "qkv_bias": True}, ["sglang builds o_proj with biases that this head lacks"]),
        ("eagle", {"bias": True, "qkv_bias": True}, []),
    ],
)
def test_what_sglang_does_of_biases_is_noted(engine: str, changes: dict[str, Any], notes: list[str]) -> None:
    head = Head(eagle_checkpoint(**changes), TargetTables(torch.ones(96, 32), torch.ones(96, 32)),
                profile=ENGINES[engine])  # fmt: skip
    assert [note.startswith(start) for note, start in zip(head.notes, notes, strict=True)] == [True] * len(notes)


def test_tensors_tell_the_families_apart(tmp_path: Path) -> None:
    tensors = dict(eagle_checkpoint().tensors)
    tensors["embed_tokens.weight"] = torch.randn(96, 32)
    first = replay.load_head(write_head(tmp_path / "first", eagle_config(**SHARED), tensors)).config
    third = replay.load_head(write_head(tmp_path / "third", tiny_config(**SHARED))).config
    assert (first.family, third.family) == ("eagle", "eagle3")
    assert not first.use_aux_hidden_state and first.features_width == 32 and first.lm_head == "target"
    in_memory = replay.head_from_tensors(eagle_config(**SHARED), tensors)
    assert in_memory.config == first


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle"])
@pytest.mark.parametrize("name", ["layers.0.input_layernorm.weight", "norm.weight", "d2t"])
def test_tensors_of_both_are_refused(architecture: str, name: str) -> None:
    tensors = {**eagle_checkpoint().tensors, name: torch.zeros(32, dtype=torch.int64 if name == "d2t" else None)}
    with pytest.raises(CheckpointError, match=rf"the head has {name.replace('.', '[.]')} of EAGLE-3"):
        replay.head_from_tensors(eagle_config(architectures=[architecture]), tensors)


def test_a_third_kind_under_the_name_of_the_first_is_refused() -> None:
    tensors = random_tensors(parse_config(tiny_config()))
    with pytest.raises(CheckpointError, match="LlamaForCausalLMEagle, an EAGLE-1 or EAGLE-2 head, and the head has"):
        replay.head_from_tensors(tiny_config(architectures=["LlamaForCausalLMEagle"]), tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 40}, "draft_vocab_size is 40, 96"),
        ({"hot_vocab_size": 40}, "hot_vocab_size is 40, 96"),
        ({"target_hidden_size": 40}, "target_hidden_size is 40, 32"),
    ],
)
def test_what_such_a_head_does_not_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(eagle_config(**changes))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wiring.norm=residual", "no hidden_norm"),
        ("wiring.norm=twice", "no hidden_norm"),
        ("wiring.norm=skip:norm", "no norm to leave out"),
        ("wiring.norm=skip:input_layernorm", "no input_layernorm to leave out"),
        ("wiring.recycle-norm", "no norm behind its layers"),
        ("vocab.d2t", "without d2t"),
        ("weights.overwritten=lm_head", "no lm_head of its own"),
    ],
)
def test_faults_without_a_meaning_are_refused_by_name(fault: str, message: str) -> None:
    subject = Subject(Wiring(("final",)), eagle_checkpoint(), HEALTHY, 8, PLAIN)
    with pytest.raises(CheckpointError, match=message):
        apply_faults(subject, parse_faults(fault))


def test_inspect_names_the_family_and_check_says_what_it_has_rules_for(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", eagle_config(**SHARED), eagle_checkpoint().tensors)
    said = CliRunner().invoke(cli, ["inspect", str(folder)])
    assert said.exit_code == 0 and "EAGLE-1 or EAGLE-2" in said.output
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 96}'
    )
    said = CliRunner().invoke(cli, ["check", "--draft", str(folder), "--target", str(tmp_path / "target")])
    assert said.exit_code != 0 and "check has rules for EAGLE-3 heads" in " ".join(said.output.split())


def test_simulate_feeds_it_the_final_state(tmp_path: Path) -> None:
    """And a head of speculators what its ids are as R indices."""
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64}
    layer = {**SPECULATORS["transformer_layer_config"], **small}
    nested = {
        **SPECULATORS,
        "draft_vocab_size": 48,
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [2, 0],
    }
    trace = write_trace(tmp_path / "trace", [make_requests(3)])
    for name, config, wiring in (("first", eagle_config(**small), "final"), ("nested", nested, "embed,2")):
        folder = write_head(tmp_path / name, config)
        said = CliRunner().invoke(cli, ["simulate", str(trace), "--draft", str(folder), "--json"])
        assert said.exit_code == 0, said.output
        assert json.loads(said.stdout)["variants"][0]["wiring"] == wiring.split(",")
