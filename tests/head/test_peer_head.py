"""Step logits equal those of other projects' heads, which they compute with their own code and their own caches.

Ours are what replay runs: ``draft_every_anchor`` with its packed attention. Only the choice of tokens is tapped,
to see the logits and to feed the tokens that a peer insists on.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.heads import target_tables, tiny_checkpoint
from support.peer_heads import SpecForge, Speculators, teacher_forced
from support.replayed import replayed_logits
from torch import Tensor

from replay.checkpoint.checkpoint import Checkpoint, load_head
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.rows import DraftInput
from replay.engines.profiles import ENGINES, NUMERICS
from replay.head.model import Head, TargetTables

STEPS = 5
LENGTH = 24
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# Options that both peers have. The plain head has grouped queries, a draft vocabulary and head_dim * heads != hidden.
SHARED: dict[str, dict[str, Any]] = {
    "plain": {},
    "no grouping": {"num_key_value_heads": 4, "head_dim": 8},
    "one key-value head": {"num_key_value_heads": 1, "head_dim": 16},
    "whole vocabulary": {"draft_vocab_size": 96},
    "target's lm_head": {"draft_vocab_size": None},
    "tied": {"draft_vocab_size": None, "tie_word_embeddings": True},
    "fc_norm": {"fc_norm": True},
    "large epsilon": {"rms_norm_eps": 0.1},
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
    "linear rope": {"rope_parameters": LINEAR},
}
SPECFORGE = SHARED | {"wider target": {"target_hidden_size": 40}}
SPECULATORS = SHARED | {
    "norm_before_fc": {"eagle_config": {"norm_before_fc": True}},
    "norm_output": {"norm_output": True},
    "two taps": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "two layers": {"num_hidden_layers": 2},
    "three layers, norm_output": {"num_hidden_layers": 3, "norm_output": True},
}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Both peers compile parts of themselves and warn about packages that a CPU does not need."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


def calm(checkpoint: Checkpoint) -> Checkpoint:
    """Half the gain in the layers: as they come, these heads turn a change of 1e-6 into 1e-3 within five steps, and
    would measure the rounding of the machine."""
    tensors = {
        key: tensor / 2 if key.startswith("layers.") and tensor.ndim == 2 else tensor
        for key, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


def build(options: dict[str, Any], engine: str, numerics: str) -> tuple[Checkpoint, Head, Tensor, Tensor]:
    """A small head with the embedding [V, E] and lm_head [W, E] that any engine should end up using."""
    checkpoint = calm(tiny_checkpoint(seed=3, **options))
    target_embed_VE, target_lm_head_VE = target_tables(checkpoint)
    embed_VE = checkpoint.tensors.get("embed_tokens.weight", target_embed_VE)
    lm_head_WE = {
        "own": checkpoint.tensors.get("lm_head.weight"),
        "target": target_lm_head_VE,
        "embed": target_embed_VE,
    }[checkpoint.config.lm_head]
    assert lm_head_WE is not None
    head = Head(
        checkpoint,
        TargetTables(target_embed_VE, target_lm_head_VE),
        profile=replace(ENGINES[engine], numerics=numerics),
    )
    return checkpoint, head, embed_VE, lm_head_WE


def random_request(head: Head) -> DraftInput:
    """One prompt token, so that every row is an anchor's."""
    generator = torch.Generator().manual_seed(11)
    tokens_T = torch.randint(head.config.vocab_size, (LENGTH,), generator=generator)
    return DraftInput(tokens_T, torch.randn(LENGTH - 1, head.config.fc_inputs, generator=generator), 1)


def assert_equal_logits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) == STEPS
    for mine, peer in zip(ours, theirs, strict=True):
        assert mine.shape == peer.shape
        assert (mine - peer).abs().max() < 1e-4
    # ... and there is something to tell apart: rows differ, and steps differ.
    assert all(step.std(dim=0).mean() > 0.3 for step in theirs)
    assert all((first - then).abs().mean() > 0.05 for first, then in pairwise(theirs))


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("name", SPECFORGE)
def test_own_drafts_equal_those_of_specforge(name: str, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SPECFORGE[name]
    checkpoint, head, embed_VE, lm_head_WE = build(options, "sglang", numerics)
    peer = SpecForge(checkpoint, embed_VE, lm_head_WE, options.get("rope_parameters", PLAIN_ROPE))
    item = random_request(head)
    ours = replayed_logits(monkeypatch, head, item, STEPS)
    d2t_W = checkpoint.tensors.get("d2t", torch.zeros(checkpoint.config.draft_vocab_size, dtype=torch.long))

    def own_draft(_step: int, logits_RW: Tensor) -> Tensor:
        index_R = logits_RW.argmax(-1)
        return index_R + d2t_W[index_R]

    ids_R, features_RKD = item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows]
    theirs = peer.logits(ids_R, features_RKD, STEPS, own_draft)
    assert_equal_logits(ours, theirs)
    (drafts,) = draft_every_anchor(head, [item], STEPS)
    assert drafts.drafted_AK.T.tolist() == [own_draft(step, logits).tolist() for step, logits in enumerate(theirs)]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("name", SPECULATORS)
