"""`replay check` of DFlash heads: a sound pair is silent, each broken one is named by its fault and no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.check_cases import target_config, write
from support.dflash_heads import MASK, dflash_checkpoint, dflash_config

from replay.check import rules_block
from replay.check.facts import Facts, read_facts
from replay.check.run import BLOCK_RULES, check
from replay.check.server import parse_server_arguments
from replay.cli.app import cli
from replay.engines.wiring import parse_wiring

Tensors = dict[str, torch.Tensor]
LINE = "--speculative-algorithm DFLASH --speculative-draft-model-path x "
TARGET = {"num_hidden_layers": 8}


def facts_of(
    folder: Path,
    changes: dict[str, Any] | None = None,
    change: Callable[[Tensors], object] = lambda tensors: None,
    target: dict[str, Any] | None = None,
    server: str | None = None,
    **more: Any,
) -> Facts:
    tensors = dict(dflash_checkpoint().tensors)
    change(tensors)
    draft = write(folder / "draft", dflash_config(**{"torch_dtype": "bfloat16", **(changes or {})}), tensors)
    beside = write(folder / "target", target_config(**{**TARGET, **(target or {})}))
    return read_facts(draft, beside, None if server is None else parse_server_arguments(server, None), **more)


IDS = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]}
BROKEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no mask token": ("config.field-drop", "warning", {"changes": {"dflash_config": {"target_layer_ids": [0, 2, 3]}}}),
    "a Domino head": (
        "config.field-drop", "warning", {"changes": {"dflash_config": {**IDS, "projector_type": "domino"}}}),
    "served by EAGLE's own code": ("config.field-drop", "error", {"engine": "eagle"}),
    "ids out of order": (
        "wiring.aux-layer-id", "error", {"changes": {"dflash_config": {**IDS, "target_layer_ids": [3, 2, 0]}}}),
    "an id of the last layer": ("wiring.aux-layer-id", "error", {"target": {"num_hidden_layers": 4}}),
    "another wiring than trained": ("wiring.aux-layer-id", "error", {"wiring": parse_wiring("embed,2,3")}),
    "a target of other layers": ("wiring.aux-layer-id", "warning", {"target": {"num_hidden_layers": 9}}),
    "a wider target": ("wiring.aux-missing", "error", {"target": {"hidden_size": 64}}),
    "another number of ids": (
        "wiring.aux-missing", "error", {"changes": {"dflash_config": {**IDS, "target_layer_ids": [0, 2]}}}),
    "a smaller vocabulary": ("block.mask-token", "error", {"target": {"vocab_size": 90}}),
    "no norm of keys": (
        "weights.missing", "error", {"change": lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight")}),
    "an lm_head of its own": (
        "weights.missing", "error", {"change": lambda tensors: tensors.update({"lm_head.weight": torch.ones(96, 32)})}),
    "another head_dim": ("weights.layout", "error", {"changes": {"head_dim": 16}}),
    "algorithm EAGLE3": (
        "config.argument", "error",
        {"server": LINE.replace("DFLASH", "EAGLE3") + "--speculative-num-draft-tokens 5"}),
    "on a CPU": ("config.argument", "error", {"server": LINE + "--device cpu"}),
    "longer blocks": ("block.size", "warning", {"server": LINE + "--speculative-num-draft-tokens 8"}),
    "shorter blocks": ("block.size", "warning", {"server": LINE + "--speculative-dflash-block-size 3"}),
}  # fmt: skip


@pytest.mark.parametrize(
    "server", [None, LINE, LINE + "--speculative-num-draft-tokens 5", LINE + "--speculative-dflash-block-size 5"]
)
def test_a_sound_pair_is_silent(server: str | None, tmp_path: Path) -> None:
    outcome = check(facts_of(tmp_path, server=server, wiring=parse_wiring("1,3,4")))
    assert outcome.findings == ()
    assert outcome.fed == {"SGLang 0.5.23": "R[1,3,4]"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pair_is_named(name: str, tmp_path: Path) -> None:
    fault, severity, case = BROKEN[name]
    found = check(facts_of(tmp_path, **case)).findings
    assert [(finding.fault, finding.severity) for finding in found] == [(fault, severity)], found
    assert found[0].what and found[0].file and found[0].field and found[0].seen and found[0].expected and found[0].fix


def test_every_rule_of_blocks_finds_something(tmp_path: Path) -> None:
    own = {rule.find for rule in BLOCK_RULES if rule.find.__module__ == rules_block.__name__}
    found = set()
    for number, (_, _, case) in enumerate(BROKEN.values()):
        facts = facts_of(tmp_path / str(number), **case)
        found |= {find for find in own if any(find(facts))}
    assert found == own


def test_the_command_judges_a_head_of_blocks(tmp_path: Path) -> None:
    facts_of(tmp_path)
    ran = CliRunner().invoke(cli, ["check", "--draft", str(tmp_path / "draft"), "--target", str(tmp_path / "target")])
    assert ran.exit_code == 0, ran.output
    assert "taps: R[1,3,4] by SGLang 0.5.23" in ran.output
