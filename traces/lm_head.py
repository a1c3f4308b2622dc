"""What lm_head makes of the recorded final rows, and how far another honest computation of it may be.

Shapes: B rows, H hidden size, V vocabulary, m asked-for ids.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_WEIGHT_BYTES = 1 << 24  # of float32 lm_head rows at once, so that memory does not grow with the vocabulary
_PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}  # significant bits


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Logits of B rows in float32: the two largest, those of the asked-for ids [B, m], and the log-sum-exp.

    ``tolerance`` [B] is how far a logit that the target computed in its own dtype may be from ours, ``tie`` [B] the
    gap within which the argmax may be another. See ``bound``.
    """

    best_id: "torch.Tensor"
    best: "torch.Tensor"
    second: "torch.Tensor"
    asked: "torch.Tensor"
    logsumexp: "torch.Tensor"
    tolerance: "torch.Tensor"
    tie: "torch.Tensor"

    def rows(self, part: slice) -> "Recomputed":
        """Some of the B rows."""
        return Recomputed(*(getattr(self, item.name)[part] for item in fields(self)))


def recompute(
    final_BH: "torch.Tensor", lm_head_VH: "torch.Tensor", ids_Bm: "torch.Tensor", *, dtype: str, device: str = "cpu"
) -> Recomputed:
    """The logits of ``final_BH`` in float32, in slices of the vocabulary; ``dtype`` is the one the target ran in."""
    import torch

    final = final_BH.to(device, torch.float32)
    ids = ids_Bm.to(device)
    count, width = final.shape
    top = torch.full((count, 2), -torch.inf, device=device)
    top_ids = torch.zeros((count, 2), dtype=torch.int64, device=device)
    asked = torch.zeros(ids.shape, device=device)
    total = torch.full((count,), -torch.inf, device=device)
    peak = torch.zeros(count, device=device)
    longest = torch.zeros((), device=device)
    step = max(1, _WEIGHT_BYTES // (4 * width))
    for start in range(0, len(lm_head_VH), step):
        weight = lm_head_VH[start : start + step].to(device, torch.float32)
        logits = final @ weight.T  # [B, slice]
        here = logits.topk(min(2, logits.shape[1]), dim=1)
        top, order = torch.cat([top, here.values], 1).topk(2, dim=1)
        top_ids = torch.cat([top_ids, here.indices + start], 1).gather(1, order)
        total = torch.logaddexp(total, logits.logsumexp(1))
        peak = torch.maximum(peak, logits.abs().amax(1))
        longest = torch.maximum(longest, weight.norm(dim=1).amax())
        inside = (ids >= start) & (ids < start + len(weight))
        values = logits.gather(1, (ids - start).clamp(0, len(weight) - 1))
        asked = torch.where(inside, values, asked)
    slack = 4 * width**0.5 * 2.0**-24 * final.norm(dim=1) * longest + 8 * 2.0**-24 * total.abs()
    tolerance, tie = ulp(peak, dtype) + slack, ulp(top[:, 0], dtype) + slack
    parts = (top_ids[:, 0], top[:, 0], top[:, 1], asked, total, tolerance, tie)
    return Recomputed(*(part.cpu() for part in parts))


def ulp(value: "torch.Tensor", dtype: str) -> "torch.Tensor":
    """The distance of neighbouring numbers of ``dtype`` at ``value``.

    Two honest computations of one logit differ by less: each rounds the exact value to ``dtype`` (half an ulp at
    most; the other half is for products summed in another order), and log-sum-exp moves no farther than the farthest
    logit. ``recompute`` adds what float32 sums of H products may differ by: 4 sqrt(H) 2^-24 |final| |lm_head row|
    (the probabilistic bound of Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
    """
    import torch

    exponent = torch.frexp(value.abs().clamp_min(torch.finfo(torch.float32).tiny)).exponent
    return torch.ldexp(torch.ones_like(value), exponent - _PRECISION[dtype])
