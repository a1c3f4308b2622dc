"""A config.json as SGLang reads it: the language part, its class's defaults, rope in one form, length and dtype.

Sources: SGLang 0.5.23 utils/hf_transformers/common.py (``get_hf_text_config``, ``get_context_length``),
configs/model_config.py (``_get_and_verify_dtype``); Transformers modeling_rope_utils.py
(``convert_rope_params_to_dict``, ``standardize_rope_params``), alike in 5.19 and 5.24.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replay.checkpoint.config_classes import (
    FULL_ATTENTION,
    PARAMETERS_FIRST,
    SCALING_ALONE,
    SCALING_FIRST,
    ConfigClass,
    class_called,
    class_of,
)
from replay.checkpoint.config_file import Settings

DEFAULT_THETA = 10000.0  # of every engine and of most trainers, whatever the config says
DEFAULT_LENGTH = 2048  # where a config states none and its class has none
_LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_INNER = ("llm_config", "language_config", "text_config")  # the order in which SGLang looks for a language part
# Transformers writes the length before scaling into parameters of these kinds, so no factor multiplies it.
_KEEP_LENGTH = ("yarn", "longrope")
_FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class Rope:
    """``values``: the parameters that hold, of full attention where layers differ. ``theta`` is None where the config
    says null. ``stated``: the config states a theta. ``by_layer``: the config has parameters for each kind of layer.
    ``raw``: the class leaves parameters as they stand. ``implicit``: they are the class's own."""

    values: Settings
    theta: float | None
    stated: bool
    by_layer: bool = False
    raw: bool = False
    implicit: bool = False

    @property
    def kind(self) -> str:
        """``default`` where nothing is scaled."""
        return self.values.text("rope_type") or self.values.text("type") or "default"


def language_part(outer: Settings, cls: ConfigClass | None) -> tuple[Settings, ConfigClass | None]:
    """The settings of a model's language part and their class; those given where the model has no other part."""
    if (thinker := outer.inner("thinker_config")).values:
        return language_part(thinker, cls)
    for key in _INNER:
        if isinstance(outer.values.get(key), dict):
            part = outer.inner(key)
            return part, _class_of_part(part, key, cls)
    return outer, class_called(cls.inner_class) if cls is not None and cls.inner_class else cls


def _class_of_part(part: Settings, key: str, cls: ConfigClass | None) -> ConfigClass | None:
    own = class_of(part.text("model_type"))
    if cls is None or cls.inner_class is None or (cls.follows and own is not None):
        return own
    return class_called(cls.inner_class) if cls.inner in (key, "thinker_config") else own


def filled(settings: Settings, cls: ConfigClass | None) -> Settings:
    """With the class's defaults for fields that are not there at all, and its own names of fields spelled our way."""
    if cls is None:
        return settings
    stated = dict(settings.values)
    for name, own in cls.aliases.items():
        one, other = (name, own) if own in stated else (own, name)
        if other in stated:
            stated[one] = stated[other]
    return Settings({**cls.defaults, **stated}, settings.where)


def rope_of(settings: Settings, cls: ConfigClass | None) -> Rope:
    """The rotary embedding that a config asks for. Raises CheckpointError for parameters of impossible types."""
    scaling, parameters = settings.inner("rope_scaling"), settings.inner("rope_parameters")
    default = Settings(cls.rope_default if cls is not None else {}, f"{settings.where}: rope_parameters")
    order = cls.rope_order if cls is not None else SCALING_FIRST
    if order == FULL_ATTENTION:
        chosen, merged = parameters if parameters.values else default, scaling.values
    else:
        listed = {PARAMETERS_FIRST: (parameters, scaling), SCALING_ALONE: (scaling,)}.get(order, (scaling, parameters))
        chosen, merged = next((one for one in listed if one.values), default), {}
    by_layer = isinstance(chosen.values.get(_FULL), dict)
    full = chosen.inner(_FULL) if by_layer else chosen
    values = Settings({**full.values, **merged}, (scaling if merged else full).where)
    # A flat object in the place of one for each kind of layer leaves the latter as the class has it.
    places = (settings,) if order == FULL_ATTENTION and not by_layer else (values, settings)
    stated = "rope_theta" in settings.values or ("rope_theta" in values.values and chosen is not default)
    return Rope(
        values, _theta(places, cls), stated, by_layer, cls is not None and cls.raw, chosen is default and not merged
    )


def _theta(places: Sequence[Settings], cls: ConfigClass | None) -> float | None:
    for one in places:
        if "rope_theta" in one.values:
            return one.number("rope_theta")
    return (cls.theta if cls is not None else None) or DEFAULT_THETA


def context_of(settings: Settings, rope: Rope) -> int:
    """Tokens of context that a filled config gives. A linear or dynamic factor multiplies the length, no other does."""
    kept = rope.by_layer or rope.kind == "llama3" or (rope.kind in _KEEP_LENGTH and not rope.raw)
    stated = rope.values.number("factor")
    factor = 1.0 if kept or stated is None else stated
    if "original_max_position_embeddings" in rope.values.values:
        factor = 1.0
    for key in _LENGTHS:
        if (length := settings.count(key)) is not None:
            return int(factor * length)
    return DEFAULT_LENGTH
