"""P-EAGLE heads: speculators' own files are read, and its own forward (0.9.0) gives the same logits at every step."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import speculators_peer
from support.heads import PARALLEL, random_tensors, tiny_config, write_head
from support.random_heads import make_head, requests
from support.replayed import random_request, replayed_logits
from support.trace_maker import make_four, write_trace
from twins.rounds import draft_one_round, replay_request

import replay
from replay.check.inspection import DraftFacts
from replay.checkpoint.config import parse_config
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.margins import margins_along
from replay.drafting.round_by_round import walk
from replay.engines.behaviour import Behaviour
from replay.errors import CheckpointError, UsageError
from replay.head.model import Head, TargetTables

STEPS, LENGTH, MASK = 5, 20, 90
# Kind of layer, fields of the layer's config, fields around it.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen3, norm before the residual": ("qwen3", {}, {"norm_before_residual": True}),
    "norm before fc": ("llama", {}, {"norm_before_fc": True}),
    "fc_norm, norm_output": ("qwen3", {}, {"fc_norm": True, "norm_output": True}),
    "three layers, two taps": ("llama", {"num_hidden_layers": 3}, {"eagle_aux_hidden_state_layer_ids": [0, 4]}),
    "window": ("qwen3", {"layer_types": ["sliding_attention"], "sliding_window": 7, "use_sliding_window": True}, {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", CASES)
def test_its_own_files_give_its_own_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, layer, outer = CASES[name]
    model = speculators_peer.make_model(kind, layer, outer | {"mask_token_id": MASK}, "peagle")
    checkpoint = replay.load_head(speculators_peer.save(model, tmp_path / "head"))
    assert checkpoint.config.family == "peagle" and checkpoint.config.mask_token == MASK
    head = Head(checkpoint, TargetTables(torch.zeros(96, 32)), behaviour=Behaviour(window=checkpoint.config.window))
    item = random_request(head, LENGTH)
    ours = replayed_logits(monkeypatch, head, item, STEPS)
    ids_R = torch.cat([item.tokens_T[1 : item.rows + 1], torch.zeros(STEPS, dtype=torch.long)])
    features_RKD = torch.cat([item.features_RKD[: item.rows], torch.zeros(STEPS, item.features_RKD.shape[1])])
    theirs = speculators_peer.parallel_logits(model, ids_R, features_RKD, STEPS, item.rows)
    for mine, peer in zip(ours, theirs, strict=True):
        assert (mine - peer).abs().max() < 1e-4
        assert peer.std(dim=0).mean() > 0.3


def test_what_was_drafted_is_not_fed() -> None:
    """Along its own drafts every margin is 0, and along others the preferred tokens stay the same."""
    head = make_head("P-EAGLE")
    items = requests(head, [(3, 9), (1, 4)])
    drafts = [drafts.drafted_AK for drafts in draft_every_anchor(head, items, STEPS)]
    others = [(drafted_AK + 1) % 96 for drafted_AK in drafts]
    for own, other in zip(margins_along(head, items, drafts), margins_along(head, items, others), strict=True):
        assert (own.margin_AK == 0).all()
        assert torch.equal(own.preferred_AK, other.preferred_AK)
        assert (other.margin_AK > 0).all()


@pytest.mark.parametrize(
    "behaviour", [Behaviour(), Behaviour(rewrite="stale"), Behaviour(hole="accepted")], ids=["healthy", "stale", "hole"]
)
def test_rounds_in_order_equal_the_twins(behaviour: Behaviour) -> None:
    head = make_head("P-EAGLE", behaviour=behaviour)
    items = requests(head, [(3, 12), (2, 7)])
    for item, rounds in zip(items, walk(head, items, 3), strict=True):
        twin = replay_request(head, item.tokens_T, item.features_RKD, item.prompt_tokens, 3)
        assert rounds.drafted_RK.tolist() == [list(one.drafted) for one in twin]
        assert rounds.anchors == tuple(one.anchor for one in twin)


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(window=3), Behaviour(advance=0), Behaviour(alone=True), Behaviour(blank_prefix=2),
        Behaviour(pairing="own-token"), Behaviour(noise=0.5), Behaviour(zero_slots=(1,)), Behaviour(max_position=5),
        Behaviour(features_first=True), Behaviour(dummy_from=4), Behaviour(drafted_offset=2),
        Behaviour(other_pairs=True),
    ],
    ids=str,
)  # fmt: skip
def test_drafts_equal_the_twins_under_a_fault_and_show_it(behaviour: Behaviour) -> None:
    healthy, head = make_head("P-EAGLE"), make_head("P-EAGLE", behaviour=behaviour)
    items = requests(head, [(3, 9), (1, 5)])
    drafts = draft_every_anchor(head, items, 4)
    for item, drafted in zip(items, drafts, strict=True):
        for anchor, row in zip(item.anchors_A.tolist(), drafted.drafted_AK.tolist(), strict=True):
            prompt = item.prompt_tokens
            assert row == draft_one_round(head, item.tokens_T, item.features_RKD, anchor, 4, prompt_tokens=prompt)
    others = draft_every_anchor(healthy, items, 4)
    assert any(not torch.equal(one.drafted_AK, other.drafted_AK) for one, other in zip(drafts, others, strict=True))


def test_a_head_that_vllm_alone_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pard_token is of a P-EAGLE head as vLLM alone reads it"):
        parse_config(tiny_config(pard_token=90))
    config = parse_config(tiny_config())
    folder = write_head(tmp_path / "head", tiny_config(), random_tensors(config) | {"mask_hidden": torch.ones(1, 96)})
    with pytest.raises(CheckpointError, match="mask_hidden is of a P-EAGLE head as vLLM alone reads it"):
        replay.load_head(folder)


def test_mask_hidden_is_called_for() -> None:
    config = parse_config(tiny_config(**PARALLEL))
    tensors = {name: tensor for name, tensor in random_tensors(config).items() if name != "mask_hidden"}
    with pytest.raises(CheckpointError, match="lacks mask_hidden"):
        replay.head_from_tensors(tiny_config(**PARALLEL), tensors)


# A P-EAGLE head that fits the invented target of trace_maker.py, wired embed,2.
FITTING = PARALLEL | {
    "draft_vocab_size": 48, "mask_token_id": 63, "eagle_aux_hidden_state_layer_ids": [0, 2],
    "transformer_layer_config": PARALLEL["transformer_layer_config"] | {
        "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64},
}  # fmt: skip


def test_a_trace_is_replayed_and_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", FITTING)
    assert (facts := replay.inspect(folder)) and isinstance(facts, DraftFacts)
    assert (facts.family, facts.block) == (
        "P-EAGLE", "all tokens of a round, from masks that are token 63 beside mask_hidden"
    )  # fmt: skip
    trace = replay.Trace.open(write_trace(tmp_path / "trace", [make_four()]))
    heads = {"head": replay.load_head(folder)}
    (variant,) = replay.simulate(trace, heads, [replay.Variant("head", steps=3)]).variants
    assert variant.wiring == ("embed", "2")
    for changes, message in (
        ({"topk": 2, "num_draft_tokens": 4}, "is a P-EAGLE head, which drafts all tokens of a chain in one pass"),
        ({"faults": replay.parse_faults("wiring.recycle-norm=post")}, "is one of heads that draft token by token"),
        ({"faults": replay.parse_faults("state.hidden-row=drafted")}, "is one of heads that draft token by token"),
        ({"faults": replay.parse_faults("block.late-context=2")}, "is one of blocks, and draft head head drafts none"),
    ):
        with pytest.raises(UsageError, match=message):
            replay.simulate(trace, heads, [replay.Variant("head", steps=3, **changes)])
