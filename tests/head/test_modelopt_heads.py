"""Heads that Model-Optimizer exports: its own module gives the same logits, and other switches are refused by name."""

import warnings
from typing import Any

import pytest
from support.heads import target_tables, tiny_checkpoint, tiny_config
from support.modelopt_peer import ModelOpt
from support.replayed import random_request, replayed_logits
from torch import Tensor

from replay.checkpoint.config import parse_config
from replay.engines.behaviour import HEALTHY, Behaviour
from replay.engines.profiles import ENGINES
from replay.errors import CheckpointError
from replay.head.model import Head, TargetTables

STEPS, LENGTH = 4, 20
# As modelopt/torch/export/plugins/hf_spec_configs.py writes them.
SWITCHES: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": [1, 13, 24], "use_aux_hidden_state": True, "next_layer_regular": True,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip


def both(monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Our step logits and those of the trainer's module, which never feed each other."""
    checkpoint = tiny_checkpoint(seed=3, **options)
    for name, tensor in checkpoint.tensors.items():  # half the gain: see ``calm`` in test_peer_head.py
        if name.startswith("layers.") and tensor.ndim == 2:
            tensor /= 2
    embed_VE, lm_head_VE = target_tables(checkpoint)
    head = Head(checkpoint, TargetTables(embed_VE, lm_head_VE), behaviour=behaviour)
    item, offsets_W = random_request(head, LENGTH), checkpoint.tensors["d2t"]
    peer = ModelOpt(checkpoint, embed_VE, {"rope_type": "default", "rope_theta": 10000.0})

    def next_id(logits_W: Tensor) -> int:
        return int(logits_W.argmax() + offsets_W[logits_W.argmax()])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peer.logits(item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows], STEPS, next_id)
    return replayed_logits(monkeypatch, head, item, STEPS), theirs


@pytest.mark.parametrize(
    "options",
    [
        {"eagle_config": SWITCHES},
        {"eagle_config": SWITCHES, "num_hidden_layers": 3},
        {"eagle_config": SWITCHES | {"use_last_layernorm": False}, "num_hidden_layers": 2},
    ],
    ids=["one layer", "three layers", "no norm behind the last"],
)
def test_its_own_module_gives_the_same_logits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``wiring.norm=twice``: its first layer is a whole Llama layer, whose input_layernorm the state passes
    before hidden_norm. Servers do not run it so, and neither does replay where nobody asks for it."""
    ours, theirs = both(monkeypatch, Behaviour(state_normed_twice=True), **options)
    for mine, peer in zip(ours, theirs, strict=True):
        assert (mine - peer).abs().max() < 1e-4
        assert peer.std(dim=0).mean() > 0.3


def test_its_trainer_norms_the_state_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(monkeypatch, HEALTHY, eagle_config=SWITCHES)
    assert all((mine - peer).abs().max() > 0.1 for mine, peer in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ({"next_layer_regular": False}, "next_layer_regular is False, true"),
        ({"use_mtp_layernorm": True}, "use_mtp_layernorm is True, false"),
        ({"use_input_layernorm_in_first_layer": False}, "use_input_layernorm_in_first_layer is False, true"),
        ({"parallel_draft_step": 3}, "parallel_draft_step is 3, 1"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(switch: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(tiny_config(eagle_config=SWITCHES | switch))


def test_heads_of_others_keep_the_later_norms_of_sglang() -> None:
    config = parse_config(tiny_config(num_hidden_layers=2))
    assert config.later_norm == "hidden_norm" and config.last_norm


@pytest.mark.parametrize(
    ("eagle", "layers", "notes"),
    [
        (SWITCHES, 1, []),
        (SWITCHES, 3, ["sglang norms the stream of layers after the first by a hidden_norm that this head lacks"]),
        (SWITCHES | {"use_last_layernorm": False}, 1, ["sglang has a norm in front of lm_head that this head lacks"]),
    ],
    ids=["as SGLang", "three layers", "no norm behind the last"],
)
def test_what_sglang_does_otherwise_is_noted(eagle: dict[str, Any], layers: int, notes: list[str]) -> None:
    """SGLang 0.5.23 models/llama_eagle3.py: ``hidden_norm`` enters every layer, and ``LlamaModel.norm`` follows."""
    checkpoint = tiny_checkpoint(eagle_config=eagle, num_hidden_layers=layers)
    tables = TargetTables(*target_tables(checkpoint))
    said = Head(checkpoint, tables).notes
    assert [note.startswith(start) for note, start in zip(said, notes, strict=True)] == [True] * len(notes)
    assert Head(checkpoint, tables, profile=ENGINES["eagle"]).notes == []
