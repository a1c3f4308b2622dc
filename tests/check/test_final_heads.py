"""`replay check` of EAGLE-1 and NextN heads: a sound pair is silent, each broken one is named by its fault alone.

What it says of SGLang's classes is read in SGLang's own source, without importing it.
"""

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.check_cases import target_config, write
from support.eagle_heads import eagle_checkpoint, eagle_config
from support.nextn_heads import as_written, nextn_checkpoint, nextn_config

from replay.check import rules_final
from replay.check.facts import Facts, read_facts
from replay.check.run import FINAL_RULES, check
from replay.check.server import parse_server_arguments
from replay.cli.app import cli
from replay.engines.wiring import parse_wiring

Tensors = dict[str, torch.Tensor]
LINE = "--speculative-algorithm EAGLE --speculative-draft-model-path x "
CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
BF16 = {"torch_dtype": "bfloat16"}


def facts_of(
    folder: Path,
    family: str = "eagle",
    changes: dict[str, Any] | None = None,
    change: Callable[[Tensors], object] = lambda tensors: None,
    target: dict[str, Any] | None = None,
    server: str | None = None,
    **more: Any,
) -> Facts:
    """``change`` is made to the tensors as they are written."""
    config = (eagle_config if family == "eagle" else nextn_config)(**{**BF16, **(changes or {})})
    sound = eagle_checkpoint() if family == "eagle" else nextn_checkpoint()
    tensors = dict(sound.tensors) if family == "eagle" else as_written(dict(sound.tensors), 6)
    change(tensors)
    draft = write(folder / "draft", config, tensors)
    beside = write(folder / "target", target_config(**(target or {})))
    return read_facts(draft, beside, None if server is None else parse_server_arguments(server, None), **more)


