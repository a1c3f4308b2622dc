"""From logits to a token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How output tokens are chosen: temperature 0 is greedy; top_p 1 and top_k 0 leave all tokens in."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


def choose(logits_V: "Tensor", sampling: Sampling, generator: "torch.Generator") -> int:
    """A token drawn from float32 logits on the CPU at a temperature above 0, with one random number of the generator.

    top_k keeps the k likeliest, then top_p the fewest likeliest that reach the mass p among these (the one that crosses
    it included), as SGLang, vLLM and Transformers do; the draw is by inverse cumulative distribution, likeliest first.
    """
    import torch

    chances_V, ids_V = (logits_V.double() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    if sampling.top_k > 0:
        chances_V, ids_V = chances_V[: sampling.top_k], ids_V[: sampling.top_k]
        chances_V = chances_V / chances_V.sum()
    mass_V = chances_V.cumsum(-1)
    kept = int((mass_V - chances_V < sampling.top_p).sum())
    point = torch.rand(1, generator=generator, dtype=torch.float64) * mass_V[kept - 1]
    place = int(torch.searchsorted(mass_V[:kept], point, right=True).clamp(max=kept - 1))
    return int(ids_V[place])
