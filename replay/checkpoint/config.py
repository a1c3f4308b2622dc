"""A draft head's config.json → HeadConfig: typed, complete, and refused by field where replay does not compute it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from replay.checkpoint.config_file import Settings
from replay.errors import CheckpointError
from replay.traces.fields import show

ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What Transformers stops without (modeling_rope_utils.py, 5.19 and 5.24).
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_ORIGINAL = "original_max_position_embeddings"
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


def parse_config(document: Mapping[str, Any], *, name: str = "config") -> HeadConfig:
    """Read a draft config as SGLang 0.5.23 does (models/llama_eagle3.py), defaults of LlamaConfig included.

    Raises CheckpointError for another architecture, a wrong type, or what replay does not compute.
    """
    config = Settings(document, name)
    _check_kind(config)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    vocab_size = config.size("vocab_size")
    tied = bool(config.flag("tie_word_embeddings"))
    draft_vocab_size = config.size("draft_vocab_size", vocab_size)
    _check_vocabulary(name, tied, draft_vocab_size, vocab_size)
    eagle = config.inner("eagle_config")
    norm_before_fc, layer_ids = eagle.flag("norm_before_fc"), _layer_ids(eagle)
    found = HeadConfig(
        hidden_size=hidden_size,
        target_hidden_size=config.size("target_hidden_size", hidden_size),
        num_taps=config.size("num_aux_hidden_states", len(layer_ids) if layer_ids else 3, most=_MOST),
        intermediate_size=config.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_heads),
        head_dim=config.size("head_dim", max(1, hidden_size // num_heads)),
        num_layers=config.size("num_hidden_layers", 1, most=_MOST),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        lm_head="embed" if tied else "target" if config.count("draft_vocab_size") is None else "own",
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope=_rope(config),
        max_position_embeddings=config.size("max_position_embeddings", 2048),
        fc_bias=bool(config.flag("bias")),
        attention_bias=bool(config.flag("attention_bias") or config.flag("qkv_bias")),
        mlp_bias=bool(config.flag("mlp_bias")),
        norm_before_fc=bool(config.flag("norm_before_fc") if norm_before_fc is None else norm_before_fc),
        fc_norm=bool(config.flag("fc_norm") or config.flag("use_aux_norm")),
        norm_output=bool(config.flag("norm_output")),
        use_aux_hidden_state=eagle.flag("use_aux_hidden_state") is not False,
        layer_ids=layer_ids,
        dtype=config.text("dtype") or config.text("torch_dtype"),
    )
    _check_attention(name, found)
    return found


def _check_kind(config: Settings) -> None:
    architectures = config.values.get("architectures") or [ARCHITECTURES[0]]
    if not isinstance(architectures, list) or architectures[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{config.where}: architecture {show(architectures)}, replay reads EAGLE-3 heads of the kinds "
            f"{', '.join(ARCHITECTURES)}"
        )
    if config.values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{config.where}: hidden_act is {show(config.values['hidden_act'])}, replay computes silu only"
        )


def _check_vocabulary(name: str, tied: bool, draft_vocab_size: int, vocab_size: int) -> None:
    if draft_vocab_size > vocab_size:
        raise CheckpointError(f"{name}: draft_vocab_size {draft_vocab_size} is above vocab_size {vocab_size}")
    if tied and draft_vocab_size != vocab_size:
        raise CheckpointError(
            f"{name}: tie_word_embeddings is true with draft_vocab_size {draft_vocab_size} of {vocab_size}; a server "
            "would use the embedding as lm_head and drop the head's own: set tie_word_embeddings to false"
        )


def _check_attention(name: str, config: HeadConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{name}: {config.num_heads} attention heads do not divide into {config.num_kv_heads} key-value heads"
        )
    if config.rotary_dim < 2 or config.rotary_dim % 2 or config.rotary_dim > config.head_dim:
        raise CheckpointError(
            f"{name}: {config.rotary_dim} of {config.head_dim} features per attention head would be rotated, "
            "an even number from 2 to head_dim was expected"
        )


def _layer_ids(eagle: Settings) -> tuple[int, ...] | None:
    ids = eagle.ids("eagle_aux_hidden_state_layer_ids")
    if ids == ():
        raise eagle.refuse("eagle_aux_hidden_state_layer_ids", "a list of layer ids, such as [2, 15]")
    return ids


def _rope(config: Settings) -> Rope:
    """Rope parameters from the older ``rope_scaling`` or, without it, from transformers 5's ``rope_parameters``.

    Transformers 5.19 modeling_rope_utils.py (``convert_rope_params_to_dict``): the older one takes the place of the
    other, and what neither states comes from the top level. SGLang 0.5.23 models/llama.py: partial_rotary_factor counts
    at the top level alone, and an original length there comes before the one inside.
    """
    inner, parameters = config.inner("rope_scaling"), config.inner("rope_parameters")
    inner = inner if inner.values else parameters
    kind = inner.values.get("rope_type") or inner.values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"{config.where}: rope type {show(kind)}, replay computes {', '.join(ROPE_TYPES)}")
    if config.values.get("rope_is_neox_style", True) is not True:
        raise CheckpointError(f"{config.where}: rope_is_neox_style is false, replay computes the neox layout only")
    for key in _ROPE_NEEDS[kind]:
        inner.positive(key)
    factor = inner.positive("factor", 1.0)
    return Rope(
        theta=inner.positive("rope_theta", config.positive("rope_theta", 10000.0)),
        type=kind,
        partial_factor=config.positive("partial_rotary_factor", 1.0),
        factor=factor,
        low_freq_factor=inner.positive("low_freq_factor", 1.0),
        high_freq_factor=inner.positive("high_freq_factor", 4.0),
        original_max_position=config.size(
            _ORIGINAL, inner.size(_ORIGINAL, config.size("max_position_embeddings", 2048))
        ),
        beta_fast=inner.positive("beta_fast", 32.0),
        beta_slow=inner.positive("beta_slow", 1.0),
        attention_factor=_attention_factor(inner, factor) if kind == "yarn" else 1.0,
        truncate=inner.flag("truncate") is not False,
    )


def _attention_factor(inner: Settings, factor: float) -> float:
    """YaRN (arXiv 2309.00071); mscale as DeepSeek writes it, SGLang 0.5.23 layers/rotary_embedding/yarn.py."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0

    found = scale(1.0)
    if inner.number("mscale") is not None and inner.number("mscale_all_dim") is not None:
        found = scale(inner.positive("mscale")) / scale(inner.positive("mscale_all_dim"))
    return inner.positive("attention_factor", found) * inner.positive("attn_factor", 1.0)
