"""Config fields of DFlash heads: they draft a block of mask tokens in one pass, over keys and values of target taps.

Sources: z-lab's package dflash 0.1.0 (``dflash/model.py``) and SGLang 0.5.23 (speculative/dflash_utils.py
``parse_dflash_draft_config``, models/dflash.py). What one of them would fill in from a class of Transformers has to be
stated here.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.checkpoint.config_file import Settings
from replay.errors import CheckpointError

DEFAULT_BLOCK = 16  # of both programs
_MASK_EMBEDDING = "mask_embedding.pt"
_MOST_BLOCK = 256
_MOST_LAYERS = 256
# Parts of relatives (DFlash2, Domino, DSpark, Nemotron's) that change the forward, and what they are where absent.
_UNKNOWN = {
    "conv_kernel_size": 0, "conv_group_size": 0, "selector_rank": 0, "selector_top_k": 0, "projector_type": None,
    "markov_rank": 0, "output_multiplier": 1, "input_embedding_scale": 1, "final_logit_softcapping": 0,
    "attention_sink_bias": False, "attention_value_scale": None, "use_gemma_norm": False, "has_embed_tokens": False,
    "shift_label": False, "pure_draft_prefix_len": 0, "sample_from_anchor": None, "mlp_bias": False,
    "bias": False, "draft_vocab_size": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """How a head drafts blocks: the known token and ``size`` - 1 mask tokens, trained on so many.

    By layer: ``causal``, whether a row of the block sees only rows before it and itself, and ``windows``, how many
    positions it sees, its own included (None: all).
    """

    size: int
    mask_token: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]


def read_block(config: Settings) -> Block:
    """Raises CheckpointError for a field that is missing, and for what replay does not compute."""
    inner = config.inner("dflash_config")
    for place in (config, inner):
        for key, absent in _UNKNOWN.items():
            if place.values.get(key) not in (None, absent):
                raise place.refuse(key, "nothing (replay does not compute it of a DFlash head)")
    vocabulary = config.size("vocab_size")
    place = _place(config, inner, "mask_token_id")
    mask_token = place.count("mask_token_id")
    if mask_token is None or mask_token >= vocabulary:
        raise place.refuse("mask_token_id", f"a token from 0 to {vocabulary - 1}, that of the masks of a block")
    _check_rope(config)
    kinds = _layer_kinds(config)
    causal, sliding = config.flag("is_causal"), [kind == "sliding_attention" for kind in kinds]
    return Block(
        size=_place(config, inner, "block_size").size("block_size", DEFAULT_BLOCK, most=_MOST_BLOCK),
        mask_token=mask_token,
        causal=tuple(slides if causal is None else causal for slides in sliding),
        windows=tuple(_window(config) if slides else None for slides in sliding),
    )


def _check_rope(config: Settings) -> None:
    """Raises CheckpointError for what only SGLang's class of these heads reads of RoPE, where that changes something.

    SGLang 0.5.23 models/dflash.py ``DFlashAttention``: ``rope_dim`` is the rotary width, and ``is_neox_style`` counts
    where ``rope_is_neox_style`` is absent. dflash 0.1.0 turns whole heads whatever these say.
    """
    width = config.size("head_dim")
    for inner in (config.inner("rope_scaling"), config.inner("rope_parameters")):
        if inner.values.get("rope_dim", width) != width:
            raise inner.refuse("rope_dim", f"{width}, the head_dim (replay turns whole heads of a DFlash head)")
    if config.values.get("is_neox_style", True) is not True:
        raise config.refuse("is_neox_style", "true (replay computes the neox layout only)")


def check_folder(folder: Path) -> None:
    """Raises CheckpointError where the mask token's embedding was trained: SGLang 0.5.23 then runs another one than the
    target's (speculative/dflash_worker_v2.py ``_maybe_merge_trained_mask_embedding``), and the file is a pickle."""
    if os.path.lexists(folder / _MASK_EMBEDDING):
        raise CheckpointError(
            f"{folder} holds {_MASK_EMBEDDING}, a trained embedding of the mask token, which replay does not read; "
            "give a head whose mask token has the target's embedding"
        )


def read_layer_ids(config: Settings) -> tuple[int, ...]:
    """Target layers whose outputs are fed: those stated, else spread over ``num_target_layers`` as both programs do.

    Raises CheckpointError.
    """
    inner = config.inner("dflash_config")
    place = _place(config, inner, "target_layer_ids")
    ids = place.ids("target_layer_ids")
    if ids is None:
        layers, heads = _place(config, inner, "num_target_layers"), config.size("num_hidden_layers", most=_MOST_LAYERS)
        return spread_layer_ids(layers.size("num_target_layers"), heads)
    if not ids or min(ids) < 0:
        raise place.refuse("target_layer_ids", "a list of target layers from 0, such as [1, 9, 17]")
    return ids


def spread_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """As many target layers as the head has, evenly from layer 1 to the fourth last one.

    dflash 0.1.0 ``build_target_layer_ids``; SGLang 0.5.23 speculative/dflash_utils.py has the same.
    """
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + place * span / (draft_layers - 1)) for place in range(draft_layers))


def _place(config: Settings, inner: Settings, key: str) -> Settings:
    """The object that says ``key``: dflash_config where it is there, else the top level."""
    return inner if inner.has(key) else config


def _layer_kinds(config: Settings) -> list[str]:
    layers: int = config.size("num_hidden_layers", most=_MOST_LAYERS)
    kinds: Any = config.values.get("layer_types")
    if kinds is None and not config.flag("use_sliding_window"):
        return ["full_attention"] * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise config.refuse("layer_types", f"a list of {layers} of {' and '.join(known)}, one for each layer")
    return kinds


def _window(config: Settings) -> int:
    """Transformers' Qwen3Config drops the window where ``use_sliding_window`` is not set."""
    if not config.flag("use_sliding_window"):
        raise config.refuse("use_sliding_window", "true (layer_types has sliding layers)")
    return config.size("sliding_window")
