"""Names and shapes of a draft head's tensors: one spelling of them, and the table that a config implies.

Heads are written with the names of SafeAILab/EAGLE (``midlayer.*``), SpecForge 0.2 and SGLang 0.5.23 (``layers.0.*``,
``aux_norm_low``), with or without a leading ``model.``.
"""

import re

from replay.checkpoint import nextn
from replay.checkpoint.config import MASK_HIDDEN, HeadConfig

# Spellings that SGLang 0.5.23 (models/llama_eagle3.py load_weights) takes for one tensor.
_RENAMES = (
    (re.compile(r"^model\.(?!lm_head\.)"), ""),  # it looks for lm_head outside of the model
    (re.compile(r"^.*\.(?=(?:d2t|t2d)$)"), ""),
    (re.compile(r"midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)


# Those that it takes for a latent head (models/kimi_k25_eagle3.py load_weights); it skips any other name.
_LATENT_RENAMES = (
    (re.compile(r"^.*\.(?=(?:d2t|t2d)$)"), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
)


def spell(name: str, *, latent: bool = False) -> str:
    """``name`` as SGLang spells it now."""
    for pattern, replacement in _LATENT_RENAMES if latent else _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def expected_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor that a head of this config must have."""
    if config.block is not None:
        return _block_tensors(config)
    E = config.hidden_size
    table: dict[str, tuple[int, ...]] = {}
    if config.experts is not None:
        table |= nextn.tensors(config.experts, E)
    else:
        table["fc.weight"] = (E, 2 * E if _joins_early(config) else config.fc_inputs)
    if config.last_norm:
        table["norm.weight"] = (E,)
    if config.fc_bias:
        table["fc.bias"] = (E,)
    if config.mask_token is not None:
        table[MASK_HIDDEN] = (1, 1, config.fc_inputs)  # speculators 0.9.0 models/peagle/core.py
    if config.norm_before_fc:
        table["input_norm.weight"] = (config.fc_inputs,)
    if config.fc_norm:
        table |= {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(config.num_taps)}
    for layer in range(config.num_layers):
        table |= {f"layers.{layer}.{name}": shape for name, shape in _layer_tensors(config, layer).items()}
    if config.lm_head == "own":
        table["lm_head.weight"] = (config.draft_vocab_size, E)
    if config.draft_vocab_size != config.vocab_size:
        table["d2t"] = (config.draft_vocab_size,)
    if config.hidden_size != config.target_hidden_size:
        table["embed_tokens.weight"] = (config.vocab_size, E)
    return table


def _joins_early(config: HeadConfig) -> bool:
    """Whether fc takes in the embedding beside the state, and not the first layer."""
    return config.family == "eagle"


def _layer_tensors(config: HeadConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Those of one decoder layer, by their names in it."""
    E, F = config.hidden_size, config.intermediate_size
    table: dict[str, tuple[int, ...]] = {f"{norm}.weight": (E,) for norm in _layer_norms(config, layer)}
    if config.qk_norm:
        table |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    inputs = E if layer or _joins_early(config) else 2 * E
    projections = _grouped_projections(config, inputs) if config.latent is None else _latent_projections(config)
    if config.experts is None:
        projections |= {"mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F)}
    if config.latent is not None:
        table["self_attn.q_a_layernorm.weight"] = (config.latent.q_rank,)
        table["self_attn.kv_a_layernorm.weight"] = (config.latent.kv_rank,)
    for projection, shape in projections.items():
        table[f"{projection}.weight"] = shape
        if _has_bias(config, projection):
            table[f"{projection}.bias"] = shape[:1]
    return table


def _has_bias(config: HeadConfig, projection: str) -> bool:
    if not projection.startswith("self_attn."):
        return config.mlp_bias
    return config.output_bias if projection.endswith("o_proj") else config.attention_bias


def _layer_norms(config: HeadConfig, layer: int) -> tuple[str, ...]:
    """Those of one layer. SGLang's later layers have a norm that nobody reads, those of other programs do not."""
    if config.family == "nextn":
        return "input_layernorm", "post_attention_layernorm"
    if config.family == "eagle" and layer == 0:
        return ("post_attention_layernorm",)
    if layer and config.later_norm == "input_layernorm":
        return "input_layernorm", "post_attention_layernorm"
    return "input_layernorm", "hidden_norm", "post_attention_layernorm"


def _grouped_projections(config: HeadConfig, inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj": (config.num_heads * config.head_dim, inputs),
        "self_attn.k_proj": (config.num_kv_heads * config.head_dim, inputs),
        "self_attn.v_proj": (config.num_kv_heads * config.head_dim, inputs),
        "self_attn.o_proj": (config.hidden_size, config.num_heads * config.head_dim),
    }


def _block_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Of a DFlash head: embedding and lm_head are the target's (dflash 0.1.0, SGLang 0.5.23 models/dflash.py).

    One of speculators with a vocabulary of drafts has an lm_head and a map of its own (0.9.0 models/dflash/core.py).
    """
    E, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    table: dict[str, tuple[int, ...]] = {"fc.weight": (E, config.fc_inputs), "hidden_norm.weight": (E,)}
    table["norm.weight"] = (E,)
    projections = _grouped_projections(config, E)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        table |= {f"{prefix}{norm}.weight": (E,) for norm in ("input_layernorm", "post_attention_layernorm")}
        table |= {f"{prefix}self_attn.{norm}.weight": (H,) for norm in ("q_norm", "k_norm")}
        matrices = projections | {"mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F)}
        table |= {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
        if config.attention_bias:
            table |= {f"{prefix}{name}.bias": shape[:1] for name, shape in projections.items()}
    if config.lm_head == "own":
        table |= {"lm_head.weight": (config.draft_vocab_size, E), "d2t": (config.draft_vocab_size,)}
    return table


def _latent_projections(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """SGLang 0.5.23 models/kimi_k25_eagle3.py; kv_b_proj has each head's key rows before its value rows."""
    assert config.latent is not None
    latent, heads, E = config.latent, config.num_heads, config.hidden_size
    inputs = E if config.family == "nextn" else 2 * E
    return {
        "self_attn.q_a_proj": (latent.q_rank, inputs),
        "self_attn.kv_a_proj_with_mqa": (latent.kv_rank + latent.rope, inputs),
        "self_attn.q_b_proj": (heads * (latent.nope + latent.rope), latent.q_rank),
        "self_attn.kv_b_proj": (heads * (latent.nope + latent.value), latent.kv_rank),
        "self_attn.o_proj": (E, heads * latent.value),
    }


def optional_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of tensors that a head may carry.

    ``embed_tokens`` is used by the ``eagle`` profile and replaced by the target's in ``sglang`` (SGLang 0.5.23
    speculative/eagle_worker_v2.py ``init_lm_head``); ``t2d`` is the training side's mask; ``inv_freq`` is derived.
    """
    table: dict[str, tuple[int, ...]] = {}
    if config.block is None:
        table["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    if config.block is None or config.lm_head == "own":
        table |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    for layer in range(config.num_layers):
        table[f"layers.{layer}.self_attn.rotary_emb.inv_freq"] = (config.rotary_dim // 2,)
    return table


# Part of a latent head's attention: SGLang 0.5.23 models/kimi_k25_eagle3.py ``post_load_weights`` refuses it quantised.
LATENT_KV_B = "layers.0.self_attn.kv_b_proj"
NOT_LINEAR = ("d2t", "t2d", "embed_tokens")


def linear_names(config: HeadConfig) -> list[str]:
    """The head's linear layers in forward order, as checkpoints call them; lm_head, own or borrowed, is last."""
    names = [name.removesuffix(".weight") for name, shape in expected_tensors(config).items() if len(shape) == 2]
    return [name for name in names if name not in (*NOT_LINEAR, "lm_head")] + ["lm_head"]
