"""Configs of heads as large as those beside Kimi-K2."""

from typing import Any

# Of Kimi-K2-Instruct's config.json and its EAGLE-3 heads: one layer, dense MLP, a draft vocabulary of 32,000.
SIZES: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "hidden_size": 7168, "num_attention_heads": 64,
    "num_key_value_heads": 64, "head_dim": None, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "vocab_size": 163840,
    "draft_vocab_size": 32000, "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
}  # fmt: skip
# A Llama head of that width, of two layers: 8 key-value heads for 64 of queries.
LLAMA = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 128,
    "q_lora_rank": None, "kv_lora_rank": None, "qk_nope_head_dim": None, "qk_rope_head_dim": None, "v_head_dim": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"latent": SIZES, "llama": LLAMA}
# What a narrower head has less of; its vocabularies stay.
_WIDTHS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank",
)  # fmt: skip


def narrowed(kind: str, width: int) -> dict[str, Any]:
    """The config of a kind with another width than 7168, a divisor of it, and all else smaller by the same factor."""
    factor, rest = divmod(SIZES["hidden_size"], width)
    assert not rest
    config = KINDS[kind]
    return config | {name: config[name] // factor for name in _WIDTHS if config[name] is not None}
