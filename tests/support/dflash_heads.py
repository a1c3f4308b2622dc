"""Small random DFlash heads, and the same head in z-lab's own package or in SpecForge."""

import warnings
from importlib import import_module
from typing import Any

import torch
from support.heads import random_tensors
from torch import Tensor, nn

from replay.checkpoint.checkpoint import Checkpoint, check_checkpoint
from replay.checkpoint.config import parse_config

SIZE, MASK = 5, 90


def dflash_config(**changes: Any) -> dict[str, Any]:
    """A config.json as z-lab writes it, of a small head; ``changes`` replace or (None) remove fields."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256, "block_size": SIZE,
        "num_target_layers": 8, "attention_bias": False, "tie_word_embeddings": True,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]},
    }  # fmt: skip
    config |= changes
    return {key: value for key, value in config.items() if value is not None}


SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4,
}  # fmt: skip
# One for each option that changes the forward.
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, one tap": {"num_hidden_layers": 1, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [4]}},
    "ids spread over the target": {"num_hidden_layers": 3, "dflash_config": {"mask_token_id": MASK}},
    "no grouping": {"num_key_value_heads": 4, "head_dim": 8},
    "biases": {"attention_bias": True},
    "sliding": SLIDING,
    "sliding, both ways": SLIDING | {"is_causal": False},
    "causal": {"is_causal": True},
    "yarn rope": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "large epsilon": {"rms_norm_eps": 0.1},
}


def dflash_checkpoint(seed: int = 0, **changes: Any) -> Checkpoint:
    """A checked random head of ``dflash_config``."""
    config = parse_config(dflash_config(**changes))
    return check_checkpoint("blocks", config, random_tensors(config, seed))


ZLAB, SPECFORGE = "dflash.model", "specforge.modeling.draft.dflash"


def dflash_peer(document: dict[str, Any], checkpoint: Checkpoint, module: str = ZLAB) -> nn.Module:
    """The head as dflash 0.1.0 or SpecForge 0.2.0 builds it of the same config and tensors, in fp32."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    fields = {key: value for key, value in document.items() if key != "architectures"}
    with warnings.catch_warnings():  # SpecForge's, about packages that a CPU does not need
        warnings.simplefilter("ignore")
        built = import_module(module)
    peer: nn.Module = built.DFlashDraftModel(Qwen3Config(**fields)).float().eval()
    tensors: dict[str, Tensor] = {name: tensor.float() for name, tensor in checkpoint.tensors.items()}
    peer.load_state_dict(tensors, strict=True)
    return peer


def peer_states(peer: nn.Module, features_RKD: Tensor, ids_B: Tensor, embed_VE: Tensor) -> Tensor:
    """The peer's normed states [B, E] of one block behind a context, in one pass and without a cache."""
    rows = len(features_RKD)
    with torch.inference_mode():
        states_1BE: Tensor = peer(
            position_ids=torch.arange(rows + len(ids_B))[None],
            noise_embedding=embed_VE[ids_B][None],
            target_hidden=features_RKD[None],
        )
    return states_1BE[0]
