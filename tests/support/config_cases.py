"""Pairs whose configs SGLang 0.5.23 reads otherwise than they look: broken ones with what check must name, sound ones.

tests/check/test_engine_agrees.py holds every one of them against SGLang itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
from support.check_cases import Case, Tensors, both, d2t, drop, ids, put, put_mask, rename

Pairs = dict[str, tuple[str, str, Case]]

# ---- targets as they are published, with what their classes leave implicit ----

# A whole config: None takes the flat one's fields away.
NO_FLAT = dict.fromkeys(
    ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings", "rope_theta", "torch_dtype")
)
# google/gemma-3-27b-it's text_config: no vocab_size, no length, no theta; Gemma3TextConfig has 262208, 131072 and 1e6.
GEMMA3_TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 30,
    "num_key_value_heads": 2, "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}  # fmt: skip
GEMMA3 = {
    **NO_FLAT, "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "torch_dtype": "bfloat16", "text_config": GEMMA3_TEXT,
}  # fmt: skip
ON_GEMMA3 = {"vocab_size": 262208, "max_position_embeddings": 131072}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": None, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 150000.0, "quantization_config": MXFP4,
}  # fmt: skip
SIZED = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
MISTRAL3 = {
    **NO_FLAT, "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "dtype": "bfloat16",
    "text_config": {
        "model_type": "mistral", **SIZED, "head_dim": 8, "num_hidden_layers": 30, "hidden_size": 32, "vocab_size": 96,
        "max_position_embeddings": 256, "rope_theta": 500000.0, "sliding_window": None,
    },
}  # fmt: skip
LLAMA4 = {
    **NO_FLAT, "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text", **SIZED, "head_dim": 8, "num_hidden_layers": 30, "hidden_size": 32,
        "vocab_size": 96, "max_position_embeddings": 256, "rope_theta": 500000.0,
    },
}  # fmt: skip
KIMI_TEXT = {
    "model_type": "kimi_k2", **SIZED, "num_key_value_heads": 4, "num_hidden_layers": 61, "hidden_size": 32,
    "vocab_size": 96, "max_position_embeddings": 256, "rope_theta": 50000.0, "q_lora_rank": 8, "kv_lora_rank": 6,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip
KIMI = {
    **NO_FLAT, "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "text_config": KIMI_TEXT,
}  # fmt: skip
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZED, "head_dim": 8}
_ORIGINAL = "original_max_position_embeddings"
SECTIONS = {"type": "mrope", "mrope_section": [2, 2, 2]}
QWEN25_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **SIZED,
    "rope_scaling": SECTIONS, "vision_config": {"hidden_size": 32, "num_heads": 4, "depth": 2},
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip

# ---- quantisations as targets state them ----

FP8 = {"activation_scheme": "dynamic", "quant_method": "fp8"}
FP8_BLOCKS = {**FP8, "fmt": "e4m3", "weight_block_size": [128, 128]}
# moonshotai/Kimi-K2.5: its experts are in INT4, and all that a head has too is ignored, under other names.
KIMI_INT4 = {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32,
                                                                      "strategy": "group", "symmetric": True}}},
    "format": "pack-quantized", "quant_method": "compressed-tensors",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
MODELOPT_FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}

# ---- heads with DeepSeek's attention: SGLang 0.5.23 models/kimi_k25_eagle3.py ----

MLA = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 8, "kv_lora_rank": 6,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "num_key_value_heads": 4, "head_dim": None,
    "rope_theta": 50000.0, "rope_scaling": KIMI_TEXT["rope_scaling"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
}  # fmt: skip
_MLA_SHAPES = {
    "q_a_proj": (8, 64), "q_a_layernorm": (8,), "q_b_proj": (24, 8), "kv_a_proj_with_mqa": (8, 64),
    "kv_a_layernorm": (6,), "kv_b_proj": (32, 6), "o_proj": (32, 16),
}  # fmt: skip


def latent(tensors: Tensors) -> None:
    """DeepSeek's attention in the place of Llama's."""
    for name in [name for name in tensors if "self_attn" in name]:
        del tensors[name]
    tensors |= {f"layers.0.self_attn.{name}.weight": noise(*shape) for name, shape in _MLA_SHAPES.items()}


def noise(*shape: int) -> torch.Tensor:
    """Numbers that are no constant."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def mla(config: Mapping[str, Any] | None = None, *changes: Any, **more: Any) -> Case:
    """An MLA head on Kimi."""
    return Case({**MLA, **(config or {})}, both(latent, *changes), target=KIMI, **more)


