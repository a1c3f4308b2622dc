"""Heads in the dialect of speculators: its own writer's files are read, and its own forward gives the same logits."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import speculators_peer
from support.heads import write_head
from support.peer_heads import teacher_forced
from support.replayed import random_request, replayed_logits

import replay
from replay.checkpoint.config import parse_config
from replay.engines.behaviour import Behaviour
from replay.engines.wiring import indices_wiring
from replay.errors import CheckpointError, WiringError
from replay.head.model import Head, TargetTables

STEPS, LENGTH = 5, 24
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
# Kind of layer, fields of the layer's config, fields around it.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "norm before the residual": ("llama", {}, {"norm_before_residual": True}),
    "norm before fc": ("qwen3", {}, {"norm_before_fc": True}),
    "fc_norm, norm_output": ("qwen3", {}, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    "three layers": ("qwen3", {"num_hidden_layers": 3}, {"norm_before_residual": True}),
    "two taps, biases": ("llama", {"attention_bias": True, "mlp_bias": True},
                         {"eagle_aux_hidden_state_layer_ids": [4, 0]}),
    "yarn, whole vocabulary": ("llama", {"rope_parameters": YARN}, {"draft_vocab_size": 96}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", CASES)
def test_its_own_files_give_its_own_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = speculators_peer.make_model(*CASES[name])
    head = Head(replay.load_head(speculators_peer.save(model, tmp_path / "head")), TargetTables(torch.zeros(96, 32)))
    item = random_request(head, LENGTH)
    ids_R, features_RKD = item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows]
    ours = replayed_logits(monkeypatch, head, item, STEPS, teacher_forced(ids_R, STEPS))
    theirs = speculators_peer.logits(model, ids_R, features_RKD, STEPS)
    for mine, peer in zip(ours, theirs, strict=True):
        assert (mine - peer).abs().max() < 1e-4
        assert peer.std(dim=0).mean() > 0.3


def test_a_window_is_the_trainers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first step only: later ones move the window on in a server, and not in the trainer."""
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
    model = speculators_peer.make_model("qwen3", layer, {})
    checkpoint = replay.load_head(speculators_peer.save(model, tmp_path / "head"))
    assert checkpoint.config.window == 5
    for window, least, most in ((5, 0, 1e-4), (None, 0.1, 100)):
        head = Head(checkpoint, TargetTables(torch.zeros(96, 32)), behaviour=Behaviour(window=window))
        item = random_request(head, LENGTH)
        (ours,) = replayed_logits(monkeypatch, head, item, 1)
        ids_R, features_RKD = item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows]
        (theirs,) = speculators_peer.logits(model, ids_R, features_RKD, 1)
        assert least <= (ours - theirs).abs().max() < most


DOCUMENT: dict[str, Any] = {
    "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 40,
    "transformer_layer_config": {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 1, "vocab_size": 96},
}  # fmt: skip


def test_what_a_config_leaves_out_is_what_its_classes_take() -> None:
    config = parse_config(DOCUMENT)
    assert (config.num_taps, config.layer_ids, config.rms_norm_eps, config.max_position_embeddings) == (
        3, None, 1e-6, 32768)  # fmt: skip
    assert config.qk_norm and not config.norm_before_residual
    assert parse_config({**DOCUMENT, "draft_vocab_size": 96}).lm_head == "own"


def test_ids_are_r_indices_in_layer_order() -> None:
    config = parse_config({**DOCUMENT, "eagle_aux_hidden_state_layer_ids": [4, 0, 2]})
    assert config.layer_ids == (4, 0, 2)
    assert indices_wiring(config.layer_ids, layers=4).taps == ("embed", "2", "4")
    assert indices_wiring(None, layers=30).taps == ("2", "15", "27")
    with pytest.raises(WiringError, match=r"layer ids \[4, 0, 2\], which are R indices, and the target has R\[0\]"):
        indices_wiring(config.layer_ids, layers=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculators_model_type": "peagle"},
            "'peagle' with architecture .*; peagle as PEagleSpeculator or",
        ),
        ({"speculators_model_type": "peagle", "architectures": None}, "mask_token_id is None, a token from 0 to 95"),
        (
            {"speculators_model_type": "peagle", "architectures": [], "mask_token_id": 96},
            "mask_token_id is 96, a",
        ),
        ({"speculators_model_type": "mtp"}, "this head is a multi-token-prediction layer"),
        ({"speculators_model_type": "medusa"}, "speculators_model_type 'medusa' with architecture"),
        ({"architectures": ["LlamaForCausalLM"]}, "of speculators replay reads eagle3 as Eagle3Speculator or"),
        ({"architectures": [None]}, "of speculators replay reads eagle3"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm is True, false beside norm_before_fc"),
        ({"target_hidden_size": 40}, "target_hidden_size is 40, 32"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, r"layer_ids is \[1, 1, 2\], distinct R indices"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}, r"layer_ids is \[-1, 1, 2\], distinct R indices"),
        ({"transformer_layer_config": {"model_type": "gemma3"}}, "model_type is 'gemma3', llama or qwen3"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config({**DOCUMENT, **changes})


def test_layers_of_two_kinds_of_attention_are_refused() -> None:
    layer = DOCUMENT["transformer_layer_config"] | {"layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(CheckpointError, match="one kind for all layers"):
        parse_config({**DOCUMENT, "transformer_layer_config": layer})


def test_the_norms_of_queries_and_keys_are_called_for(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", DOCUMENT)
    layer = DOCUMENT["transformer_layer_config"] | {"model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**DOCUMENT, "transformer_layer_config": layer}))
    with pytest.raises(CheckpointError, match=r"has layers\.0\.self_attn\.[qk]_norm\.weight"):
        replay.load_head(folder)