def test_teacher_forced_logits_equal_those_of_speculators(
    name: str, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SPECULATORS[name]
    # SGLang builds q, k and v without bias; the `eagle` profile runs what the checkpoint has, as speculators does.
    checkpoint, head, embed_VE, lm_head_WE = build(options, "eagle", numerics)
    peer = Speculators(checkpoint, embed_VE, lm_head_WE, options.get("rope_parameters", PLAIN_ROPE))
    item = random_request(head)
    ids_R, features_RKD = item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows]
    ours = replayed_logits(monkeypatch, head, item, STEPS, list(teacher_forced(ids_R, STEPS)))
    assert_equal_logits(ours, peer.logits(ids_R, features_RKD, STEPS))


def test_a_peer_that_norms_before_the_residual_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of speculators' trainer: same tensors, another head."""
    checkpoint, head, embed_VE, lm_head_WE = build({}, "eagle", "hf")
    peer = Speculators(checkpoint, embed_VE, lm_head_WE, PLAIN_ROPE, norm_before_residual=True)
    item = random_request(head)
    ids_R, features_RKD = item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows]
    ours = replayed_logits(monkeypatch, head, item, STEPS, list(teacher_forced(ids_R, STEPS)))
    for mine, theirs in zip(ours, peer.logits(ids_R, features_RKD, STEPS), strict=True):
        assert (mine - theirs).abs().max() > 0.1


@pytest.mark.parametrize("name", [name for name in SHARED if name.endswith("rope") or "theta" in name])
def test_a_peer_with_another_rope_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the texts above are long enough to see what a rope does."""
    checkpoint, head, embed_VE, lm_head_WE = build(SHARED[name], "eagle", "hf")
    peer = Speculators(checkpoint, embed_VE, lm_head_WE, PLAIN_ROPE)
    item = random_request(head)
    ids_R, features_RKD = item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows]
    ours = replayed_logits(monkeypatch, head, item, STEPS, list(teacher_forced(ids_R, STEPS)))
    for mine, theirs in zip(ours, peer.logits(ids_R, features_RKD, STEPS), strict=True):
        assert (mine - theirs).abs().max() > 0.02


DEMO = Path(__file__).parents[2] / "traces" / "samples" / "smollm2-eagle3"
TEXT = "The Aral Sea shrank because the rivers that fed it were led away to water cotton. Since then its northern part"


def smollm2_head(name: str) -> Checkpoint:
    """A head as wide as SmolLM2-135M: random, or the sample that ships with the project."""
    if name == "sample":
        return load_head(DEMO)
    return calm(
        tiny_checkpoint(
            seed=5,
            hidden_size=576,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            intermediate_size=1536,
            vocab_size=49152,
            draft_vocab_size=8192,
            rope_theta=100000.0,
            max_position_embeddings=2048,
        )
    )


@pytest.fixture(scope="module")
def smollm2_text(target_dir: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T] of a text, SmolLM2's features of `embed,3,16` [T, 3*D], its embedding [V, D]; fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(target_dir)(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    features_RKD = torch.cat([states[index][0] for index in (0, 3, 16)], dim=-1)
    return tokens[0], features_RKD, model.get_input_embeddings().weight.detach()


# The sample joins as soon as it lies there.
@pytest.mark.parametrize("name", ["random", "sample"])
def test_on_the_features_of_a_real_target(
    name: str, smollm2_text: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_T, features_RKD, embed_VE = smollm2_text
    checkpoint = smollm2_head(name)
    config = checkpoint.config
    assert config.rope.type == "default" and config.lm_head == "own"
    rope = {"rope_type": "default", "rope_theta": config.rope.theta}
    head = Head(checkpoint, TargetTables(embed_VE))
    item = DraftInput(tokens_T, features_RKD, 1)
    ids_R, rows_RKD = tokens_T[1 : item.rows + 1], features_RKD[: item.rows]
    forced = list(teacher_forced(ids_R, STEPS))
    ours = replayed_logits(monkeypatch, head, item, STEPS, forced)
    lm_head_WE = checkpoint.tensors["lm_head.weight"].float()
    specforge = SpecForge(checkpoint, embed_VE, lm_head_WE, rope)
    speculators = Speculators(checkpoint, embed_VE, lm_head_WE, rope)
    assert_equal_logits(ours, specforge.logits(ids_R, rows_RKD, STEPS, lambda step, _: forced[step]))
    assert_equal_logits(ours, speculators.logits(ids_R, rows_RKD, STEPS))
