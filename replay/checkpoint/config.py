"""A draft head's config.json → HeadConfig: typed, complete, and refused by field where replay does not compute it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What SGLang 0.5.23 and transformers index without a default (transformers modeling_rope_utils.py).
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# More layers or taps than any head has: a config that asks for millions must not make us count to it.
_MOST = 256


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding parameters, from either transformers spelling (``rope_theta``/``rope_scaling`` or v5's dict)."""

    theta: float = 10000.0
    type: str = "default"
    partial_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 2048
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Everything about a draft head that its config states. Widths in elements."""

    hidden_size: int
    target_hidden_size: int
    num_taps: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int  # equals vocab_size where the head drafts over the whole vocabulary
    lm_head: str  # "own", "target" (draft_vocab_size is null) or "embed" (tied)
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    fc_bias: bool
    attention_bias: bool
    mlp_bias: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    layer_ids: tuple[int, ...] | None  # eagle_config.eagle_aux_hidden_state_layer_ids, as stated
    dtype: str | None
    use_aux_hidden_state: bool = True  # false: the target's final state is fed instead of taps on the way

    @property
    def fc_inputs(self) -> int:
        """Input features of ``fc``."""
        return self.num_taps * self.target_hidden_size

    @property
    def features_width(self) -> int:
        """Features that a row is fed: those of ``fc``, or the final state's where it takes the place of taps.

        A final state that is not as wide as the head goes through ``fc`` as taps do.
        """
        final_fits = not self.use_aux_hidden_state and self.target_hidden_size == self.hidden_size
        return self.target_hidden_size if final_fits else self.fc_inputs

    @property
    def skips_fc(self) -> bool:
        """Whether features are as wide as the head, which then takes them as they stand: no fc, no norm before it.

        SGLang 0.5.23 (models/llama_eagle3.py ``LlamaModel.forward``) and SafeAILab/EAGLE (eagle/model/cnets.py
        ``Model.forward``) compare the widths as they run. Config and wiring tell it beforehand: a wiring whose features
        are not ``features_width`` wide is refused (simulator/fit.py).
        """
        return self.features_width == self.hidden_size

    @property
    def rotary_dim(self) -> int:
        """Leading features of each attention head that are rotated."""
        return int(self.head_dim * self.rope.partial_factor)


def read_config(path: Path) -> HeadConfig:
    """The HeadConfig of a checkpoint folder's ``config.json``. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give --draft the folder that holds the head's config.json")
    return parse_config(_read_json(path / "config.json"), name=str(path / "config.json"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; give --draft the folder of a draft head") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; copy or export the head again") from error
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(document).__name__}, an object was expected; copy or export the head again"
        )
    return document


