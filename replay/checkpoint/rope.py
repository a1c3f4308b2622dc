"""Rotary embedding parameters of a draft head's config, in either spelling of transformers."""

from dataclasses import dataclass
from math import log

from replay.checkpoint.config_file import Settings
from replay.errors import CheckpointError
from replay.traces.fields import show

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What Transformers stops without (modeling_rope_utils.py, 5.19 and 5.24).
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_ORIGINAL = "original_max_position_embeddings"


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
    score_factor: float = 1.0  # multiplies attention scores beside head_dim**-0.5


def read_rope(config: Settings) -> Rope:
    """Rope parameters from the older ``rope_scaling`` or, without it, from transformers 5's ``rope_parameters``.

    SGLang 0.5.23 models/llama.py: partial_rotary_factor counts at the top level alone, and an original length there
    comes before the one inside. Raises CheckpointError.
    """
    inner = _stated(config)
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


def _stated(config: Settings) -> Settings:
    """Transformers 5.19 modeling_rope_utils.py (``convert_rope_params_to_dict``): the older object takes the place of
    the other, and what neither states comes from the top level."""
    older = config.inner("rope_scaling")
    return older if older.values else config.inner("rope_parameters")


def _attention_factor(inner: Settings, factor: float) -> float:
    """YaRN (arXiv 2309.00071); mscale as DeepSeek writes it, SGLang 0.5.23 layers/rotary_embedding/yarn.py."""
    found = _yarn_scale(factor, 1.0)
    if inner.number("mscale") is not None and inner.number("mscale_all_dim") is not None:
        found = _yarn_scale(factor, inner.positive("mscale")) / _yarn_scale(factor, inner.positive("mscale_all_dim"))
    return inner.positive("attention_factor", found) * inner.positive("attn_factor", 1.0)


def read_latent_rope(config: Settings) -> Rope:
    """Rope of a latent head: DeepSeek's YaRN or none.

    SGLang 0.5.23 runs any scaling of such a head as this one (models/deepseek_v2.py ``DeepseekV2AttentionMLA``,
    layers/rotary_embedding/rope_variant.py ``DeepseekScalingRotaryEmbedding``), and multiplies scores by the square of
    the factor of ``mscale_all_dim`` (configs/model_config.py ``compute_mla_mscale_scaling``). Raises CheckpointError
    for another type, and for what of YaRN replay does not compute.
    """
    inner = _stated(config)
    theta = inner.positive("rope_theta", config.positive("rope_theta", 10000.0))
    kind = inner.values.get("rope_type") or inner.values.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind not in ("yarn", "deepseek_yarn"):
        raise CheckpointError(
            f"{config.where}: rope type {show(kind)}, a latent head runs default or yarn; mend the file"
        )
    if inner.number("extrapolation_factor") not in (None, 1):
        raise inner.refuse("extrapolation_factor", "1")
    factor = inner.positive("factor")
    all_dims = _yarn_scale(factor, _number(inner, "mscale_all_dim", 0.0))
    scaled = inner.flag("apply_yarn_scaling") is not False and inner.flag("apply_scale") is not False
    return Rope(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position=inner.size(_ORIGINAL, config.size("max_position_embeddings", 2048)),
        beta_fast=inner.positive("beta_fast", 32.0),
        beta_slow=inner.positive("beta_slow", 1.0),
        attention_factor=_yarn_scale(factor, _number(inner, "mscale", 1.0))
        / all_dims
        * inner.positive("attn_factor", 1.0),
        score_factor=all_dims**2 if scaled else 1.0,
    )


def _number(inner: Settings, key: str, default: float) -> float:
    found = inner.number(key)
    return default if found is None else found


def _yarn_scale(factor: float, mscale: float) -> float:
    """SGLang 0.5.23 layers/rotary_embedding/yarn.py ``yarn_get_mscale``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0
