"""A tiny DeepSeek-V3 target (MLA and experts) whose text can be followed, and a latent head that follows it.

The embedding is random. The output row of a live token is the sum of the embeddings of the tokens that it comes after,
each of which has two successors; context decides between them. The head copies the embedding of its token through
attention to its own row, which is the row most like itself, and reads the same output rows.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from support.heads import write_head
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from replay.checkpoint.config import parse_config
from replay.checkpoint.tensor_table import expected_tensors

H, V, HEADS, LAYERS, LIVE = 256, 49152, 4, 8, 1000
RANK, NOPE, ROPE, VALUE, LATENT = 96, 32, 64, 64, 512
YARN = {"factor": 32.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256}  # fmt: skip
_WIDTHS = {"hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": RANK,
           "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
           "vocab_size": V, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6}  # fmt: skip
# What Transformers 5 leaves out of a config, and SGLang 0.5.23 models/deepseek_v2.py reads.
_LEFT_OUT = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0,
             "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **YARN}}  # fmt: skip


def write_deepseek(folder: Path, tokenizer: Path) -> Path:
    """The target, in bf16, with the tokenizer files of another folder."""
    generator = torch.Generator().manual_seed(0)
    config = DeepseekV3Config(
        **_WIDTHS, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=LAYERS, n_shared_experts=1,
        n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        initializer_range=0.05, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "yarn", "rope_theta": 50000.0, **YARN}, dtype="bfloat16",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= _tables(generator)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensor * 0.2
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    del stated["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(stated | _LEFT_OUT))
    for file in tokenizer.glob("token*"):
        shutil.copy(file, folder)
    return folder


def _tables(generator: torch.Generator) -> dict[str, Tensor]:
    embed_VE = torch.randn(V, H, generator=generator) * 0.15
    lm_head_VE = torch.randn(V, H, generator=generator) * 0.01
    live = torch.randperm(V - 100, generator=generator)[:LIVE] + 100
    unit_VE = embed_VE / embed_VE.norm(dim=1, keepdim=True)
    for weight in (1.0, 0.9):
        after = live[torch.randint(LIVE, (V,), generator=generator)]
        lm_head_VE.index_add_(0, after[live], unit_VE[live] * weight)
    return {"model.embed_tokens.weight": embed_VE.bfloat16(), "lm_head.weight": lm_head_VE.bfloat16()}


# The model that sees, around the text model. Its weights are left out: SGLang 0.5.23 models/kimi_k25.py starts without.
_VISION = {"patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4,
           "pos_emb_type": "divided_fixed", "vt_num_attention_heads": 4, "vt_num_hidden_layers": 2,
           "vt_hidden_size": 64, "vt_intermediate_size": 128, "merge_kernel_size": [2, 2],
           "video_attn_type": "spatial_temporal", "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger",
           "mm_hidden_size": 64, "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
           "text_hidden_size": H}  # fmt: skip


def write_kimi(folder: Path, text: Path) -> Path:
    """The target of ``write_deepseek`` as the text model of Kimi-K2.5, in the names of the published checkpoint."""
    shutil.copytree(text, folder)
    tensors = load_file(text / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((text / "config.json").read_text())
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
        "text_config": stated | {"model_type": "kimi_k2"}, "vision_config": _VISION, "tie_word_embeddings": False,
        "media_placeholder_token_id": V - 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "language_model_only": True,  # SGLang then loads a tokenizer in the place of the checkpoint's own processor
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_int4(folder: Path, text: Path) -> Path:
    """The target of ``write_deepseek`` with its experts on the INT4 grid of Kimi's checkpoints, stored in bf16.

    Groups of 32 inputs, symmetric, of routed experts only; compressed-tensors itself rounds.
    """
    shutil.copytree(text, folder)
    tensors = load_file(text / "model.safetensors")
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = _on_grid(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _on_grid(weight_OI: Tensor) -> Tensor:
    grid = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    groups_OGI = weight_OI.unflatten(1, (-1, 32))
    scale_OG, zero_OG = calculate_qparams(groups_OGI.amin(-1), groups_OGI.amax(-1), grid)
    rounded_OI: Tensor = fake_quantize(weight_OI, scale_OG, zero_OG, grid)
    return rounded_OI


def write_follower(folder: Path, target: Path, **changes: Any) -> Path:
    """The latent head of ``write_deepseek``'s target, in bf16; ``changes`` of its config."""
    config = {
        **_WIDTHS, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3",
        "intermediate_size": 512, "num_hidden_layers": 1, "hidden_act": "silu", "draft_vocab_size": 2 * LIVE,
        "tie_word_embeddings": False, "norm_output": True, "dtype": "bfloat16", "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", **YARN},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}, **changes,
    }  # fmt: skip
    tables = load_file(target / "model.safetensors")
    lm_head_VE = tables["lm_head.weight"].float()
    ids_W = lm_head_VE.norm(dim=1).topk(2 * LIVE).indices.sort().values
    tensors = _follower_layers(expected_tensors(parse_config(config)))
    tensors |= {"lm_head.weight": lm_head_VE[ids_W], "d2t": ids_W - torch.arange(2 * LIVE)}
    rounded = {name: tensor if name == "d2t" else tensor.bfloat16() for name, tensor in tensors.items()}
    return write_head(folder, config, rounded)


def _follower_layers(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Every tensor with noise of its own, so that each matters; the path of the embedding stands out of it."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else 0.1 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    attention = "layers.0.self_attn."
    tensors[f"{attention}q_a_proj.weight"][:, :H] += torch.randn(RANK, H, generator=generator) / H**0.5
    tensors[f"{attention}kv_a_proj_with_mqa.weight"][:H, :H] += torch.eye(H)
    likeness_RL = tensors[f"{attention}q_a_proj.weight"][:, :H]
    up_NOR = tensors[f"{attention}q_b_proj.weight"].unflatten(0, (HEADS, -1))
    up_NOR[:, :NOPE] += 2 * torch.randn(HEADS, NOPE, RANK, generator=generator) / RANK**0.5
    # RoPE moves scores enough to tell how it turns.
    tensors[f"{attention}kv_a_proj_with_mqa.weight"][LATENT:, :H] += torch.randn(ROPE, H, generator=generator) / H**0.5
    up_NOR[:, NOPE:] += 3 * torch.randn(HEADS, ROPE, RANK, generator=generator) / RANK**0.5
    both_NOL = tensors[f"{attention}kv_b_proj.weight"].unflatten(0, (HEADS, -1))
    both_NOL[:, :NOPE, :H] += 0.3 * up_NOR[:, :NOPE] @ likeness_RL  # keys like queries
    both_NOL[:, NOPE:, :H] += torch.eye(H).view(HEADS, VALUE, H)
    tensors[f"{attention}o_proj.weight"] += 4 * torch.eye(H)
    tensors["norm.weight"] *= 0.4  # no draft is certain, so that rounding shows
    return tensors
