"""DFlash heads as speculators writes them: its own files are read, its own forward (0.9.0) gives the same logits."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import speculators_peer
from support.check_cases import target_config, write
from support.heads import random_tensors, write_head
from support.trace_maker import make_four, write_trace
from twins.blocks import draft_one_block

import replay
from replay.check.facts import read_facts
from replay.checkpoint.config import parse_config
from replay.drafting.chains import chain_steps
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.rows import DraftInput
from replay.errors import CheckpointError
from replay.head.model import Head, TargetTables

SIZE, TOKENS, PROMPT = 5, 18, 3
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
# Fields of the layer's config, fields around it.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "whole vocabulary": ({}, {"draft_vocab_size": 96}),
    "one layer, two taps, biases": (
        {"num_hidden_layers": 1, "attention_bias": True}, {"aux_hidden_state_layer_ids": [0, 4]}),
    "sliding": (SLIDING, {}),
    "sliding, both ways": (SLIDING, {"sliding_window_non_causal": True}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


def make_peer(name: str) -> Any:
    layer, outer = CASES[name]
    outer = {"mask_token_id": 90, "block_size": SIZE, "aux_hidden_state_layer_ids": [1, 2, 4]} | outer
    return speculators_peer.make_model("qwen3", {"num_hidden_layers": 2} | layer, outer, "dflash")


@pytest.mark.parametrize("name", CASES)
def test_its_own_files_give_its_own_logits(name: str, tmp_path: Path) -> None:
    """The twin drafts the same, so that the windows of the trainer hold there too."""
    model = make_peer(name)
    checkpoint = replay.load_head(speculators_peer.save(model, tmp_path / "head"))
    head = Head(checkpoint, TargetTables(model.embed_tokens.weight.detach(), model.lm_head.weight.detach()))
    assert checkpoint.config.lm_head == ("target" if name == "whole vocabulary" else "own")
    generator = torch.Generator().manual_seed(7)
    tokens_T = torch.randint(96, (TOKENS,), generator=generator)
    features_RKD = torch.randn(TOKENS - 1, checkpoint.config.fc_inputs, generator=generator)
    item = DraftInput(tokens_T, features_RKD, PROMPT)
    states = chain_steps(head, first_pass(head, [item]), SIZE - 1, lambda _: tokens_T)
    ours_ASW = torch.stack([head.logits(state.normed_AE) for state in states], 1)
    anchors = range(PROMPT, TOKENS - 1)
    theirs_ABW = speculators_peer.block_logits(model, tokens_T, features_RKD, anchors)
    assert (ours_ASW - theirs_ABW[:, 1:]).abs().max() < 1e-4
    assert theirs_ABW.std(dim=0).mean() > 0.3
    (drafts,) = draft_every_anchor(head, [item], SIZE - 1)
    twins = [draft_one_block(head, item, anchor, SIZE - 1)[1].argmax(-1).tolist() for anchor in anchors[::4]]
    assert drafts.drafted_AK[::4].tolist() == [[int(head.target_ids_W[index]) for index in row] for row in twins]


DOCUMENT: dict[str, Any] = {
    "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "draft_vocab_size": 48,
    "mask_token_id": 63, "aux_hidden_state_layer_ids": [2, 0],
    "transformer_layer_config": {
        "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": 64},
}  # fmt: skip


def test_a_trace_is_replayed_and_ids_are_r_indices(tmp_path: Path) -> None:
    trace = replay.Trace.open(write_trace(tmp_path / "trace", [make_four()]))
    head = replay.load_head(write_head(tmp_path / "head", DOCUMENT))
    assert head.config.block is not None and head.config.block.size == 8  # speculators' own default
    (variant,) = replay.simulate(trace, {"head": head}, [replay.Variant("head", steps=3)]).variants
    assert variant.wiring == ("embed", "2")
    with pytest.raises(CheckpointError, match="is a DFlash head as speculators writes it, which no class of SGLang's"):
        read_facts(tmp_path / "head", write(tmp_path / "target", target_config(hidden_size=16, vocab_size=64)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id is None, a token from 0 to 63"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None, distinct R indices"),
        ({"aux_hidden_state_layer_ids": [1, 1]}, r"aux_hidden_state_layer_ids is \[1, 1\], distinct R indices"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True, false"),
        ({"target_hidden_size": 24}, "target_hidden_size is 24, 16"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65"),
        ({"architectures": ["DSparkSpeculator"]}, "'dflash' with architecture .*, of speculators replay reads it as"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type 'dspark' with architecture"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "model_type is 'llama', qwen3"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config({**DOCUMENT, **changes})


def test_tensors_of_the_vocabulary_are_called_for() -> None:
    tensors = random_tensors(parse_config(DOCUMENT))
    for name in ("lm_head.weight", "d2t"):
        with pytest.raises(CheckpointError, match=f"lacks {name}"):
            replay.head_from_tensors(DOCUMENT, {key: part for key, part in tensors.items() if key != name})
