"""The EAGLE-3 family: several taps go through one fusion layer, and layer 0 takes in the embedding beside the state.

Suffixes as in model.py. Sources: arXiv 2503.01840; SafeAILab/EAGLE ``eagle/model/cnets.py``; sglang 0.5.23
``models/llama_eagle3.py`` and ``models/kimi_k25_eagle3.py``; for the switches of other trainers speculators 0.9.0
``models/eagle3`` and Model-Optimizer 0.47 ``speculative/plugins/modeling_eagle.py``.
"""

import torch
from torch import Tensor

from replay.head.parts import Parts
from replay.head.products import ProductSizes


class Eagle3:
    """Its fusion layer, and what lies around attention and MLP of its layers."""

    def fuse(self, parts: Parts, x_RKD: Tensor, sizes: ProductSizes | None) -> Tensor:
        """The head's state [R, E] for rows of target features [R, K*D].

        Where the config skips fc (``HeadConfig.skips_fc``), they are that state: no fc, no norm before it.
        """
        config, x = parts.config, x_RKD
        if config.skips_fc:
            return x
        if config.norm_before_fc:
            x = parts.norm(x, "input_norm")
        if config.fc_norm:
            chunks = x.chunk(config.num_taps, dim=-1)
            x = torch.cat([parts.norm(chunk, f"fc_norm.{tap}") for tap, chunk in enumerate(chunks)], dim=-1)
        return parts.linear(x, "fc", sizes)

    def enter(
        self, parts: Parts, layer: int, embeds: Tensor, hidden: Tensor, residual: Tensor, sizes: ProductSizes | None
    ) -> tuple[Tensor, Tensor]:
        """What a layer's attention takes in, and the stream that its outcome is added to."""
        behaviour, prefix = parts.behaviour, f"layers.{layer}."
        if layer == 0:
            state = parts.norm(hidden, f"{prefix}input_layernorm") if behaviour.state_normed_twice else hidden
            normed = parts.norm(state, f"{prefix}hidden_norm")
            halves = [parts.norm(embeds, f"{prefix}input_layernorm"), normed]
            inputs = torch.cat(halves[::-1] if behaviour.features_first else halves, dim=-1)
            stated = parts.config.norm_before_residual
            starts_normed = stated if behaviour.residual_normed is None else behaviour.residual_normed
            return inputs, normed if starts_normed else hidden
        return parts.enter_later(layer, hidden, residual)

    def mlp(self, parts: Parts, layer: int, x_RE: Tensor, sizes: ProductSizes | None) -> Tensor:
        """What a layer's MLP adds to the stream."""
        return parts.mlp(f"layers.{layer}.mlp.", x_RE, sizes)

    def leave(self, parts: Parts, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What lm_head takes in, and the stream."""
        if not parts.config.last_norm:
            return (total := parts.add(hidden, residual)), total
        return parts.add_norm(hidden, residual, "norm")