def parse_config(document: Mapping[str, Any], *, name: str = "config") -> HeadConfig:
    """Read a draft config as SGLang 0.5.23 does (models/llama_eagle3.py), defaults of LlamaConfig included.

    Raises CheckpointError for another architecture, a wrong type, or what replay does not compute.
    """
    fields = _Fields(document, name)
    architectures = document.get("architectures") or ["LlamaForCausalLMEagle3"]
    if not isinstance(architectures, list) or architectures[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{name}: architecture {architectures}, replay reads EAGLE-3 heads of the kinds {', '.join(ARCHITECTURES)}"
        )
    if document.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{name}: hidden_act is {document['hidden_act']!r}, replay computes silu only")
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    vocab_size = fields.size("vocab_size")
    tied = fields.flag("tie_word_embeddings")
    draft_vocab_size = fields.size("draft_vocab_size", vocab_size)
    if draft_vocab_size > vocab_size:
        raise CheckpointError(f"{name}: draft_vocab_size {draft_vocab_size} is above vocab_size {vocab_size}")
    if tied and draft_vocab_size != vocab_size:
        raise CheckpointError(
            f"{name}: tie_word_embeddings is true with draft_vocab_size {draft_vocab_size} of {vocab_size}; a server "
            "would use the embedding as lm_head and drop the head's own: set tie_word_embeddings to false"
        )
    eagle = _Fields(fields.object("eagle_config"), f"{name}: eagle_config")
    layer_ids = _layer_ids(fields.object("eagle_config"), name)
    config = HeadConfig(
        hidden_size=hidden_size,
        target_hidden_size=fields.size("target_hidden_size", hidden_size),
        num_taps=fields.size("num_aux_hidden_states", len(layer_ids) if layer_ids else 3, most=_MOST),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=fields.size("head_dim", max(1, hidden_size // num_heads)),
        num_layers=fields.size("num_hidden_layers", 1, most=_MOST),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        lm_head="embed" if tied else "own" if fields.has("draft_vocab_size") else "target",
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, document, name),
        max_position_embeddings=fields.size("max_position_embeddings", 2048),
        fc_bias=fields.flag("bias"),
        attention_bias=fields.flag("attention_bias") or fields.flag("qkv_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        norm_before_fc=eagle.flag("norm_before_fc", fields.flag("norm_before_fc")),
        fc_norm=fields.flag("fc_norm") or fields.flag("use_aux_norm"),
        norm_output=fields.flag("norm_output"),
        use_aux_hidden_state=eagle.flag("use_aux_hidden_state", True),
        layer_ids=layer_ids,
        dtype=fields.text("dtype") or fields.text("torch_dtype"),
    )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{name}: {config.num_heads} attention heads do not divide into {config.num_kv_heads} key-value heads"
        )
    if config.rotary_dim < 2 or config.rotary_dim % 2 or config.rotary_dim > config.head_dim:
        raise CheckpointError(
            f"{name}: {config.rotary_dim} of {config.head_dim} features per attention head would be rotated, "
            "an even number from 2 to head_dim was expected"
        )
    return config


class _Fields:
    """Typed reads from a config object; every refusal names the field, the value seen and the type wanted."""

    def __init__(self, document: Mapping[str, Any], name: str) -> None:
        self._document = document
        self._name = name

    def _read(self, key: str, default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        value = self._document.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self._name} has no {key}, {wanted} was expected; add it")
            return default
        if not fits(value):
            raise CheckpointError(f"{self._name}: {key} is {value!r}, {wanted} was expected")
        return value

    def size(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        fits = lambda value: type(value) is int and 0 < value <= most  # noqa: E731
        return int(self._read(key, default, fits, f"an integer from 1 to {most}"))

    def number(self, key: str, default: float | None = None) -> float:
        fits = lambda value: type(value) in (int, float) and 0 < value <= 1e300  # noqa: E731
        return float(self._read(key, default, fits, "a positive number"))

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._read(key, default, lambda value: type(value) is bool, "true or false"))

    def text(self, key: str) -> str | None:
        return str(self._read(key, "", lambda value: isinstance(value, str), "a string")) or None

    def object(self, key: str) -> dict[str, Any]:
        value = self._read(key, {}, lambda value: isinstance(value, dict), "an object")
        return dict(value)

    def has(self, key: str) -> bool:
        return self._document.get(key) is not None


def _layer_ids(eagle: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(index) is int for index in ids):
        raise CheckpointError(
            f"{name}: eagle_aux_hidden_state_layer_ids is {ids!r}, a list of layer ids was expected, such as [2, 15]"
        )
    return tuple(ids)


def _rope(fields: _Fields, document: Mapping[str, Any], name: str) -> Rope:
    """Rope parameters from transformers 5's ``rope_parameters`` or the older ``rope_theta`` with ``rope_scaling``."""
    from math import log

    spelling = "rope_parameters" if fields.object("rope_parameters") else "rope_scaling"
    parameters = fields.object(spelling)
    inner = _Fields(parameters, f"{name}: {spelling}")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"{name}: rope type {kind!r}, replay computes {', '.join(ROPE_TYPES)}")
    if document.get("rope_is_neox_style", True) is not True:
        raise CheckpointError(f"{name}: rope_is_neox_style is false, replay computes the neox layout only")
    for key in _ROPE_NEEDS[kind]:
        inner.number(key)
    factor = inner.number("factor", 1.0)
    attention_factor = 1.0
    if kind == "yarn":
        # YaRN (arXiv 2309.00071); mscale as DeepSeek writes it, SGLang 0.5.23 layers/rotary_embedding/yarn.py.
        def scale(mscale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0

        attention_factor = scale(1.0)
        if inner.has("mscale") and inner.has("mscale_all_dim"):
            attention_factor = scale(inner.number("mscale", 1.0)) / scale(inner.number("mscale_all_dim", 1.0))
        attention_factor = inner.number("attention_factor", attention_factor) * inner.number("attn_factor", 1.0)
    return Rope(
        theta=inner.number("rope_theta", fields.number("rope_theta", 10000.0)),
        type=kind,
        partial_factor=inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)),
        factor=factor,
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        original_max_position=inner.size(
            "original_max_position_embeddings", fields.size("max_position_embeddings", 2048)
        ),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=inner.flag("truncate", True),
    )
