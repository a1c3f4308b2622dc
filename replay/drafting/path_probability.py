"""The head's own probabilities along the recorded text: at every anchor it is fed the text's next token at each step.

A head that samples its draft (rule ``rejection``) reads its own sample at each step. Given that the samples were
x_1 .. x_k, its distribution for the next is the one that it has when it is fed x_1 .. x_k, with its own states between.

Suffixes as in chains.py: A anchors of all packed requests, B of a block, K steps, W draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from replay.drafting.chains import chain_steps
from replay.drafting.first_pass import FirstPass, first_pass
from replay.drafting.next_tokens import draft_ids, read_logits
from replay.drafting.rows import DraftInput, find_dummies
from replay.head.model import Head


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
    is the first pass over the same inputs, where another variant has made it. Equal to forcing each anchor by itself
    (tests/twins/path_probability.py) up to the rounding of products over other numbers of rows.
    """
    counts = [item.anchors for item in inputs]
    if sum(counts) == 0:
        return [torch.zeros((0, steps), dtype=torch.float64) for _ in inputs]
    path_AK = torch.cat([path_tokens(item, steps) for item in inputs]).to(head.device)
    heat_A = torch.tensor(temperatures, device=head.device).repeat_interleave(torch.tensor(counts, device=head.device))
    first = first or first_pass(head, inputs)
    index_AK = torch.where(path_AK < 0, -1, draft_ids(head)[path_AK.clamp(min=0)])
    states = chain_steps(head, first, steps, lambda step: path_AK[:, step - 1].clamp(min=0))
    chances = [
        _chances(head, state.normed_AE, index_A, heat_A) for state, index_A in zip(states, index_AK.T, strict=True)
    ]
    q_AK = torch.stack(chances, 1)
    dummy_A = find_dummies(first.anchor_rows_A, head.behaviour)
    q_AK[dummy_A] = (path_AK[dummy_A] == 0).double()
    return list(q_AK.cpu().split(counts))


def _chances(head: Head, normed_AE: Tensor, index_A: Tensor, heat_A: Tensor) -> Tensor:
    """The probability of the draft id ``index_A`` after each row, 0 where it is -1."""

    def read(logits_BW: Tensor, block: slice) -> tuple[Tensor]:
        probs_BW = (logits_BW.float() / heat_A[block, None]).softmax(-1)
        return (probs_BW.gather(1, index_A[block, None].clamp(min=0))[:, 0],)

    # The last bits of a probability decide no draft: these products need no server's size.
    # Three tensors in fp32 beside the logits: as probabilities, over the temperature, and widened.
    (chance_A,) = read_logits(head, normed_AE, read, widening=4)
    return chance_A.double().masked_fill(index_A < 0, 0.0)
