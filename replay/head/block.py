"""The forward of a DFlash head where it differs: keys and values of the context, and attention of a block.

A block holds the known token of its anchor and mask tokens, at positions S, S+1, .... Its rows see the context, rows
0 .. S-1 whose keys and values come from the target's taps alone, and one another.

Suffixes as in model.py; A anchors, B rows of a block, R rows of the context, G queries per key-value head.
Sources: dflash 0.1.0 ``dflash/model.py``; SGLang 0.5.23 models/dflash.py and speculative/dflash_worker_v2.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replay.engines.profiles import Numerics
from replay.head.attention import KeyValues
from replay.head.grouped import GroupedAttention, Norm, Rotation

# Scores of one piece, in elements: bounds memory on long requests (64 MiB in fp32).
_PIECE_SCORES = 1 << 24


class BlockAttention(GroupedAttention):
    """As grouped attention with norms of queries and keys; and keys and values of context rows alone."""

    def context(self, layer: int, fused_RE: Tensor, rotation: Rotation, norm: Norm) -> KeyValues:
        """Keys and values [R, M, H] of context rows, from their fused features."""
        config, prefix = self.config, f"layers.{layer}.self_attn"
        queries, bias_O = config.num_heads * config.head_dim, self.biases[layer]
        bias_O = None if bias_O is None else bias_O[queries:]
        product = self.product(f"{prefix}.qkv_proj", fused_RE, self.weights[layer][queries:], bias_O, None)
        k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in product.chunk(2, dim=-1))
        return KeyValues(self.stored(self.turned(norm(k, f"{prefix}.k_norm"), rotation)), self.stored(v))


@dataclass(frozen=True, slots=True)
class BlockSight:
    """What the rows of the blocks of some anchors see.

    Of the context the rows from ``first_AB`` to before ``stop_A``; of these ``blank_R`` left no keys and values (None:
    all did) and take no part where ``masked``, else are zeros, with score 0 and value 0. Of their block what
    ``seen_BB`` marks for each row.
    """

    first_AB: Tensor
    stop_A: Tensor
    seen_BB: Tensor
    blank_R: Tensor | None = None
    masked: bool = False

    def of(self, part: slice) -> "BlockSight":
        """That of some of the anchors."""
        return BlockSight(self.first_AB[part], self.stop_A[part], self.seen_BB, self.blank_R, self.masked)


def attend_context_and_block(
    q_ABNH: Tensor, context: KeyValues, block: KeyValues, sight: BlockSight, numerics: Numerics
) -> Tensor:
    """Mixed values [A, B, N*H]: each row over what it sees of ``context`` [R, M, H] and of its ``block`` [A, B, M, H].

    One softmax spans both. Anchors run in pieces, so memory does not grow with A*R. Scores are scaled by H**-0.5 times
    ``numerics.score_factor``.
    """
    rows, (_, size, heads, _) = context.k.shape[0] + block.k.shape[1], q_ABNH.shape
    anchors = max(1, _PIECE_SCORES // (heads * size * rows))
    pieces = [slice(start, start + anchors) for start in range(0, len(q_ABNH), anchors)]
    return torch.cat(
        [
            _attend(q_ABNH[part], context, KeyValues(block.k[part], block.v[part]), sight.of(part), numerics)
            for part in pieces
        ]
    )


def _attend(q_ABNH: Tensor, context: KeyValues, block: KeyValues, sight: BlockSight, numerics: Numerics) -> Tensor:
    dtype = q_ABNH.dtype
    if numerics.attention_fp32:
        q_ABNH, context, block = q_ABNH.float(), context.float(), block.float()
    scale = q_ABNH.shape[-1] ** -0.5 * numerics.score_factor
    q_ABMGH = q_ABNH.unflatten(2, (block.k.shape[2], -1))
    context_MGABR = torch.einsum("abmgh,rmh->mgabr", q_ABMGH, context.k) * scale
    seen_ABR, zero_R = _seen(sight, context.k.shape[0])
    if zero_R is not None:
        context_MGABR = context_MGABR.masked_fill(zero_R, 0.0)
    context_MGABR = context_MGABR.masked_fill(~seen_ABR, float("-inf"))
    block_MGABC = torch.einsum("abmgh,acmh->mgabc", q_ABMGH, block.k) * scale
    block_MGABC = block_MGABC.masked_fill(~sight.seen_BB[None], float("-inf"))
    weights = torch.cat([context_MGABR, block_MGABC], dim=-1).float().softmax(dim=-1).to(q_ABNH.dtype)
    context_w, block_w = weights.split([context.k.shape[0], block.k.shape[1]], dim=-1)
    if zero_R is not None:
        context_w = context_w.masked_fill(zero_R, 0.0)
    mixed_ABMGH = torch.einsum("mgabr,rmh->abmgh", context_w, context.v)
    mixed_ABMGH = mixed_ABMGH + torch.einsum("mgabc,acmh->abmgh", block_w, block.v)
    out_ABI: Tensor = mixed_ABMGH.flatten(2).to(dtype)
    return out_ABI


def _seen(sight: BlockSight, rows: int) -> tuple[Tensor, Tensor | None]:
    """Which context rows each row of a block sees [A, B, R], and which of them are zeros [R] (None: none)."""
    row_R = torch.arange(rows, device=sight.stop_A.device)
    seen_ABR = (row_R >= sight.first_AB[..., None]) & (row_R < sight.stop_A[:, None, None])
    if sight.blank_R is None or not sight.masked:
        return seen_ABR, sight.blank_R
    return seen_ABR & ~sight.blank_R, None
