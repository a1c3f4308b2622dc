"""The dialect of speculators: the decoder layer's fields in an object of their own, layer ids at the top level.

Source: speculators 0.9.0 models/eagle3/config.py (fields and defaults), models/eagle3/core.py and model_definitions.py
(the forward), models/utils.py ``resolve_target_layer_ids``; vLLM 0.32, which serves such heads, reads ids as R indices
and feeds them in layer order (model_executor/models/interfaces.py). P-EAGLE heads, which have the same fields and a
mask token beside them: models/peagle/config.py and core.py.
"""

from collections.abc import Mapping
from typing import Any

from replay.checkpoint.config_classes import class_of
from replay.checkpoint.config_file import Settings
from replay.errors import CheckpointError
from replay.traces.fields import show

ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")
PARALLEL = ("PEagleSpeculator", "PEagleDraftModel")
_ALGORITHMS = {"eagle3": ARCHITECTURES, "peagle": PARALLEL}
_LAYER = "transformer_layer_config"
_IDS = "eagle_aux_hidden_state_layer_ids"
_KINDS = ("llama", "qwen3")  # models/eagle3/model_definitions.py
_DRAFT_VOCABULARY = 32000
_OTHERS = {
    "mtp": "a multi-token-prediction layer, which reads one state of its target and no taps",
}


def is_speculators(document: Mapping[str, Any]) -> bool:
    """Whether a config is of this dialect."""
    return "speculators_model_type" in document or isinstance(document.get(_LAYER), dict)


def flattened(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config with every field at the top level, as SGLang's classes spell them, defaults of its classes included.

    Raises CheckpointError for another algorithm or kind of layer, and for what speculators itself refuses.
    """
    config = Settings(document, where)
    _check_algorithm(config)
    layer = config.inner(_LAYER)
    kind = layer.text("model_type") or "qwen3"
    cls = class_of(kind) if kind in _KINDS else None
    if cls is None:
        raise layer.refuse("model_type", " or ".join(_KINDS))
    if config.flag("norm_before_fc") and config.flag("fc_norm"):
        raise config.refuse("fc_norm", "false beside norm_before_fc (speculators has one of the two)")
    fields = {**cls.defaults, **layer.values}
    width = Settings(fields, layer.where).size("hidden_size")
    if config.size("target_hidden_size", width) != width:
        raise config.refuse("target_hidden_size", f"{width} (speculators builds fc for targets as wide as the head)")
    ids = config.ids(_IDS)
    if ids and (min(ids) < 0 or len(set(ids)) < len(ids)):
        raise config.refuse(_IDS, "distinct R indices from 0")
    return fields | {
        "architectures": [ARCHITECTURES[0]],
        "model_type": kind,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.size("draft_vocab_size", _DRAFT_VOCABULARY),
        "num_aux_hidden_states": len(ids) if ids else 3,
        "norm_before_fc": config.flag("norm_before_fc"),
        "fc_norm": config.flag("fc_norm"),
        "norm_output": config.flag("norm_output"),
        "dtype": config.text("dtype") or config.text("torch_dtype") or layer.text("dtype"),
    }


def switches(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What such a head has beside the fields of SGLang's classes, by the names that ``HeadConfig`` gives them."""
    config = Settings(document, where)
    ids, layer = config.ids(_IDS), config.inner(_LAYER)
    parallel = _kind(config) == "peagle"
    return {
        "family": "peagle" if parallel else "eagle3",
        "mask_token": _mask_token(config, layer) if parallel else None,
        "norm_before_residual": bool(config.flag("norm_before_residual")),
        "qk_norm": (layer.text("model_type") or "qwen3") == "qwen3",
        "later_norm": "input_layernorm",
        "layer_ids": ids or None,
        "vllms": True,
        "window": _window(layer),
    }


def _kind(config: Settings) -> str:
    return config.text("speculators_model_type") or "eagle3"


def _check_algorithm(config: Settings) -> None:
    kind = _kind(config)
    if kind in _OTHERS:
        raise CheckpointError(f"{config.where}: this head is {_OTHERS[kind]}; replay reads none of speculators")
    known = _ALGORITHMS.get(kind, ())
    architectures = config.values.get("architectures") or list(known[:1])
    if not isinstance(architectures, list) or not known or architectures[0] not in known:
        possible = "; ".join(f"{name} as {' or '.join(names)}" for name, names in _ALGORITHMS.items())
        raise CheckpointError(
            f"{config.where}: speculators_model_type {show(kind)} with architecture {show(architectures)}, of "
            f"speculators replay reads {possible}; dflash as DFlashSpeculator or DFlashDraftModel"
        )


def _mask_token(config: Settings, layer: Settings) -> int:
    """The token that every drafted row of a P-EAGLE head embeds. Raises CheckpointError."""
    token, vocabulary = config.count("mask_token_id"), layer.size("vocab_size")
    if token is None or token >= vocabulary:
        raise config.refuse("mask_token_id", f"a token from 0 to {vocabulary - 1}, which the drafted rows embed")
    return token


def _window(layer: Settings) -> int | None:
    """Rows that a row sees, itself included (models/eagle3/attention.py); None where it sees all.

    Raises CheckpointError where layers differ.
    """
    kinds = layer.values.get("layer_types") or []
    if not isinstance(kinds, list) or len(set(map(str, kinds))) > 1:
        raise layer.refuse("layer_types", "one kind for all layers (replay has one attention window for a head)")
    return layer.size("sliding_window") if kinds and kinds[0] == "sliding_attention" else None
