"""The slow, obvious twin of the engine: one request, one round, one token at a time; no cache, no batching.

Every drafted token recomputes the head over the whole sequence so far. Tests hold the engine equal to it.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from replay.engines import Numerics
from replay.head import Head


@dataclass(frozen=True, slots=True)
class TwinRound:
    """One round: committed tokens at its start, target ids drafted, how many the target took."""

    anchor: int
    drafted: tuple[int, ...]
    accepted: int


def plain_causal_attention(q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor, numerics: Numerics) -> Tensor:
    """Mixed values [R, N*H], row by row and head by head: row i sees rows 0..i."""
    dtype = q_RNH.dtype
    if numerics.attention_fp32:
        q_RNH, k_RMH, v_RMH = q_RNH.float(), k_RMH.float(), v_RMH.float()
    rows, heads, width = q_RNH.shape
    group = heads // k_RMH.shape[1]
    out_RNH = torch.empty_like(q_RNH)
    for head in range(heads):
        q, k, v = q_RNH[:, head], k_RMH[:, head // group], v_RMH[:, head // group]
        scores_RR = q @ k.T / sqrt(width)
        scores_RR = scores_RR.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), float("-inf"))
        out_RNH[:, head] = scores_RR.float().softmax(-1).to(q.dtype) @ v
    return out_RNH.flatten(1).to(dtype)


def draft_one_round(head: Head, tokens_T: Tensor, features_RKD: Tensor, anchor: int, steps: int) -> list[int]:
    """The target ids that ``head`` drafts when ``anchor`` tokens are committed and token x[anchor] is known."""
    embeds = list(head.embed(tokens_T[1 : anchor + 1]))
    states = list(head.fuse(features_RKD[:anchor]))
    drafted: list[int] = []
    for _ in range(steps):
        output = head.forward(
            torch.stack(embeds),
            torch.stack(states),
            torch.arange(len(states)),
            lambda _, q, k, v: plain_causal_attention(q, k, v, head.numerics),
        )
        logits_W = head.logits(output.normed_RE[-1:])[0]
        drafted.append(int(head.target_ids_W[int(logits_W.argmax())]))
        embeds.append(head.embed(torch.tensor([drafted[-1]]))[0])
        states.append(output.feedback_RE[-1])
    return drafted


def replay_request(
    head: Head, tokens_T: Tensor, features_RKD: Tensor, prompt_tokens: int, steps: int, tail: tuple[int, ...] = ()
) -> list[TwinRound]:
    """The served walk of one request: draft, compare with what the target chose, jump, until the output ends."""
    chosen = [int(token) for token in tokens_T] + list(tail)
    rounds = []
    anchor = prompt_tokens
    while anchor < len(tokens_T) - 1:
        drafted = draft_one_round(head, tokens_T, features_RKD, anchor, steps)
        accepted = 0
        while accepted < steps and anchor + 1 + accepted < len(chosen):
            if drafted[accepted] != chosen[anchor + 1 + accepted]:
                break
            accepted += 1
        rounds.append(TwinRound(anchor, tuple(drafted), accepted))
        anchor += accepted + 1
    return rounds
