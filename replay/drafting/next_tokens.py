"""From the head's states to tokens: its logits a block of rows at a time, and the likeliest tokens by them.

Suffixes: A anchors, R rows, B rows of a block, P proposed tokens, E head width, W draft vocabulary, V vocabulary of the
target.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from replay.head.model import Head
from replay.head.products import ProductSizes

# Logits in memory at a time, in elements (32 MiB in bf16), but of no fewer rows than fill a product.
_BLOCK_LOGITS, _ROWS_AT_LEAST = 1 << 24, 256


def read_logits(
    head: Head,
    normed_RE: Tensor,
    read: Callable[[Tensor, slice], tuple[Tensor, ...]],
    sizes: ProductSizes | None = None,
    *,
    widening: int = 1,
) -> tuple[Tensor, ...]:
    """What ``read`` makes of the draft logits [B, W] of a block of rows and the slice that names these, all joined.

    Nobody holds logits of all rows, but of 512 over a draft vocabulary of 32,000, and of 256 over one of 163,840.
    ``sizes`` of the products in which each row's logits are computed, where these matter: a block then has rows for the
    largest. ``widening`` is how many times the memory of the logits ``read`` takes. There must be a row.
    """
    rows = _rows_of_block(head, widening, sizes)
    blocks = [slice(start, start + rows) for start in range(0, len(normed_RE), rows)]
    parts = [
        read(head.logits(normed_RE[block], None if sizes is None else sizes.keep(block)), block) for block in blocks
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _rows_of_block(head: Head, widening: int, sizes: ProductSizes | None) -> int:
    """A power of two: matrix units then round as they do for the few rows of a server."""
    fitting = max(_ROWS_AT_LEAST, _BLOCK_LOGITS // head.config.draft_vocab_size) // widening
    largest = 1 if sizes is None else max((size for size, _ in sizes.groups), default=1)
    return 1 << (max(1, fitting, 4 * largest - 1).bit_length() - 1)


def next_tokens(head: Head, normed_AE: Tensor, sizes: ProductSizes | None = None) -> tuple[Tensor, Tensor]:
    """``choose`` for every row; ``sizes`` as in ``read_logits``."""
    ids_A, tied_A = read_logits(head, normed_AE, lambda logits_BW, _: choose(head, logits_BW), sizes)
    return ids_A, tied_A


def choose(head: Head, logits_AW: Tensor) -> tuple[Tensor, Tensor]:
    """The greedy draft token of each row as a target id [A], and whether its logit was shared [A].

    Of equal logits the lowest draft id wins.
    """
    best_A, index_A = logits_AW.max(dim=-1)  # the first of equals, which topk does not promise
    tied_A = logits_AW.scatter(1, index_A[:, None], float("-inf")).amax(-1) == best_A
    return head.target_ids_W[index_A], tied_A


def propose(head: Head, normed_RE: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``topk`` likeliest tokens after each row, likeliest first.

    Probabilities [R, P] in fp32, target ids [R, P], and where a token left out was exactly as likely [R, P].
    """
    probs_RP, index_RP, tied_RP = read_logits(head, normed_RE, lambda logits_BW, _: likeliest(logits_BW, topk)[1:])
    return probs_RP, head.target_ids_W[index_RP], tied_RP


def likeliest(logits_RW: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The probabilities [R, W] in fp32, and the ``topk`` largest, likeliest first.

    Of these: probabilities [R, P], draft ids [R, P], and where one left out was exactly as likely [R, P].
    """
    probs_RW = logits_RW.float().softmax(dim=-1)
    probs_RP, index_RP = probs_RW.topk(topk, dim=-1)
    last_R1 = probs_RP[:, -1:]
    shared_R1 = (probs_RW == last_R1).sum(-1, keepdim=True) > (probs_RP == last_R1).sum(-1, keepdim=True)
    return probs_RW, probs_RP, index_RP, shared_R1 & (probs_RP == last_R1)


def draft_ids(head: Head) -> Tensor:
    """For each target id the draft id that stands for it [V], -1 for none."""
    size = max(int(head.target_ids_W.max()) + 1, head.config.vocab_size)
    ids_V = torch.full((size,), -1, dtype=torch.long, device=head.device)
    ids_V[head.target_ids_W] = torch.arange(len(head.target_ids_W), device=head.device)
    return ids_V
