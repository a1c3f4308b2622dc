"""Chains at every anchor with the head's own confidence: the probability that it gives to each token it drafts.

Suffixes as in every_anchor.py: A anchors, K steps, B rows of a block, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.chains import chain_steps
from replay.drafting.first_pass import first_pass
from replay.drafting.next_tokens import choose, read_logits
from replay.drafting.rows import DraftInput
from replay.head.model import Head


@dataclass(frozen=True, slots=True)
class ConfidentDrafts:
    """Target ids drafted at each anchor of one request [A, K], and the probability of each [A, K] in fp32."""

    drafted_AK: Tensor
    chance_AK: Tensor


def draft_with_confidence(head: Head, inputs: Sequence[DraftInput], steps: int) -> list[ConfidentDrafts]:
    """What ``draft_every_anchor`` drafts, and at each token the softmax of the rounded draft logits, temperature 1."""
    counts = [item.anchors for item in inputs]
    if sum(counts) == 0:
        empty = torch.empty((0, steps))
        return [ConfidentDrafts(empty.long(), empty) for _ in inputs]
    drafted: list[Tensor] = []
    chances: list[Tensor] = []

    def read(logits_BW: Tensor, _: slice) -> tuple[Tensor, ...]:
        ids_B, _tied = choose(head, logits_BW)
        return ids_B, logits_BW.float().softmax(-1).amax(-1)

    for state in chain_steps(head, first_pass(head, inputs), steps, lambda _: drafted[-1]):
        ids_A, chance_A = read_logits(head, state.normed_AE, read, state.logit_sizes, widening=3)
        drafted.append(ids_A)
        chances.append(chance_A)
    parts = zip(torch.stack(drafted, 1).cpu().split(counts), torch.stack(chances, 1).cpu().split(counts), strict=True)
    return [ConfidentDrafts(*part) for part in parts]
