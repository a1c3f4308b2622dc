"""The draft's attention, run here so that an injection may change what is seen. Shapes as in live.py."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .live import Live, Span


@dataclass(slots=True)
class View:
    """What the new rows of one request see in one attention: keys and values of its rows 0 to L - 1.

    ``first``: the row of the first query. ``anchor``: rows that are committed, of a drafted row; else None.
    ``blank_TL``: rows that are there as zeros."""

    pool: int
    first: int
    anchor: int | None
    keys_LMH: Tensor
    values_LMH: Tensor
    seen_TL: Tensor
    blank_TL: Tensor

    @property
    def rows_T(self) -> Tensor:
        """Row numbers of the queries, as a column [T, 1]."""
        return (self.first + torch.arange(len(self.seen_TL)))[:, None]

    @property
    def rows_L(self) -> Tensor:
        """Row numbers of the keys [1, L]; rows that were put behind them count on."""
        return torch.arange(self.seen_TL.shape[1])[None]


def attend(q_TNH: Tensor, view: View, scaling: float) -> Tensor:
    """Softmax attention [T, N, H] in fp32 as the rig's own (sgl_kernel), with rows that are there as zeros."""
    rows, heads, width = q_TNH.shape
    kv_heads = view.keys_LMH.shape[1]
    group = heads // kv_heads
    q_MRH = q_TNH.float().view(rows, kv_heads, group, width).permute(1, 2, 0, 3).flatten(1, 2)
    scores_MRL = torch.bmm(q_MRH, view.keys_LMH.float().permute(1, 2, 0)) * scaling
    scores_MRL.masked_fill_(view.blank_TL.repeat(group, 1), 0.0)
    scores_MRL.masked_fill_(~view.seen_TL.repeat(group, 1), float("-inf"))
    weights_MRL = scores_MRL.softmax(dim=-1).masked_fill(view.blank_TL.repeat(group, 1), 0.0).nan_to_num(0.0)
    out_MRH = torch.bmm(weights_MRL, view.values_LMH.float().transpose(0, 1))
    return out_MRH.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).flatten(1, 2).to(q_TNH.dtype)


def _view(live: Live, pool: int, first: int, anchor: int | None, keys: Tensor, values: Tensor, seen: Tensor) -> View:
    view = View(pool, first, anchor, keys, values, seen, torch.zeros_like(seen))
    for hook in live.views:
        hook(view)
    return view


def extend(live: Live, q: Tensor, k: Any, v: Any, o: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> None:
    """In place of sgl_kernel.extend_attention_cpu."""
    _, _, table, pools, lengths, counts, starts, _, scaling = rest[:9]
    assert live.call is not None
    for span, pool, length, rows, start in zip(
        live.call.spans, pools.tolist(), lengths.tolist(), counts.tolist(), starts.tolist(), strict=True
    ):
        slots_L = table[pool, :length].long()
        for write in live.writes:
            write(span, keys, values, slots_L)
        seen_TL = torch.cat([torch.ones(rows, length - rows).bool(), torch.ones(rows, rows).bool().tril()], dim=1)
        k_LMH, v_LMH = keys[slots_L], values[slots_L]
        if q.shape[-1] != keys.shape[-1]:  # a whole prompt of a latent head: every head's keys and values, as made
            k_LMH, v_LMH = (part[start : start + rows].reshape(rows, q.shape[1], -1) for part in (k, v))
        view = _view(live, span.pool, length - rows, None, k_LMH, v_LMH, seen_TL)
        o[start : start + rows] = attend(q[start : start + rows], view, scaling * live.scale)


def decode(live: Live, query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> None:
    """In place of sgl_kernel.decode_attention_cpu."""
    _, _, output, key, value, loc, _, table, pools, lengths, scaling = rest[:11]
    assert live.call is not None
    keys[loc] = key.reshape(-1, *keys.shape[1:])
    values[loc] = value.reshape(-1, *values.shape[1:])
    for row, (pool, length) in enumerate(zip(pools.tolist(), lengths.tolist(), strict=True)):
        span = live.call.spans[row // live.topk]
        slots_L = table[pool, :length].long()
        for write in live.writes:
            write(Span(span.pool, row, row + 1, length - 1), keys, values, slots_L)
        q_TNH = query[row : row + 1].view(1, -1, keys.shape[-1])
        seen_TL = torch.ones(1, length).bool()
        view = _view(live, span.pool, length - 1, span.first, keys[slots_L], values[slots_L], seen_TL)
        output[row : row + 1] = attend(q_TNH, view, scaling * live.scale).view(output[row : row + 1].shape)
