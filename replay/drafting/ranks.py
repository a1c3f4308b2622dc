"""What a head thought along the chains of a run: its likeliest tokens, and where the wanted one stood among them.

Every drafted row embeds what the run drafted, so that each step is read where the run read it (chains.py).

Suffixes as in chains.py: A anchors, B of a block, K steps, P likeliest tokens, W draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.chains import chain_steps
from replay.drafting.first_pass import first_pass
from replay.drafting.margins import served_index
from replay.drafting.next_tokens import read_logits
from replay.drafting.rows import DraftInput
from replay.head.model import Head
from replay.head.products import ProductSizes


@dataclass(frozen=True, slots=True)
class Ranked:
    """One request, at each anchor and step [A, K], on the CPU.

    ``rank_AK`` of the wanted token in the head's order, 1 for the likeliest (of equal ones the lowest draft id stands
    first); 0 where none was wanted or the head cannot draft it. ``chance_AK`` is its probability, an fp32 softmax of
    the rounded draft logits. ``behind_AK`` is by how many nats the drafted token lies behind the likeliest: 0 where it
    is the likeliest, inf where the head cannot draft it. ``top_AKP`` are the likeliest target ids, the first one first,
    ``chances_AKP`` their probabilities.
    """

    rank_AK: Tensor
    chance_AK: Tensor
    behind_AK: Tensor
    top_AKP: Tensor
    chances_AKP: Tensor


def rank_along(head: Head, item: DraftInput, drafted_AK: Tensor, wanted_AK: Tensor, top: int) -> Ranked:
    """Ranks of the target ids ``wanted_AK`` (-1 for none) along the target ids ``drafted_AK`` that a run drafted.

    ``top`` likeliest tokens are told, or as many as the draft vocabulary has. There must be an anchor. Behaviour that
    follows the walk is not read here.
    """
    top = min(top, head.config.draft_vocab_size)
    wanted, drafted = (served_index(head, ids_AK.to(head.device)) for ids_AK in (wanted_AK, drafted_AK))
    fed_AK = drafted_AK.to(head.device)
    states = chain_steps(head, first_pass(head, [item]), drafted_AK.shape[1], lambda step: fed_AK[:, step - 1])
    read = [
        _read(head, state.normed_AE, wanted_A, drafted_A, top, state.logit_sizes)
        for state, wanted_A, drafted_A in zip(states, wanted.T, drafted.T, strict=True)
    ]
    return Ranked(*(torch.stack(column, 1).cpu() for column in zip(*read, strict=True)))


def _read(
    head: Head, normed_AE: Tensor, wanted_A: Tensor, drafted_A: Tensor, top: int, sizes: ProductSizes | None
) -> tuple[Tensor, ...]:
    """The numbers of one step [A], in the order of ``Ranked``; wanted and drafted are draft ids, -1 for none."""

    def read(logits_BW: Tensor, block: slice) -> tuple[Tensor, ...]:
        logits_BW = logits_BW.float()
        probs_BW = logits_BW.softmax(-1)
        index_B1 = wanted_A[block, None].clamp(min=0)
        none_B = wanted_A[block] < 0
        own_B1 = logits_BW.gather(1, index_B1)
        places_W = torch.arange(logits_BW.shape[1], device=logits_BW.device)
        before_BW = (logits_BW > own_B1) | ((logits_BW == own_B1) & (places_W < index_B1))
        rank_B = (before_BW.sum(-1) + 1).masked_fill(none_B, 0)
        chance_B = probs_BW.gather(1, index_B1)[:, 0].masked_fill(none_B, 0.0)
        drafted_B = logits_BW.gather(1, drafted_A[block, None].clamp(min=0))[:, 0]
        behind_B = (logits_BW.amax(-1) - drafted_B).masked_fill(drafted_A[block] < 0, float("inf"))
        order_BP = logits_BW.argsort(dim=-1, descending=True, stable=True)[:, :top]  # of equals the lowest id first
        return rank_B, chance_B, behind_B, head.target_ids_W[order_BP], probs_BW.gather(1, order_BP)

    return read_logits(head, normed_AE, read, sizes, widening=4)
