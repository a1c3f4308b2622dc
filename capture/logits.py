"""From logits to what a trace keeps of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
