"""config_classes.json is what the installed SGLang and Transformers say, and check reads a config by it as they do."""

import copy
import importlib.util
import json
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rig.inprocess import sglang_module

from replay.check import engine_config, facts, rules_positions
from replay.check.engine_config import context_of, filled, language_part, rope_of
from replay.check.quantization import METHODS
from replay.checkpoint.config_classes import class_called, class_of, is_known, letter_of
from replay.checkpoint.config_file import Settings

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "config_classes.py"
LINEAR = {"rope_type": "linear", "factor": 8.0}
# What a config may say of rope, as it is written before and since Transformers 5.
ROPES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta": {"rope_theta": 77.0},
    "linear": {"rope_theta": 77.0, "rope_scaling": LINEAR},
    "linear, old type": {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
    "linear, no theta": {"rope_scaling": LINEAR},
    "dynamic": {"rope_theta": 77.0, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
    "yarn": {"rope_theta": 77.0, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
    "yarn, original length": {
        "rope_theta": 77.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    },
    "parameters": {"rope_parameters": LINEAR | {"rope_theta": 66.0}},
    "parameters, outer theta": {"rope_theta": 77.0, "rope_parameters": LINEAR},
    "both": {"rope_parameters": LINEAR | {"rope_theta": 66.0}, "rope_scaling": LINEAR | {"factor": 4.0}},
}  # fmt: skip
# Classes that work their parameters out in a way of their own, or take no such config: nothing is claimed of them.
ODD = {
    "BeamConfig of SGLang", "ChatGLMConfig of SGLang", "Dots3Config of SGLang", "Dots3NoteTextConfig",
    "HYV4Config of SGLang", "JetNemotronConfig of SGLang", "LagunaConfig of SGLang", "Spark2_5Config of SGLang",
    "Step3TextConfig of SGLang", "Step3p5Config of SGLang",
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script, with SGLang imported as on a CPU server."""
    sglang_module("srt.utils.hf_transformers.common")
    spec = importlib.util.spec_from_file_location("config_classes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield module


@pytest.fixture(scope="module")
def derived(script: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = script.derive()
    return found


def test_the_file_is_the_one_that_the_script_writes(script: ModuleType, derived: dict[str, Any]) -> None:
    """Where a new wheel moves a class, it is named here: run scripts/config_classes.py and read the difference."""
    kept = json.loads(script.PATH.read_text())
    moved = {name for name in kept["classes"].keys() | derived["classes"].keys()
             if kept["classes"].get(name) != derived["classes"].get(name)}  # fmt: skip
    assert moved == set(), f"written for sglang {kept['sglang']} and transformers {kept['transformers']}"
    assert {name: kept[name] for name in kept if name != "classes"} == {
        name: derived[name] for name in derived if name != "classes"
    }
    assert (kept["sglang"], kept["transformers"]) == (version("sglang"), version("transformers"))


def test_a_config_is_read_as_its_class_reads_it(script: ModuleType, derived: dict[str, Any]) -> None:
    """Length and theta of every class, by SGLang's own get_context_length over Transformers' own object."""
    common = sglang_module("srt.utils.hf_transformers.common")
    registry, mapping = script._registries()
    wrong, compared = [], 0
    for kind, name in derived["model_types"].items():
        cls = class_called(name)
        if cls is None or cls.inner is not None or name in ODD:
            continue
        for said, document in ROPES.items():
            document = {**copy.deepcopy(document), "max_position_embeddings": 1000, "model_type": kind}
            try:
                config = (registry.get(kind) or mapping[kind])(**copy.deepcopy(document))
                theirs = _theirs(common, config)
            except Exception:
                continue  # a class that refuses the document says nothing of how it reads it
            settings, _ = language_part(Settings(document, "config.json"), cls)
            rope = rope_of(settings, cls)
            ours = (context_of(filled(settings, cls), rope), rope.theta)
            compared += 1
            if ours[0] != theirs[0] or (theirs[1] is not None and ours[1] != theirs[1]):
                wrong.append((name, said, ours, theirs))
    assert not wrong, "\n".join(map(str, wrong))
    assert compared > 1000


def _theirs(common: Any, config: Any) -> tuple[int, float | None]:
    """Length and theta; None where the class keeps no parameters that say one."""
    object.__setattr__(config, "allow_global_per_layer_attribute_access", True)
    parameters = getattr(config, "rope_parameters", None) or {}
    full = parameters.get("full_attention") or parameters
    return common.get_context_length(config), full.get("rope_theta")


def test_what_check_knows_of_sglang_by_name_is_so(script: ModuleType) -> None:
    """Quantisations that it has, targets that it runs in bf16, and types of rope scaling that it builds."""
    assert set(sglang_module("srt.layers.quantization").QUANTIZATION_METHODS) == METHODS
    fixed = sglang_module("srt.arg_groups.model_override_base").MODEL_OVERRIDES
    assert {name for name, values in fixed.items() if "dtype" in values} == set(facts._IN_BF16)
    assert {values["dtype"] for values in fixed.values() if "dtype" in values} == {"bfloat16"}
    folder = Path(sglang_module("srt.arg_groups.model_overrides").__path__[0])
    assert [path.stem for path in sorted(folder.glob("*.py")) if '["dtype"]' in path.read_text()] == ["gpt_oss"]
    assert set(sglang_module("srt.utils.hf_transformers.common").CONTEXT_LENGTH_KEYS) == set(engine_config._LENGTHS)
    get_rope = sglang_module("srt.layers.rotary_embedding.factory").get_rope
    for kind in rules_positions._BUILT:
        assert get_rope(8, 8, 64, 10000, True, _scaling(kind)) is not None
    with pytest.raises(ValueError, match="Unknown RoPE scaling type"):
        get_rope(8, 8, 64, 10000, True, _scaling("su"))


def _scaling(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}


def test_classes_are_found_by_model_type() -> None:
    """By hand: Transformers 5.24 models/gemma3 and models/llama, and SGLang 0.5.23 configs/kimi_k25.py."""
    gemma = class_of("gemma3")
    assert gemma is not None and (gemma.inner, gemma.inner_class) == ("text_config", "Gemma3TextConfig")
    text = class_called("Gemma3TextConfig")
    assert text is not None and (text.defaults["vocab_size"], text.theta) == (262208, 1e6)
    llama = class_of("llama")
    assert llama is not None and llama.defaults["num_hidden_layers"] == 32 and llama.types["rms_norm_eps"] == "f"
    assert llama.expected("head_dim") == "null or a whole number"
    kimi = class_of("kimi_k25")
    assert kimi is not None and kimi.inner_class == "DeepseekV3Config" and not kimi.follows
    assert class_of("eagle3") is None and not is_known("eagle3") and is_known("bart") and class_of(None) is None


@pytest.mark.parametrize(
    ("value", "letter"),
    [(None, "n"), (True, "b"), (1, "i"), (1.0, "f"), ("x", "s"), ([1], "l"), (["x"], "t"), ([], "lt"), ([1, "x"], "lt"),
     ({}, "d"), (10**30, "i"), (float("nan"), "f")],
)  # fmt: skip
def test_a_value_has_the_letter_of_its_type(value: object, letter: str) -> None:
    assert letter_of(value) == letter
