"""speculators' own EAGLE-3 model (0.9.0): random weights, its own files on disk, its own training forward."""

from pathlib import Path
from typing import Any

import torch
from support.peer_heads import _import_speculators
from torch import Tensor

WIDTHS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "num_hidden_layers": 1, "vocab_size": 96, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def make_model(kind: str, layer: dict[str, Any], outer: dict[str, Any]) -> Any:
    """A model of ``kind`` of layers, llama or qwen3; ``layer`` and ``outer`` replace fields of its two configs."""
    from transformers import LlamaConfig, Qwen3Config

    Eagle3SpeculatorConfig, Eagle3DraftModel = _import_speculators()
    layers = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**WIDTHS | layer, pad_token_id=None)
    layers._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(transformer_layer_config=layers, **{"draft_vocab_size": 40} | outer)
    model = Eagle3DraftModel(config).float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "d2t":
                chosen = torch.randperm(96, generator=generator)[: len(tensor)].sort().values
                tensor.copy_(chosen - torch.arange(len(tensor)))
                model.state_dict()["t2d"].zero_()[chosen] = True
            elif name != "t2d" and tensor.dim() == 1:
                tensor.copy_(1 + 0.2 * torch.randn(tensor.shape, generator=generator))
            elif name != "t2d":
                # half the gain in the layers, so that five steps do not measure the rounding of the machine
                gain = 1 if name.startswith("layers.") else 2
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * gain / tensor.shape[-1] ** 0.5)
    return model


def save(model: Any, folder: Path) -> Path:
    """What its trainer writes."""
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: Any, ids_R: Tensor, features_RKD: Tensor, steps: int) -> list[Tensor]:
    """Logits [R, W] of each step, read where its own loop computes them; the text's own tokens are fed."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _args, out: seen.append(out[0].clone()))
    model(features_RKD[None], ids_R[None], torch.zeros_like(ids_R)[None], ttt_steps=steps)
    hook.remove()
    return seen
