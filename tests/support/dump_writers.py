"""Dumps of a real target, each written by its project's own code where that runs from PyPI."""

import gzip
import importlib
import io
import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """Tokens [S], which of them are output [S], and the target's states [S, H]: R[0] to R[N], and after the norm."""

    tokens: Tensor
    mask: Tensor
    streams: Sequence[Tensor]
    final: Tensor


def run_target(folder: Path, texts: Sequence[tuple[Sequence[int], Sequence[int]]], dtype: torch.dtype) -> list[Text]:
    """Prompt and output in one pass of Transformers; R[N] is what goes into its last norm."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    entered: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: entered.append(args[0][0].clone()))
    made = []
    for prompt, output in texts:
        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            states = model(ids, output_hidden_states=True).hidden_states
        mask = torch.tensor([0] * len(prompt) + [1] * len(output))
        made.append(
            Text(ids[0], mask, [*(one[0].clone() for one in states[:-1]), entered.pop()], states[-1][0].clone())
        )
    return made


def specforge(folder: Path, texts: Sequence[Text], layers: Sequence[int], packed: bool = False) -> Path:
    """By SpecForge 0.2.0's own feature store; a .gz is its file packed, as its own reader unpacks it."""
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore, load_feature_file

    folder.mkdir()
    store = LocalFeatureStore(dump_dir=str(folder))
    for number, text in enumerate(texts):
        aux = torch.cat([text.streams[layer] for layer in layers], dim=-1)[None]
        tensors = {"input_ids": text.tokens, "loss_mask": text.mask, "aux_hidden_state": aux,
                   "hidden_state": text.final[None]}  # fmt: skip
        store.put(tensors, sample_id=f"data_{number}", metadata={})
        path = folder / f"data_{number}.ckpt"
        if packed:
            path = path.rename(folder / f"data_{number}.ckpt.raw")
            (folder / f"data_{number}.ckpt.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
            path = folder / f"data_{number}.ckpt.gz"
        assert load_feature_file(str(path)).keys() == tensors.keys()
    return folder


def modelopt(folder: Path, texts: Sequence[Text], layers: Sequence[int], masked: bool = True) -> Path:
    """Key by key as Model-Optimizer 0.47's examples/speculative_decoding/collect_hidden_states/
    compute_hidden_states_hf.py ``dump_hidden_states`` saves them: the examples are not in the package on PyPI."""
    folder.mkdir()
    for number, text in enumerate(texts):
        body = {"input_ids": text.tokens, "hidden_states": text.final, "conversation_id": f"c{number}",
                "aux_hidden_states": torch.cat([text.streams[layer] for layer in layers], dim=-1)}  # fmt: skip
        torch.save(body | ({"loss_mask": text.mask} if masked else {}), folder / f"c{number}.pt")
    return folder


def stacked(folder: Path, texts: Sequence[Text], layers: Sequence[int], last: int = 0) -> Path:
    """As vLLM 0.32's ExampleHiddenStatesConnector writes (``_write_tensors``: save_file of these two), named as
    speculators 0.9.0 names them; read back by hs-connectors' own reader. ``last`` tokens have no states."""
    from hs_connectors.transfer import FileTransfer

    folder.mkdir()
    for number, text in enumerate(texts):
        save_file(_stack(text, layers, last), folder / f"hs_{number}.safetensors")
        read = FileTransfer(folder).get_cached(number)
        assert read is not None and read["hidden_states"].shape[1] == len(layers) + 1
    return folder


def _stack(text: Text, layers: Sequence[int], last: int) -> dict[str, Tensor]:
    end = len(text.tokens) - last
    states = torch.stack([text.streams[layer][:end] for layer in (*layers, len(text.streams) - 1)], dim=1)
    return {"hidden_states": states, "token_ids": text.tokens[:end].clone()}


def rounded(folder: Path, texts: Sequence[Text], layers: Sequence[int], patch: pytest.MonkeyPatch) -> Path:
    """By hs-connectors 0.9.0's own FP8 connector, on a stand-in for the vLLM class that it extends."""
    place = "vllm.distributed.kv_transfer.kv_connector.v1"
    for name in (*accumulate(place.split("."), "{}.{}".format), f"{place}.example_hidden_states_connector"):
        patch.setitem(sys.modules, name, ModuleType(name))
    base: Any = sys.modules[f"{place}.example_hidden_states_connector"]
    base.ExampleHiddenStatesConnector = object
    sys.modules[place].example_hidden_states_connector = base  # type: ignore[attr-defined]
    writer = importlib.import_module("hs_connectors.fp8_hidden_states_connector").FP8HiddenStatesConnector
    folder.mkdir()
    for number, text in enumerate(texts):
        event = type("Event", (), {"synchronize": lambda self: None})()
        writer._write_tensors(_stack(text, layers, 0), event, str(folder / f"hs_{number}.safetensors"), None)
    return folder


def target_cache(folder: Path, texts: Sequence[Text], layer_ids: Sequence[int]) -> Path:
    """Byte by byte as DeepSpec's deepspec/data/target_cache_dataset.py writes version 2 (``write_sample_bytes``,
    ``pack_index_record``): DeepSpec is not on PyPI."""
    folder.mkdir()
    shard, index = io.BytesIO(), io.BytesIO()
    for number, text in enumerate(texts):
        states = torch.cat([text.streams[layer + 1] for layer in layer_ids], dim=-1)
        parts = [text.tokens.int().numpy().tobytes(), torch.ones_like(text.mask, dtype=torch.uint8).numpy().tobytes(),
                 text.mask.to(torch.uint8).numpy().tobytes(),
                 *(one.bfloat16().view(torch.uint16).numpy().tobytes() for one in (states, text.final))]  # fmt: skip
        starts = [shard.tell()]
        for part in parts:
            shard.write(part)
            starts.append(shard.tell())
        index.write(struct.pack("<QIIQQQQQ", number, 0, len(text.tokens), *starts[:-1]))
    (folder / "shard-00000.bin").write_bytes(shard.getvalue())
    (folder / "samples.idx").write_bytes(index.getvalue())
    manifest = {"version": 2, "num_samples": len(texts), "num_shards": 1, "target_layer_ids": list(layer_ids),
                "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56,
                "hidden_size": texts[0].final.shape[1],
                "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}]}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def loss_masks(path: Path, texts: Sequence[Text]) -> Path:
    """Rows as speculators 0.9.0 cli/prepare_data.py saves them through `datasets`: an Arrow stream in a folder."""
    import polars as pl

    path.mkdir()
    table = pl.DataFrame({"input_ids": [text.tokens.tolist() for text in texts],
                          "loss_mask": [text.mask.tolist() for text in texts]})  # fmt: skip
    table.write_ipc_stream(path / "data-00000-of-00001.arrow")
    return path
