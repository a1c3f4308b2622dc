"""Attention of Llama heads: queries, keys and values from one product, key-value heads shared by groups of queries.

Suffixes as in model.py. Sources: SGLang 0.5.23 models/llama_eagle3.py; for norms of queries and keys Transformers
models/qwen3/modeling_qwen3.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from replay.checkpoint.config import HeadConfig
from replay.head.emulation import RoundedProducts
from replay.head.products import ProductSizes
from replay.head.rope import rotate, rotate_interleaved

Rotation = tuple[Tensor, Tensor]
Projected = tuple[Tensor, Tensor, Tensor]
Norm = Callable[[Tensor, str], Tensor]  # of features, with a norm's name


class CachedWidths(NamedTuple):
    """What the draft KV holds of a row and layer: so many heads, each a key and a value of these widths."""

    heads: int
    key: int
    value: int


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Before and after the mixing of values, for every layer: ``weights`` and ``biases`` of q, k and v, stacked."""

    config: HeadConfig
    other_pairs: bool
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    product: RoundedProducts
    stored: Callable[[Tensor], Tensor]

    @property
    def cached(self) -> CachedWidths:
        """Key-value heads, and the width of one twice."""
        return CachedWidths(self.config.num_kv_heads, self.config.head_dim, self.config.head_dim)

    def project(
        self, layer: int, inputs_RI: Tensor, rotation: Rotation, sizes: ProductSizes | None, norm: Norm
    ) -> Projected:
        """Rotated queries [R, N, H], and keys and values [R, M, H] as the draft KV holds them."""
        config = self.config
        widths = [config.num_heads * config.head_dim] + 2 * [config.num_kv_heads * config.head_dim]
        name = f"layers.{layer}.self_attn.qkv_proj"
        product = self.product(name, inputs_RI, self.weights[layer], self.biases[layer], sizes)
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in product.split(widths, dim=-1))
        if config.qk_norm:
            q, k = norm(q, f"layers.{layer}.self_attn.q_norm"), norm(k, f"layers.{layer}.self_attn.k_norm")
        return self.turned(q, rotation), self.stored(self.turned(k, rotation)), self.stored(v)

    def turned(self, x_RNH: Tensor, rotation: Rotation) -> Tensor:
        """Queries or keys at their positions."""
        return (rotate_interleaved if self.other_pairs else rotate)(x_RNH, *rotation)

    def leave(self, mixed_RI: Tensor, sizes: ProductSizes | None) -> Tensor:
        """What o_proj takes in [R, N*H]: the mixed values as they are."""
        return mixed_RI
