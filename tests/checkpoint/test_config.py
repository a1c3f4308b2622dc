"""Configs of draft heads: spellings, defaults, and what no server runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_parts import ROPES, Tensors, assert_same, parts, write_tiny
from support.heads import (
    DEEPSEEK_YARN,
    LATENT,
    tiny_config,
)

import replay
from replay.checkpoint.checkpoint import check_checkpoint, read_checkpoint
from replay.checkpoint.config import parse_config
from replay.errors import CheckpointError


def test_tensors_in_memory_are_checked_as_those_on_disk() -> None:
    _, tensors = parts()
    assert replay.head_from_tensors(tiny_config(), tensors).name == "in-memory head"
    del tensors["fc.weight"]
    with pytest.raises(CheckpointError, match=r"draft head step 5 lacks fc.weight"):
        replay.head_from_tensors(tiny_config(), tensors, name="step 5")


def test_what_a_config_leaves_out_is_what_sglang_takes() -> None:
    """sglang 0.5.23 models/llama_eagle3.py over transformers' LlamaConfig."""
    bare = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "draft_vocab_size")
    config = parse_config({key: tiny_config()[key] for key in bare})
    assert (config.num_kv_heads, config.head_dim, config.num_layers, config.num_taps) == (4, 8, 1, 3)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.target_hidden_size) == (1e-6, 2048, 32)
    assert (config.rope.theta, config.rope.type) == (10000.0, "default")
    flags = (config.fc_bias, config.attention_bias, config.mlp_bias, config.norm_before_fc, config.fc_norm)
    assert not any((*flags, config.norm_output)) and config.layer_ids is None


@pytest.mark.parametrize("spelling", [{"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}}])
def test_norm_before_fc_may_stand_in_both_places(spelling: dict[str, Any]) -> None:
    assert parse_config(tiny_config(**spelling)).norm_before_fc


def test_other_spellings_of_flags() -> None:
    assert parse_config(tiny_config(use_aux_norm=True)).fc_norm
    assert parse_config(tiny_config(qkv_bias=True)).attention_bias
    assert parse_config(tiny_config(torch_dtype="bfloat16")).dtype == "bfloat16"
    assert parse_config(tiny_config(dtype="float16", torch_dtype="bfloat16")).dtype == "float16"


@pytest.mark.parametrize("kind", ROPES)
def test_both_spellings_of_rope_are_one_rope(kind: str) -> None:
    old_type = {"type" if key == "rope_type" else key: value for key, value in ROPES[kind].items()}
    new = parse_config(tiny_config(rope_theta=None, rope_parameters={"rope_theta": 5e5, **ROPES[kind]})).rope
    for scaling in (ROPES[kind], old_type):
        assert parse_config(tiny_config(rope_theta=5e5, rope_scaling=scaling)).rope == new
    assert new.type == kind and new.theta == 5e5
    plain = parse_config(tiny_config(rope_theta=5e5)).rope
    assert (new == plain) == (kind == "default")


def test_partial_rotary_factor_counts_at_the_top_level_alone() -> None:
    """Seen in SGLang 0.5.23 with the Transformers 5.19 that it asks for: rotary_dim 6 and 12 of 12."""
    outer = parse_config(tiny_config(partial_rotary_factor=0.5))
    inner = parse_config(tiny_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}))
    assert (outer.rotary_dim, inner.rotary_dim) == (6, 12)


def test_rope_scaling_takes_the_place_of_rope_parameters() -> None:
    """... with their theta; tests/check/test_engine_agrees.py holds SGLang to it."""
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    both = parse_config(tiny_config(rope_theta=None, rope_scaling=ROPES["linear"], rope_parameters=parameters)).rope
    assert (both.type, both.theta) == ("linear", 10000.0)
    outer = parse_config(tiny_config(rope_theta=7e4, rope_parameters={"rope_type": "default"})).rope
    assert outer.theta == 7e4


def test_the_original_length_is_filled_in() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0}
    assert parse_config(tiny_config(rope_scaling=rope)).rope.original_max_position == 256
    assert parse_config(tiny_config(rope_scaling=rope | {"original_max_position_embeddings": 64},
                                    original_max_position_embeddings=32)).rope.original_max_position == 32  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config has no hidden_size, an integer from 1 to 2147483647 was expected; add it"),
        ({"hidden_size": 0}, "hidden_size is 0, an integer from 1 to"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0, an integer"),
        ({"hidden_size": "32"}, "hidden_size is '32', an integer"),
        ({"hidden_size": True}, "hidden_size is True, an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, an integer from 1 to 256 was expected"),
        ({"num_aux_hidden_states": 10**9}, "num_aux_hidden_states is 1000000000, an integer from 1 to 256"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, a positive number was expected"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, a positive number"),
        ({"rope_theta": 10**400}, r"rope_theta is 10*\.\.\., a positive number"),
        ({"fc_norm": "true"}, "fc_norm is 'true', true or false was expected"),
        ({"bias": 1}, "bias is 1, true or false"),
        ({"eagle_config": []}, r"eagle_config is \[\], an object was expected"),
        ({"eagle_config": {"norm_before_fc": 1}}, "eagle_config: norm_before_fc is 1, true or false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, r"layer_ids is \[\], a list of layer ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "layer_ids is 3, a list of layer ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "2"]}}, r"layer_ids is \[1, '2'\], a list"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True]}}, r"layer_ids is \[True\], a list"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architecture \['Qwen3ForCausalLM'\], replay reads heads of"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "architecture 'LlamaForCausalLMEagle3', replay reads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', replay computes silu only"),
        ({"draft_vocab_size": 97}, "draft_vocab_size 97 is above vocab_size 96"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true with draft_vocab_size 40 of 96; a server would"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3 key-value heads"),
        ({"head_dim": 7}, "7 of 7 features per attention head would be rotated, an even number from 2 to head_dim"),
        ({"partial_rotary_factor": 2.0}, "24 of 12 features per attention head would be rotated"),
        ({"dtype": 16}, "dtype is 16, a string was expected"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style is false, replay computes the neox layout only"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', an object was expected"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope', replay computes default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\], replay computes"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor, a positive number was expected; add it"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0, a positive number"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
         "rope_parameters has no factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64}},
         "rope_parameters has no low_freq_factor"),
        ({"rope_parameters": {**ROPES["yarn"], "truncate": 0}}, "rope_parameters: truncate is 0, true or false"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_names_the_field_and_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(tiny_config(**changes))


def test_a_latent_head_has_the_tensors_of_its_class() -> None:
    """Shapes worked by hand from the class: 4 heads of 10 + 8 and 6, ranks 20 and 24, 32 wide."""
    _, tensors = parts(**LATENT)
    attention = {name: tuple(tensors[name].shape) for name in tensors if ".self_attn." in name}
    short = {name.removeprefix("layers.0.self_attn.").removesuffix(".weight"): attention[name] for name in attention}
    assert short == {
        "q_a_proj": (20, 64), "q_a_layernorm": (20,), "q_b_proj": (72, 20), "kv_a_proj_with_mqa": (32, 64),
        "kv_a_layernorm": (24,), "kv_b_proj": (64, 24), "o_proj": (32, 24),
    }  # fmt: skip


def test_a_latent_head_is_read_in_both_of_its_spellings(tmp_path: Path) -> None:
    _, tensors = parts(**LATENT)
    midlayer = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    for number, spelled in enumerate((tensors, midlayer)):
        folder = write_tiny(tmp_path / str(number), spelled, **LATENT)
        assert_same(read_checkpoint(folder).tensors, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: {f"model.{name}": tensor for name, tensor in found.items()},
         "a server skips every name that begins with model.; export it as fc.weight"),
        (lambda found: found | {"aux_norm_low.weight": torch.ones(32)}, "has aux_norm_low.weight, which its config"),
        (lambda found: {k: v for k, v in found.items() if "kv_a_proj" not in k}, "lacks .*kv_a_proj_with_mqa.weight"),
        (lambda found: found | {"layers.0.self_attn.q_a_proj.bias": torch.ones(20)}, "has .*q_a_proj.bias"),
    ],
)  # fmt: skip
def test_a_tensor_that_a_server_skips_in_a_latent_head_is_refused(
    change: Callable[[Tensors], Tensors], message: str
) -> None:
    config, tensors = parts(**LATENT)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint("h", config, change(tensors))


