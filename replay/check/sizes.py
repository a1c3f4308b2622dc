"""Sizes of a draft head that its config leaves out: what its class takes for them, and what its tensors have.

A size that is left out is the class's default to SGLang 0.5.23 (Transformers models/*/configuration_*.py). That is
right where the tensors have it too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from replay.check.engine_config import filled
from replay.checkpoint.config_classes import ConfigClass
from replay.checkpoint.config_file import Settings
from replay.checkpoint.headers import TensorFact

_LAYER = re.compile(r"layers\.(\d{1,4})\.", re.ASCII)
_SIZES = (
    "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "num_hidden_layers", "q_lora_rank",
    "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replaced:
    """A size that the config does not state: what its class takes, None where it has no default, and what there is."""

    name: str
    default: int | None
    found: int


def with_sizes(
    stated: Settings, cls: ConfigClass | None, tensors: Mapping[str, TensorFact], hidden_size: int, vocab_size: int
) -> tuple[Settings, tuple[Replaced, ...]]:
    """The config filled in, with the sizes that its tensors (or its target's ``hidden_size`` and ``vocab_size``) have.

    The second value names those that the engine takes wrongly. Raises CheckpointError for a size of another type.
    """
    values = dict(filled(stated, cls).values)
    replaced = []
    for name in _SIZES:
        if stated.count(name) is not None:
            continue
        default = Settings(values, stated.where).count(name)
        found = _measured(name, values, tensors, {"hidden_size": hidden_size, "vocab_size": vocab_size})
        if found is not None and found != default:
            values[name] = found
            replaced.append(Replaced(name, default, found))
    return Settings(values, stated.where), tuple(replaced)


def _measured(
    name: str, values: Mapping[str, object], tensors: Mapping[str, TensorFact], target: Mapping[str, int]
) -> int | None:
    """What the tensors say of one size; None where they say nothing."""
    if name == "num_hidden_layers":
        layers = {int(match[1]) for tensor in tensors if (match := _LAYER.match(tensor))}
        return len(layers) or None
    if name == "vocab_size":
        return target[name]
    if name == "hidden_size":
        return _rows(tensors, "norm.weight") or target[name]
    if name == "intermediate_size":
        return _rows(tensors, "layers.0.mlp.gate_proj.weight")
    if name == "num_attention_heads":
        return _heads(values, tensors)
    return _latent(name, values, tensors)


def _heads(values: Mapping[str, object], tensors: Mapping[str, TensorFact]) -> int | None:
    """By the features of one head; a config without those shares hidden_size out among any number of heads."""
    rows, config = _rows(tensors, "layers.0.self_attn.q_proj.weight"), Settings(values, "")
    features, default = config.count("head_dim"), config.count("num_attention_heads")
    if rows is not None and features:
        return rows // features
    if rows is not None and default and rows != default * ((config.count("hidden_size") or 0) // default):
        return 0
    return None


def _latent(name: str, values: Mapping[str, object], tensors: Mapping[str, TensorFact]) -> int | None:
    """Sizes of DeepSeek's attention (SGLang 0.5.23 models/kimi_k25_eagle3.py)."""
    part = "layers.0.self_attn."
    known = Settings(values, "")
    heads, rope, nope, rank = (
        known.count(key) or 0 for key in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank")
    )
    q_rows, kv_rows = _rows(tensors, part + "q_b_proj.weight"), _rows(tensors, part + "kv_b_proj.weight")
    both = _rows(tensors, part + "kv_a_proj_with_mqa.weight")
    if name in ("q_lora_rank", "kv_lora_rank"):
        return _rows(tensors, f"{part}{name[0] if name[0] == 'q' else 'kv'}_a_layernorm.weight")
    if name == "qk_rope_head_dim":
        return both - rank if both is not None else None
    if name == "qk_nope_head_dim":
        return q_rows // heads - rope if q_rows is not None and heads else None
    return kv_rows // heads - nope if kv_rows is not None and heads else None


def _rows(tensors: Mapping[str, TensorFact], name: str) -> int | None:
    fact = tensors.get(name)
    return fact.shape[0] if fact is not None and fact.shape else None
