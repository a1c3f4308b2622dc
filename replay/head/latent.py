"""Attention of latent heads (DeepSeek's MLA): the draft KV holds one latent and one rope key a row, for all heads.

Two orders of the same products. Unabsorbed, as Transformers runs it (models/deepseek_v3/modeling_deepseek_v3.py): keys
and values of every head are made from the latent, and rows hold these. Absorbed, as SGLang 0.5.23 runs decode, verify
and draft extend (models/deepseek_common/attention_forward_methods/forward_mla.py): the key half of ``kv_b_proj`` goes
into the query and its value half behind the mixing, and one key-value head of latents serves all heads. A server runs
a prompt that it prefills whole unabsorbed all the same (head/model.py ``of_whole_prompts``).

Suffixes: R rows, I inputs, N attention heads, P not rotated and Q rotated features of one, L features of the latent, V
of a value, C = L + Q what a row stores. Source: SGLang 0.5.23 models/kimi_k25_eagle3.py, models/deepseek_v2.py.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.checkpoint.config import HeadConfig
from replay.checkpoint.latent import Latent
from replay.head.emulation import RoundedProducts
from replay.head.grouped import CachedWidths, Norm, Projected, Rotation
from replay.head.held import Held
from replay.head.parts import join_rows
from replay.head.products import Execution, ProductSizes, multiply_heads
from replay.head.rope import rotate, rotate_interleaved

PREFIX = "layers.0.self_attn."


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Matrices as they lie in a checkpoint, those of q_a_proj and kv_a_proj_with_mqa stacked, as servers run them."""

    down_OI: Tensor
    q_b_OI: Tensor
    kv_b_OL: Tensor

    @classmethod
    def of(cls, tensors: MutableMapping[str, Tensor], held: Held) -> "LatentWeights":
        """Those among the weights of a head; the two that are stacked are rows of the stack from now on."""
        down, q_b, kv_b = ("q_a_proj", "kv_a_proj_with_mqa"), "q_b_proj", "kv_b_proj"
        down_OI = join_rows(tensors, [f"{PREFIX}{part}.weight" for part in down], held)
        return cls(down_OI, *(tensors[f"{PREFIX}{part}.weight"] for part in (q_b, kv_b)))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Before and after the mixing of values in the one layer of such a head."""

    config: HeadConfig
    latent: Latent
    other_pairs: bool
    absorbed: bool
    weights: LatentWeights
    execution: Execution
    product: RoundedProducts
    stored: Callable[[Tensor], Tensor]

    @property
    def cached(self) -> CachedWidths:
        """Absorbed: one head of latent and rope key, whose value is the latent. Else each head's key and value."""
        latent = self.latent
        if self.absorbed:
            return CachedWidths(1, latent.kv_rank + latent.rope, latent.kv_rank)
        return CachedWidths(self.config.num_heads, latent.nope + latent.rope, latent.value)

    def project(
        self, layer: int, inputs_RI: Tensor, rotation: Rotation, sizes: ProductSizes | None, norm: Norm
    ) -> Projected:
        """Rotated queries, keys and values [R, heads, width] with the widths of ``cached``."""
        latent, weights = self.latent, self.weights
        down = self.product(f"{PREFIX}fused_qkv_a_proj_with_mqa", inputs_RI, weights.down_OI, None, sizes)
        q_down, latent_RL, key_RQ = down.split([latent.q_rank, latent.kv_rank, latent.rope], dim=-1)
        q_normed = norm(q_down, f"{PREFIX}q_a_layernorm")
        q_RO = self.product(f"{PREFIX}q_b_proj", q_normed, weights.q_b_OI, None, sizes)
        q_RNP, q_RNQ = q_RO.unflatten(-1, (-1, latent.nope + latent.rope)).split([latent.nope, latent.rope], dim=-1)
        turn = rotate if latent.interleaved == self.other_pairs else rotate_interleaved
        q_RNQ, key_R1Q = turn(q_RNQ, *rotation), turn(key_RQ[:, None], *rotation)
        latent_R1L = norm(latent_RL, f"{PREFIX}kv_a_layernorm")[:, None]
        stored_R1C = self.stored(torch.cat([latent_R1L, key_R1Q], dim=-1))
        if self.absorbed:
            q_RNC = torch.cat([self._by_head(q_RNP, self._halves()[0], sizes), q_RNQ], dim=-1)
            return q_RNC, stored_R1C, stored_R1C[..., : latent.kv_rank]
        return torch.cat([q_RNP, q_RNQ], dim=-1), *self._expand(stored_R1C, sizes)

    def _expand(self, stored_R1C: Tensor, sizes: ProductSizes | None) -> tuple[Tensor, Tensor]:
        """Every head's keys [R, N, P + Q] and values [R, N, V] from what a row stores."""
        latent = self.latent
        latent_RL, key_R1Q = stored_R1C[:, 0, : latent.kv_rank], stored_R1C[..., latent.kv_rank :]
        both_RO = self.product(f"{PREFIX}kv_b_proj", latent_RL, self.weights.kv_b_OL, None, sizes)
        both = both_RO.unflatten(-1, (-1, latent.nope + latent.value))
        k_RNP, v_RNV = both.split([latent.nope, latent.value], dim=-1)
        return torch.cat([k_RNP, key_R1Q.expand(-1, k_RNP.shape[1], -1)], dim=-1), v_RNV

    def leave(self, mixed_RI: Tensor, sizes: ProductSizes | None) -> Tensor:
        """What o_proj takes in [R, N*V], from mixed latents or mixed values."""
        if not self.absorbed:
            return mixed_RI
        mixed_RNL = mixed_RI.unflatten(-1, (-1, self.latent.kv_rank))
        return self._by_head(mixed_RNL, self._halves()[1].transpose(1, 2), sizes).flatten(1)

    def _halves(self) -> tuple[Tensor, Tensor]:
        """kv_b_proj of each head: what makes its keys [N, P, L] and its values [N, V, L]."""
        both_NOL = self.weights.kv_b_OL.unflatten(0, (-1, self.latent.nope + self.latent.value))
        key_NPL, value_NVL = both_NOL.split([self.latent.nope, self.latent.value], dim=1)
        return key_NPL, value_NVL

    def _by_head(self, x_RNI: Tensor, weight_NIO: Tensor, sizes: ProductSizes | None) -> Tensor:
        return multiply_heads(x_RNI.to(weight_NIO.dtype), weight_NIO, self.execution, sizes).to(x_RNI.dtype)