@pytest.mark.parametrize(
    ("changes", "taps", "layer_ids"),
    [
        ({}, 3, (-1, 0, 2)),
        ({"eagle_config": None}, 3, None),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 2]}, 2, None),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, 3, (-1, 0, 2)),
    ],
    ids=str,
)
def test_top_level_ids_count_taps_and_choose_none(
    changes: dict[str, Any], taps: int, layer_ids: tuple[int, ...] | None
) -> None:
    config, _ = parts(**LATENT | changes)
    assert (config.num_taps, config.layer_ids) == (taps, layer_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "config has no q_lora_rank, an integer"),
        ({"v_head_dim": 0}, "v_head_dim is 0, an integer from 1"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers is 2, 1 \(a latent head has one layer\) was expected"),
        ({"num_hidden_layers": None}, "config has no num_hidden_layers"),
        ({"qk_rope_head_dim": 7}, "7 of 7 features per attention head would be rotated"),
        ({"norm_before_residual": True}, r"norm_before_residual is True, false \(SGLang does not"),
        ({"eagle_config": {"norm_before_fc": True}}, r"eagle_config: norm_before_fc is True, false \(SGLang"),
        ({"num_aux_hidden_states": 4}, r"num_aux_hidden_states is 4, 3 \(SGLang counts"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear', a latent head runs default or yarn"),
        ({"rope_scaling": DEEPSEEK_YARN | {"factor": None}}, "rope_scaling has no factor"),
        (
            {"rope_scaling": DEEPSEEK_YARN | {"extrapolation_factor": 0.5}},
            "extrapolation_factor is 0.5, 1 was expected",
        ),
    ],
    ids=str,
)
def test_a_latent_config_that_no_server_runs_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(tiny_config(**LATENT | changes))
