"""The DFlash family: the stream begins with embeddings alone, and target features only become keys and values.

Suffixes as in model.py. Sources: dflash 0.1.0 ``dflash/model.py``; SGLang 0.5.23 ``models/dflash.py``. Attention of a
block lies in block.py.
"""

from torch import Tensor

from replay.head.eagle3 import Eagle3
from replay.head.parts import Parts
from replay.head.products import ProductSizes


class Dflash(Eagle3):
    """As EAGLE-3 but for its fusion layer and the entry of its layers."""

    def fuse(self, parts: Parts, x_RKD: Tensor, sizes: ProductSizes | None) -> Tensor:
        """Context rows [R, E] of target features [R, K*D], normed behind fc."""
        return parts.norm(parts.linear(x_RKD, "fc", sizes), "hidden_norm")

    def enter(
        self, parts: Parts, layer: int, embeds: Tensor, hidden: Tensor, residual: Tensor, sizes: ProductSizes | None
    ) -> tuple[Tensor, Tensor]:
        """What a layer's attention takes in, and the stream that its outcome is added to."""
        name = f"layers.{layer}.input_layernorm"
        if layer == 0:  # the stream is the embedding alone
            return parts.norm(hidden, name), hidden
        return parts.add_norm(hidden, residual, name)
