"""What SGLang's and Transformers' config classes take a config.json for: derived from the installed packages.

    PYTHONPATH=../tests/rig python config_classes.py

writes replay/checkpoint/config_classes.json, one class a line. A config.json leaves out what its class has a default
for, and a class refuses a field of another type; `replay check` reads both from this file, because it runs without
either package. tests/check/test_config_classes.py holds the file against the installed packages.

Sources: SGLang sglang/srt/utils/hf_transformers/ (common.py: ``_CONFIG_REGISTRY``, ``get_hf_text_config``),
Transformers models/auto and models/*/configuration_*.py, huggingface_hub dataclasses.py (``strict``).
"""

import ast
import contextlib
import copy
import dataclasses
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PATH = Path(__file__).resolve().parent.parent / "replay" / "checkpoint" / "config_classes.json"
# Fields whose defaults rules need: sizes, lengths (SGLang's CONTEXT_LENGTH_KEYS), and what changes a head's forward.
DEFAULTS = (
    "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim", "max_sequence_length", "seq_length", "max_seq_len", "model_max_length",
    "max_position_embeddings", "tie_word_embeddings", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "dtype", "hidden_act",
)  # fmt: skip
# Classes whose fields are the ones that get their types into the file.
_MODELS = ("llama", "llama4_text", "qwen3", "deepseek_v3", "gemma3_text", "gpt_oss")
# By letter: null, boolean, integer, float, string, list of integers, list of strings, object.
PROBES: dict[str, Any] = {"n": None, "b": True, "i": 1, "f": 1.5, "s": "x", "l": [1], "t": ["x"], "d": {}}
_INNER = ("thinker_config", "llm_config", "language_config", "text_config")  # the order of get_hf_text_config


def derive() -> Row:
    """The whole file. Imports SGLang and Transformers."""
    registry, mapping = _registries()
    types = {name: registry.get(name) or mapping[name] for name in sorted({*mapping.keys(), *registry})}
    served = {*registry, *_served(mapping)} & types.keys()
    fields = _field_names([types[name] for name in _MODELS])
    rows: dict[str, Row] = {}
    for name in sorted(served):
        with contextlib.suppress(Exception):  # a class that takes no empty config tells no defaults
            _add(rows, types[name], fields)
    common = _common_types(rows)
    from transformers.configuration_utils import _LEGACY_LAYER_TYPE_REMAP, ALLOWED_LAYER_TYPES

    return {
        "sglang": version("sglang"),
        "transformers": version("transformers"),
        "layer_types": sorted({*ALLOWED_LAYER_TYPES, *_LEGACY_LAYER_TYPE_REMAP}),
        "types": common,
        "model_types": {name: _called(types[name]) for name in types if _called(types[name]) in rows},
        "others": " ".join(name for name in types if _called(types[name]) not in rows),
        "classes": {name: _short(rows[name], common) for name in sorted(rows)},
    }


def _registries() -> tuple[dict[str, Any], Any]:
    warnings.simplefilter("ignore")
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers import CONFIG_MAPPING

    return dict(_CONFIG_REGISTRY), CONFIG_MAPPING


def _served(mapping: Any) -> set[str]:
    """Model types for which Transformers names an architecture that SGLang has a class for, and text parts."""
    import sglang.srt.models
    import transformers.models.auto.modeling_auto as auto

    classes = _entry_classes(Path(sglang.srt.models.__path__[0]))
    tables = [getattr(auto, name) for name in dir(auto) if name.startswith("MODEL") and name.endswith("_NAMES")]
    pairs = [pair for table in tables for pair in table.items()]
    found = {kind for kind, names in pairs if classes & set([names] if isinstance(names, str) else names)}
    return found | {name for name in mapping.keys() if name.endswith("_text")}