def behind_model(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


BROKEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a vocabulary of drafts": ("config.field-drop", "warning", {"changes": {"draft_vocab_size": 40}}),
    "SafeAILab's architecture": ("config.field-drop", "error", {"changes": {"architectures": ["LlamaForCausalLM"]}}),
    "a wider target": ("wiring.aux-missing", "error", {"target": {"hidden_size": 64}}),
    "a larger vocabulary": ("vocab.d2t", "warning", {"target": {"vocab_size": 128}}),
    "trained on taps": ("wiring.aux-layer-id", "error", {"wiring": parse_wiring("embed,2,3")}),
    "half an MLP": ("weights.missing", "error", {"change": lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight")}),
    "an lm_head of its own": (
        "weights.missing", "error", {"change": lambda tensors: tensors.update({"lm_head.weight": torch.ones(96, 32)})}),
    "names behind model.": ("weights.missing", "error", {"change": behind_model}),
    "another head_dim": ("weights.layout", "error", {"changes": {"head_dim": 16}}),
    "fc without a bias": (
        "weights.missing", "warning",
        {"changes": {"bias": False}, "change": lambda tensors: tensors.pop("fc.bias")}),
    "in fp32": ("precision.dtype-cast", "warning", {"changes": {"torch_dtype": "float32"}}),
    "algorithm EAGLE3": ("wiring.aux-missing", "error", {"server": LINE.replace("EAGLE", "EAGLE3") + CHAIN}),
    "no speculation": ("config.steps", "error", {"server": "sglang serve --model-path y"}),
    "fewer tokens than asked for": (
        "config.steps", "warning", {"server": LINE + CHAIN.replace("tokens 4", "tokens 9")}),
    "a head for each step": ("config.argument", "error", {"server": LINE + CHAIN + "--enable-multi-layer-eagle"}),
    "a target with a head for each step": (
        "config.argument", "error",
        {"server": LINE + CHAIN, "target": {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2"}}),
    "the layer of another number": (
        "weights.missing", "error", {"family": "nextn", "changes": {"num_hidden_layers": 7}}),
    "an expert that is not there": (
        "weights.missing", "error", {
            "family": "nextn",
            "change": lambda tensors: tensors.pop("model.layers.6.mlp.experts.5.up_proj.weight")}),
    "several layers": ("config.field-drop", "warning", {"family": "nextn", "changes": {"num_nextn_predict_layers": 3}}),
    "another latent": ("weights.layout", "error", {"family": "nextn", "changes": {"kv_lora_rank": 28}}),
    "a NextN head for each step": (
        "config.argument", "error", {"family": "nextn", "server": LINE + CHAIN + "--enable-multi-layer-eagle"}),
}  # fmt: skip


@pytest.mark.parametrize("family", ["eagle", "nextn"])
@pytest.mark.parametrize("server", [None, LINE + CHAIN, LINE.replace("EAGLE", "NEXTN") + CHAIN])
def test_a_sound_pair_is_silent(family: str, server: str | None, tmp_path: Path) -> None:
    outcome = check(facts_of(tmp_path, family, server=server, wiring=parse_wiring("final")))
    assert outcome.findings == ()
    assert outcome.fed == {"SGLang 0.5.23": "final"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pair_is_named(name: str, tmp_path: Path) -> None:
    fault, severity, case = BROKEN[name]
    found = check(facts_of(tmp_path, **case)).findings
    assert [(finding.fault, finding.severity) for finding in found] == [(fault, severity)], found
    assert found[0].what and found[0].file and found[0].field and found[0].seen and found[0].expected and found[0].fix


def test_every_rule_of_the_final_state_finds_something(tmp_path: Path) -> None:
    own = {rule.find for rule in FINAL_RULES if rule.find.__module__ == rules_final.__name__}
    found = set()
    for number, (_, _, case) in enumerate(BROKEN.values()):
        facts = facts_of(tmp_path / str(number), **case)
        found |= {find for find in own if any(find(facts))}
    assert found == own


def test_the_command_judges_a_head_of_the_final_state(tmp_path: Path) -> None:
    facts_of(tmp_path)
    ran = CliRunner().invoke(cli, ["check", "--draft", str(tmp_path / "draft"), "--target", str(tmp_path / "target")])
    assert ran.exit_code == 0, ran.output
    assert "taps: final by SGLang 0.5.23" in ran.output


SPEC = find_spec("sglang")
assert SPEC is not None and SPEC.submodule_search_locations
SGLANG = Path(SPEC.submodule_search_locations[0]) / "srt"


def classes_by_step() -> set[str]:
    """The classes of heads whose constructor takes the number of a step."""
    texts = [path.read_text(encoding="utf-8") for path in (SGLANG / "models").glob("*.py")]
    trees = [ast.parse(text) for text in texts if "draft_model_idx" in text]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    made = [(kind.name, part) for kind in classes for part in kind.body if isinstance(part, ast.FunctionDef)]
    return {name for name, part in made if part.name == "__init__" and "draft_model_idx" in ast.unparse(part.args)}


def test_sglang_builds_other_classes_for_each_step() -> None:
    """model_loader/loader.py ``_initialize_model`` hands the number of the step to the class, whatever it takes."""
    loader = (SGLANG / "model_loader" / "loader.py").read_text(encoding="utf-8")
    assert 'kwargs["draft_model_idx"] = load_config.draft_model_idx' in loader
    ours = {"LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "DeepseekV3ForCausalLMNextN", "DFlashDraftModel"}
    found = classes_by_step()
    assert {"MiMoV2MTP", "Step3p5MTP"} <= found and not found & ours


def test_sglang_turns_it_on_for_these_targets() -> None:
    turned = {
        path: path.read_text(encoding="utf-8").count('overrides["enable_multi_layer_eagle"] = True')
        for path in (SGLANG / "arg_groups").rglob("*.py")
    }
    files = {path: count for path, count in turned.items() if count}
    assert sum(files.values()) == 3
    said = " ".join(path.read_text(encoding="utf-8") for path in files)
    assert all(f'"{name}"' in said for name in rules_final.MANY_LAYERS)


def test_sglang_reads_these_heads_as_check_says() -> None:
    """That fc has a bias in any case, that a leading model. is put in front of every name, and which layer is read."""
    eagle = (SGLANG / "models" / "llama_eagle.py").read_text(encoding="utf-8")
    assert "self.fc = torch.nn.Linear(config.hidden_size * 2, config.hidden_size)\n" in eagle
    assert 'if "lm_head" not in name:\n                name = "model." + name' in eagle
    loader = (SGLANG / "models" / "deepseek_common" / "deepseek_weight_loader.py").read_text(encoding="utf-8")
    assert "0 if self.config.num_hidden_layers == 1 else self.config.num_hidden_layers" in loader
    assert "if not name.startswith(layer_prefix):\n                            continue" in loader
