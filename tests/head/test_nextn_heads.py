"""NextN heads: step logits equal those of Transformers' own DeepSeek-V3 layer, and files are read strictly."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.heads import target_tables, write_head
from support.nextn_heads import NextNPeer, as_written, nextn_checkpoint, nextn_config
from support.replayed import random_request, replayed_logits
from support.trace_maker import make_requests, write_trace

import replay
from replay.checkpoint.config import parse_config
from replay.cli.app import cli
from replay.engines.behaviour import HEALTHY
from replay.engines.precision import PLAIN
from replay.engines.profiles import ENGINES, NUMERICS
from replay.engines.wiring import Wiring
from replay.errors import CheckpointError
from replay.faults.change import Subject
from replay.faults.table import apply_faults, parse_faults
from replay.head.model import Head, TargetTables
from replay.head.products import Execution

STEPS, LENGTH = 4, 16
CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one group, weights as they are": {
        "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_experts_per_tok": 2},
    "plain rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}  # fmt: skip


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = nextn_config(**CASES[name])
    checkpoint = nextn_checkpoint(seed=3, **CASES[name])
    for tensor in checkpoint.tensors.values():  # half the gain: see ``calm`` in test_peer_head.py
        if tensor.ndim == 2:
            tensor /= 2
    embed_VE, lm_head_VE = target_tables(checkpoint)
    profile = replace(ENGINES["sglang"], numerics=numerics)
    head = Head(checkpoint, TargetTables(embed_VE, lm_head_VE), profile=profile)
    item = random_request(head, LENGTH)
    ours = replayed_logits(monkeypatch, head, item, STEPS)
    peer = NextNPeer(checkpoint, document, embed_VE, lm_head_VE)
    ids_R, states_RE = item.tokens_T[1 : item.rows + 1], item.features_RKD[: item.rows]
    theirs = peer.logits(ids_R, states_RE, STEPS, lambda logits_V: int(logits_V.argmax()))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < 1e-4
        assert other.std(dim=0).mean() > 0.3


def test_it_is_read_under_the_number_of_its_layer(tmp_path: Path) -> None:
    tensors = dict(nextn_checkpoint().tensors)
    for number in (0, 61):
        written = as_written(tensors, number)
        written[f"model.layers.{number}.shared_head.head.weight"] = torch.randn(96, 32)
        written[f"model.layers.{number}.embed_tokens.weight"] = torch.randn(96, 32)
        found = replay.load_head(write_head(tmp_path / str(number), nextn_config(), written))
        assert found.tensors.keys() == tensors.keys() | {"embed_tokens.weight"}
    assert found.config.family == "nextn" and found.config.lm_head == "target"


@pytest.mark.parametrize("name", ["layers.0.mlp.experts.7.up_proj.weight", "eh_proj.weight", "norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = dict(nextn_checkpoint().tensors)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"lacks {name.replace('.', '[.]')}"):
        replay.load_head(write_head(tmp_path / "head", nextn_config(), as_written(tensors, 6)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', noaux_tc"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, 1"),
        ({"n_group": 3, "topk_group": 1}, "n_group is 3, a divisor of 8"),
        ({"n_group": 8}, "n_group is 8, a divisor of 8"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, at most 4"),
        ({"n_routed_experts": None}, "has no n_routed_experts"),
        ({"q_lora_rank": None}, "has no q_lora_rank"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(nextn_config(**changes))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wiring.norm=residual", "no hidden_norm"),
        ("wiring.norm=skip:hidden_norm", "no hidden_norm to leave out"),
        ("wiring.multi-layer", "has one layer"),
        ("weights.layout", "latent attention"),
        ("vocab.d2t", "without d2t"),
    ],
)
def test_faults_without_a_meaning_are_refused_by_name(fault: str, message: str) -> None:
    subject = Subject(Wiring(("final",)), nextn_checkpoint(), HEALTHY, 6, PLAIN)
    with pytest.raises(CheckpointError, match=message):
        apply_faults(subject, parse_faults(fault))


@pytest.mark.parametrize("fault", ["wiring.norm=skip:enorm", "wiring.norm=skip:hnorm", "wiring.concat-order=qkv"])
def test_its_own_faults_move_the_logits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = nextn_checkpoint()
    subject = apply_faults(Subject(Wiring(("final",)), checkpoint, HEALTHY, 6, PLAIN), parse_faults(fault))
    tables = TargetTables(*target_tables(checkpoint))
    both = [Head(checkpoint, tables, behaviour=behaviour) for behaviour in (HEALTHY, subject.behaviour)]
    first, other = (replayed_logits(monkeypatch, head, random_request(head, 6), 1)[0] for head in both)
    assert (first - other).abs().mean() > 0.05


def test_the_bias_of_the_routing_stays_as_it_lies_in_the_file() -> None:
    checkpoint = nextn_checkpoint()
    head = Head(checkpoint, TargetTables(*target_tables(checkpoint)), execution=Execution(torch.bfloat16))
    name = "layers.0.mlp.gate.e_score_correction_bias"
    assert torch.equal(head._weights[name], checkpoint.tensors[name])


def test_the_commands_know_it(tmp_path: Path) -> None:
    config = nextn_config(hidden_size=16, vocab_size=64)
    folder, trace = write_head(tmp_path / "head", config), write_trace(tmp_path / "trace", [make_requests(3)])
    said = CliRunner().invoke(cli, ["simulate", str(trace), "--draft", str(folder), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["variants"][0]["wiring"] == ["final"]
    said = CliRunner().invoke(cli, ["inspect", str(folder)])
    assert said.exit_code == 0 and "NextN" in said.output
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"architectures": ["DeepseekV3ForCausalLM"]}))
    said = CliRunner().invoke(cli, ["check", "--draft", str(folder), "--target", str(tmp_path / "target")])
    assert said.exit_code == 1 and "SGLang reads layer 6 alone" in " ".join(said.output.split())  # all are layers.0.*
