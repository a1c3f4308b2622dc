"""The DeepSeek form of multi-token prediction: both inputs normed and joined, then one whole layer with experts.

The state is the target's after its final norm at first, and then the head's own, normed. Suffixes as in model.py;
X experts, U experts that a row uses, G groups. Sources: SGLang 0.5.23 models/deepseek_nextn.py, models/deepseek_v2.py
(``DeepseekV2MoE``) and layers/moe/topk.py (``biased_grouped_topk_impl``). Scores are fp32.
"""

import torch
from torch import Tensor

from replay.checkpoint.nextn import ROUTING_BIAS, Experts
from replay.head.parts import Parts
from replay.head.products import ProductSizes


class NextN:
    """What lies around attention of its layer, and the experts."""

    def fuse(self, parts: Parts, x_RKD: Tensor, sizes: ProductSizes | None) -> Tensor:
        """The state [R, E]: the target's final state as it stands."""
        return x_RKD

    def enter(
        self, parts: Parts, layer: int, embeds: Tensor, hidden: Tensor, residual: Tensor, sizes: ProductSizes | None
    ) -> tuple[Tensor, Tensor]:
        """What attention takes in, and the stream that its outcome is added to."""
        halves = [parts.norm(embeds, "enorm"), parts.norm(hidden, "hnorm")]
        both = torch.cat(halves[::-1] if parts.behaviour.features_first else halves, dim=-1)
        joined = parts.linear(both, "eh_proj", sizes)
        return parts.norm(joined, "layers.0.input_layernorm"), joined

    def mlp(self, parts: Parts, layer: int, x_RE: Tensor, sizes: ProductSizes | None) -> Tensor:
        """The experts that each row chooses, weighed, and the shared ones."""
        experts, mlp = parts.config.experts, "layers.0.mlp."
        assert experts is not None
        scores_RX = parts.linear(x_RE, f"{mlp}gate", sizes).float().sigmoid()
        chosen_RU, weights_RU = choose(scores_RX, parts.weights[mlp + ROUTING_BIAS], experts)
        out_RE = torch.zeros_like(x_RE, dtype=torch.promote_types(x_RE.dtype, torch.float32))
        for expert in chosen_RU.unique().tolist():
            rows_N, place_N = (chosen_RU == expert).nonzero(as_tuple=True)
            made_NE = parts.mlp(f"{mlp}experts.{expert}.", x_RE[rows_N], None)
            out_RE.index_add_(0, rows_N, (made_NE * weights_RU[rows_N, place_N, None]).to(out_RE.dtype))
        return out_RE.to(x_RE.dtype) + parts.mlp(f"{mlp}shared_experts.", x_RE, sizes)

    def leave(self, parts: Parts, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What lm_head takes in, and the stream."""
        return parts.add_norm(hidden, residual, "norm")


def choose(scores_RX: Tensor, bias_X: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The experts [R, U] of each row, and their weights [R, U] in fp32.

    A group counts by its two best scores with the bias; experts are chosen in the best groups alone.
    """
    biased_RX = scores_RX + bias_X.float()
    grouped_RGx = biased_RX.unflatten(1, (experts.groups, -1))
    best_RG = grouped_RGx.topk(2, dim=-1).values.sum(-1).topk(experts.best_groups, dim=-1).indices
    seen_RG = torch.zeros_like(grouped_RGx[..., 0], dtype=torch.bool).scatter_(1, best_RG, value=True)
    biased_RX = grouped_RGx.masked_fill(~seen_RG[..., None], float("-inf")).flatten(1)
    chosen_RU = biased_RX.topk(experts.used, dim=-1).indices
    weights_RU = scores_RX.gather(1, chosen_RU)
    if experts.normed:
        weights_RU = weights_RU / weights_RU.sum(-1, keepdim=True)
    return chosen_RU, weights_RU * experts.scale
