"""Small random targets in Transformers' own form, for what needs no words."""

from pathlib import Path
from typing import Any

import torch


def tiny(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A random two-layer fp32 target without a tokenizer; vocabulary 50, hidden size 16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 40,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **changes})).save_pretrained(folder)
    return folder
