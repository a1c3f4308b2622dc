"""The slow, obvious twin of drafting/path_probability.py: one anchor, every row made again at every step, healthy
behaviour only."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from twins.rounds import plain_causal_attention

from replay.drafting.rows import DraftInput
from replay.head.model import Head


def logits_along(head: Head, item: DraftInput, anchor: int, fed: Sequence[int]) -> Iterator[Tensor]:
    """The draft logits [W] at ``anchor``, then those after each of the ``fed`` tokens."""
    embeds = list(head.embed(item.tokens_T[1 : anchor + 1]))
    states = list(head.fuse(item.features_RKD[:anchor]))
    for token in [*fed, None]:
        output = head.forward(
            torch.stack(embeds),
            torch.stack(states),
            torch.arange(len(states)),
            lambda _, q, k, v: plain_causal_attention(q, k, v, head.numerics),
        )
        yield head.logits(output.normed_RE[-1:])[0]
        if token is not None:
            masked = head.config.mask_token
            embeds.append(head.embed(torch.tensor([token if masked is None else masked]))[0])
            mask_KD = None if masked is None else head._weights["mask_hidden"].flatten()
            states.append(output.feedback_RE[-1] if mask_KD is None else head.fuse(mask_KD[None])[0])


def force_one_anchor(head: Head, item: DraftInput, anchor: int, temperature: float, steps: int) -> list[float]:
    """q of x[anchor+1] .. x[anchor+steps], each after the head has read all before it; 0 beyond the end."""
    path = item.tokens_T[anchor + 1 : anchor + 1 + steps].tolist()
    chances = [
        float((logits_W.float() / temperature).softmax(-1)[head.target_ids_W == wanted].sum())
        for wanted, logits_W in zip(path, logits_along(head, item, anchor, path[:-1]), strict=True)
    ]
    return chances + [0.0] * (steps - len(path))
