"""Whether a dump's last states are those before or after the final norm: seen in the numbers, held against the text."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from replay.capture.dumps.sample import Sample
from replay.capture.dumps.target import DumpTarget
from replay.errors import CaptureError

if TYPE_CHECKING:
    from torch import Tensor

Stage = Literal["before", "after"]

# A row after the norm, divided by the norm's weights, has a root mean square of 1: a little less where the row before
# was so small that epsilon counts, and off by what rounding does to H values together.
_LEAST, _MOST = 0.9, 1.02
_ROWS = 512  # rows whose next token is scored, at most
_SPEAKS = 0.5  # nats below those of a blind guess from which the text says something about the states


@dataclass(frozen=True, slots=True)
class Seen:
    """Over the scored rows: nats that the next token of the text costs, if the states are taken as before or after."""

    rows: int
    before: float
    after: float


def stage_of(sample: Sample, target: DumpTarget) -> Stage:
    """Before or after the final norm, from the rows' sizes."""
    return "after" if _is_normed(sample.last_SH, target.norm_H) else "before"


def find_stage(sample: Sample, target: DumpTarget) -> Stage:
    """``stage_of``, and its text does not say the opposite.

    Raises CaptureError where the rows fit the target's norm in neither way.
    """
    stage = stage_of(sample, target)
    if stage == "before":
        seen = score(sample, target)
        if seen.after < seen.before and min(seen.after, seen.before) < math.log(target.info.vocab_size) - _SPEAKS:
            raise CaptureError(
                f"{sample.where}: the last states have been through another norm than that of {target.info.path} (its "
                f"text costs {seen.after:.2f} nats a token as they are, {seen.before:.2f} once normed): name the "
                "target that the dump is of"
            )
    return stage


def _is_normed(rows_SH: "Tensor", norm_H: "Tensor") -> bool:
    """Whether every row is the output of a norm with these weights; columns of weights near 0 say nothing."""
    weight = norm_H.float()
    told = weight.abs() > weight.abs().max() / 1000
    size = (rows_SH.float()[:, told] / weight[told]).pow(2).mean(1).sqrt()
    return bool(((size > _LEAST) & (size < _MOST)).all())


def score(sample: Sample, target: DumpTarget) -> Seen:
    """What the text costs under both readings, at rows spread evenly over it."""
    import torch

    count = len(sample.tokens_S) - 1
    rows = torch.arange(0, count, max(1, -(-count // _ROWS)))
    states, said = sample.last_SH[rows], sample.tokens_S[rows + 1]
    before, after = (_cost(made, said, target) for made in (target.normed(states), states))
    return Seen(len(rows), before, after)


def _cost(final_RH: "Tensor", said_R: "Tensor", target: DumpTarget) -> float:
    import torch

    total = 0.0
    for final, said in zip(final_RH.split(128), said_R.split(128), strict=True):
        logits = logits_of(final, target.output_VH)
        total += float(torch.nn.functional.cross_entropy(logits, said, reduction="sum"))
    return total / len(said_R)


def logits_of(final_RH: "Tensor", output_VH: "Tensor") -> "Tensor":
    """[R, V] float32, in the dtype of ``output_VH`` (``DumpTarget.multiplying``)."""
    return (final_RH.to(output_VH.dtype) @ output_VH.T).float()