def behind_model(tensors: Tensors) -> None:
    """Names as a module that keeps the head in ``model`` saves them."""
    for name in [name for name in tensors if name not in ("lm_head.weight", "d2t")]:
        tensors[f"model.{name}"] = tensors.pop(name)


def turn(name: str) -> Any:
    """The transpose in a matrix's place."""
    return lambda tensors: tensors.__setitem__(name, tensors[name].T.contiguous())


def in_one(whole: str, *parts: str) -> Any:
    """Several matrices as the one that SGLang makes of them."""

    def join(tensors: Tensors) -> None:
        tensors[f"layers.0.{whole}.weight"] = torch.cat([tensors.pop(f"layers.0.{part}.weight") for part in parts])

    return join


IN_ONE = both(
    in_one("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    in_one("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
)


def eights(*names: str) -> Any:
    """Matrices in fp8 with a scale each."""

    def quantise(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(names)]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale")] = torch.ones(())
            tensors[name.replace(".weight", ".input_scale")] = torch.ones(())

    return quantise


def packed(tensors: Tensors) -> None:
    """Matrices of an MLA head as Model-Optimizer packs fp4, two numbers a byte."""
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_mqa.weight", "fc.weight"))]:
        rows, inputs = tensors[name].shape
        tensors[name] = torch.zeros(rows, inputs // 2, dtype=torch.uint8)
        tensors[name + "_scale"] = torch.ones(rows, max(1, inputs // 16))


def first_tokens(tensors: Tensors) -> None:
    """A draft vocabulary of the first ids, in d2t and in t2d."""
    tensors["d2t"].zero_()
    tensors["t2d"] = torch.arange(96) < 40


def spread(offsets: torch.Tensor) -> torch.Tensor:
    """Every second target id."""
    return torch.arange(len(offsets))


def damaged(offsets: torch.Tensor) -> torch.Tensor:
    """Every second target id, the last three rows off by 20: in range as ids, out of range as offsets."""
    return spread(offsets) + 20 * (torch.arange(len(offsets)) >= len(offsets) - 3)


_FIELD, _ROPE, _WEIGHTS = "config.field-drop", "position.rope-params", "precision.draft-weights"
BROKEN: Pairs = {
    # ---- what the class of a model type takes ----
    "no model type": (_FIELD, "error", Case({"model_type": None})),
    "null model type": (_FIELD, "error", Case(null=("model_type",))),
    "model type that nobody knows": (_FIELD, "error", Case({"model_type": "eagle3"})),
    "speculators' model type": (_FIELD, "error", Case({"model_type": "speculator_model"})),
    "model type of a model that also sees": (_FIELD, "error", Case({"model_type": "kimi_k25"})),
    "Mistral 3's model type in the head": (_FIELD, "error", Case({"model_type": "mistral3"})),
    "null auto_map": (_FIELD, "error", Case(null=("auto_map",))),
    "empty text part": (_FIELD, "error", Case({"text_config": {}})),
    "activation of another class": (_FIELD, "error", Case({"model_type": "arcee"})),
    "target that nobody knows": (_FIELD, "error", Case(target={"model_type": "llama9"})),
    "target without a model type": (_FIELD, "error", Case(target={"model_type": None})),
    "epsilon is a word": (_FIELD, "error", Case({"rms_norm_eps": "x"})),
    "epsilon is a number in quotes": (_FIELD, "error", Case({"rms_norm_eps": "1e-5"})),
    "epsilon is a whole number": (_FIELD, "error", Case({"rms_norm_eps": 0})),
    "epsilon is null": (_FIELD, "error", Case(null=("rms_norm_eps",))),
    "epsilon of the target is a word": (_FIELD, "error", Case(target={**SIZED, "rms_norm_eps": "x"})),
    "epsilon of a text part is a word": (
        _FIELD, "error", Case(ON_GEMMA3,
                              target={**GEMMA3, "text_config": {**GEMMA3_TEXT, "rms_norm_eps": "x"}})),
    "flag in quotes": (_FIELD, "error", Case({"use_cache": "true"})),
    "null flag": (_FIELD, "error", Case(null=("attention_bias",))),
    "null activation": (_FIELD, "error", Case(null=("hidden_act",))),
    "padding token is a word": (_FIELD, "error", Case({"pad_token_id": "<pad>"})),
    "layer types is a word": (_FIELD, "error", Case({"layer_types": "x"})),
    "layer types of Qwen3 is a word": (_FIELD, "error", Case({"model_type": "qwen3", "layer_types": "x"})),
    "layer types of the target": (_FIELD, "error", Case({"layer_types": ["full_attention"] * 30})),
    "layer type that nobody knows": (_FIELD, "error", Case({"layer_types": ["attn"]})),
    "layer types of the target too few": (
        _FIELD, "error", Case(target={**QWEN3, "layer_types": ["full_attention"] * 29})),
    "heads that do not divide the width": (
        _FIELD, "error",
        Case({"num_attention_heads": 5, "num_key_value_heads": 1}, both(
            put("layers.0.self_attn.q_proj.weight", 60, 64), put("layers.0.self_attn.k_proj.weight", 12, 64),
            put("layers.0.self_attn.v_proj.weight", 12, 64), put("layers.0.self_attn.o_proj.weight", 32, 60)))),
    "null target_hidden_size": (_FIELD, "error", Case(null=("target_hidden_size",))),
    "no num_attention_heads": (_FIELD, "error", Case({"num_attention_heads": None})),
    "dtype in short": (_FIELD, "error", Case({"torch_dtype": "bf16"})),
    "dtype of torch": (_FIELD, "error", Case({"torch_dtype": "torch.bfloat16"})),
    "dtype of integers": (_FIELD, "error", Case({"torch_dtype": "int8"})),
    "dtype of fp8": (_FIELD, "error", Case({"torch_dtype": "float8_e4m3fn"})),
    "automatic dtype": (_FIELD, "error", Case({"torch_dtype": "auto"})),
    "dtype of the target in short": (_FIELD, "error", Case(target={"torch_dtype": "bf16"})),
    # ---- rope ----
    "null theta": (_ROPE, "error", Case(null=("rope_theta",))),
    "scaling of an unknown type": (_ROPE, "error", Case({"rope_scaling": {"rope_type": "su", "factor": 2.0}})),
    "llama3 without its frequencies": (
        _ROPE, "error", Case({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}})),
    "longrope without its factors": (_ROPE, "error", Case({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}})),
    "yarn without its factor": (_ROPE, "error", Case({"rope_scaling": {"rope_type": "yarn"}})),
    "dynamic without its factor": (_ROPE, "error", Case({"rope_scaling": {"rope_type": "dynamic"}})),
    "theta of zero": (_ROPE, "error", Case({"rope_theta": 0})),
    "null type": (_ROPE, "error", Case({"rope_scaling": {"rope_type": None, "factor": 2.0}})),
    "linear factor without a decimal point": (
        _ROPE, "error", Case({"rope_scaling": {"rope_type": "linear", "factor": 2}})),
    "yarn with a null length": (_ROPE, "error", Case({"rope_scaling": {**YARN, _ORIGINAL: None}})),
    "longrope of another head": (_ROPE, "error", Case({"rope_scaling": {
        "rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}})),
    "scaling of the target without its factor": (
        _ROPE, "error", Case(target={**SIZED, "rope_scaling": {"rope_type": "linear"}})),
    "theta of Ministral 3's class": (
        _ROPE, "warning", Case({"model_type": "ministral3"}, target={"max_position_embeddings": 64})),
    "factor without a type": (_ROPE, "warning", Case({"rope_scaling": {"factor": 2.0}})),
    "theta lost beside a scaling": (
        _ROPE, "error", Case({"rope_theta": None, "rope_scaling": LINEAR,
                              "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
                             target={"rope_scaling": LINEAR, "max_position_embeddings": 128})),
    "Gemma 3's model type in the head": (
        _ROPE, "error", Case({"model_type": "gemma3_text", "tie_word_embeddings": False})),
    "yarn that gpt-oss brings along": (_ROPE, "warning", Case({"model_type": "gpt_oss", "attention_bias": False})),
    "yarn multiplies no length": (
        "position.max-len", "error", Case({"rope_theta": 5e5, "rope_scaling": YARN, "max_position_embeddings": 128},
                                          target={"rope_scaling": YARN})),
    "shorter than Gemma 3": (
        "position.max-len", "error", Case({**ON_GEMMA3, "max_position_embeddings": 65536}, target=GEMMA3)),
    "partial rotation copied from the target": (
        "position.rope-geometry", "warning",
        Case({"partial_rotary_factor": 0.5}, target={"model_type": "glm4", "partial_rotary_factor": 0.5, **SIZED})),
    # ---- precision ----
    "fp16 head on Gemma 3": (
        "precision.dtype-cast", "warning", Case({**ON_GEMMA3, "torch_dtype": None},
                                                target={**GEMMA3, "torch_dtype": None})),
    "no dtype beside Llama 4": ("precision.dtype-cast", "warning", Case({"torch_dtype": None}, target=LLAMA4)),
    "Mistral 3 captures no layers": ("wiring.aux-missing", "error", Case(target=MISTRAL3)),
    "fp8 of the target copied": (_WEIGHTS, "error", Case({"quantization_config": FP8})),
    "fp8 in blocks copied": (_WEIGHTS, "error", Case({"quantization_config": FP8_BLOCKS})),
    "fp8 that ignores names of the file": (_WEIGHTS, "error", Case({"quantization_config": {
        **FP8, "ignored_layers": ["layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj",
                                  "layers.0.self_attn.v_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj",
                                  "layers.0.mlp.down_proj", "layers.0.self_attn.o_proj"]}})),
    "INT4 of Kimi copied": (_WEIGHTS, "error", Case({"quantization_config": KIMI_INT4})),
    "INT4 of Kimi copied to an MLA head": (_WEIGHTS, "error", mla({"quantization_config": KIMI_INT4})),
    "gptq copied": (_WEIGHTS, "error", Case({"quantization_config": GPTQ})),
    "mxfp4 of gpt-oss copied": (_WEIGHTS, "error", Case({"quantization_config": MXFP4}, target=GPT_OSS)),
    "fp4 of Model-Optimizer copied": (_WEIGHTS, "error", Case({"quantization_config": MODELOPT_FP4})),
    "fp8 of Model-Optimizer copied": (_WEIGHTS, "error", Case({"quantization_config": MODELOPT_FP8})),
    "quantisation that SGLang lacks": (
        _WEIGHTS, "error", Case({"quantization_config": {"quant_method": "torchao", "quant_type": "int4"}})),
    "quantisation without a method": (_WEIGHTS, "error", Case({"quantization_config": {"bits": 4}})),
    "empty quantisation": (_WEIGHTS, "error", Case({"quantization_config": {}})),
    "null method": (_WEIGHTS, "error", Case({"quantization_config": {"quant_method": None}})),
    "fc quantised": (
        _WEIGHTS, "error", Case({"quantization_config": MODELOPT_FP8}, eights("_proj.weight", "fc.weight"))),
    "empty quantisation of the target": (_FIELD, "error", Case(target={**SIZED, "quantization_config": {}})),
    "quantisation of the target that SGLang lacks": (
        _FIELD, "error", Case(target={**SIZED, "quantization_config": {"quant_method": "fbgemm_fp8"}})),
    # ---- MLA heads ----
    "MLA names behind model.": ("weights.missing", "error", mla(None, behind_model)),
    "MLA norm before fc": ("wiring.norm", "error", mla({"norm_before_fc": True}, put("input_norm.weight", 96))),
    "MLA norm before fc in the config alone": ("wiring.norm", "warning", mla({"norm_before_fc": True})),
    "MLA with old names of fc_norm": (
        "weights.missing", "error",
        mla({"fc_norm": True}, *(put(f"aux_norm_{name}.weight", 32) for name in ("low", "mid", "high")))),
    "MLA of two layers": (
        "wiring.multi-layer", "error", mla({"num_hidden_layers": 2}, put("layers.1.hidden_norm.weight", 32))),
    "MLA of two layers in the config alone": ("wiring.multi-layer", "error", mla({"num_hidden_layers": 2})),
    "MLA without a number of layers": (_FIELD, "error", mla({"num_hidden_layers": None})),
    "MLA without a rank of q": (_FIELD, "error", mla(null=("q_lora_rank",))),
    "MLA with another rank than the class's": (_FIELD, "error", mla({"kv_lora_rank": None})),
    "MLA with null experts": (_FIELD, "error", mla(null=("n_routed_experts",))),
    "MLA with its first projection in one": (
        "weights.missing", "error",
        mla(None, in_one("self_attn.fused_qkv_a_proj_with_mqa", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"))),
    "MLA in fp4": (_WEIGHTS, "error", mla({"quantization_config": MODELOPT_FP4}, packed)),
    "MLA in fp8": (
        _WEIGHTS, "error",
        mla({"quantization_config": MODELOPT_FP8}, eights("_proj.weight", "_mqa.weight", "fc.weight"))),
    # ---- tensors and the map ----
    "fc transposed": ("weights.layout", "error", Case(change=turn("fc.weight"))),
    "down_proj transposed": ("weights.layout", "error", Case(change=turn("layers.0.mlp.down_proj.weight"))),
    "lm_head transposed": ("weights.layout", "error", Case(change=turn("lm_head.weight"))),
    "last rows of the map out of range": ("vocab.d2t", "error", Case(change=d2t(damaged))),
    "first tokens only": ("vocab.d2t", "note", Case(change=first_tokens)),
}  # fmt: skip

# Pairs with nothing to say of them.
SOUND: dict[str, Case] = {
    "Gemma 3 as it is published": Case(ON_GEMMA3, target=GEMMA3),
    "Gemma 3 with its theta": Case({**ON_GEMMA3, "rope_theta": 1e6}, target=GEMMA3),
    "Gemma 3 without a dtype": Case(
        ON_GEMMA3, target={**GEMMA3, "torch_dtype": None}),
    "MXFP4 gpt-oss without a dtype": Case(target=GPT_OSS),
    "MXFP4 gpt-oss, head without one": Case({"torch_dtype": None}, target=GPT_OSS),
    "MXFP4 gpt-oss, head in fp16": Case({"torch_dtype": "float16"}, target=GPT_OSS),
    "Llama 4": Case(target=LLAMA4),
    "Kimi as it is published": Case(ids(2, 30, 58), target=KIMI),
    "Qwen 3": Case(target=QWEN3),
    "Qwen 2.5 VL, its fields beside each other": Case({"rope_scaling": SECTIONS}, target=QWEN25_VL),
    "linear scaling multiplies the length": Case(
        {"rope_theta": 5e5, "rope_scaling": LINEAR, "max_position_embeddings": 128}, target={"rope_scaling": LINEAR,
                                                                                   "max_position_embeddings": 128}),
    "dynamic scaling": Case(
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        target={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "yarn without the original length": Case(
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        target={"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    "llama3 scaling": Case({"rope_theta": 5e5, "rope_scaling": LLAMA3}, target={"rope_scaling": LLAMA3}),
    "old spelling of the type": Case(
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 128},
        target={"rope_scaling": LINEAR, "max_position_embeddings": 128}),
    "theta beside parameters without one": Case(
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}),
    "partial rotation that the target alone has": Case(
        {"partial_rotary_factor": 1.0}, target={"model_type": "glm4", "partial_rotary_factor": 0.5, **SIZED}),
    "partial rotation where SGLang does not read it": Case(
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5,
                                                 "partial_rotary_factor": 0.5}}),
    "sizes of the class left out": Case(
        {"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": None, "tie_word_embeddings": None},
        lambda tensors: tensors.update({f"layers.0.self_attn.{name}_proj.weight": noise(32, 32 if name == "o" else 64)
                                        for name in "qkvo"})),
    "null where the class takes it": Case(
        null=("num_aux_hidden_states", "rope_scaling", "rope_parameters", "layer_types", "quantization_config", "bias",
              "pad_token_id", "eagle_aux_hidden_state_layer_ids")),
    "one layer type for one layer": Case({"layer_types": ["full_attention"]}),
    "longrope": Case({"rope_theta": 5e5, "rope_scaling": LONGROPE}, target={"rope_scaling": LONGROPE}),
    "fp8 in capitals": Case({"quantization_config": {**FP8, "quant_method": "FP8"}}),
    "MLA with as many key-value heads as its class": mla({"num_key_value_heads": None}),
    "token outside of the vocabulary": Case({"pad_token_id": -1}),
    "head of Qwen 3's class": Case({"model_type": "qwen3"}),
    "dtype in transformers 5's spelling": Case({"torch_dtype": None, "dtype": "bfloat16"}),
    "dtype beside the old one": Case({"dtype": "bfloat16", "torch_dtype": "float16"}),
    "matrices in one piece": Case(change=IN_ONE),
    "fp8 that ignores all of the head": Case({"quantization_config": {
        **FP8, "ignored_layers": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}}),
    "MLA": mla(),
    "MLA under EAGLE's name": mla(None, rename("layers.0.", "midlayer.")),
    "MLA of Kimi's model type": mla({"model_type": "kimi_k2"}),
    "MLA with its norms": mla({"fc_norm": True, "norm_output": True},
                              *(put(f"fc_norm.{tap}.weight", 32) for tap in range(3))),
    "MLA with the target's lm_head": mla({"draft_vocab_size": None}, drop("lm_head.weight", "d2t")),
    "MLA with null target_hidden_size": mla(null=("target_hidden_size",)),
    "MLA beside fp4 of Model-Optimizer": mla({"quantization_config": MODELOPT_FP4}),
    "MLA with gate and up in one": mla(None, in_one("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj")),
    "every second token, and its mask": Case(change=both(d2t(spread), put_mask(lambda mask: None))),
}  # fmt: skip
# What only a GPU can build: compressed tensors ask CUDA for its version.
NEEDS_CUDA = ("INT4 of Kimi copied", "INT4 of Kimi copied to an MLA head")
