"""Attention of draft rows: over the committed draft KV and each anchor's own chain, or over KV slots.

Shape suffixes: A queries (one per anchor), R committed rows, J chain steps so far, N heads, M key-value heads,
G queries per key-value head (N = M*G), H features per head. Over slots, where letters are few: N requests, Q queries of
each, C slots, n heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replay.engines.profiles import Numerics

# Scores of one block of queries, in elements: bounds memory on long requests (64 MiB in fp32).
_BLOCK_SCORES = 1 << 24
# In fp32 on a CPU: blocks that fit into its caches, and that the allocator keeps instead of asking the kernel anew.
_BLOCK_SCORES_CPU = 1 << 22
# Committed rows are left out by so many at a time, so that each that stays keeps its place in the vectors of a sum, and
# down to so many: over fewer (measured: up to 384) a CPU's product sums in another order.
_ROWS_AT_ONCE, _ROWS_AT_LEAST = 64, 512


class KeyValues(NamedTuple):
    """Keys and values of the same rows: [R, M, H] committed, [J, A, M, H] of chains, [N, C, M, H] in slots.

    A value may be of another width than a key.
    """

    k: Tensor
    v: Tensor

    def float(self) -> "KeyValues":
        """In fp32."""
        return KeyValues(self.k.float(), self.v.float())


@dataclass(frozen=True, slots=True)
class Sight:
    """What queries do not see of the committed rows below their reach.

    Rows before ``first_A``; and rows that left no KV, ``blank_R``, save the query's own anchor row ``own_A``, which
    its pass has just made: a ``masked`` one takes no part, any other is a KV slot of zeros, with score 0 and value 0.
    """

    first_A: Tensor | None = None
    blank_R: Tensor | None = None
    own_A: Tensor | None = None
    masked: bool = False

    def of(self, part: slice) -> "Sight":
        """That of some of the queries."""
        first, own = (None if rows is None else rows[part] for rows in (self.first_A, self.own_A))
        return Sight(first, self.blank_R, own, self.masked)


FULL_SIGHT = Sight()


def attend_committed_and_chain(
    q_ANH: Tensor,
    base: KeyValues,
    reach_A: Tensor,
    chain: KeyValues,
    numerics: Numerics,
    sight: Sight = FULL_SIGHT,
    reaches: Sequence[int] | None = None,
) -> Tensor:
    """Mixed values [A, N*H]: query a sees committed rows 0..reach[a]-1 and its own J chain rows, in that order.

    ``sight`` takes some of the committed rows away. One softmax spans both. J may be 0. Queries run in blocks, so
    memory grows with R, not with A*R. Scores are scaled by H**-0.5 times ``numerics.score_factor``.

    ``reaches`` is ``reach_A`` as numbers, where the caller knows them: to ask a GPU for them would wait for it. Rows
    beyond all of a block are then left out of its products in fp32, where their weights are zeros (torch 2.13 on an
    AMD EPYC: no bit of the sums over the rest changes).
    """
    heads, kv_heads = q_ANH.shape[1], base.k.shape[1]
    rows = base.k.shape[0]
    dtype = q_ANH.dtype
    if numerics.attention_fp32:
        q_ANH, base, chain = q_ANH.float(), base.float(), chain.float()
    fp32 = q_ANH.dtype == torch.float32
    most = _BLOCK_SCORES_CPU if fp32 and q_ANH.device.type == "cpu" else _BLOCK_SCORES
    size = max(1, most // (heads * max(1, rows + chain.k.shape[0])))
    blocks = [slice(start, start + size) for start in range(0, q_ANH.shape[0], size)]
    out = [
        _attend_block(
            q_ANH[block].unflatten(1, (kv_heads, -1)),
            base,
            reach_A[block],
            KeyValues(chain.k[:, block], chain.v[:, block]),
            numerics,
            sight.of(block),
            None if reaches is None or not fp32 else reaches[block],
        ).to(dtype)
        for block in blocks
    ]
    return torch.cat(out) if out else q_ANH.new_empty((0, heads * base.v.shape[-1]), dtype=dtype)


def _attend_block(
    q_AMGH: Tensor,
    base: KeyValues,
    reach_A: Tensor,
    chain: KeyValues,
    numerics: Numerics,
    sight: Sight,
    reaches: Sequence[int] | None,
) -> Tensor:
    queries, _, group, width = q_AMGH.shape
    scale = width**-0.5 * numerics.score_factor
    rows, seen = _rows_that_matter(base.k.shape[0], reaches, sight)
    base = KeyValues(base.k[:rows], base.v[:rows])
    # The queries of one key-value head form the rows of one product: [M, G*A, H] x [M, H, R].
    q_MgH = q_AMGH.permute(1, 2, 0, 3).flatten(1, 2)
    base_MgR = (q_MgH @ base.k.permute(1, 2, 0)).mul_(scale)  # in place: scores are the largest tensors
    base_MGAR = base_MgR.unflatten(1, (group, queries))
    unseen_AR, blank_AR = _hidden_rows(reach_A, rows, sight)
    if blank_AR is not None:
        base_MGAR = base_MGAR.masked_fill(blank_AR, float("-inf") if sight.masked else 0.0)
    base_MGAR[..., seen:].masked_fill_(unseen_AR[:, seen:], float("-inf"))
    if chain.k.shape[0]:
        chain_MGAJ = torch.einsum("amgh,jamh->mgaj", q_AMGH, chain.k) * scale
        base_MGAR = torch.cat([base_MGAR, chain_MGAJ], dim=-1)
    weights = base_MGAR.float().softmax(dim=-1).to(q_AMGH.dtype)
    base_w, chain_w = weights[..., :rows], weights[..., rows:]
    if blank_AR is not None:
        base_w = base_w.masked_fill(blank_AR, 0.0)
    out_MgH = base_w.flatten(1, 2) @ base.v.transpose(0, 1)
    out_MGAH: Tensor = out_MgH.unflatten(1, (group, queries))
    if chain.k.shape[0]:
        out_MGAH = out_MGAH + torch.einsum("mgaj,jamh->mgah", chain_w, chain.v)
    return out_MGAH.permute(2, 0, 1, 3).flatten(1)


def _rows_that_matter(rows: int, reaches: Sequence[int] | None, sight: Sight) -> tuple[int, int]:
    """How many committed rows a block of queries takes into its products, and how many of them all queries see."""
    if not reaches:
        return rows, 0
    beyond = max(0, rows - max(_ROWS_AT_LEAST, *reaches))
    seen = min(reaches) if sight.first_A is None else 0
    return rows - beyond // _ROWS_AT_ONCE * _ROWS_AT_ONCE, seen


def _hidden_rows(reach_A: Tensor, rows: int, sight: Sight) -> tuple[Tensor, Tensor | None]:
    """Which committed rows each query does not see, and which are blank to it [A, R]."""
    rows_R = torch.arange(rows, device=reach_A.device)
    unseen_AR = rows_R >= reach_A[:, None]
    if sight.first_A is not None:
        unseen_AR |= rows_R < sight.first_A[:, None]
    if sight.blank_R is None or sight.own_A is None:
        return unseen_AR, None
    return unseen_AR, sight.blank_R[:rows] & (rows_R != sight.own_A[:, None])


def attend_to_slots(
    q_NQnH: Tensor, slots: KeyValues, seen_NQC: Tensor, blank_NQC: Tensor, numerics: Numerics, *, masked: bool
) -> Tensor:
    """Mixed values [N, Q, n*H]: each row over the slots that it sees; blank ones are zeros or take no part."""
    dtype = q_NQnH.dtype
    if numerics.attention_fp32:
        q_NQnH, slots = q_NQnH.float(), slots.float()
    grouped_NQMGH = q_NQnH.unflatten(2, (slots.k.shape[2], -1))
    scale = q_NQnH.shape[-1] ** -0.5 * numerics.score_factor
    scores_NMGQC = torch.einsum("nqmgh,ncmh->nmgqc", grouped_NQMGH, slots.k) * scale
    blank, seen = blank_NQC[:, None, None], seen_NQC[:, None, None]
    scores_NMGQC = scores_NMGQC.masked_fill(blank, float("-inf") if masked else 0.0).masked_fill(~seen, float("-inf"))
    weights = scores_NMGQC.float().softmax(dim=-1).to(q_NQnH.dtype).masked_fill(blank, 0.0)
    out_NQMGH: Tensor = torch.einsum("nmgqc,ncmh->nqmgh", weights, slots.v)
    return out_NQMGH.flatten(2).to(dtype)
