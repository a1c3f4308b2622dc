"""How a head's config says that its tensors are quantised, and which of its layers SGLang then builds quantised.

Sources: SGLang 0.5.23 configs/model_config.py (``_parse_quant_hf_config``, ``_verify_quantization``),
layers/quantization/ (__init__.py, utils.py ``is_layer_skipped``, fp8.py, mxfp4.py, modelopt_quant.py
``is_layer_excluded``, compressed_tensors/utils.py ``should_ignore_layer``, awq/awq.py, gptq/gptq.py), and the names
that models/llama_eagle3.py and models/kimi_k25_eagle3.py give their layers: not those of the checkpoint.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay.checkpoint.config_file import Settings
from replay.checkpoint.headers import TensorFact

if TYPE_CHECKING:
    from replay.check.facts import Draft

# layers/quantization/__init__.py on CUDA.
METHODS = frozenset({
    "fp8", "mxfp8", "minimax_m3_nvfp4", "blockwise_int8", "modelopt", "modelopt_fp8", "modelopt_fp4", "nvfp4_online",
    "modelopt_mixed", "w8a8_int8", "w8a8_fp8", "awq", "awq_marlin", "bitsandbytes", "gguf", "gptq", "gptq_marlin",
    "moe_wna16", "compressed-tensors", "w4afp8", "petit_nvfp4", "quark", "quark_mxfp4", "auto-round",
    "auto-round-int8", "modelslim", "quark_int4fp8_moe", "humming", "mxfp_w4a8", "mxfp4",
})  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")
# What a quantised layer has beside, or in place of, its weight.
_SCALES = (
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "weight_zero_point", "qweight", "qzeros",
    "scales", "g_idx", "weight_shape", "input_scale", "absmax",
)  # fmt: skip
_LLAMA = {  # as models/llama_eagle3.py names them, whatever the layer; its fc is a plain torch.nn.Linear
    "model.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "model.self_attn.o_proj": ("self_attn.o_proj",),
    "model.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "model.down_proj": ("mlp.down_proj",),
}
_MLA = {
    "model.self_attn.fused_qkv_a_proj_with_mqa": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "model.self_attn.q_b_proj": ("self_attn.q_b_proj",),
    "model.self_attn.kv_b_proj": ("self_attn.kv_b_proj",),
    "model.self_attn.o_proj": ("self_attn.o_proj",),
    "model.mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "model.mlp.down_proj": ("mlp.down_proj",),
}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Of a foreign pattern only this much is run: literals, dots, .*, \d+, classes, groups and alternatives.
_TAME = re.compile(r"(?:[\w\-/^$|.,]|\\[.d]|\.\*|\\d\+|\((?:\?:)?|\)|\[[\w^.\-]{1,20}\]\+?)*", re.ASCII)
_MOST_PATTERN, _MOST_STARS, _MOST_PATTERNS = 200, 3, 512


@dataclass(frozen=True, slots=True)
class Quantisation:
    """``method``: as SGLang resolves it, None where it stops at reading it. ``where`` and ``field`` are evidence."""

    method: str | None
    config: Mapping[str, Any]
    where: str
    field: str


def quantisation_of(config: Settings, beside: Mapping[str, Any] | None, where: str) -> Quantisation | None:
    """What the config, or a ``hf_quant_config.json`` ``beside`` it, says; None of a head that is not quantised.

    Raises CheckpointError where the field is neither an object nor null.
    """
    for field in ("quantization_config", "compression_config"):
        if config.values.get(field) is not None:
            document = config.inner(field).values
            return Quantisation(_method(document), document, config.where, field)
    if beside is None:
        return None
    section, method = _section(beside), _modelopt(beside)
    return None if method is None else Quantisation(method, section, where, "quantization")


def _method(document: Mapping[str, Any]) -> str | None:
    stated = document.get("quant_method", "")
    if "quant_method" not in document or stated == "modelopt":
        stated = _modelopt(document) or ("" if stated == "modelopt" else stated)
    return stated.lower() if isinstance(stated, str) else None


def _section(document: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = document.get("quantization")
    return nested if isinstance(nested, dict) else document


def _modelopt(document: Mapping[str, Any]) -> str | None:
    """``_parse_modelopt_quant_config``: the method of Model-Optimizer's algorithm; None where it names none."""
    algorithm = _section(document).get("quant_algo")
    if not isinstance(algorithm, str):
        return None
    if algorithm == "MIXED_PRECISION":
        return "modelopt_mixed"
    return "modelopt_fp4" if "FP4" in algorithm else {"FP8": "modelopt_fp8", "MXFP8": "mxfp8"}.get(algorithm)


