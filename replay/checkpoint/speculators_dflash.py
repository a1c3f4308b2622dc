"""The dialect of speculators for DFlash heads: a nested config, R indices as layer ids, and a vocabulary of drafts.

Source: speculators 0.9.0 models/dflash/config.py (fields and defaults), core.py, attention.py and model_definitions.py
(the forward). vLLM, which serves such heads, reads the ids as R indices too (transformers_utils/configs/speculators/
algos.py ``update_dflash``: one below each is DFlash's own id).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from replay.checkpoint.config_classes import class_of
from replay.checkpoint.config_file import Settings
from replay.checkpoint.dflash import Block
from replay.errors import CheckpointError
from replay.traces.fields import show

ARCHITECTURES = ("DFlashSpeculator", "DFlashDraftModel")
_LAYER, _IDS, _KIND = "transformer_layer_config", "aux_hidden_state_layer_ids", "qwen3"
_DRAFT_VOCABULARY, _BLOCK = 32000, 8


def is_speculators_dflash(document: Mapping[str, Any]) -> bool:
    """Whether a config is of this dialect."""
    return document.get("speculators_model_type") == "dflash"


def flattened(document: Mapping[str, Any], where: str, architecture: str) -> dict[str, Any]:
    """The config as z-lab writes it, with the defaults of its classes; layer ids stay R indices.

    Raises CheckpointError for another architecture or kind of layer, and for what replay does not compute.
    """
    config = Settings(document, where)
    architectures = document.get("architectures") or list(ARCHITECTURES[:1])
    if not isinstance(architectures, list) or architectures[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: speculators_model_type 'dflash' with architecture {show(architectures)}, of speculators replay "
            f"reads it as {' or '.join(ARCHITECTURES)}"
        )
    layer, cls = config.inner(_LAYER), class_of(_KIND)
    assert cls is not None
    if (layer.text("model_type") or _KIND) != _KIND:
        raise layer.refuse("model_type", _KIND)
    fields = {**cls.defaults, **layer.values}
    width = Settings(fields, layer.where).size("hidden_size")
    if config.size("target_hidden_size", width) != width:
        raise config.refuse("target_hidden_size", f"{width} (speculators builds fc for targets as wide as the head)")
    if config.flag("sample_from_anchor"):
        raise config.refuse("sample_from_anchor", "false (with true the known token's row drafts too)")
    ids = config.ids(_IDS)
    if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
        raise config.refuse(_IDS, "distinct R indices from 0")
    return fields | {
        "architectures": [architecture],
        "tie_word_embeddings": False,
        "draft_vocab_size": None,
        "is_causal": False if config.flag("sliding_window_non_causal") else None,
        "block_size": config.size("block_size", _BLOCK),
        "dflash_config": {"mask_token_id": config.count("mask_token_id"), "target_layer_ids": list(ids)},
        "dtype": config.text("dtype") or config.text("torch_dtype") or layer.text("dtype"),
    }


def switches(document: Mapping[str, Any], where: str, block: Block | None, vocabulary: int) -> dict[str, Any]:
    """What such a head has beside, by the names of ``HeadConfig``. ``vocabulary`` counts the target's tokens.

    Raises CheckpointError for a vocabulary of drafts that is larger.
    """
    config = Settings(document, where)
    drafted = config.size("draft_vocab_size", _DRAFT_VOCABULARY, most=vocabulary)
    assert block is not None
    return {
        "block": replace(block, from_anchor=True),
        "draft_vocab_size": drafted,
        "lm_head": "target" if drafted == vocabulary else "own",
        "vllms": True,
    }
