"""From the head's states to drafted tokens: the likeliest ones, a block of rows at a time.

Suffixes: A anchors, R rows, P proposed tokens, W draft vocabulary, E head width."""

import torch
from torch import Tensor

from replay.head.model import Head

# Logits in memory at a time, in elements.
_BLOCK_LOGITS = 1 << 26


def next_tokens(head: Head, normed_AE: Tensor, sizes_A: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``choose`` for every row, a block of rows at a time: logits of all anchors over a large vocabulary are many.

    ``sizes_A`` of the products in which each row's logits are computed, where these matter.
    """
    block = max(1, _BLOCK_LOGITS // head.config.draft_vocab_size)
    parts = []
    for start in range(0, len(normed_AE), block):
        with head.products_like(None if sizes_A is None else sizes_A[start : start + block]):
            parts.append(choose(head, head.logits(normed_AE[start : start + block])))
    return torch.cat([ids_A for ids_A, _ in parts]), torch.cat([tied_A for _, tied_A in parts])


def choose(head: Head, logits_AW: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy draft token of each row as a target id [A], and whether its logit was shared [A].

    Of equal logits the lowest draft id wins.
    """
    index_A = logits_AW.max(dim=-1).indices  # the first of equals, which topk does not promise
    best_A2 = logits_AW.topk(min(2, logits_AW.shape[1]), dim=-1).values
    tied_A = (best_A2[:, 0] == best_A2[:, -1]) & (logits_AW.shape[1] > 1)
    return head.target_ids_W[index_A], tied_A


def propose(head: Head, normed_RE: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``topk`` likeliest tokens after each row, likeliest first.

    Probabilities [R, P] in fp32, target ids [R, P], and where a token left out was exactly as likely [R, P].
    """
    fitting = max(1, _BLOCK_LOGITS // head.config.draft_vocab_size)
    # A power of two: matrix units then round as they do for the few rows of a server.
    rows = 1 << (fitting.bit_length() - 1)
    parts = [_propose_block(head, block_RE, topk) for block_RE in normed_RE.split(rows)]
    probs_RP, index_RP, tied_RP = (torch.cat(part) for part in zip(*parts, strict=True))
    return probs_RP, head.target_ids_W[index_RP], tied_RP


def _propose_block(head: Head, normed_RE: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    probs_RW = head.logits(normed_RE).float().softmax(dim=-1)
    probs_RP, index_RP = probs_RW.topk(topk, dim=-1)
    last_R1 = probs_RP[:, -1:]
    shared_R1 = (probs_RW == last_R1).sum(-1, keepdim=True) > (probs_RP == last_R1).sum(-1, keepdim=True)
    return probs_RP, index_RP, shared_R1 & (probs_RP == last_R1)
