"""Heads that are quantised, rightly or wrongly: what SGLang builds of them, and that other rules go on."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rig.inprocess import sglang_module
from support.check_cases import Case, both, drop, ids, outcome, put, write_case
from support.config_cases import FP8, KIMI_INT4, MODELOPT_FP8, eights

from replay.check.facts import read_facts
from replay.check.quantization import Quantisation, built_quantised
from replay.check.run import check

EIGHTS = eights("_proj.weight")
QUANTISED = {"quantization_config": MODELOPT_FP8}
MODULES = (
    "model.qkv_proj", "model.self_attn.o_proj", "model.gate_up_proj", "model.down_proj", "model.fc",
    "model.self_attn.fused_qkv_a_proj_with_mqa", "model.self_attn.kv_b_proj", "model.mlp.gate_up_proj",
)  # fmt: skip


def _said(folder: Path, case: Case) -> list[tuple[str, str]]:
    return [(finding.fault, finding.severity) for finding in outcome(folder, case).findings]


def test_a_head_in_fp8_that_says_so_costs_acceptance_at_most(tmp_path: Path) -> None:
    assert _said(tmp_path, Case(QUANTISED, EIGHTS)) == [("precision.draft-weights", "warning")]


@pytest.mark.parametrize(
    ("config", "change", "fault"),
    [
        ({}, drop("norm.weight"), "weights.missing"),
        ({}, put("layers.0.hidden_norm.weight", 16), "weights.layout"),
        ({}, put("layers.0.self_attn.q_norm.weight", 12), "weights.missing"),
        (ids(1, 14), lambda tensors: None, "wiring.aux-missing"),
    ],
)
def test_a_quantised_head_is_looked_at_like_any_other(
    config: dict[str, Any], change: Any, fault: str, tmp_path: Path
) -> None:
    """Before, a quantisation switched off the rules on taps, names and shapes."""
    assert (fault, "error") in _said(tmp_path, Case({**QUANTISED, **config}, both(EIGHTS, change)))


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"quantization": {"quant_algo": None}}, []),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
         [("precision.draft-weights", "error")]),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["*"]}}, []),
    ],
)  # fmt: skip
def test_what_model_optimizer_writes_beside_a_config_is_read(
    beside: dict[str, Any], said: list[tuple[str, str]], tmp_path: Path
) -> None:
    """SGLang 0.5.23 configs/model_config.py ``_parse_quant_hf_config`` reads hf_quant_config.json."""
    draft, target = write_case(tmp_path, Case())
    (draft / "hf_quant_config.json").write_text(json.dumps(beside))
    found = check(read_facts(draft, target)).findings
    assert [(finding.fault, finding.severity) for finding in found] == said


IGNORED: list[list[str]] = [
    [], ["lm_head"], ["re:.*self_attn.*"], KIMI_INT4["ignore"], ["o_proj"], ["model.gate_up_proj"],
    ["re:model\\..*_proj$"], ["re:.*\\.(o|down)_proj"], ["self_attn.o_proj", "model.self_attn.kv_b_proj"],
    ["model.self_attn"],
]  # fmt: skip


@pytest.mark.parametrize("ignored", IGNORED)
def test_compressed_tensors_are_ignored_as_sglang_ignores_them(ignored: list[str]) -> None:
    """Against layers/quantization/compressed_tensors/utils.py, with the empty table of fused layers of heads."""
    theirs = sglang_module("srt.layers.quantization.compressed_tensors.utils").should_ignore_layer
    found = Quantisation("compressed-tensors", {"ignore": ignored}, "config.json", "quantization_config")
    for module in MODULES:
        assert built_quantised(found, module) == (not theirs(module, ignored)), module


@pytest.mark.parametrize(
    "ignored",
    [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["model.self_attn"], ["self_attn"], ["mlp.gate"], ["fc"],
     ["model.fc"], ["layers.0.self_attn.o_proj"], ["o_proj"]],
)  # fmt: skip
@pytest.mark.parametrize("method", ["fp8", "modelopt_fp8"])
def test_layers_are_skipped_as_sglang_skips_them(method: str, ignored: list[str]) -> None:
    """Against the configs of layers/quantization/fp8.py and modelopt_quant.py themselves."""
    if method == "fp8":
        config: dict[str, Any] = {**FP8, "ignored_layers": ignored}
        theirs = sglang_module("srt.layers.quantization.fp8").Fp8Config.from_config(dict(config))
        listed = theirs.ignored_layers
    else:
        config = {**MODELOPT_FP8, "ignore": ignored}
        theirs = sglang_module("srt.layers.quantization.modelopt_quant").ModelOptFp8Config.from_config(
            {**config, "packed_modules_mapping": {}}
        )
        listed = theirs.exclude_modules
    skipped = sglang_module("srt.layers.quantization.utils").is_layer_skipped
    found = Quantisation(method, config, "config.json", "quantization_config")
    for module in MODULES:
        left = skipped(module, listed) or (method == "modelopt_fp8" and theirs.is_layer_excluded(module))
        assert built_quantised(found, module) == (not left), module


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:" + ".*" * 40 + "b", "re:[", "re:(?=x)", "re:" + "a" * 1000])
def test_a_foreign_pattern_that_could_take_long_is_not_run(pattern: str) -> None:
    began = time.monotonic()
    found = Quantisation("compressed-tensors", {"ignore": [pattern] * 100}, "config.json", "quantization_config")
    assert built_quantised(found, "model." + "a" * 30) is None
    assert time.monotonic() - began < 1
