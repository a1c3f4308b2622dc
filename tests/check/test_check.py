"""`replay check`: each broken pair is named by its fault and no other, sound pairs are silent, junk is refused."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.check_cases import (
    CHAIN,
    DEFAULT_IDS,
    EAGLE3,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    Case,
    both,
    d2t,
    draft_config,
    drop,
    flip,
    ids,
    move_mark,
    outcome,
    put,
    put_mask,
    rename,
    sound_tensors,
    swap_first_two,
    target_config,
    target_ids,
    write,
    write_case,
)

from replay.check.facts import read_facts
from replay.check.layer_ids import readings
from replay.check.run import RULES, check
from replay.check.server import live_server, parse_server_arguments
from replay.checkpoint.headers import read_weights
from replay.cli.app import cli
from replay.errors import CheckpointError, ReplayError, UsageError

KIMI = {"model_type": "kimi_k25", "num_hidden_layers": 61}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 36}
LOW_IDS = torch.arange(40) + torch.arange(40) // 20  # target ids whose sum with the draft ids is still in range
TOP_IDS = "eagle_aux_hidden_state_layer_ids"


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
    "default ids as vLLM counts": ("wiring.aux-layer-id", "warning", Case(ids(2, 15, 27))),
    "two lists disagree": ("wiring.aux-layer-id", "warning", Case({**ids(1, 14, 26), TOP_IDS: [1, 14, 26]})),
    "other wiring than trained": ("wiring.aux-layer-id", "error", Case(wiring="embed,3,16")),
    "trained on final": ("wiring.aux-layer-id", "error", Case(wiring="3,16,final")),
    "Kimi ids that two trainers mean otherwise": ("wiring.aux-layer-id", "warning", Case(ids(5, 30, 55), target=KIMI)),
    "default ids as SGLang counts, served by vLLM": (
        "wiring.aux-layer-id", "warning", Case({"eagle_config": None, TOP_IDS: DEFAULT_IDS}, engine="vllm")),
    "ids only for vLLM's V1 runner": ("wiring.aux-layer-id", "warning", Case(ids(3, 16, 25), engine="vllm")),
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
        "position.rope-params", "error", Case({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}})),
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
    "tree of fewer tokens than steps": ("config.steps", "warning", Case(
        server=EAGLE3 + "--speculative-num-steps 8 --speculative-eagle-topk 4 --speculative-num-draft-tokens 4")),
    "tree of more tokens than branches": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 1 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16")),
    "tree that the backend cannot": ("config.steps", "error", Case(
        server=EAGLE3 + "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 "
        "--attention-backend trtllm_mha")),
    "lenient threshold": (
        "sampling.accept-rule", "warning", Case(server=EAGLE3 + CHAIN + "--speculative-accept-threshold-single 0.8")),
    "rejection sampling over two vocabularies": (
        "sampling.accept-rule", "error", Case(server=EAGLE3 + CHAIN + "--speculative-use-rejection-sampling")),
    "made-up acceptance": (
        "metrics.definition", "error", Case(server="SGLANG_SIMULATE_ACC_LEN=3.5 " + EAGLE3 + CHAIN)),
}  # fmt: skip
# Tensors made for another config than the sound one.
BUILT: dict[str, dict[str, Any]] = {
    "second layer made for vLLM": {"num_hidden_layers": 2},
}


def test_there_are_enough_cases() -> None:
    assert len(BROKEN) >= 40
    assert len({fault for fault, _, _ in BROKEN.values()}) >= 15


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pair_is_named(name: str, tmp_path: Path) -> None:
    fault, severity, case = BROKEN[name]
    found = outcome(tmp_path, case, BUILT.get(name)).findings
    assert [(finding.fault, finding.severity) for finding in found] == [(fault, severity)], found
    finding = found[0]
    assert finding.what and finding.file and finding.field and finding.seen and finding.expected and finding.fix


def test_every_fault_name_is_of_the_fault_table() -> None:
    known = {
        "wiring.aux-layer-id", "weights.missing", "vocab.d2t", "config.steps", "wiring.aux-missing", "wiring.norm",
        "wiring.recycle-norm", "position.max-len", "attn.window", "metrics.definition", "sampling.accept-rule",
        "config.field-drop", "precision.draft-weights", "position.rope-geometry", "weights.layout",
        "position.rope-params", "wiring.multi-layer", "precision.draft-kv", "precision.dtype-cast",
        "weights.overwritten", "mm.embeds",
    }  # fmt: skip
    assert {fault for fault, _, _ in BROKEN.values()} == known


# ---- sound pairs ----

MULTI = {"num_hidden_layers": 2}
FULL_VOCABULARY = {"draft_vocab_size": VOCABULARY}
WIDE = {"target_hidden_size": 64}
SOUND: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (Case(), {}),
    "no ids: the default of every engine": (Case({"eagle_config": None}), {}),
    "embedding first": (Case(ids(-1, 2, 15)), {}),
    "trained as it is fed": (Case(ids(-1, 2, 15), wiring="embed,3,16"), {}),
    "EAGLE's names": (Case(change=rename("layers.0.", "midlayer.")), {}),
    "names behind model.": (Case(change=both(
        rename("layers.0.", "model.layers.0."), rename("fc.", "model.fc."), rename("d2t", "model.d2t"))), {}),
    "all norms": (
        Case({**ids(1, 14, 26, norm_before_fc=True), "fc_norm": True, "norm_output": True}),
        {**ids(1, 14, 26, norm_before_fc=True), "fc_norm": True}),
    "two layers": (Case(MULTI), MULTI),
    "whole vocabulary": (Case(FULL_VOCABULARY), FULL_VOCABULARY),
    "the target's lm_head": (
        Case({"draft_vocab_size": None}, null=("draft_vocab_size",)), {"draft_vocab_size": None}),
    "tied": (Case({"draft_vocab_size": VOCABULARY, "tie_word_embeddings": True}, drop("lm_head.weight")),
             FULL_VOCABULARY),
    "narrower than the target": (Case(WIDE, target={"hidden_size": 64}), WIDE),
    "final state instead of taps": (
        Case({"eagle_config": {"use_aux_hidden_state": False}}, drop("fc.weight")), {"eagle_config": None}),
    "bias of the output projection": (
        Case({"attention_bias": True}, put("layers.0.self_attn.o_proj.bias", 32)), {}),
    "bias of fc": (Case({"bias": True}, put("fc.bias", 32)), {}),
    "five taps": (Case(ids(1, 8, 14, 20, 26)), ids(1, 8, 14, 20, 26)),
    "with its mask and inv_freq": (
        Case(change=both(put_mask(lambda mask: None), put("layers.0.self_attn.rotary_emb.inv_freq", 6))), {}),
    "Kimi as SGLang reads it": (Case(ids(2, 30, 58), target=KIMI), {}),
    "Kimi as SpecForge writes it": (Case(ids(1, 29, 57), target=KIMI), {}),
    "Kimi, embedding first": (Case(ids(0, 3, 31), target=KIMI), {}),
    "gpt-oss up to its last layer": (Case(ids(24, 30, 36), target=GPT_OSS), {}),
    "a target that also sees": (
        Case(target={"text_config": target_config(), "num_hidden_layers": 7, "hidden_size": 11}), {}),
    "rope as transformers 5 writes it": (
        Case({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
             target={"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}), {}),
    "a window that is switched off": (Case({"sliding_window": 64, "use_sliding_window": False}), {}),
    "a window that the server knows": (
        Case({"sliding_window": 64}, server=EAGLE3 + CHAIN + "--speculative-draft-window-size 64"), {}),
    "a chain": (Case(server="python -m sglang.launch_server " + EAGLE3 + CHAIN), {}),
    "a tree": (Case(server=EAGLE3 + "--speculative-num-steps 5 --speculative-eagle-topk 4 "
                    "--speculative-num-draft-tokens 8 --attention-backend fa3 --page-size 16"), {}),
    "quantised target, head left alone": (
        Case(server=EAGLE3 + CHAIN + "--quantization fp8 --speculative-draft-model-quantization unquant "
             "--kv-cache-dtype fp8_e4m3 --speculative-draft-kv-cache-dtype bf16"), {}),
    "dtype said to the server": (Case({"torch_dtype": None}, server=EAGLE3 + CHAIN + "--dtype bfloat16"), {}),
    "a shorter head, served shorter": (
        Case({"max_position_embeddings": 128}, server=EAGLE3 + CHAIN + "--context-length 128"), {}),
    "speculators in vLLM": (
        Case({"architectures": ["Eagle3Speculator"], "eagle_config": None, TOP_IDS: [3, 16, 28],
              "norm_before_residual": True},
             server="vllm serve x --speculative-config '{\"method\": \"eagle3\", \"num_speculative_tokens\": 3}'"), {}),
    "EAGLE in its own code": (Case({"architectures": ["LlamaForCausalLM"], "eagle_config": None}, engine="eagle"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_pair_is_silent(name: str, tmp_path: Path) -> None:
    case, built = SOUND[name]
    result = outcome(tmp_path, case, built, weights=True)
    assert result.findings == ()
    assert "tensor names" in result.checked


def test_a_sound_multimodal_latent_attention_head_is_silent(tmp_path: Path) -> None:
    """Tensor names of SGLang 0.5.23 models/kimi_k25_eagle3.py."""
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
    config = draft_config(architectures=["Eagle3DeepseekV2ForCausalLM"], **ids(2, 30, 58), **sizes)
    tensors = {name: tensor for name, tensor in sound_tensors().items() if "self_attn" not in name}
    shapes = {
        "q_a_proj": (8, 64), "q_a_layernorm": (8,), "q_b_proj": (24, 8), "kv_a_proj_with_mqa": (8, 64),
        "kv_a_layernorm": (6,), "kv_b_proj": (32, 6), "o_proj": (32, 16),
    }  # fmt: skip
    tensors |= {f"layers.0.self_attn.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    target = write(tmp_path / "target", target_config(**KIMI))
    sound = check(read_facts(write(tmp_path / "a", config, tensors), target))
    assert sound.findings == ()
    del tensors["layers.0.self_attn.kv_b_proj.weight"]
    broken = check(read_facts(write(tmp_path / "b", config, tensors), target))
    assert [(finding.fault, finding.field) for finding in broken.findings] == [
        ("weights.missing", "layers.0.self_attn.kv_b_proj.weight")
    ]


def test_the_real_target_and_the_head_of_the_demo_agree(target_dir: Path, tmp_path: Path) -> None:
    """A head of the real target's sizes, whose own embedding is the target's: read from bf16 as from fp32."""
    from safetensors.torch import load_file

    embed = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    real = json.loads((target_dir / "config.json").read_text())
    sizes = dict(
        hidden_size=real["hidden_size"], vocab_size=real["vocab_size"], max_position_embeddings=8192,
        rope_theta=real["rope_parameters"]["rope_theta"],
    )  # fmt: skip
    tensors = sound_tensors(**sizes)
    same = write(tmp_path / "same", draft_config(**sizes), tensors | {"embed_tokens.weight": embed.float()})
    assert check(read_facts(same, target_dir)).findings == ()
    own = write(tmp_path / "own", draft_config(**sizes), tensors | {"embed_tokens.weight": 2 * embed})
    found = check(read_facts(own, target_dir)).findings
    assert [(finding.fault, finding.severity) for finding in found] == [("weights.overwritten", "warning")]


# ---- what is read ----


def test_an_lm_head_inside_the_model_is_not_found(tmp_path: Path) -> None:
    """SGLang 0.5.23 models/llama_eagle3.py takes the other names with or without ``model.``, this one without."""
    found = outcome(tmp_path, Case(change=rename("lm_head.", "model.lm_head."))).findings
    assert {finding.fault for finding in found} == {"weights.missing"}
    assert {"lm_head.weight", "model.lm_head.weight"} == {finding.field for finding in found}


def test_layer_ids_are_read_as_each_engine_does(tmp_path: Path) -> None:
    """By hand, from the table of conventions: SGLang adds 1, vLLM takes ids as they stand and not in every place."""
    draft, target = write_case(tmp_path, Case(ids(2, 30, 58), target=KIMI))
    facts = read_facts(draft, target)
    assert {name: reading.taps for name, reading in readings(facts.draft, facts.target).items()} == {
        "SGLang 0.5.23": (2, 30, 58),
        "SGLang before #25454": (3, 31, 59),
        "vLLM 0.32 (V1 runner)": (2, 30, 58),
        "vLLM 0.32 (V2 runner)": (2, 30, 58),  # its default; it does not read the nested place
        "EAGLE": (2, 30, 58),
        "SpecForge 0.2": (3, 31, 59),
    }


def test_an_older_server_reads_kimi_ids_otherwise(tmp_path: Path) -> None:
    draft, target = write_case(tmp_path, Case(ids(2, 30, 58), target=KIMI))
    for version, faults in (("0.5.9", ["wiring.aux-layer-id"]), ("0.5.23", []), ("0.5.23.post1", [])):
        server = live_server({"model_path": "x", "version": version, "internal_states": [{}]}, "url")
        assert [finding.fault for finding in check(read_facts(draft, target, server)).findings] == faults


def test_the_fix_of_a_wiring_is_silent_when_followed(tmp_path: Path) -> None:
    before = outcome(tmp_path / "a", Case(wiring="embed,3,16"))
    assert '"eagle_aux_hidden_state_layer_ids": [-1, 2, 15]' in before.findings[0].fix
    assert outcome(tmp_path / "b", Case(ids(-1, 2, 15), wiring="embed,3,16")).findings == ()


@pytest.mark.parametrize(("share", "severity"), [(0.0, "error"), (0.7, "warning"), (1.0, None)])
def test_coverage_of_what_a_trace_emitted(share: float, severity: str | None, tmp_path: Path) -> None:
    mapped = target_ids(sound_tensors()["d2t"]).tolist()
    other = next(token for token in range(VOCABULARY) if token not in mapped)
    emitted = {mapped[0]: round(100 * share), other: 100 - round(100 * share)}
    found = outcome(tmp_path, Case(), emitted=emitted).findings
    assert [(finding.fault, finding.severity) for finding in found] == ([("vocab.d2t", severity)] if severity else [])


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("fc.weight", float("nan"), "weights.missing"),
        ("fc.weight", 3.0, "weights.missing"),
        ("lm_head.weight", 0.0, "weights.missing"),
        ("layers.0.mlp.up_proj.weight", 0.0, "weights.missing"),
        ("norm.weight", 0.0, "weights.missing"),
    ],
)
def test_weights_are_read_whole_when_asked(name: str, value: float, fault: str, tmp_path: Path) -> None:
    case = Case(change=lambda tensors: tensors[name].fill_(value))
    assert [finding.fault for finding in outcome(tmp_path, case, weights=True).findings] == [fault]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_fp16_cannot_hold(dtype: torch.dtype, tmp_path: Path) -> None:
    def large(tensors: dict[str, torch.Tensor]) -> None:
        tensors["fc.weight"][0, 0] = 1e5
        tensors["fc.weight"] = tensors["fc.weight"].to(dtype)

    half = Case(change=large, server=EAGLE3 + CHAIN + "--dtype float16")
    found = outcome(tmp_path / "a", half, weights=True).findings
    assert [(finding.fault, finding.severity) for finding in found] == [("precision.dtype-cast", "error")]
    assert outcome(tmp_path / "b", Case(change=large), weights=True).findings == ()


def test_shards_and_links_are_read(tmp_path: Path) -> None:
    """As a hub cache lays them out: names that are links into a store of blobs."""
    draft, target = write_case(tmp_path, Case())
    tensors = sound_tensors()
    (draft / "model.safetensors").unlink()
    store = tmp_path / "blobs"
    store.mkdir()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, store / shard)
        (draft / shard).symlink_to(store / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check(read_facts(draft, target)).findings == ()


def test_a_torch_file_is_read_as_weights_only(tmp_path: Path) -> None:
    draft, target = write_case(tmp_path, Case())
    (draft / "model.safetensors").unlink()
    tensors = sound_tensors()
    torch.save(tensors, draft / "pytorch_model.bin")
    assert check(read_facts(draft, target, weights=True)).findings == ()
    torch.save(tensors | {"d2t": torch.zeros_like(tensors["d2t"])}, draft / "pytorch_model.bin")
    assert [finding.fault for finding in check(read_facts(draft, target)).findings] == ["vocab.d2t"]


def test_of_a_torch_file_only_what_was_asked_for_is_told(tmp_path: Path) -> None:
    torch.save(sound_tensors(), tmp_path / "pytorch_model.bin")
    only = read_weights(tmp_path, whole=True, only=re.compile(r"fc\.weight|norm\.weight"))
    assert only.tensors.keys() == {"fc.weight", "norm.weight"}
    assert only.extents is not None and only.extents.keys() == only.tensors.keys()
    assert only.d2t is None


# ---- foreign bytes ----


def _break(name: str, draft: Path, target: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    weights = draft / "model.safetensors"
    data = weights.read_bytes()
    match name:
        case "no folder":
            (draft / "config.json").unlink()
        case "no weights":
            weights.unlink()
        case "no JSON":
            (draft / "config.json").write_text("{")
        case "a list":
            (draft / "config.json").write_text("[1]")
        case "NaN":
            (draft / "config.json").write_text('{"hidden_size": NaN}')
        case "deep":
            (draft / "config.json").write_text('{"a":' * 100_000)
        case "text for a number":
            (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": "1"}))
        case "number for a flag":
            (draft / "config.json").write_text(json.dumps(config | {"norm_output": 1}))
        case "text ids":
            (draft / "config.json").write_text(json.dumps(config | ids(*"abc")))  # type: ignore[arg-type]
        case "eagle_config is a list":
            (draft / "config.json").write_text(json.dumps(config | {"eagle_config": []}))
        case "negative size":
            (draft / "config.json").write_text(json.dumps(config | {"hidden_size": -32}))
        case "architectures is a word":
            (draft / "config.json").write_text(json.dumps(config | {"architectures": "Llama"}))
        case "truncated":
            weights.write_bytes(data[:-10])
        case "header beyond the file":
            weights.write_bytes((1 << 62).to_bytes(8, "little") + data[8:])
        case "empty":
            weights.write_bytes(b"")
        case "no weight_map":
            weights.unlink()
            (draft / "model.safetensors.index.json").write_text("{}")
        case "shard out of the folder":
            weights.unlink()
            index = {"weight_map": {"fc.weight": "../../etc/passwd"}}
            (draft / "model.safetensors.index.json").write_text(json.dumps(index))
        case "shard that is not there":
            weights.unlink()
            index = {"weight_map": {"fc.weight": "model-1.safetensors"}}
            (draft / "model.safetensors.index.json").write_text(json.dumps(index))
        case "pickle that runs code":
            weights.unlink()
            (draft / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        case "target without layers":
            (target / "config.json").write_text(json.dumps(target_config(num_hidden_layers=None)))


@pytest.mark.parametrize(
    "name",
    [
        "no folder", "no weights", "no JSON", "a list", "NaN", "deep", "text for a number", "number for a flag",
        "text ids", "eagle_config is a list", "negative size", "architectures is a word", "truncated",
        "header beyond the file", "empty", "no weight_map", "shard out of the folder", "shard that is not there",
        "pickle that runs code", "target without layers",
    ],
)  # fmt: skip
def test_foreign_bytes_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    draft, target = write_case(tmp_path, Case())
    _break(name, draft, target)
    with pytest.raises(CheckpointError) as refusal:
        check(read_facts(draft, target))
    assert "\n" not in str(refusal.value)


def test_a_config_that_asks_for_millions_of_layers_is_answered(tmp_path: Path) -> None:
    started = time.process_time()
    found = outcome(tmp_path, Case({"num_hidden_layers": 10**9})).findings
    assert [finding.fault for finding in found] == ["weights.missing"]
    assert time.process_time() - started < 5


# ---- server arguments ----


def test_a_launch_line_is_read() -> None:
    server = parse_server_arguments(
        "SGLANG_SIMULATE_ACC_LEN=2 CUDA_VISIBLE_DEVICES=0,1 python3 -m sglang.launch_server --model-path 'a b' "
        "--tp=8 --speculative-algo EAGLE3 --trust-remote-code --speculative-num-steps=5 --dtype bfloat16"
    )
    assert server.engine == "sglang" and server.stated and not server.live
    assert server.environment["SGLANG_SIMULATE_ACC_LEN"] == "2"
    assert server.arguments == {
        "model_path": "a b", "tp": "8", "speculative_algorithm": "EAGLE3", "trust_remote_code": True,
        "speculative_num_steps": 5, "dtype": "bfloat16",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["--dtype 'bfloat16", "--speculative-num-steps many", "--speculative-num-steps", "--context-length 1e99",
     "--context-length nan", "--dtype", "--speculative-config {", "--speculative-config 3"],
)  # fmt: skip
def test_a_launch_line_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_server_arguments(text)


@pytest.mark.parametrize("info", [None, [], "x", {}, {"internal_states": 3}, {"internal_states": []}])
def test_a_server_that_is_none_is_refused(info: object) -> None:
    with pytest.raises(UsageError):
        live_server(info, "http://here")


def _info(**arguments: Any) -> dict[str, Any]:
    """As SGLang 0.5.23 answers: resolved arguments at the top level and in each scheduler's state."""
    resolved = {
        "model_path": "target", "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "quantization": None, "dtype": "auto",
        "kv_cache_dtype": "auto", "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0,
        "context_length": None, "_speculative_draft_quantization_explicitly_set": False,
    } | arguments  # fmt: skip
    return {**resolved, "version": "0.5.23", "internal_states": [resolved]}


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        ({}, []),
        ({"speculative_algorithm": None}, []),
        ({"speculative_algorithm": ""}, ["config.steps"]),
        ({"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}, ["config.steps"]),
        ({"quantization": "fp8", "speculative_draft_model_quantization": "fp8"}, ["precision.draft-weights"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["precision.draft-kv"]),
        ({"speculative_algorithm": "EAGLE"}, ["wiring.aux-missing"]),
    ],
)
def test_arguments_in_force(arguments: dict[str, Any], faults: list[str], tmp_path: Path) -> None:
    draft, target = write_case(tmp_path, Case())
    found = check(read_facts(draft, target, live_server(_info(**arguments), "http://here"))).findings
    assert [finding.fault for finding in found] == faults


# ---- command line ----


def _run(draft: Path, target: Path, *more: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["check", "--draft", str(draft), "--target", str(target), *more])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_is_silent_on_a_sound_pair(tmp_path: Path) -> None:
    code, out, err = _run(*write_case(tmp_path, Case()))
    assert (code, err) == (0, "")
    assert out.startswith("nothing found: draft on target, sglang")
    assert "R[2,15,27] by SGLang 0.5.23" in " ".join(out.split())


def test_the_command_exits_1_with_errors_and_0_with_warnings(tmp_path: Path) -> None:
    broken = write_case(tmp_path / "a", Case(ids(26, 14, 1)))
    code, out, err = _run(*broken)
    assert code == 1 and out.startswith("error wiring.aux-layer-id") and err.startswith("replay: ")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert _run(*broken, "--exit-zero")[0] == 0
    code, out, err = _run(*write_case(tmp_path / "b", Case({"torch_dtype": None})))
    assert (code, err) == (0, "") and out.startswith("warning precision.dtype-cast")


def test_the_json_document(tmp_path: Path) -> None:
    code, out, _ = _run(*write_case(tmp_path, Case(ids(26, 14, 1))), "--json", "--server-args", EAGLE3 + CHAIN)
    document = json.loads(out)
    assert code == 1
    assert list(document) == ["schema_version", "findings", "checked", "unchecked", "fed"]
    assert document["findings"] == [
        {
            "fault": "wiring.aux-layer-id",
            "severity": "error",
            "what": "ids out of order: SGLang feeds R[2,15,27] in layer order, a head trained in the stated order "
            "reads each tap in another's place",
            "fix": document["findings"][0]["fix"],
            "evidence": {
                "file": "draft/config.json",
                "field": "eagle_config.eagle_aux_hidden_state_layer_ids",
                "seen": "[26, 14, 1]",
                "expected": "rising ids",
            },
        }
    ]
    assert len(document["checked"]) + sum(map(len, document["unchecked"].values())) == len(RULES)
    assert set(document["unchecked"]) == {"--trace", "--weights"}


def test_a_live_server_is_asked(tmp_path: Path) -> None:
    draft, target = write_case(tmp_path, Case())
    with _serving(_info(kv_cache_dtype="fp8_e4m3")) as url:
        code, out, _ = _run(draft, target, "--server", url, "--json")
    assert code == 0
    assert [finding["fault"] for finding in json.loads(out)["findings"]] == ["precision.draft-kv"]


@contextmanager
def _serving(info: dict[str, Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(info).encode()
            self.send_response(200 if self.path == "/server_info" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (("--server", "127.0.0.1:1"), 1),  # nobody listens there
        (("--engine", "mlx"), 1),
        (("--wiring", "embed,99"), 1),
        (("--server-args", "--speculative-num-steps x"), 1),
        (("--server", "x", "--server-args", "y"), 2),
        (("--server", "x", "--engine", "vllm"), 2),
    ],
)
def test_what_the_command_refuses(more: tuple[str, ...], code: int, tmp_path: Path) -> None:
    seen, out, err = _run(*write_case(tmp_path, Case()), *more)
    assert (seen, out) == (code, "") and err


def test_a_trace_adds_coverage(tmp_path: Path) -> None:
    """The invented target of trace_maker has 64 tokens; its traces are counted whole."""
    from collections import Counter

    from support.trace_maker import make_request, write_trace

    from replay.check.facts import count_emitted
    from replay.traces.reader import Trace

    requests = [make_request(f"r{seed}", seed) for seed in range(3)]
    trace = write_trace(tmp_path / "trace", [requests])
    wanted = Counter(token for request in requests for token in request.output_ids)
    assert count_emitted(Trace.open(trace)) == wanted
    code, out, _ = _run(*write_case(tmp_path, Case()), "--trace", str(trace), "--json")
    assert "coverage of emitted tokens" in json.loads(out)["checked"]
    assert code in (0, 1)


LEAN = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = sys.modules["polars"] = None
import time
from pathlib import Path
from replay.check.run import check
from replay.check.facts import read_facts
started = time.process_time()
outcome = check(read_facts(Path(sys.argv[1]), Path(sys.argv[2])))
print(time.process_time() - started, len(outcome.findings))
"""


def test_it_needs_neither_torch_nor_numpy_and_takes_milliseconds(tmp_path: Path) -> None:
    """On a vocabulary map of real size: 32,000 of 128,256 tokens."""
    vocabulary, size = 128_256, 32_000
    config = draft_config(vocab_size=vocabulary, draft_vocab_size=size)
    tensors = sound_tensors() | {"lm_head.weight": torch.ones(size, HIDDEN), "d2t": torch.arange(size)}
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[2 * torch.arange(size)] = True
    draft = write(tmp_path / "draft", config, tensors | {"t2d": mask})
    target = write(tmp_path / "target", target_config(vocab_size=vocabulary))
    code = [sys.executable, "-I", "-c", LEAN, str(draft), str(target)]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    seconds, findings = done.stdout.split()
    assert findings == "0"
    assert float(seconds) < 0.25


def test_every_rule_is_said_once_and_can_be_reached() -> None:
    whats = [rule.what for rule in RULES]
    assert len(set(whats)) == len(whats)
    assert LAYERS == 30 and issubclass(CheckpointError, ReplayError)
