"""A tiny head's config and tensors, to read as they are or with one thing wrong."""

from pathlib import Path
from typing import Any

import torch
from support.heads import (
    random_tensors,
    tiny_config,
    write_head,
)
from torch import Tensor

from replay.checkpoint.config import HeadConfig, parse_config

Tensors = dict[str, Tensor]
RICH = {
    "fc_norm": True,
    "bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 2]},
}


def parts(**changes: Any) -> tuple[HeadConfig, Tensors]:
    config = parse_config(tiny_config(**changes))
    return config, random_tensors(config)


def write_tiny(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    return write_head(folder, tiny_config(**changes), tensors)


def assert_same(left: Any, right: Tensors) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in right)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16,
             "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
}  # fmt: skip
