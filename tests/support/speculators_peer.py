"""speculators' own EAGLE-3, P-EAGLE and DFlash models (0.9.0): random weights, its own files, its training forward."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

WIDTHS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "num_hidden_layers": 1, "vocab_size": 96, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


@contextmanager
def importable() -> Iterator[None]:
    """Its models without its data loader, which asks for ``openai`` and ``datasets``: they need a type's name of it."""
    name = "speculators.train.data"
    placeholder = ModuleType(name)
    placeholder.BatchType = dict  # type: ignore[attr-defined]
    there = sys.modules.setdefault(name, placeholder)
    try:
        yield
    finally:
        if there is placeholder:
            del sys.modules[name]


def make_model(kind: str, layer: dict[str, Any], outer: dict[str, Any], algorithm: str = "eagle3") -> Any:
    """A model of ``kind`` of layers, llama or qwen3; ``layer`` and ``outer`` replace fields of its two configs."""
    from transformers import LlamaConfig, Qwen3Config

    layers = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**WIDTHS | layer, pad_token_id=None)
    layers._attn_implementation = "eager"
    fields = {"transformer_layer_config": layers, "draft_vocab_size": 40} | outer
    made, config = _classes(algorithm)
    model = made(config(**fields)).float()
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


def _classes(algorithm: str) -> tuple[Any, Any]:
    """The model and its config."""
    with importable():
        from speculators.models import dflash, eagle3, peagle
        from speculators.models.dflash.core import DFlashDraftModel
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.models.peagle.core import PEagleDraftModel
    return {
        "eagle3": (Eagle3DraftModel, eagle3.Eagle3SpeculatorConfig),
        "peagle": (PEagleDraftModel, peagle.PEagleSpeculatorConfig),
        "dflash": (DFlashDraftModel, dflash.DFlashSpeculatorConfig),
    }[algorithm]


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


@torch.no_grad()
def parallel_logits(model: Any, ids_R: Tensor, features_RKD: Tensor, steps: int, rows: int) -> list[Tensor]:
    """Of a P-EAGLE model, the logits [rows, W] of each step, read where its own forward computes them.

    Each of the first ``rows`` rows is an anchor with all its steps, where its trainer draws some; there are ``steps``
    rows more than that.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    assert len(ids_R) == rows + steps
    depth = torch.arange(steps).repeat_interleave(rows)
    anchor = torch.arange(rows).repeat(steps)
    more = torch.arange(rows, rows + steps)  # rows of depth 0 that its forward wants behind the anchors
    order = (torch.cat([anchor[:rows], more, anchor[rows:]]), torch.cat([depth[:rows], more * 0, depth[rows:]]))
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _args, out: seen.append(out[0].clone()))
    drawn, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **_: order
    try:
        last_1RE = torch.zeros(1, len(ids_R), model.hidden_size)
        model(features_RKD[None], ids_R[None], torch.zeros_like(ids_R)[None],
              verifier_last_hidden_states=last_1RE, num_depths=steps,
              loss_config=resolve_loss_config("kl_div", "eager"))  # fmt: skip
    finally:
        core.generate_cod_sample_indices = drawn
        hook.remove()
    logits_QW = seen[0]
    return [logits_QW[:rows], *logits_QW[rows + steps :].split(rows)]


@torch.no_grad()
def block_logits(model: Any, tokens_T: Tensor, features_RKD: Tensor, anchors: range) -> Tensor:
    """Of a DFlash model, the logits [A, B, W] of the blocks of these anchors, read where its own forward makes them.

    Its trainer takes anchors at random among those that a mask allows: here as many as it allows.
    """
    from speculators.losses import resolve_loss_config

    size, rows = model.block_size, anchors.stop + model.block_size  # of the last ones it takes none
    ids_R = torch.cat([tokens_T, tokens_T.new_zeros(size)])[:rows]
    padded_RKD = torch.cat([features_RKD, features_RKD.new_zeros(size, features_RKD.shape[1])])[:rows]
    allowed_R = torch.zeros(1, rows)
    allowed_R[:, anchors.start :] = 1
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _args, out: seen.append(out[0].clone()))
    last_1RE, documents_1R = torch.zeros(1, rows, model.hidden_size), torch.zeros_like(ids_R)[None]
    loss = resolve_loss_config("kl_div", "eager")
    model(padded_RKD[None], ids_R[None], allowed_R, last_1RE, documents_1R, max_anchors=len(anchors), loss_config=loss)
    hook.remove()
    return seen[0].unflatten(0, (len(anchors), size))
