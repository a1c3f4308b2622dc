"""Small random draft heads for tests: seeded, every option of the config, sharp enough to disagree with each other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from replay.checkpoint.checkpoint import Checkpoint, check_checkpoint
from replay.checkpoint.config import HeadConfig, parse_config
from replay.checkpoint.tensor_table import expected_tensors


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json of a small head; ``changes`` replace or (None) remove fields."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "vocab_size": 96,
        "draft_vocab_size": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 2]},
    }
    config |= changes
    return {key: value for key, value in config.items() if value is not None}


# What makes it a head with DeepSeek's attention, whose key (nope + rope), value and latent are of three widths.
LATENT: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_key_value_heads": 4, "head_dim": None,
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip
# What makes it a head in the dialect of speculators, with norms of queries and keys.
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": True,
    "transformer_layer_config": {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 1, "vocab_size": 96, "rms_norm_eps": 1e-5},
}  # fmt: skip
# What makes that a P-EAGLE head, as wide and over the same vocabulary.
PARALLEL: dict[str, Any] = SPECULATORS | {
    "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "mask_token_id": 90,
    "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
}  # fmt: skip
# As Kimi-K2 writes it, but for an mscale of its own, so that both factors of it are other than 1, and for a base and a
# length at which each number tells.
DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 64,
                 "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0}  # fmt: skip

# A head that fits the invented target of trace_maker.py: wired embed,2.
INVENTED = tiny_config(
    hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=64, draft_vocab_size=48,
    eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 1]},
)  # fmt: skip


def random_tensors(config: HeadConfig, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of the shapes that ``config`` calls for; d2t spreads the draft ids over the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        if name == "d2t":
            chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
            tensors[name] = chosen - torch.arange(config.draft_vocab_size)
        elif len(shape) == 1:
            tensors[name] = 1 + 0.2 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5
    return tensors


def tiny_checkpoint(seed: int = 0, **changes: Any) -> Checkpoint:
    """A checked random head of ``tiny_config``."""
    config = parse_config(tiny_config(**changes))
    return check_checkpoint("tiny", config, random_tensors(config, seed))


def target_tables(checkpoint: Checkpoint, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Embedding and lm_head [V, E] of an imagined target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (checkpoint.config.vocab_size, checkpoint.config.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def invented_checkpoint() -> Checkpoint:
    """A checked random head of ``INVENTED``."""
    config = parse_config(INVENTED)
    return check_checkpoint("tiny", config, random_tensors(config))


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A head's folder; without ``tensors`` it gets random ones."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(parse_config(config)) if tensors is None else tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
