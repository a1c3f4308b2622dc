"""Each broken pair is named by its fault and no other; every rule finds what it is there for."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import config_cases
from support.check_cases import (
    CHAIN,
    DEFAULT_IDS,
    EAGLE3,
    GPT_OSS,
    KIMI,
    QWEN_MOE,
    TOP_IDS,
    VOCABULARY,
    Case,
    both,
    d2t,
    drop,
    facts_of,
    flip,
    ids,
    move_mark,
    outcome,
    put,
    put_mask,
    rename,
    swap_first_two,
    target_ids,
)

import replay.check
from replay.check.finding import Finding
from replay.check.run import BLOCK_RULES, FINAL_RULES, RULES
from replay.faults.table import FAULTS

LOW_IDS = torch.arange(40) + torch.arange(40) // 20  # target ids whose sum with the draft ids is still in range


def _mask_of(marked: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[marked] = True
    return mask


# What lies wrong, and the one fault (named as in the fault table) that check must name.
BROKEN: dict[str, tuple[str, str, Case]] = {
    # ---- layer ids ----
    "ids at the top level": ("wiring.aux-layer-id", "error", Case({"eagle_config": None, TOP_IDS: [3, 16, 28]})),
    "ids in eagle_config.layer_ids": (
        "wiring.aux-layer-id", "error", Case({"eagle_config": {"layer_ids": [3, 9, 20]}})),
    "ids twice": ("wiring.aux-layer-id", "error", Case(ids(1, 14, 14))),
    "no ids in the list": ("wiring.aux-layer-id", "error", Case(ids())),
    "eagle_config without ids": ("wiring.aux-layer-id", "warning", Case({"eagle_config": {"norm_before_fc": False}})),
    "embedding as vLLM counts": ("wiring.aux-layer-id", "warning", Case(ids(0, 3, 16))),
    "null ids": (
        "wiring.aux-layer-id", "warning", Case({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}})),
    "ids out of order": ("wiring.aux-layer-id", "error", Case(ids(26, 14, 1))),
    "id of the last layer": ("wiring.aux-layer-id", "error", Case(ids(1, 14, 29))),
    "id beyond the last layer": ("wiring.aux-layer-id", "error", Case(ids(1, 14, 40))),
    "id below the embedding": ("wiring.aux-layer-id", "error", Case(ids(-2, 14, 26))),
    "ids of Kimi begin with the embedding": ("wiring.aux-layer-id", "error", Case(ids(-1, 2, 30), target=KIMI)),
    "id of the last layer, which the server marks": (
        "wiring.aux-layer-id", "error", Case(ids(1, 14, 29), target=QWEN_MOE)),
    "id that marks a layer from the end": ("wiring.aux-layer-id", "error", Case(ids(-2, 14, 26), target=QWEN_MOE)),
    "id beyond what Gemma captures": (
        "wiring.aux-layer-id", "error", Case(ids(1, 14, 30), target={"architectures": ["Gemma3ForCausalLM"]})),
    "ids twice, into one buffer": ("wiring.aux-layer-id", "error", Case(ids(2, 2, 30), target=KIMI)),
    "gpt-oss up to its last layer, on a release that cannot": (
        "wiring.aux-layer-id", "error", Case(ids(24, 30, 36), target=GPT_OSS, version="0.5.9")),
    "Kimi on a release between two ways": (
        "wiring.aux-layer-id", "warning", Case(ids(3, 30, 58), wiring=None, target=KIMI, version="0.5.11")),
    "ids that decode graphs do not see": ("wiring.aux-layer-id", "error", Case(ids(-1, 2, 15), version="0.5.9")),
    "default ids as vLLM counts": ("wiring.aux-layer-id", "warning", Case(ids(2, 15, 27))),
    "two lists disagree": ("wiring.aux-layer-id", "warning", Case({**ids(1, 14, 26), TOP_IDS: [1, 14, 26]})),
    "other wiring than trained": ("wiring.aux-layer-id", "error", Case(wiring="embed,3,16")),
    "trained on final": ("wiring.aux-layer-id", "error", Case(wiring="3,16,final")),
    "Kimi ids that two trainers mean otherwise": ("wiring.aux-layer-id", "warning", Case(ids(5, 30, 55), target=KIMI)),
    "default ids as SGLang counts, served by vLLM": (
        "wiring.aux-layer-id", "warning", Case({"eagle_config": None, TOP_IDS: DEFAULT_IDS}, engine="vllm")),
    "ids only for vLLM's V1 runner": ("wiring.aux-layer-id", "warning", Case(ids(3, 16, 25), engine="vllm")),
    "embedding of a DeepSeek target, served by vLLM": (
        "wiring.aux-layer-id", "error",
        Case(ids(0, 3, 16), target={"architectures": ["DeepseekV3ForCausalLM"]}, engine="vllm")),
    "negative id, served by vLLM": ("wiring.aux-layer-id", "error", Case(ids(-1, 2, 15), engine="vllm")),
    "ids served by EAGLE's own code": (
        "wiring.aux-layer-id", "error", Case({"eagle_config": None, TOP_IDS: [3, 16, 28]}, engine="eagle")),
    # ---- taps ----
    "two ids, fc takes three": ("wiring.aux-missing", "error", Case(ids(1, 14))),
    "four ids, fc takes three": ("wiring.aux-missing", "error", Case(ids(1, 14, 20, 26))),
    "num_aux_hidden_states of another head": ("wiring.aux-missing", "error", Case({"num_aux_hidden_states": 2})),
    "made for a wider target": ("wiring.aux-missing", "error", Case(change=put("fc.weight", 32, 100))),
    "target_hidden_size of another target": ("wiring.aux-missing", "error", Case({"target_hidden_size": 64})),
    "taps switched off": ("wiring.aux-missing", "error", Case(ids(1, 14, 26, use_aux_hidden_state=False))),
    "one tap as wide as the head": ("wiring.aux-missing", "error", Case(ids(14), put("fc.weight", 32, 32))),
    "algorithm EAGLE": ("wiring.aux-missing", "error", Case(server="--speculative-algorithm EAGLE " + CHAIN)),
    # ---- norms ----
    "input_norm without its flag": ("wiring.norm", "error", Case(change=put("input_norm.weight", 96))),
    "norm_before_fc without its tensor": ("wiring.norm", "error", Case({"norm_before_fc": True})),
    "norm_before_fc contradicted in eagle_config": (
        "wiring.norm", "error",
        Case({**ids(1, 14, 26, norm_before_fc=False), "norm_before_fc": True}, put("input_norm.weight", 96))),
    "fc_norm without its flag": ("wiring.norm", "error", Case(change=put("fc_norm.0.weight", 32))),
    "fc_norm only in eagle_config": (
        "wiring.norm", "error", Case(ids(1, 14, 26, fc_norm=True), put("aux_norm_low.weight", 32))),
    "fc_norm for two of three taps": (
        "wiring.norm", "error",
        Case({"fc_norm": True}, both(put("fc_norm.0.weight", 32), put("fc_norm.1.weight", 32)))),
    "fc_norm of another width": (
        "weights.layout", "error",
        Case({"fc_norm": True}, both(*(put(f"fc_norm.{tap}.weight", 16) for tap in range(3))))),
    "fc_norm without its tensors": ("wiring.norm", "error", Case({"fc_norm": True})),
    "norm_before_residual": ("wiring.norm", "warning", Case({"norm_before_residual": True})),
    "no input_layernorm in training": (
        "wiring.norm", "error", Case(ids(1, 14, 26, use_input_layernorm_in_first_layer=False))),
    "norm_output only in eagle_config": ("wiring.recycle-norm", "error", Case(ids(1, 14, 26, norm_output=True))),
    "norm_output served by EAGLE": (
        "wiring.recycle-norm", "error", Case({"norm_output": True, "eagle_config": None}, engine="eagle")),
    "second layer made for vLLM": (
        "wiring.multi-layer", "error", Case({"num_hidden_layers": 2}, drop("layers.1.hidden_norm.weight"))),
    # ---- tensors ----
    "target of which no layers are captured": (
        "wiring.aux-missing", "error", Case(target={"architectures": ["Olmo2ForCausalLM"]})),
    "target that SGLang has no class of": (
        "wiring.aux-missing", "error", Case(target={"architectures": ["NoSuchForCausalLM"]})),
    "target that names no class": ("wiring.aux-missing", "error", Case(target={"architectures": None})),
    "target whose code tells nothing": ("wiring.aux-missing", "note", Case(target={"architectures": ["MiniCPMV"]})),
    "target served as Transformers does": (
        "wiring.aux-missing", "error", Case(server=EAGLE3 + CHAIN + "--model-impl transformers")),
    "target of a later release": ("wiring.aux-missing", "error", Case(ids(2, 30, 58), target=KIMI, version="0.5.9")),
    "architecture of a plain Llama": ("config.field-drop", "error", Case({"architectures": ["LlamaForCausalLM"]})),
    "no architecture": ("config.field-drop", "error", Case({"architectures": None})),
    "no vocab_size": ("config.field-drop", "error", Case({"vocab_size": None})),
    "no hidden_size": ("config.field-drop", "error", Case({"hidden_size": None})),
    "no num_hidden_layers": ("config.field-drop", "error", Case({"num_hidden_layers": None})),
    "no layers": ("config.field-drop", "error", Case({"num_hidden_layers": 0})),
    "no intermediate_size": ("config.field-drop", "error", Case({"intermediate_size": None})),
    "no fc": ("weights.missing", "error", Case(change=drop("fc.weight"))),
    "no final norm": ("weights.missing", "error", Case(change=drop("norm.weight"))),
    "no hidden_norm": ("weights.missing", "error", Case(change=drop("layers.0.hidden_norm.weight"))),
    "no lm_head": ("weights.missing", "error", Case(change=drop("lm_head.weight"))),
    "names of another wrapper": ("weights.missing", "error", Case(change=rename("layers.0.", "module.decoder."))),
    "q_norm and k_norm": (
        "weights.missing", "error",
        Case(change=both(put("layers.0.self_attn.q_norm.weight", 12), put("layers.0.self_attn.k_norm.weight", 12)))),
    "biases of q, k and v": ("weights.missing", "error", Case(change=put("layers.0.self_attn.q_proj.bias", 48))),
    "attention_bias without tensors, served by vLLM": (
        "weights.missing", "error", Case({"attention_bias": True, "eagle_config": None}, engine="vllm")),
    "zeros": ("weights.missing", "error", Case(change=lambda tensors: tensors["fc.weight"].zero_())),
    "NaN": ("weights.missing", "error", Case(change=lambda tensors: tensors["norm.weight"].fill_(float("nan")))),
    "NaN in bf16": (
        "weights.missing", "error",
        Case(change=lambda tensors: tensors.update({"norm.weight": torch.full((32,), float("nan")).bfloat16()}))),
    "fc bias without its flag": ("weights.missing", "error", Case(change=put("fc.bias", 32))),
    "second layer that the config does not count": (
        "weights.missing", "error", Case(change=put("layers.1.mlp.up_proj.weight", 48, 32))),
    "random weights asked for": (
        "weights.missing", "error", Case(server=EAGLE3 + CHAIN + "--load-format dummy")),
    "head_dim left out": ("weights.layout", "error", Case({"head_dim": None})),
    "head_dim of another head": ("weights.layout", "error", Case({"head_dim": 16})),
    "key-value heads of another head": ("weights.layout", "error", Case({"num_key_value_heads": 4})),
    "heads that do not divide": (
        "weights.layout", "error", Case({"num_key_value_heads": 3}, both(
            put("layers.0.self_attn.k_proj.weight", 36, 64), put("layers.0.self_attn.v_proj.weight", 36, 64)))),
    "intermediate_size of another head": ("weights.layout", "error", Case({"intermediate_size": 64})),
    "q without the embedding half": (
        "weights.layout", "error", Case(change=put("layers.0.self_attn.q_proj.weight", 48, 32))),
    "lm_head of another size": ("weights.layout", "error", Case(change=put("lm_head.weight", 41, 32))),
    "one name twice": ("weights.layout", "error", Case(change=put("midlayer.hidden_norm.weight", 32))),
    "tied with a draft vocabulary": ("weights.layout", "error", Case({"tie_word_embeddings": True})),
    "tied with an lm_head of its own": (
        "weights.overwritten", "error",
        Case({"tie_word_embeddings": True, "draft_vocab_size": 96}, both(drop("d2t"), put("lm_head.weight", 96, 32)))),
    "null draft_vocab_size with an lm_head of its own": (
        "weights.overwritten", "error", Case({"draft_vocab_size": None}, null=("draft_vocab_size",),
                                             change=both(drop("d2t"), put("lm_head.weight", 96, 32)))),
    "no draft_vocab_size": (
        "config.field-drop", "error",
        Case({"draft_vocab_size": None}, both(drop("d2t"), put("lm_head.weight", 96, 32)))),
    "narrower head that does not say so": (
        "config.field-drop", "error",
        Case({}, both(put("fc.weight", 32, 192), put("embed_tokens.weight", 96, 32)), target={"hidden_size": 64})),
    "narrower head without an embedding": (
        "weights.missing", "error",
        Case({"target_hidden_size": 64}, put("fc.weight", 32, 192), target={"hidden_size": 64})),
    # ---- vocabulary ----
    "no map": ("vocab.d2t", "error", Case(change=drop("d2t"))),
    "map of target ids": ("vocab.d2t", "error", Case(change=d2t(target_ids))),
    "map of zeros": ("vocab.d2t", "error", Case(change=d2t(torch.zeros_like))),
    "map beyond the vocabulary": ("vocab.d2t", "error", Case(change=d2t(lambda offsets: offsets + VOCABULARY))),
    "map below zero": ("vocab.d2t", "error", Case(change=d2t(lambda offsets: offsets - 60))),
    "map out of order": ("vocab.d2t", "error", Case(change=d2t(swap_first_two))),
    "map too short": ("vocab.d2t", "error", Case(change=d2t(lambda offsets: offsets[:-1]))),
    "map of floats": ("vocab.d2t", "error", Case(change=d2t(lambda offsets: offsets.float()))),
    "map of bytes": ("vocab.d2t", "error", Case(change=d2t(lambda offsets: offsets.to(torch.uint8)))),
    "mask with a token too many": (
        "vocab.d2t", "warning", Case(change=put_mask(lambda mask: flip(mask, int((~mask).nonzero()[0]))))),
    "mask of other tokens": ("vocab.d2t", "warning", Case(change=put_mask(move_mark))),
    "map shifted by one against its mask": (
        "vocab.d2t", "error", Case(change=both(put_mask(lambda mask: None), d2t(lambda offsets: offsets - 1)))),
    "mask of another vocabulary": ("vocab.d2t", "warning", Case(change=put("t2d", 90, dtype=torch.bool))),
    "map of few target ids": (
        "vocab.d2t", "error",
        Case(change=lambda tensors: tensors.update(
            {"d2t": LOW_IDS, "t2d": _mask_of(LOW_IDS)}))),
    "other vocabulary than the target's": ("vocab.d2t", "warning", Case(target={"vocab_size": VOCABULARY + 8})),
    # ---- positions ----
    "no theta": ("position.rope-params", "warning", Case({"rope_theta": None})),
    "strange theta": ("position.rope-params", "warning", Case({"rope_theta": 123.0})),
    "theta stated twice": (
        "position.rope-params", "error",
        Case({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})),
    "scaling dropped": (
        "position.rope-params", "warning",
        Case({"rope_theta": 5e5}, target={"rope_scaling": {"rope_type": "linear", "factor": 1.0}})),
    "scaling that the target lacks": (
        "position.rope-params", "warning", Case({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})),
    "theta dropped beside the target's scaling": (
        "position.rope-params", "warning",
        Case({"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
             target={"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 128})),
    "scaling without its factor": ("position.rope-params", "error", Case({"rope_scaling": {"rope_type": "linear"}})),
    "partial rotation": ("position.rope-geometry", "warning", Case({"partial_rotary_factor": 0.5})),
    "odd rotation": ("position.rope-geometry", "error", Case({"partial_rotary_factor": 0.25})),
    "interleaved pairs": ("position.rope-geometry", "error", Case({"rope_interleave": True})),
    "shorter than the target": ("position.max-len", "error", Case({"max_position_embeddings": 128})),
    "shorter, with the override": (
        "position.max-len", "warning",
        Case({"max_position_embeddings": 128}, server="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 " + EAGLE3 + CHAIN)),
    "no length": ("position.max-len", "error", Case(
        {"max_position_embeddings": None}, target={"max_position_embeddings": 4096})),
    "window that SGLang does not read": ("attn.window", "warning", Case({"sliding_window": 64})),
    "window that the head was not trained with": (
        "attn.window", "warning", Case(server=EAGLE3 + CHAIN + "--speculative-draft-window-size 64")),
    # ---- precision ----
    "no dtype": ("precision.dtype-cast", "warning", Case({"torch_dtype": None})),
    "fp32 dtype": ("precision.dtype-cast", "warning", Case({"torch_dtype": "float32"})),
    "fp16 dtype": ("precision.dtype-cast", "warning", Case({"torch_dtype": None, "dtype": "float16"})),
    "inherited quantisation": (
        "precision.draft-weights", "warning", Case(server=EAGLE3 + CHAIN + "--quantization fp8")),
    "weights in int8": (
        "precision.draft-weights", "error",
        Case(change=put("layers.0.mlp.up_proj.weight", 48, 32, dtype=torch.int8))),
    "inherited KV dtype, in vLLM": (
        "precision.draft-kv", "warning",
        Case({"eagle_config": None}, server="vllm serve x --kv-cache-dtype fp8 --speculative-config {}")),
    "no image positions": ("mm.embeds", "warning", Case(
        target={"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 1]}})),
    "inherited KV dtype": ("precision.draft-kv", "warning", Case(server=EAGLE3 + CHAIN + "--kv-cache-dtype fp8_e4m3")),
    # ---- server ----
    "one step, 16 draft tokens": ("config.steps", "warning", Case(
        server=EAGLE3 + "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 16")),
    "depth without its companions": ("config.steps", "error", Case(server=EAGLE3 + "--speculative-num-steps 5")),
    "draft tokens without depth": ("config.steps", "error", Case(server=EAGLE3 + "--speculative-num-draft-tokens 8")),
    "tree of fewer tokens than steps": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 8 --speculative-eagle-topk 4 --speculative-num-draft-tokens 4")),
    "tree of more tokens than branches": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 1 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16")),
    "tree that the backend cannot": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 "
        "--attention-backend trtllm_mha")),
    "no steps": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 0 --speculative-eagle-topk 1")),
    "fewer than no steps": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps -1 --speculative-eagle-topk 1")),
    "no branches": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 3 --speculative-eagle-topk 0 --speculative-num-draft-tokens 4")),
    "tree of one token": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 1")),
    "tree without a size": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 3 --speculative-eagle-topk 4")),
    "steps that are no number": ("config.steps", "error", Case(server=EAGLE3 + "--speculative-num-steps 3.5")),
    "option that is none": ("config.argument", "error", Case(server=EAGLE3 + CHAIN + "--speculative-num-stepz 3")),
    "dtype that is none": ("precision.dtype-cast", "error", Case(server=EAGLE3 + CHAIN + "--dtype int7")),
    "file of options that is not read": (
        "config.argument", "error", Case(server=EAGLE3 + CHAIN + "--config=server.yaml")),
    "no algorithm": ("config.steps", "error", Case(server=EAGLE3.partition("EAGLE3 ")[2] + CHAIN)),
    "algorithm NONE": ("config.steps", "error", Case(server=EAGLE3.replace("EAGLE3", "none") + CHAIN)),
    "algorithm with a hyphen": ("config.argument", "error", Case(server=EAGLE3.replace("EAGLE3", "EAGLE-3") + CHAIN)),
    "algorithm STANDALONE": (
        "wiring.aux-missing", "error", Case(server=EAGLE3.replace("EAGLE3", "standalone") + CHAIN)),
    "whole line without a head": ("weights.missing", "error", Case(
        server="sglang serve target --speculative-algorithm EAGLE3 " + CHAIN)),
    "the target for a head": ("weights.missing", "error", Case(server=EAGLE3 + CHAIN + "--model-path x")),
    "files that are not there": ("weights.missing", "error", Case(
        server=EAGLE3 + CHAIN + "--speculative-draft-load-format pt")),
    "context of nothing": ("position.max-len", "error", Case(server=EAGLE3 + CHAIN + "--context-length -5")),
    "context beyond the target's": ("position.max-len", "error", Case(
        {"max_position_embeddings": 512}, server=EAGLE3 + CHAIN + "--context-length 512")),
    "rope of the head rewritten too": ("position.rope-params", "warning", Case(
        server=EAGLE3 + CHAIN
        + """--json-model-override-args '{"rope_scaling": {"rope_type": "linear", "factor": 4.0}}'""")),
    "rope by its old name": ("position.rope-params", "warning", Case(
        server=EAGLE3 + CHAIN + """--json-model-override-args '{"rope_scaling": {"type": "yarn"}}'""")),
    "theta where nobody reads it": ("position.rope-params", "warning", Case(
        server=EAGLE3 + CHAIN + """--json-model-override-args '{"rope_theta": 1e6}'""")),
    "length of the head rewritten too": ("position.max-len", "warning", Case(
        server=EAGLE3 + CHAIN + """--json-model-override-args '{"max_position_embeddings": 4096}'""")),
    "norm of the head rewritten too": ("config.argument", "error", Case(
        server=EAGLE3 + CHAIN + """--json-model-override-args '{"rms_norm_eps": 0.1}'""")),
    "override that is no object": ("config.argument", "error", Case(
        server=EAGLE3 + CHAIN + "--json-model-override-args yarn")),
    "more GPUs than the head has heads": ("config.argument", "error", Case(server=EAGLE3 + CHAIN + "--tp-size 8")),
    "pipeline parallelism": ("config.argument", "error", Case(server=EAGLE3 + CHAIN + "--pp-size 2")),
    "window below nothing": ("attn.window", "error", Case(
        server=EAGLE3 + CHAIN + "--speculative-draft-window-size -64")),
    "backend by which no head drafts": ("config.argument", "error", Case(
        server=EAGLE3 + CHAIN + "--attention-backend torch_native")),
    "verify mode that is none": ("config.argument", "error", Case(
        server="SGLANG_RAGGED_VERIFY_MODE=dynamic " + EAGLE3 + CHAIN)),
    "fp16 over bf16": ("precision.dtype-cast", "warning", Case(server=EAGLE3 + CHAIN + "--dtype half")),
    "inherited AWQ": ("precision.draft-weights", "error", Case(server=EAGLE3 + CHAIN + "--quantization awq")),
    "taken for int8": ("precision.draft-weights", "error", Case(
        server=EAGLE3 + CHAIN + "--speculative-draft-model-quantization w8a8_int8")),
    "threshold above 1": (
        "sampling.accept-rule", "error", Case(server=EAGLE3 + CHAIN + "--speculative-accept-threshold-acc 1.5")),
    "block verification over two vocabularies": (
        "sampling.accept-rule", "error", Case(server=EAGLE3 + CHAIN + "--speculative-use-block-verification")),
    "lenient threshold": (
        "sampling.accept-rule", "warning", Case(server=EAGLE3 + CHAIN + "--speculative-accept-threshold-single 0.8")),
    "rejection sampling over two vocabularies": (
        "sampling.accept-rule", "error", Case(server=EAGLE3 + CHAIN + "--speculative-use-rejection-sampling")),
    "made-up acceptance": (
        "metrics.definition", "error", Case(server="SGLANG_SIMULATE_ACC_LEN=3.5 " + EAGLE3 + CHAIN)),
}  # fmt: skip
BROKEN.update(config_cases.BROKEN)
# Tensors made for another config than the sound one.
BUILT: dict[str, dict[str, Any]] = {
    "second layer made for vLLM": {"num_hidden_layers": 2},
}


def test_there_are_enough_cases() -> None:
    assert len(BROKEN) >= 170
    assert len({fault for fault, _, _ in BROKEN.values()}) >= 21


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pair_is_named(name: str, tmp_path: Path) -> None:
    fault, severity, case = BROKEN[name]
    found = outcome(tmp_path, case, BUILT.get(name)).findings
    assert [(finding.fault, finding.severity) for finding in found] == [(fault, severity)], found
    finding = found[0]
    assert finding.what and finding.file and finding.field and finding.seen and finding.expected and finding.fix


# Kinds that only the check can see: nothing that a replay could play, so the fault table lacks them.
ONLY_CHECKED = {
    "config.argument", "config.field-drop", "config.steps", "metrics.definition", "mm.embeds", "sampling.accept-rule",
}  # fmt: skip


def test_every_fault_name_is_of_the_fault_table() -> None:
    """Or of those that only the check can see; each of these is found in some pair."""
    named = {fault for fault, _, _ in BROKEN.values()}
    assert named - set(FAULTS) == ONLY_CHECKED


# ---- rules ----

# What these look at has to be asked for; tests/check/test_sound_pairs.py breaks it.
ASKED = {"coverage of emitted tokens", "whole weights"}


def test_every_rule_is_said_once() -> None:
    whats = [rule.what for rule in RULES]
    assert len(set(whats)) == len(whats)
    assert all(rule.lacks or rule.needs is RULES[0].needs for rule in RULES), "what a rule needs is an option to name"


def test_every_rule_that_is_written_runs() -> None:
    """A function from facts to findings, in a file of rules, is in the table of run.py."""
    files = [file.name for file in pkgutil.iter_modules(replay.check.__path__) if file.name.startswith("rules_")]
    modules = [importlib.import_module(f"replay.check.{name}") for name in files]
    written = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_") and _is_rule(function)
    }
    assert written == {rule.find for rule in (*RULES, *BLOCK_RULES, *FINAL_RULES)}


def _is_rule(function: Callable[..., object]) -> bool:
    signature = inspect.signature(function)
    return list(signature.parameters) == ["facts"] and signature.return_annotation == Iterator[Finding]


def test_every_rule_finds_something_in_a_broken_pair(tmp_path: Path) -> None:
    found = set(ASKED)
    for number, (name, (_, _, case)) in enumerate(BROKEN.items()):
        facts = facts_of(tmp_path / str(number), case, BUILT.get(name))
        found |= {rule.what for rule in RULES if rule.needs(facts) and any(rule.find(facts))}
    assert found == {rule.what for rule in RULES}
