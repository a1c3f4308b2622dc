"""From logits to a token and to what a trace keeps of them."""

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


@dataclass(frozen=True, slots=True)
class LogitsSummary:
    """What is kept of n rows of logits, on the CPU."""

    topk_ids: "Tensor"  # [n, k] int32, most likely first, equal ones by rising id
    topk_logprobs: "Tensor"  # [n, k] float32
    logsumexp: "Tensor"  # [n] float32

    def rows(self, start: int, end: int) -> "LogitsSummary":
        """Rows start to end."""
        return LogitsSummary(self.topk_ids[start:end], self.topk_logprobs[start:end], self.logsumexp[start:end])


def summarise_logits(logits_NV: "Tensor", k: int) -> LogitsSummary:
    """Top k and log-sum-exp of logits in float32; column 0 is the argmax, the lowest id where some are equal."""
    import torch

    logits_NV = logits_NV.float()
    logsumexp_N = logits_NV.logsumexp(-1)
    ids_NK = logits_NV.topk(min(k, logits_NV.shape[-1])).indices.sort().values
    values_NK, order_NK = logits_NV.gather(-1, ids_NK).sort(descending=True, stable=True)
    ids_NK = ids_NK.gather(-1, order_NK)
    # With more than k equal maxima topk may leave out the lowest id; all it kept are equal then, so one can go.
    ids_NK[:, 0] = logits_NV.argmax(-1)
    return LogitsSummary(ids_NK.to(torch.int32).cpu(), (values_NK - logsumexp_N[:, None]).cpu(), logsumexp_N.cpu())


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
