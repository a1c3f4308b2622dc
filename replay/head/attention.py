"""Attention of draft rows over the committed draft KV and over each anchor's own chain.

Shape suffixes: A queries (one per anchor), R committed rows, J chain steps so far, N heads, M key-value heads,
G queries per key-value head (N = M*G), H features per head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replay.engines.profiles import Numerics

# Scores of one block of queries, in elements: bounds memory on long requests (64 MiB in fp32).
_BLOCK = 1 << 24


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
    base_k_RMH: Tensor,
    base_v_RMH: Tensor,
    reach_A: Tensor,
    chain_k_JAMH: Tensor,
    chain_v_JAMH: Tensor,
    numerics: Numerics,
    sight: Sight = FULL_SIGHT,
) -> Tensor:
    """Mixed values [A, N*H]: query a sees committed rows 0..reach[a]-1 and its own J chain rows, in that order.

    ``sight`` takes some of the committed rows away. One softmax spans both. J may be 0. Queries run in blocks, so
    memory grows with R, not with A*R.
    """
    heads, kv_heads = q_ANH.shape[1], base_k_RMH.shape[1]
    rows = base_k_RMH.shape[0]
    block = max(1, _BLOCK // (heads * max(1, rows + chain_k_JAMH.shape[0])))
    out = [
        _attend_block(
            q_ANH[start : start + block].unflatten(1, (kv_heads, -1)),
            base_k_RMH,
            base_v_RMH,
            reach_A[start : start + block],
            chain_k_JAMH[:, start : start + block],
            chain_v_JAMH[:, start : start + block],
            numerics,
            sight.of(slice(start, start + block)),
        )
        for start in range(0, q_ANH.shape[0], block)
    ]
    return torch.cat(out) if out else q_ANH.flatten(1)


def _attend_block(
    q_AMGH: Tensor,
    base_k_RMH: Tensor,
    base_v_RMH: Tensor,
    reach_A: Tensor,
    chain_k_JAMH: Tensor,
    chain_v_JAMH: Tensor,
    numerics: Numerics,
    sight: Sight,
) -> Tensor:
    dtype = q_AMGH.dtype
    if numerics.attention_fp32:
        q_AMGH, base_k_RMH, base_v_RMH = q_AMGH.float(), base_k_RMH.float(), base_v_RMH.float()
        chain_k_JAMH, chain_v_JAMH = chain_k_JAMH.float(), chain_v_JAMH.float()
    queries, _, group, width = q_AMGH.shape
    rows = base_k_RMH.shape[0]
    # The queries of one key-value head form the rows of one product: [M, G*A, H] x [M, H, R].
    q_MgH = q_AMGH.permute(1, 2, 0, 3).flatten(1, 2)
    base_MgR = (q_MgH @ base_k_RMH.permute(1, 2, 0)).mul_(width**-0.5)  # in place: scores are the largest tensors
    base_MGAR = base_MgR.unflatten(1, (group, queries))
    rows_R = torch.arange(rows, device=reach_A.device)
    unseen_AR = rows_R >= reach_A[:, None]
    if sight.first_A is not None:
        unseen_AR |= rows_R < sight.first_A[:, None]
    blank_AR = None
    if sight.blank_R is not None and sight.own_A is not None:
        blank_AR = sight.blank_R & (rows_R != sight.own_A[:, None])
        base_MGAR = base_MGAR.masked_fill(blank_AR, float("-inf") if sight.masked else 0.0)
    base_MGAR = base_MGAR.masked_fill_(unseen_AR, float("-inf"))
    chain_MGAJ = torch.einsum("amgh,jamh->mgaj", q_AMGH, chain_k_JAMH) * width**-0.5
    weights = torch.cat([base_MGAR, chain_MGAJ], dim=-1).float().softmax(dim=-1).to(q_AMGH.dtype)
    base_w, chain_w = weights[..., :rows], weights[..., rows:]
    if blank_AR is not None:
        base_w = base_w.masked_fill(blank_AR, 0.0)
    out_MgH = base_w.flatten(1, 2) @ base_v_RMH.transpose(0, 1)
    out_MGAH: Tensor = out_MgH.unflatten(1, (group, queries))
    out_MGAH = out_MGAH + torch.einsum("mgaj,jamh->mgah", chain_w, chain_v_JAMH)
    return out_MGAH.permute(2, 0, 1, 3).flatten(1).to(dtype)


def attend_to_slots(
    q_NQnH: Tensor, k_NCMH: Tensor, v_NCMH: Tensor, seen_NQC: Tensor, blank_NQC: Tensor, *, fp32: bool, masked: bool
) -> Tensor:
    """Mixed values [N, Q, n*H]: each row over the slots that it sees; blank ones are zeros or take no part."""
    dtype = q_NQnH.dtype
    if fp32:
        q_NQnH, k_NCMH, v_NCMH = q_NQnH.float(), k_NCMH.float(), v_NCMH.float()
    grouped_NQMGH = q_NQnH.unflatten(2, (k_NCMH.shape[2], -1))
    scores_NMGQC = torch.einsum("nqmgh,ncmh->nmgqc", grouped_NQMGH, k_NCMH) * q_NQnH.shape[-1] ** -0.5
    blank, seen = blank_NQC[:, None, None], seen_NQC[:, None, None]
    scores_NMGQC = scores_NMGQC.masked_fill(blank, float("-inf") if masked else 0.0).masked_fill(~seen, float("-inf"))
    weights = scores_NMGQC.float().softmax(dim=-1).to(q_NQnH.dtype).masked_fill(blank, 0.0)
    out_NQMGH: Tensor = torch.einsum("nmgqc,ncmh->nqmgh", weights, v_NCMH)
    return out_NQMGH.flatten(2).to(dtype)
