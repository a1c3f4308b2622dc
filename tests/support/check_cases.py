"""Small draft head and target folders for `replay check`, sound by construction, with one thing broken at a time."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.heads import random_tensors, tiny_config
from torch import Tensor

from replay.check.facts import Facts, read_facts
from replay.check.run import Outcome, check
from replay.check.server import Server, parse_server_arguments
from replay.checkpoint.config import parse_config
from replay.engines.wiring import parse_wiring

LAYERS, HIDDEN, VOCABULARY = 30, 32, 96
DEFAULT_IDS = [1, 14, 26]  # R[2], R[15] and R[27] of 30 layers, as SGLang counts
Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]

KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "num_hidden_layers": 61}
QWEN_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 36}
TOP_IDS = "eagle_aux_hidden_state_layer_ids"

EAGLE3 = "--speculative-algorithm EAGLE3 --speculative-draft-model-path x "
CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "


def ids(*values: int, **more: Any) -> dict[str, Any]:
    """An ``eagle_config`` with layer ids."""
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(values), **more}}


@dataclass(frozen=True)
class Case:
    """``config`` changes the draft's config (None removes), ``target`` the target's, ``change`` the tensors.

    ``version`` is what the server says it is.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    change: Change = lambda tensors: None
    target: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None
    engine: str | None = None
    wiring: str | None = None
    version: str | None = None
    null: tuple[str, ...] = ()  # fields of the draft's config that are there and null


def target_config(**changes: Any) -> dict[str, Any]:
    """A config.json of the target."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    } | changes  # fmt: skip
    return {key: value for key, value in config.items() if value is not None}


def draft_config(**changes: Any) -> dict[str, Any]:
    """A config.json of a head that is sound on that target."""
    return tiny_config(**{"model_type": "llama", "torch_dtype": "bfloat16", **ids(*DEFAULT_IDS), **changes})


def sound_tensors(**changes: Any) -> Tensors:
    """Tensors for the config, as a trainer saves them."""
    return random_tensors(parse_config(draft_config(**changes)))


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    """A checkpoint's folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_case(folder: Path, case: Case, built: Mapping[str, Any] | None = None) -> tuple[Path, Path]:
    """The folders of draft and target. The tensors are those of the sound config with ``built`` changed."""
    config = draft_config(**dict(case.config)) | dict.fromkeys(case.null)
    tensors = sound_tensors(**dict(built or {}))
    case.change(tensors)
    return write(folder / "draft", config, tensors), write(folder / "target", target_config(**dict(case.target)))


def facts_of(folder: Path, case: Case, built: Mapping[str, Any] | None = None, **more: Any) -> Facts:
    """What rules look at in a case; ``more`` as ``read_facts`` takes it."""
    draft, target = write_case(folder, case, built)
    server = None if case.server is None else parse_server_arguments(case.server, case.engine)
    if case.version is not None:
        server = replace(server or Server(), version=case.version)
    wiring = parse_wiring(case.wiring, layers=LAYERS) if case.wiring else None
    return read_facts(draft, target, server, engine=case.engine, wiring=wiring, **more)


def outcome(folder: Path, case: Case, built: Mapping[str, Any] | None = None, **more: Any) -> Outcome:
    """What check says of a case."""
    return check(facts_of(folder, case, built, **more))


def server_info(**arguments: Any) -> dict[str, Any]:
    """As SGLang 0.5.23 answers: resolved arguments at the top level and in each scheduler's state."""
    resolved = {
        "model_path": "target", "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "quantization": None, "dtype": "auto",
        "kv_cache_dtype": "auto", "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0,
        "context_length": None, "_speculative_draft_quantization_explicitly_set": False,
    } | arguments  # fmt: skip
    return {**resolved, "version": "0.5.23", "internal_states": [resolved]}


# ---- changes of tensors ----


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    """Add or replace a tensor by one of ``shape``."""
    return lambda tensors: tensors.__setitem__(name, torch.ones(shape, dtype=dtype))


def drop(*names: str) -> Change:
    """Take tensors out."""
    return lambda tensors: [tensors.pop(name) for name in names]


def d2t(change: Callable[[Tensor], Tensor]) -> Change:
    """Change the vocabulary map's offsets."""
    return lambda tensors: tensors.__setitem__("d2t", change(tensors["d2t"]))


def target_ids(offsets: Tensor) -> Tensor:
    """Offsets to target ids."""
    return offsets + torch.arange(len(offsets))


def swap_first_two(offsets: Tensor) -> Tensor:
    """A map whose first two draft ids stand for each other's tokens."""
    mapped = target_ids(offsets)
    mapped[:2] = mapped[:2].flip(0)
    return mapped - torch.arange(len(mapped))


def put_mask(change: Callable[[Tensor], object]) -> Change:
    """The right t2d, changed."""

    def put_it(tensors: Tensors) -> None:
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[target_ids(tensors["d2t"])] = True
        change(mask)
        tensors["t2d"] = mask

    return put_it


def rename(old: str, new: str) -> Change:
    """Every name with ``old`` in it."""
    return lambda tensors: [tensors.__setitem__(name.replace(old, new), tensors.pop(name))
                            for name in list(tensors) if old in name]  # fmt: skip


def both(*changes: Change) -> Change:
    """One after the other."""
    return lambda tensors: [change(tensors) for change in changes]


def flip(mask: Tensor, index: int) -> None:
    """Turn one mark over."""
    mask[index] = not bool(mask[index])


def move_mark(mask: Tensor) -> None:
    """Mark another token in place of the first."""
    marked = int(mask.nonzero()[0])
    mask[marked], mask[int((~mask).nonzero()[0])] = False, True
