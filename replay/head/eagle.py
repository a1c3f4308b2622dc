"""The EAGLE-1 family, EAGLE-2 included: fc joins the embedding and the state before layer 0, and no norm follows.

The state is the target's after its final norm at first, and then what the last layer left. Suffixes as in model.py.
Sources: SafeAILab/EAGLE ``eagle/model/cnets1.py``; SGLang 0.5.23 ``models/llama_eagle.py``.
"""

import torch
from torch import Tensor

from replay.head.parts import Parts
from replay.head.products import ProductSizes


class Eagle:
    """What lies around attention and MLP of its layers."""

    def fuse(self, parts: Parts, x_RKD: Tensor, sizes: ProductSizes | None) -> Tensor:
        """The state [R, E]: the target's final state as it stands."""
        return x_RKD

    def enter(
        self, parts: Parts, layer: int, embeds: Tensor, hidden: Tensor, residual: Tensor, sizes: ProductSizes | None
    ) -> tuple[Tensor, Tensor]:
        """What a layer's attention takes in, and the stream that its outcome is added to."""
        if layer:
            return parts.enter_later(layer, hidden, residual)
        halves = [embeds, hidden]
        joined = parts.linear(
            torch.cat(halves[::-1] if parts.behaviour.features_first else halves, dim=-1), "fc", sizes
        )
        return joined, joined

    def mlp(self, parts: Parts, layer: int, x_RE: Tensor, sizes: ProductSizes | None) -> Tensor:
        """What a layer's MLP adds to the stream."""
        return parts.mlp(f"layers.{layer}.mlp.", x_RE, sizes)

    def leave(self, parts: Parts, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The stream twice: lm_head reads it as it is."""
        return (total := parts.add(hidden, residual)), total
