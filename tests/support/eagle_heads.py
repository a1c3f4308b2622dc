"""A small head of the EAGLE-1 family."""

from typing import Any

from support.heads import random_tensors, tiny_config

from replay.checkpoint.checkpoint import Checkpoint, check_checkpoint
from replay.checkpoint.config import parse_config


def eagle_config(**changes: Any) -> dict[str, Any]:
    """Its config.json; None removes a field."""
    return tiny_config(**{"architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": None, "eagle_config": None,
                          "model_type": "llama"} | changes)  # fmt: skip


def eagle_checkpoint(seed: int = 0, **changes: Any) -> Checkpoint:
    """A checked random head."""
    config = parse_config(eagle_config(**changes))
    return check_checkpoint("tiny", config, random_tensors(config, seed))
