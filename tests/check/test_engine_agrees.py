"""What check says of a config is what SGLang 0.5.23 does: every pair of support/config_cases.py is given to it.

SGLang resolves the arguments, reads both configs, builds the head and loads its tensors, on the CPU (rig/heads.py).
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from rig.server import RIG
from support.check_cases import Case, write_case
from support.config_cases import BROKEN, NEEDS_CUDA, NO_FLAT, SOUND
from support.public_targets import PUBLIC

from replay.check.engine_config import context_of
from replay.check.facts import Facts, read_facts
from replay.check.finding import ERROR
from replay.check.run import check

CASES: dict[str, Case] = {name: case for name, (_, _, case) in BROKEN.items()} | SOUND | {"plain": Case()}
CASES |= {name: Case(target={**NO_FLAT, **config}) for name, config in PUBLIC.items()}
NAMES = [name for name in CASES if name not in NEEDS_CUDA]
# Parameters that no tensor is meant to reach: SGLang puts the target's in their place, begins them as zero, or does
# without them.
SHARED = {"model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.bias"}
KV_SCALES = (".attn.k_scale", ".attn.v_scale")
# Of this one SGLang reads a part that the config does not have, which is what check says.
MADE_UP = "Mistral 3's model type in the head"
ROTATIONS = {
    "default": "RotaryEmbedding", "linear": "LinearScalingRotaryEmbedding", "llama3": "Llama3RotaryEmbedding",
    "dynamic": "DynamicNTKScalingRotaryEmbedding", "yarn": "YaRNScalingRotaryEmbedding",
}  # fmt: skip


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """Of every pair, by name; the pairs lie in folders called by their numbers."""
    root = tmp_path_factory.mktemp("pairs")
    return {name: read_facts(*write_case(root / str(row), CASES[name])) for row, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def seen(facts: dict[str, Facts], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What SGLang makes of them, by name."""
    root = max(tmp_path_factory.getbasetemp().glob("pairs*"))
    folders = [str(root / str(row)) for row in range(len(NAMES))]
    done = subprocess.run(
        [sys.executable, "-P", str(RIG / "heads.py"), *folders], capture_output=True, text=True, timeout=900
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"pair"')]
    assert len(lines) == len(NAMES), done.stderr[-2000:]
    return {NAMES[int(line["pair"])]: line for line in lines}


def _lost(line: Mapping[str, Any], name: str) -> set[str]:
    """Parameters that stay as they began, and should not."""
    theirs = {"lm_head.weight"} if CASES[name].config.get("draft_vocab_size", 1) is None else set()
    return {one for one in line.get("untouched", ()) if not one.endswith(KV_SCALES)} - SHARED - theirs


def test_sglang_stops_where_check_says_so(facts: dict[str, Facts], seen: dict[str, dict[str, Any]]) -> None:
    said = {name for name in NAMES if any("SGLang stops" in one.what for one in check(facts[name]).findings)}
    assert len(said) >= 40
    assert {name for name in said if "stop" not in seen[name]} == set()


def test_check_names_what_sglang_cannot_load(facts: dict[str, Facts], seen: dict[str, dict[str, Any]]) -> None:
    hurt = {name for name in NAMES if "stop" in seen[name] or _lost(seen[name], name)}
    assert len(hurt) >= 60
    named = {name for name in NAMES if any(one.severity == ERROR for one in check(facts[name]).findings)}
    assert hurt - named == set()
    assert hurt & SOUND.keys() == set()


def test_the_dtype_is_the_one_that_sglang_gives(facts: dict[str, Facts], seen: dict[str, dict[str, Any]]) -> None:
    """A head in another dtype than its target, and no other, is named."""
    known = {name: line for name, line in seen.items() if "dtype" in line and line["stage"] in ("build", "load")}
    apart = {name for name, line in known.items() if line["dtype"] != line["target_dtype"] and "stop" not in line}
    cast = {name for name in known if any(one.fault == "precision.dtype-cast" for one in check(facts[name]).findings)}
    assert cast == apart and len(apart) >= 2


@pytest.mark.parametrize("whose", ["served", "context"])
def test_the_length_is_the_one_that_sglang_derives(
    whose: str, facts: dict[str, Facts], seen: dict[str, dict[str, Any]]
) -> None:
    wrong = {}
    for name, line in seen.items():
        side = facts[name].target if whose == "served" else facts[name].draft
        if whose in line and context_of(side.config, side.rope) != line[whose] and name != MADE_UP:
            wrong[name] = (context_of(side.config, side.rope), line[whose])
    assert wrong == {}
    assert {131072, 256} <= {line.get("served") for line in seen.values()}
    assert whose == "context" or all("served" in seen[name] for name in PUBLIC)


def test_the_rotation_is_the_one_that_sglang_builds(facts: dict[str, Facts], seen: dict[str, dict[str, Any]]) -> None:
    checked = set()
    for name, line in seen.items():
        own = facts[name].draft.rope
        if line.get("rope") and own.kind in ROTATIONS and not facts[name].draft.mla and name != MADE_UP:
            assert (line["rope"]["class"], line["rope"]["theta"]) == (ROTATIONS[own.kind], own.theta), name
            checked.add(own.kind)
    assert checked == ROTATIONS.keys()


# Layers, width, vocabulary, longest position and theta: by hand from the configs and the defaults of their classes.
READ = {
    "gemma-3-4b-it": (34, 2560, 262208, 131072, 1e6),
    "gpt-oss-20b": (24, 2880, 201088, 131072, 150000),
    "Kimi-K2.5": (61, 7168, 163840, 262144, 50000),
    "Llama-4-Scout": (48, 5120, 202048, 10485760, 500000),
    "Qwen2.5-VL-7B": (28, 3584, 152064, 128000, 1e6),
    "Qwen3-VL-8B": (36, 4096, 151936, 262144, 5e6),
    "GLM-4.5-Air": (46, 4096, 151552, 131072, 1e6),
    "Mistral-Small-3.1": (40, 5120, 131072, 131072, 1e9),
    "DeepSeek-V3": (61, 7168, 129280, 163840, 10000),
    "Llama-3.1-8B": (32, 4096, 128256, 131072, 500000),
    "Qwen3-30B-A3B": (48, 2048, 151936, 40960, 1e6),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_published_target_is_read(name: str, facts: dict[str, Facts]) -> None:
    target = facts[name].target
    length = context_of(target.config, target.rope)
    assert (target.layers, target.hidden_size, target.vocab_size, length, target.rope.theta) == READ[name]
    said = [finding.fault for finding in check(facts[name]).findings if finding.file.startswith("target")]
    # SGLang 0.5.23 models/mistral.py: the class of Mistral Small captures nothing for a head.
    assert said == (["wiring.aux-missing"] if name == "Mistral-Small-3.1" else [])
    assert target.runs_in_bf16 == (name == "gpt-oss-20b")
