"""What a family of heads has of its own: how features become a state, and what lies around attention and MLP.

A family is a file beside this one. Its attention is apart (grouped.py, latent.py), as two families may share it.
Suffixes as in model.py.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from replay.head.dflash import Dflash
from replay.head.eagle import Eagle
from replay.head.eagle3 import Eagle3
from replay.head.nextn import NextN
from replay.head.parts import Parts
from replay.head.products import ProductSizes


class Family(Protocol):
    """The forward of a head but for its attention."""

    def fuse(self, parts: Parts, x_RKD: Tensor, sizes: ProductSizes | None) -> Tensor:
        """The state [R, E] that the first step is fed, from rows of target features."""
        ...

    def enter(
        self, parts: Parts, layer: int, embeds: Tensor, hidden: Tensor, residual: Tensor, sizes: ProductSizes | None
    ) -> tuple[Tensor, Tensor]:
        """What a layer's attention takes in, and the stream that its outcome is added to.

        ``hidden`` and ``residual`` are what the layer before left, and the state of the row at layer 0.
        """
        ...

    def mlp(self, parts: Parts, layer: int, x_RE: Tensor, sizes: ProductSizes | None) -> Tensor:
        """What a layer's second half adds to the stream."""
        ...

    def leave(self, parts: Parts, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What lm_head takes in, and the stream as it left the last layer."""
        ...


_EAGLE3 = Eagle3()
# A P-EAGLE head is an EAGLE-3 head but for what its drafted rows are fed (drafting/chains.py).
FAMILIES: Mapping[str, Family] = {
    "eagle3": _EAGLE3, "eagle": Eagle(), "nextn": NextN(), "dflash": Dflash(), "peagle": _EAGLE3,
}  # fmt: skip
