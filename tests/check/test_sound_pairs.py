"""Sound pairs are silent, and what is read is read as an engine reads it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import config_cases
from support.check_cases import (
    CHAIN,
    EAGLE3,
    GPT_OSS,
    KIMI,
    QWEN_MOE,
    TOP_IDS,
    VOCABULARY,
    Case,
    both,
    draft_config,
    drop,
    ids,
    outcome,
    put,
    put_mask,
    rename,
    sound_tensors,
    target_config,
    target_ids,
    write,
    write_case,
)

from replay.check.facts import read_facts
from replay.check.layer_ids import readings, wiring_of
from replay.check.run import check
from replay.check.server import live_server
from replay.checkpoint.headers import read_weights
from replay.engines.wiring import engine_ids

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
    "gpt-oss up to its last layer, where that is what is meant": (Case(ids(23, 29, 35), target=GPT_OSS), {}),
    "a subclass of DeepSeek's": (
        Case(ids(2, 39, 75), target={"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 78}), {}),
    "Gemma up to its last layer": (Case(ids(1, 14, 29), target={"architectures": ["Gemma3ForCausalLM"]}), {}),
    "Gemma that also sees, up to its last layer": (
        Case(ids(1, 14, 29), target={"architectures": ["Gemma4ForConditionalGeneration"],
                                     "text_config": target_config()}), {}),
    "a class that marks layers, embedding first": (Case(ids(-1, 2, 15), target=QWEN_MOE), {}),
    "the first class that SGLang has": (Case(target={"architectures": ["NoSuchModel", "LlamaForCausalLM"]}), {}),
    "an older release, default ids": (Case(version="0.5.9"), {}),
    "an older release, without graphs": (
        Case(ids(-1, 2, 15), server=EAGLE3 + CHAIN + "--disable-cuda-graph", version="0.5.9"), {}),
    "a target that captures nothing, fed the final state": (
        Case({"eagle_config": {"use_aux_hidden_state": False}}, drop("fc.weight"),
             target={"architectures": ["Olmo2ForCausalLM"]}), {"eagle_config": None}),
    "a target that captures nothing, in vLLM": (
        Case({"eagle_config": None, TOP_IDS: [3, 16, 28]}, target={"architectures": ["Olmo2ForCausalLM"]},
             engine="vllm"), {}),
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


SOUND.update({name: (case, {}) for name, case in config_cases.SOUND.items()})


def test_there_are_enough_cases() -> None:
    assert len(SOUND) >= 65


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


@pytest.mark.parametrize("listed", [None, (-1, 2, 15), (2, 15, 27), (0, 1, 2), (2, 15), (1, 2, 3, 4), (5, 2, 9)])
def test_what_specforge_feeds_is_what_specforge_says(listed: tuple[int, ...] | None, tmp_path: Path) -> None:
    """Its own function is asked; and the ids that a report names for a wiring are those that feed it."""
    from specforge.algorithms.model_providers import resolve_eagle_capture_layers

    changes = ids(*listed) if listed else {}
    draft, target = write_case(tmp_path, Case(changes))
    facts = read_facts(draft, target)
    found = readings(facts.draft, facts.target)["SpecForge 0.2"].taps
    asked = SimpleNamespace(model=SimpleNamespace(aux_hidden_state_layer_ids=None))
    whole = SimpleNamespace(num_hidden_layers=facts.target.layers)
    try:
        peer = tuple(resolve_eagle_capture_layers(asked, changes, whole))
    except ValueError:
        assert found is None
        return
    if list(peer) != sorted(peer):  # its backends join the taps in different orders
        assert found is None
        return
    assert found == tuple(layer + 1 for layer in peer)
    told = engine_ids(wiring_of(found), architecture="LlamaForCausalLM", layers=facts.target.layers)
    assert {one.engine: one.ids for one in told}["SpecForge 0.2"] == peer


def test_an_older_server_reads_kimi_ids_otherwise(tmp_path: Path) -> None:
    """0.5.9 has no capture in models/kimi_k25.py. In 0.5.12 the same ids feed R[3,31,59]."""
    draft, target = write_case(tmp_path, Case(ids(2, 30, 58), target=KIMI))
    missing, ids_of = "wiring.aux-missing", "wiring.aux-layer-id"
    known = {"0.5.9": [missing], "0.5.11": [ids_of], "0.5.12": [ids_of], "0.5.23": [], "0.5.23.post1": []}
    for version, faults in known.items():
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