def built_quantised(found: Quantisation, module: str) -> bool | None:
    """Whether SGLang builds the layer that it calls ``module`` quantised; None where replay cannot tell."""
    config, method = _section(found.config), found.method or ""
    if method == "fp8" and "fp8" not in str(config.get("quant_method", "fp8")):
        return False  # in capitals fp8.py takes the checkpoint for plain, and quantises it while it loads
    if method in ("fp8", "mxfp8", "blockwise_int8", "w4afp8"):
        ignored = _names(config, "ignored_layers", "modules_to_not_convert")
        both = [*(name.removeprefix("model.") for name in ignored), *ignored]
        return _unless(_skipped(module, both))
    if method in ("modelopt_fp8", "modelopt_fp4"):
        ignored = _names(config, "ignore", "exclude_modules", "modules_to_not_convert")
        return _unless(_skipped(module, ignored) or _excluded(module, ignored))
    if method == "compressed-tensors":
        return _unless(_ignored(module, _names(config, "ignore")))
    if method in ("awq", "awq_marlin"):
        return not any(name in module for name in _names(config, "modules_to_not_convert"))
    if method in ("gptq", "gptq_marlin"):
        dynamic = config.get("dynamic")
        return None if dynamic else True
    if method in ("w8a8_fp8", "w8a8_int8"):
        return None if _names(config, "ignore") else True
    return None


def _unless(skipped: bool | None) -> bool | None:
    return None if skipped is None else not skipped


def _names(config: Mapping[str, Any], *keys: str) -> list[str]:
    """The list at the first key that is there."""
    found = next((config[key] for key in keys if config.get(key) is not None), None)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _shards(module: str) -> list[str]:
    name = module.rsplit(".", 1)[-1]
    return [module.replace(name, part) for part in _FUSED.get(name, (name,))]


def _skipped(module: str, ignored: Iterable[str]) -> bool:
    """utils.py ``is_layer_skipped``, which stops where some shards of a fused layer are and some are not."""
    listed = [name.rstrip(".") for name in ignored]
    return all(any(f".{name}." in f".{shard}." for name in listed) for shard in _shards(module))


def _excluded(module: str, ignored: Sequence[str]) -> bool | None:
    """modelopt_quant.py ``is_layer_excluded``: a pattern with ``*`` fits the whole name or one part of it."""
    if sum("*" in name for name in ignored) > _MOST_PATTERNS:
        return None
    said: list[bool | None] = [
        _matches(name.replace(".", r"\.").replace("*", ".*"), part, whole=True)
        for name in ignored
        for part in (module, *module.split("."))
    ]
    return True if True in said else None if None in said else False


def _ignored(module: str, ignored: Sequence[str]) -> bool | None:
    """compressed_tensors/utils.py ``should_ignore_layer``; heads have no table of fused layers there."""
    if sum(name.startswith("re:") for name in ignored) > _MOST_PATTERNS:
        return None
    said = [
        _matches(name[3:], module) if name.startswith("re:") else name == module or module.endswith(f".{name}")
        for name in ignored
    ]
    return True if True in said else None if None in said else False


def _matches(pattern: str, text: str, *, whole: bool = False) -> bool | None:
    """None for a foreign pattern that is not run."""
    tame = len(pattern) <= _MOST_PATTERN and pattern.count("*") + pattern.count("+") <= _MOST_STARS
    if not tame or not _TAME.fullmatch(pattern):
        return None
    try:
        return bool((re.fullmatch if whole else re.match)(pattern, text))
    except re.error:
        return None


def modules(draft: "Draft") -> Iterator[tuple[str, str]]:
    """SGLang's name of each layer that a quantisation can reach, and what the checkpoint calls (a part of) it."""
    table = _MLA if draft.mla else _LLAMA
    layers = range(min(draft.config.count("num_hidden_layers") or 1, 1 if draft.mla else 8))
    for module, parts in table.items():
        yield from ((module, f"layers.{layer}.{part}") for layer in layers for part in parts)
    if draft.mla:
        yield "model.fc", "fc"


def quantised_parts(tensors: Mapping[str, TensorFact]) -> frozenset[str]:
    """Layers, as the checkpoint calls them, whose tensors are laid out in a quantised way."""
    found = set()
    for name, fact in tensors.items():
        part, _, last = name.rpartition(".")
        if last in _SCALES or (last == "weight" and fact.dtype not in _FLOATS):
            found.add(part)
    return frozenset(found)
