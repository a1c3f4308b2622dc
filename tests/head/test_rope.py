"""Rotary frequencies and factors equal transformers' own (``modeling_rope_utils``), and rotation its Llama's."""

from typing import Any

import pytest
import torch
from support.heads import target_tables, tiny_checkpoint, tiny_config
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from replay.checkpoint.config import parse_config
from replay.head.model import Head, TargetTables
from replay.head.products import Execution
from replay.head.rope import inverse_frequencies, rotate

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "original_max_position_embeddings": 4096}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "default, Qwen3's theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": LLAMA3,
    "llama3, Llama 3.2's factor": LLAMA3 | {"factor": 32.0},
    "llama3, narrow band": LLAMA3 | {"low_freq_factor": 1.5, "high_freq_factor": 1.6},
    "llama3, short": LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn, Kimi's betas and mscales": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                                              "mscale_all_dim": 1.0},
    "yarn, other mscales": YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn, one mscale is none": YARN | {"mscale": 0.707},
    "yarn, factor stated": YARN | {"attention_factor": 0.75},
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, gpt-oss": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                      "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn, no band": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, shrinking": YARN | {"factor": 0.5},
}  # fmt: skip


def transformers_config(rope: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=int(rope.get("factor", 1) * 4096),
        rope_parameters=dict(rope),
    )


def golden(rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    config = transformers_config(rope, head_dim)
    if rope["rope_type"] == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return frequencies, factor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head_dim", [12, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_those_of_transformers(name: str, head_dim: int) -> None:
    config = parse_config(tiny_config(head_dim=head_dim, rope_parameters=ROPES[name]))
    frequencies, factor = golden(ROPES[name], head_dim)
    ours = inverse_frequencies(config.rope, config.rotary_dim)
    torch.testing.assert_close(ours, frequencies, rtol=3e-7, atol=0)
    assert config.rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_the_ropes_are_different_ones() -> None:
    """... so that no test above passes for want of a difference; factors count, as two yarns share frequencies."""
    seen = {(*golden(rope, 64)[0].tolist(), golden(rope, 64)[1]) for rope in ROPES.values()}
    # A lone mscale is ignored, so that rope is the plain yarn.
    assert len(seen) == len(ROPES) - 1
    assert golden(YARN, 64)[1] == golden(ROPES["yarn, one mscale is none"], 64)[1]


def test_part_of_each_head_is_rotated() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    config = parse_config(tiny_config(head_dim=16, rope_parameters=rope, partial_rotary_factor=0.5))
    ours = inverse_frequencies(config.rope, config.rotary_dim)
    assert ours.shape == (4,)
    torch.testing.assert_close(ours, golden(rope, 16)[0], rtol=3e-7, atol=0)
    x_RNH = torch.randn(3, 2, 16)
    cos_RH, sin_RH = torch.zeros(3, 4), torch.ones(3, 4)
    turned = rotate(x_RNH, cos_RH, sin_RH)
    assert torch.equal(turned[..., 8:], x_RNH[..., 8:])
    # A quarter turn of each pair (i, i + 4): the NeoX layout.
    assert torch.equal(turned[..., :4], -x_RNH[..., 4:8]) and torch.equal(turned[..., 4:8], x_RNH[..., :4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["default", "llama3", "yarn, other mscales"])
def test_rotation_equals_that_of_transformers(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, in bf16 and fp16 too, where cos and sin are rounded first; positions up to a long context."""
    checkpoint = tiny_checkpoint(head_dim=64, rope_parameters=ROPES[name])
    head = Head(checkpoint, TargetTables(*target_tables(checkpoint)), execution=Execution(dtype))
    positions_R = torch.tensor([0, 1, 2, 17, 2047, 8192, 100_000])
    x_RNH = torch.randn(len(positions_R), 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotary = LlamaRotaryEmbedding(transformers_config(ROPES[name], 64))
    cos, sin = rotary(x_RNH, positions_R[None])
    theirs, _ = apply_rotary_pos_emb(x_RNH.transpose(0, 1)[None], x_RNH.transpose(0, 1)[None], cos, sin)
    ours = rotate(x_RNH, *head._rotation(positions_R))
    assert torch.equal(ours, theirs[0].transpose(0, 1))
