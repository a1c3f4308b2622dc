"""What every family of heads is made of: norms, products and the MLP of a layer, in a server's rounding order.

Suffixes as in model.py.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from replay.checkpoint.config import HeadConfig
from replay.engines.behaviour import Behaviour
from replay.engines.profiles import Numerics
from replay.head.emulation import RoundedProducts
from replay.head.held import Held, split_rows, stack_rows
from replay.head.products import ProductSizes


@dataclass(frozen=True, slots=True)
class Parts:
    """A head's weights, and how they are run."""

    config: HeadConfig
    behaviour: Behaviour
    numerics: Numerics
    dtype: torch.dtype
    weights: Mapping[str, Tensor]
    product: RoundedProducts
    gate_up: Mapping[str, Tensor]  # by the prefix of an MLP, both matrices as servers run them

    def stacked(self, prefix: str, parts: str, kind: str = "weight") -> Tensor:
        """Projections of one block, joined as servers run them."""
        return stack(self.weights, prefix, parts, kind)

    def linear(self, x: Tensor, name: str, sizes: ProductSizes | None) -> Tensor:
        """One product with its bias, where the head has one."""
        return self.product(name, x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"), sizes)

    def mlp(self, prefix: str, x_RE: Tensor, sizes: ProductSizes | None) -> Tensor:
        """silu(gate) * up, brought back to the head's width."""
        bias = self.stacked(prefix, "gate_up", "bias") if f"{prefix}gate_proj.bias" in self.weights else None
        product = self.product(f"{prefix}gate_up_proj", x_RE, self.gate_up[prefix], bias, sizes)
        gate, up = product.chunk(2, dim=-1)
        return self.linear(functional.silu(gate) * up, f"{prefix}down_proj", sizes)

    def enter_later(self, layer: int, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What attention of a layer after the first takes in, and the stream that its outcome is added to."""
        name = f"layers.{layer}.{self.behaviour.later_norm or self.config.later_norm}"
        if self.behaviour.later_residual:
            return self.add_norm(hidden, residual, name)
        return self.norm(hidden, name), hidden

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm with the weight of this name."""
        if self._skips(name):
            return x
        return self._scale(x.float(), self.weights[f"{name}.weight"])

    def add_norm(self, x: Tensor, residual: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """norm(x + residual) and the rounded sum."""
        if self._skips(name):
            return (total := self.add(x, residual)), total
        weight = self.weights[f"{name}.weight"]
        if self.numerics.norm_sums_unrounded:
            total = x.float() + residual.float()
            return self._scale(total, weight), total.to(self.dtype)
        rounded = x + residual
        return self._scale(rounded.float(), weight), rounded

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The rounded sum."""
        return (x.float() + residual.float()).to(self.dtype)

    def _skips(self, name: str) -> bool:
        """Whether a norm such as ``layers.0.hidden_norm`` or ``fc_norm.1`` is left out."""
        kind = next(part for part in reversed(name.split(".")) if not part.isdigit())
        return kind in self.behaviour.skip_norms

    def _scale(self, x_fp32: Tensor, weight: Tensor) -> Tensor:
        variance = x_fp32.pow(2).mean(dim=-1, keepdim=True)
        x_fp32 = x_fp32 * torch.rsqrt(variance + self.config.rms_norm_eps)
        if self.numerics.norm_sums_unrounded:
            return (x_fp32 * weight).to(self.dtype)
        return weight * x_fp32.to(self.dtype)


def stack(weights: Mapping[str, Tensor], prefix: str, parts: str, kind: str = "weight") -> Tensor:
    """Projections of one block, such as ``q_k_v``, joined as servers run them; no copy where they lie so already."""
    return stack_rows([weights[f"{prefix}{part}_proj.{kind}"] for part in parts.split("_")])


def stack_once(weights: MutableMapping[str, Tensor], prefix: str, parts: str, held: Held) -> Tensor:
    """``stack`` of weights, whose parts are from now on rows of it: what they were before can leave memory.

    Where another head of ``held`` has joined the same ones, it is that stack.
    """
    return join_rows(weights, [f"{prefix}{part}_proj.weight" for part in parts.split("_")], held)


def join_rows(weights: MutableMapping[str, Tensor], names: Sequence[str], held: Held) -> Tensor:
    """``stack_once`` of weights by their names."""
    own = [weights[name] for name in names]
    joined = held.join(own)
    weights.update(zip(names, split_rows(joined, own), strict=True))
    return joined


def stack_gate_up(weights: MutableMapping[str, Tensor], held: Held) -> dict[str, Tensor]:
    """gate and up of every MLP among the weights, joined once, by the MLP's prefix."""
    tail = "gate_proj.weight"
    prefixes = [name.removesuffix(tail) for name in weights if name.endswith(tail)]
    return {prefix: stack_once(weights, prefix, "gate_up", held) for prefix in prefixes}