def _entry_classes(folder: Path) -> set[str]:
    """Names in ``EntryClass`` of SGLang's model files, whether they can be imported here or not."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "EntryClass" for one in node.targets):
                found |= {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
    return found


def _field_names(classes: list[Any]) -> list[str]:
    return sorted({field.name for one in classes for field in dataclasses.fields(one)})


def _add(rows: dict[str, Row], cls: Any, fields: list[str]) -> None:
    from sglang.srt.utils.hf_transformers.common import get_hf_text_config

    if _called(cls) in rows:
        return
    whole = cls()
    part = get_hf_text_config(whole)
    row: Row = {"types": _types(cls, fields)}
    if part is not whole:
        row["inner"] = _inner(cls, whole, part)
        row["flat"] = _folds(cls)
        _add(rows, type(part), fields)
    else:
        row |= {"defaults": _defaults(cls, part), "aliases": _aliases(cls), "rope": _rope(cls)}
        if _refuses(cls, {"hidden_size": 100, "num_attention_heads": 7}, "multiple of the number of attention"):
            row["divides"] = True
    rows[_called(cls)] = {key: value for key, value in row.items() if value}


def _called(cls: Any) -> str:
    """Both packages have classes of one name."""
    return str(cls.__name__) + ("" if cls.__module__.startswith("transformers.") else " of SGLang")


def _folds(cls: Any) -> bool:
    """Whether a config without the language part's field has that part's fields beside the others."""
    from sglang.srt.utils.hf_transformers.common import get_hf_text_config

    with contextlib.suppress(Exception):
        return bool(get_hf_text_config(cls(num_hidden_layers=3, hidden_size=96)).num_hidden_layers == 3)
    return False


def _inner(cls: Any, whole: Any, part: Any) -> list[str]:
    """The field with the language part, the class of that part, and ``any`` where its model_type decides instead."""
    key = next((name for name in _INNER if getattr(whole, name, None) is part), "")
    if not key and "thinker_config" in whole.to_dict():
        key = "thinker_config"
    with contextlib.suppress(Exception):
        other = getattr(cls(**{key: {"model_type": "llama"}}), key)
        if type(other).__name__ == "LlamaConfig" != type(part).__name__:
            return [key, _called(type(part)), "any"]
    return [key, _called(type(part))]


def _defaults(cls: Any, config: Any) -> Row:
    """Plain values that the class itself gives; one that it works out of other fields has the default None there."""
    stated = {name: one.default for name, one in inspect.signature(cls.__init__).parameters.items()}
    stated |= {field.name: field.default for field in dataclasses.fields(cls) if not _own_init(cls)}
    object.__setattr__(config, "allow_global_per_layer_attribute_access", True)
    found = {}
    for name in DEFAULTS:
        default = stated.get(config.attribute_map.get(name, name), getattr(type(config), name, None))
        if isinstance(default, int | float | str) and default is not inspect.Parameter.empty:
            found[name] = getattr(config, name, default) if _own_init(cls) else default
    return {name: value for name, value in found.items() if isinstance(value, int | float | str)}


def _own_init(cls: Any) -> bool:
    """Whether the class fills its fields by itself: one that Transformers makes holds each to its type."""
    owner = next(one for one in cls.__mro__ if "__init__" in vars(one))
    return not hasattr(owner.__init__, "__wrapped__")


def _aliases(cls: Any) -> dict[str, str]:
    return {alias: name for alias, name in cls.attribute_map.items() if alias in DEFAULTS}


def _rope(cls: Any) -> Row:
    """``order``: which of rope_scaling and rope_parameters wins, alone: the other is not read, or full: rope_scaling
    goes to full attention alone. ``raw``: no original length is filled in."""
    linear = {"rope_type": "linear", "factor": 8.0}
    found: Row = {"order": "scaling"}
    with contextlib.suppress(Exception):
        if "factor" not in (cls(rope_parameters=linear | {"rope_theta": 66.0}).rope_parameters or {}):
            found["order"] = "alone"
    with contextlib.suppress(Exception):
        yarn = cls(rope_theta=77.0, max_position_embeddings=1000, rope_scaling={"rope_type": "yarn", "factor": 8.0})
        found["raw"] = "original_max_position_embeddings" not in yarn.rope_scaling
    with contextlib.suppress(Exception):
        config = cls(rope_scaling=copy.deepcopy(linear))
        nested = (config.rope_parameters or {}).get("full_attention")
        if isinstance(nested, dict) and nested.get("factor") == 8.0:
            found["order"] = "full"
    with contextlib.suppress(Exception):
        both = cls(rope_parameters=linear | {"rope_theta": 66.0}, rope_scaling=linear | {"factor": 4.0})
        if both.rope_parameters.get("factor") == 8.0:
            found["order"] = "parameters"
    config = cls()
    parameters = getattr(config, "rope_parameters", None)
    theta = getattr(config, "rope_theta", None) or getattr(cls, "default_theta", None)
    found["theta"] = theta.get("global") if isinstance(theta, dict) else theta
    found = {key: value for key, value in found.items() if value}
    if isinstance(parameters, dict):
        found["default"] = default = {key: value for key, value in parameters.items() if key != "type"}
        full = default.get("full_attention") or default
        with contextlib.suppress(Exception):  # a theta that gives way to the config's own is no part of the parameters
            other = cls(rope_theta=77.0).rope_parameters
            if (other.get("full_attention") or other).get("rope_theta") == 77.0:
                found["theta"] = full.pop("rope_theta")
    return found


def _types(cls: Any, fields: list[str]) -> dict[str, str]:
    """Field → letters of what it takes, of the fields that the class holds a type for."""
    from huggingface_hub.dataclasses import type_validator
    from transformers import PreTrainedConfig

    typed = dataclasses.fields(PreTrainedConfig if _own_init(cls) else cls)
    found = {}
    for field in typed:
        taken = ""
        for letter, value in PROBES.items():
            with contextlib.suppress(TypeError):
                type_validator(field.name, value, field.type)
                taken += letter
        if field.name in fields and taken not in ("", "n", "".join(PROBES)):  # else one of certain words, or anything
            found[field.name] = taken
    return found


def _refuses(cls: Any, values: Row, words: str) -> bool:
    try:
        cls(**copy.deepcopy(values))
    except Exception as error:
        return words in str(error) and type(error).__name__.startswith("StrictDataclass")
    return False


def _common_types(rows: dict[str, Row]) -> dict[str, str]:
    votes: dict[str, Counter[str]] = {}
    for row in rows.values():
        for name, letters in row.get("types", {}).items():
            votes.setdefault(name, Counter())[letters] += 1
    return {name: counted.most_common(1)[0][0] for name, counted in sorted(votes.items())}


def _short(row: Row, common: dict[str, str]) -> Row:
    """With the fields of the usual type as a list of names."""
    types = row.pop("types", {})
    row["usual"] = " ".join(name for name, letters in types.items() if common[name] == letters)
    row["types"] = {name: letters for name, letters in types.items() if common[name] != letters}
    return {key: value for key, value in row.items() if value}


def spell(document: Row) -> str:
    """The file's text: one class a line, so that a change reads as one."""
    lines = [f' "{key}": {json.dumps(value, sort_keys=True)}' for key, value in document.items() if key != "classes"]
    classes = [f'  "{name}": {json.dumps(row, sort_keys=True)}' for name, row in document["classes"].items()]
    return "{\n" + ",\n".join(lines) + ',\n "classes": {\n' + ",\n".join(classes) + "\n }\n}\n"


if __name__ == "__main__":
    PATH.write_text(spell(derive()))
    sys.stdout.write(f"{PATH}\n")
