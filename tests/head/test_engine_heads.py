"""Step logits equal those of SGLang's own draft classes, which load the same files and run in fp32.

rig/head_logits.py runs them. Attention there has no cache; all else, loading included, is SGLang's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.server import RIG
from safetensors.torch import load_file, save_file
from support.eagle_heads import eagle_config
from support.heads import DEEPSEEK_YARN, LATENT, random_tensors, tiny_config, write_head
from support.replayed import random_request, replayed_logits
from torch import Tensor

import replay
from replay.checkpoint.config import parse_config
from replay.head.model import Head, TargetTables

STEPS, LENGTH = 4, 12
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 8, "vocab_size": 96,
    "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
MLA = LATENT | {"model_type": "deepseek_v3", "rope_parameters": DEEPSEEK_YARN}
# Algorithm, and the config of the head.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "three layers": ("EAGLE3", tiny_config(num_hidden_layers=3, model_type="llama")),
    "two layers, every norm, llama3 rope": ("EAGLE3", tiny_config(
        num_hidden_layers=2, model_type="llama", fc_norm=True, norm_output=True, rope_parameters=LLAMA3,
        eagle_config={"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 2]})),
    "EAGLE-1": ("EAGLE", eagle_config()),
    "EAGLE-1, two layers, llama3 rope": ("EAGLE", eagle_config(num_hidden_layers=2, rope_parameters=LLAMA3)),
    "biases of attention": ("EAGLE3", tiny_config(attention_bias=True, model_type="llama")),
    "EAGLE-1, biases of attention": ("EAGLE", eagle_config(attention_bias=True)),
    "EAGLE-1, biases that SGLang does not build": ("EAGLE", eagle_config(qkv_bias=True)),
    # Without YaRN the class does not start on a CPU (layers/rotary_embedding/factory.py ``get_rope_cpu``), and with
    # rope_interleave false its rotation gives queries a dimension too many there (rope_variant.py ``forward_native``).
    "latent": ("EAGLE3", tiny_config(**MLA)),
    "latent, every norm": ("EAGLE3", tiny_config(**MLA, fc_norm=True, norm_output=True)),
}  # fmt: skip


def write_pair(folder: Path, algorithm: str, document: dict[str, Any]) -> Path:
    """What the rig reads: a head, a config of a target, its tables, and tokens."""
    folder.mkdir()
    (folder / "algorithm").write_text(algorithm)
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(TARGET))
    tensors = random_tensors(parse_config(document), seed=3)
    # less gain: see ``calm`` in test_peer_head.py. Of EAGLE-1 nothing norms what grows from step to step.
    gain = {"EAGLE": 0.2, "EAGLE3": 0.5}[algorithm]
    inner = ("layers.", "fc." if algorithm == "EAGLE" else "layers.")
    calm = {name: part * gain if name.startswith(inner) and part.ndim == 2 else part for name, part in tensors.items()}
    head = Head(replay.load_head(write_head(folder / "draft", document, calm)), tables())
    item = random_request(head, LENGTH)
    drafted_RS = torch.randint(96, (item.rows, STEPS - 1), generator=torch.Generator().manual_seed(5))
    target = tables()
    assert target.embed_VE is not None and target.lm_head_VE is not None
    save_file(
        {
            "ids": item.tokens_T[1 : item.rows + 1].clone(),
            "features": item.features_RKD[: item.rows].clone(),
            "embed": target.embed_VE,
            "lm_head": target.lm_head_VE,
            "drafted": drafted_RS,
        },
        folder / "inputs.safetensors",
    )
    return folder


def tables() -> TargetTables:
    generator = torch.Generator().manual_seed(1)
    return TargetTables(torch.randn(96, 32, generator=generator), torch.randn(96, 32, generator=generator) / 4)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each case's folder, with SGLang's logits in it: one process for all of them."""
    root = tmp_path_factory.mktemp("heads")
    made = {name: write_pair(root / str(number), *case) for number, (name, case) in enumerate(CASES.items())}
    done = subprocess.run(
        [sys.executable, "-P", str(RIG / "head_logits.py"), *map(str, made.values())],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return made


@pytest.mark.parametrize("name", CASES)
def test_sglang_computes_the_same_logits(name: str, pairs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pairs[name]
    head = Head(replay.load_head(folder / "draft"), tables())
    theirs: Tensor = load_file(folder / "logits.safetensors")["logits"]
    drafted_RS = load_file(folder / "inputs.safetensors")["drafted"]
    forced = [*drafted_RS.T, drafted_RS[:, 0]]
    ours = replayed_logits(monkeypatch, head, random_request(head, LENGTH), STEPS, forced)
    assert theirs.std(dim=1).mean() > 0.3  # there is something to tell apart
    mine = torch.stack(ours)  # SGLang fills its table of tokens up to a multiple of 64
    assert (mine - theirs[..., : mine.shape[-1]]).abs().max() < 1e-4
