"""The head's own probabilities along a recorded path: K passes as in every_anchor.py, each fed the path's next token.

A head that samples its draft (rule ``rejection``) reads its own sample at each step. Given that the samples were
x_1 .. x_k, its distribution for the next is the one that it has when it is fed x_1 .. x_k, with its own states between.

Suffixes as in every_anchor.py: A anchors of all packed requests, K steps, W draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from replay.drafting.every_anchor import ChainAttention
from replay.drafting.first_pass import FirstPass, first_pass
from replay.drafting.rows import DraftInput, drafted_positions
from replay.head.model import Head

# Logits in memory at a time, in elements.
_BLOCK_LOGITS = 1 << 24


def path_tokens(item: DraftInput, steps: int) -> Tensor:
    """The path after the known token of each anchor [A, K], x[S+1] .. x[S+K]; -1 beyond the end."""
    known_T = torch.cat([item.tokens_T.cpu(), torch.full((steps,), -1)])
    return known_T[item.anchors_A.cpu()[:, None] + 1 + torch.arange(steps)]


def force_every_anchor(
    head: Head,
    inputs: Sequence[DraftInput],
    temperatures: Sequence[float],
    steps: int,
    *,
    first: FirstPass | None = None,
) -> list[Tensor]:
    """q(x_k) [A, K] in float64 of the path's tokens at every anchor, request by request; 0 beyond the end.

    q is the softmax in fp32 of the rounded draft logits / temperature over the draft vocabulary (sglang 0.5.23
    speculative/spec_utils.py ``renorm_draft_probs``: no top-k, no top-p), 0 for tokens the head cannot draft. ``first``
    is the first pass over the same inputs, where another variant has made it. Equal to forcing each anchor by itself up
    to the rounding of products over other numbers of rows; behaviour that follows the walk is not played here.
    """
    inputs = list(inputs)
    counts = [item.anchors for item in inputs]
    if sum(counts) == 0:
        return [torch.zeros((0, steps), dtype=torch.float64) for _ in inputs]
    path_AK = torch.cat([path_tokens(item, steps) for item in inputs]).to(head.device)
    heat_A = torch.tensor(temperatures, device=head.device).repeat_interleave(torch.tensor(counts, device=head.device))
    first = first or first_pass(head, inputs)
    output, chain, columns = first.output, ChainAttention(head, first.attention), _draft_columns(head)
    chances: list[Tensor] = []
    for step in range(steps):
        if step:
            embeds_AE = head.embed(path_AK[:, step - 1].clamp(min=0))
            positions_A = drafted_positions(first.positions_A, step, head.behaviour)
            output = head.forward(embeds_AE, output.feedback_RE, positions_A, chain)
        chances.append(_chances(head, output.normed_RE, path_AK[:, step], heat_A, columns))
    q_AK = torch.stack(chances, 1)
    if head.behaviour.dummy_from is not None:
        dummy_A = first.positions_A >= head.behaviour.dummy_from
        q_AK[dummy_A] = (path_AK[dummy_A] == 0).double()
    return list(q_AK.cpu().split(counts))


def _draft_columns(head: Head) -> Tensor:
    """For each target id the draft id that stands for it, -1 for none."""
    size = max(int(head.target_ids_W.max()) + 1, head.config.vocab_size)
    columns = torch.full((size,), -1, dtype=torch.long, device=head.device)
    columns[head.target_ids_W] = torch.arange(len(head.target_ids_W), device=head.device)
    return columns


def _chances(head: Head, normed_AE: Tensor, ids_A: Tensor, heat_A: Tensor, columns: Tensor) -> Tensor:
    block = max(1, _BLOCK_LOGITS // head.config.draft_vocab_size)
    column_A = columns[ids_A.clamp(min=0)]
    parts = [
        (head.logits(rows_AE).float() / heat[:, None]).softmax(-1).gather(1, column[:, None].clamp(min=0))[:, 0]
        for rows_AE, heat, column in zip(
            normed_AE.split(block), heat_A.split(block), column_A.split(block), strict=True
        )
    ]
    return torch.cat(parts).double().masked_fill((column_A < 0) | (ids_A < 0), 0.0)
