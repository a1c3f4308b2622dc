"""The slow, obvious twin of drafting/path_probability.py: one anchor, every row made again at every step, healthy
behaviour only."""

import torch
from torch import Tensor
from twins.rounds import plain_attention

from replay.drafting.rows import DraftInput
from replay.head.model import Head


def force_one_anchor(head: Head, item: DraftInput, anchor: int, temperature: float, steps: int) -> list[float]:
    """q of x[anchor+1] .. x[anchor+steps], each after the head has read all before it; 0 beyond the end."""
    tokens_T = item.tokens_T
    embeds = list(head.embed(tokens_T[1 : anchor + 1]))
    states = list(head.fuse(item.features_RKD[:anchor]))
    chances: list[float] = []
    for step in range(steps):
        if anchor + 1 + step >= len(tokens_T):
            chances.append(0.0)
            continue
        rows = len(states)
        seen_RR = torch.ones(rows, rows).tril().bool()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, seen_RR: Tensor = seen_RR) -> Tensor:
            return plain_attention(q, k, v, seen_RR, torch.zeros_like(seen_RR), head.numerics)

        output = head.forward(torch.stack(embeds), torch.stack(states), torch.arange(rows), attend)
        logits_W = head.logits(output.normed_RE[-1:])[0].float() / temperature
        wanted = int(tokens_T[anchor + 1 + step])
        chances.append(float(logits_W.softmax(-1)[head.target_ids_W == wanted].sum()))
        embeds.append(head.embed(tokens_T[anchor + 1 + step][None])[0])
        states.append(output.feedback_RE[-1])
    return chances
