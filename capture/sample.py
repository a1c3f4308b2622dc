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


def summarise_logits(logits: "Tensor", k: int) -> LogitsSummary:
    """Top k and log-sum-exp of logits [n, V] in float32; column 0 is the argmax, the lowest id where some are equal."""
    import torch

    wide = logits.float()
    logsumexp = wide.logsumexp(-1)
    ids = wide.topk(min(k, wide.shape[-1])).indices.sort().values
    values = wide.gather(-1, ids)
    values, order = values.sort(descending=True, stable=True)
    ids = ids.gather(-1, order)
    # With more than k equal maxima topk may leave out the lowest id; all it kept are equal then, so one can go.
    ids[:, 0] = wide.argmax(-1)
    return LogitsSummary(ids.to(torch.int32).cpu(), (values - logsumexp[:, None]).cpu(), logsumexp.cpu())


def choose(logits: "Tensor", sampling: Sampling, generator: "torch.Generator") -> int:
    """A token drawn from logits [V] (float32, CPU) at a temperature above 0, with one random number of the generator.

    top_k keeps the k likeliest, then top_p the fewest likeliest that reach the mass p among these (the one that crosses
    it included), as SGLang, vLLM and Transformers do; the draw is by inverse cumulative distribution, likeliest first.
    """
    import torch

    probabilities, order = (logits.double() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    if sampling.top_k > 0:
        probabilities, order = probabilities[: sampling.top_k], order[: sampling.top_k]
        probabilities = probabilities / probabilities.sum()
    mass = probabilities.cumsum(-1)
    keep = int((mass - probabilities < sampling.top_p).sum())
    mass = mass[:keep]
    point = torch.rand(1, generator=generator, dtype=torch.float64) * mass[-1]
    place = int(torch.searchsorted(mass, point, right=True).clamp(max=keep - 1))
    return int(order[place])
