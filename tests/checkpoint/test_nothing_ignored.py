"""No tensor and no number of a config is read and then ignored."""

from typing import Any

import pytest
import torch
from support.checkpoint_parts import RICH, ROPES, Tensors, parts
from support.heads import (
    DEEPSEEK_YARN,
    LATENT,
    target_tables,
)
from torch import Tensor
from twins.rounds import plain_causal_attention

from replay.checkpoint.checkpoint import check_checkpoint
from replay.checkpoint.config import HeadConfig
from replay.engines.profiles import ENGINES
from replay.head.model import Head, TargetTables


def outputs(config: HeadConfig, tensors: Tensors, engine: str = "eagle") -> tuple[Tensor, Tensor]:
    """Logits and feedback of ten rows."""
    checkpoint = check_checkpoint("h", config, tensors)
    embed_VE, lm_head_VE = target_tables(checkpoint)
    head = Head(checkpoint, TargetTables(embed_VE, lm_head_VE), profile=ENGINES[engine])
    generator = torch.Generator().manual_seed(2)
    features_RKD = torch.randn(10, config.fc_inputs, generator=generator)
    ids_R = torch.randint(config.vocab_size, (10,), generator=generator)
    output = head.forward(
        head.embed(ids_R),
        head.fuse(features_RKD),
        torch.arange(10),
        lambda _, q, k, v: plain_causal_attention(q, k, v, head.numerics),
    )
    return head.logits(output.normed_RE), output.feedback_RE


RICH_LATENT = LATENT | {"rope_scaling": DEEPSEEK_YARN, "fc_norm": True, "bias": True}
# `d2t` moves target ids and not logits; it is tested above. SGLang 0.5.23 loads `input_layernorm` of the layers after
# the first and never runs it (models/llama_eagle3.py: only layer 0 embeds), so neither does replay.
UNUSED = {"d2t", "layers.1.input_layernorm.weight"}


@pytest.mark.parametrize("options", [RICH, {"num_hidden_layers": 2}, {"target_hidden_size": 20}, RICH_LATENT], ids=str)
def test_every_tensor_moves_the_logits(options: dict[str, Any]) -> None:
    config, tensors = parts(**options)
    before, _ = outputs(config, tensors)
    still = set()
    for key, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9))
        moved = tensor + 0.1 * noise if tensor.is_floating_point() else tensor
        after, _ = outputs(config, tensors | {key: moved})
        if not (before - after).abs().max() > 1e-4:
            still.add(key)
    assert still == UNUSED & tensors.keys()


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({}, {"rms_norm_eps": 0.1}),
        ({}, {"rope_theta": 50.0}),
        ({}, {"partial_rotary_factor": 0.5}),
        *[({}, {"rope_scaling": ROPES[kind]}) for kind in ("linear", "llama3", "yarn")],
        ({"rope_scaling": ROPES["llama3"]}, {"rope_scaling": ROPES["llama3"] | {"low_freq_factor": 2.0}}),
        ({"rope_scaling": ROPES["llama3"]}, {"rope_scaling": ROPES["llama3"] | {"high_freq_factor": 40.0}}),
        ({"rope_scaling": ROPES["llama3"]}, {"rope_scaling": ROPES["llama3"] | {"factor": 2.0}}),
        ({"rope_scaling": ROPES["llama3"]},
         {"rope_scaling": ROPES["llama3"] | {"original_max_position_embeddings": 99}}),
        *[({"rope_scaling": ROPES["yarn"]}, {"rope_scaling": ROPES["yarn"] | change})
          for change in ({"factor": 2.0}, {"beta_fast": 2.0}, {"beta_slow": 8.0}, {"truncate": True}, {"mscale": 2.0},
                         {"mscale_all_dim": 2.0}, {"attention_factor": 1.5}, {"attn_factor": 1.5},
                         {"original_max_position_embeddings": 99})],
        (LATENT, {"rope_interleave": False}),
        (LATENT, {"rope_scaling": DEEPSEEK_YARN}),
        *[(RICH_LATENT, {"rope_scaling": DEEPSEEK_YARN | change})
          for change in ({"factor": 2.0}, {"beta_fast": 2.0}, {"beta_slow": 8.0}, {"mscale": 2.0}, {"rope_theta": 50.0},
                         {"mscale_all_dim": 2.0}, {"attn_factor": 1.5}, {"apply_yarn_scaling": False},
                         {"apply_scale": False}, {"original_max_position_embeddings": 999})],
    ],
    ids=str,
)  # fmt: skip
def test_every_number_of_a_config_moves_the_logits(base: dict[str, Any], changes: dict[str, Any]) -> None:
    config, tensors = parts(**base)
    other, _ = parts(**(base | changes))
    assert (outputs(config, tensors)[0] - outputs(other, tensors)[0]).abs().max() > 1e-4


def test_norm_output_moves_the_feedback_and_not_the_logits() -> None:
    config, tensors = parts()
    normed, _ = parts(norm_output=True)
    logits, feedback = outputs(config, tensors)
    same_logits, normed_feedback = outputs(normed, tensors)
    assert torch.equal(logits, same_logits) and (feedback - normed_feedback).abs().max() > 0.1


def test_each_tap_meets_its_own_norm() -> None:
    """Swapping two taps' norms is another head: the order of ``fc_norm.{i}`` is that of the wiring."""
    config, tensors = parts(fc_norm=True)
    swapped = tensors | {
        "fc_norm.0.weight": tensors["fc_norm.2.weight"],
        "fc_norm.2.weight": tensors["fc_norm.0.weight"],
    }
    assert (outputs(config, tensors)[0] - outputs(config, swapped)[0]).abs().max() > 1e-3


def test_sglang_builds_q_k_and_v_without_bias_and_says_so() -> None:
    """tests/head/test_engine_heads.py asks SGLang's class itself, which keeps the bias of o_proj."""
    config, tensors = parts(attention_bias=True)
    zeroed = {key: part * 0 if key.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) else part
              for key, part in tensors.items()}  # fmt: skip
    assert torch.equal(outputs(config, tensors, "sglang")[0], outputs(config, zeroed, "sglang")[0])
    assert not torch.equal(outputs(config, tensors, "eagle")[0], outputs(config, zeroed, "eagle")[0])
    checkpoint = check_checkpoint("h", config, tensors)
    head = Head(checkpoint, TargetTables(target_tables(checkpoint)[0]))
    assert head.notes == ["sglang builds q, k and v without the bias that this head has"]
