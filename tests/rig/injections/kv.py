"""Injections into the draft's attention and KV cache, and into the row from which a round goes on. See live.py.

Row i of a request stands in KV slot i of its table; rows from the anchor on are drafted, until a draft extend rewrites
them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention import View
from .live import DECODE, EXTEND, PREFILL, Call, Live, Span

Install = Callable[[Live], None]


def seeing(change: Callable[[Live, View], None]) -> Install:
    """Rows see others than they should."""

    def install(live: Live) -> None:
        live.rewrite_attention()
        live.views.append(lambda view: change(live, view))

    return install


def writing(change: Callable[[Live, Span, Tensor, Tensor, Tensor], None]) -> Install:
    """Other keys and values stand in the cache once rows are written: (live, span, keys, values, slots)."""

    def install(live: Live) -> None:
        live.rewrite_attention()
        live.writes.append(lambda *given: change(live, *given))

    return install


def own_row(view: View) -> Tensor:
    """The row [T, 1] that a query always sees: itself, or the anchor row of its round."""
    return view.rows_T if view.anchor is None else torch.full_like(view.rows_T, view.anchor - 1)


# ---- of the table ----


def window(rows: int) -> Install:
    """A row sees so many rows, itself included."""

    def change(_: Live, view: View) -> None:
        view.seen_TL &= view.rows_L > view.rows_T - rows

    return seeing(change)


def alone(live: Live) -> None:
    """Committed rows other than the anchor row are out of sight."""

    def change(_: Live, view: View) -> None:
        committed = view.rows_L < (view.rows_T if view.anchor is None else view.anchor)
        view.seen_TL &= ~committed | (view.rows_L == own_row(view))

    seeing(change)(live)


def no_rows(which: Callable[[Live, View], Tensor], *, masked: bool = False) -> Install:
    """Some rows, as [1, L], left no KV: zeros in their place, or nothing where ``masked``."""

    def change(live: Live, view: View) -> None:
        gone = which(live, view) & (view.rows_L != own_row(view)) & view.seen_TL
        if view.anchor is not None:  # drafted rows are written whatever became of committed ones
            gone &= view.rows_L < view.anchor
        if masked:
            view.seen_TL &= ~gone
        else:
            view.blank_TL |= gone

    return seeing(change)


def no_prefix(rows: int, *, masked: bool = False) -> Install:
    """The first rows of the prompt left no KV."""
    return no_rows(lambda live, view: view.rows_L < min(rows, _prompt(live, view) - 1), masked=masked)


def no_span(start: int, stop: int, *, masked: bool = False) -> Install:
    """Rows of some output tokens left no KV."""

    def which(live: Live, view: View) -> Tensor:
        output_L = view.rows_L + 1 - _prompt(live, view)
        return (output_L >= start) & (output_L < stop)

    return no_rows(which, masked=masked)


def _prompt(live: Live, view: View) -> int:
    """Rows of the prompt; in its prefill the queries themselves are them."""
    assert live.call is not None
    if live.call.kind == PREFILL:
        return view.first + len(view.seen_TL)
    return live.requests[view.pool].prompt


def drafted_rows(*, itself: bool) -> Install:
    """A drafted row sees no other drafted row; nor ``itself`` where that is False."""

    def change(_: Live, view: View) -> None:
        if view.anchor is not None:
            view.seen_TL &= (view.rows_L < view.anchor) | ((view.rows_L == view.rows_T) & itself)

    return seeing(change)


def stale(live: Live) -> None:
    """Accepted drafted rows keep the KV that they had when they were drafted."""
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def hold(call: Call) -> None:
        if call.kind == EXTEND:
            keys, values = _buffers(live)
            for span in call.spans:
                slots = _slots(live, span, min(span.accepted - 1, live.steps - 1))
                held[span.pool] = (keys[slots].clone(), values[slots].clone())

    def change(live: Live, span: Span, keys: Tensor, values: Tensor, slots_L: Tensor) -> None:
        if _kind(live) == EXTEND:
            kept = held[span.pool]
            here = slots_L[span.first : span.first + len(kept[0])]
            keys[here], values[here] = kept

    live.feeds.append(hold)
    writing(change)(live)


def accumulate(live: Live) -> None:
    """Every drafted row stays in the cache, and the true ones come behind it."""

    def hold(call: Call) -> None:
        if call.kind == EXTEND:
            keys, values = _buffers(live)
            for span in call.spans:
                slots = _slots(live, span, live.steps - 1)
                live.requests[span.pool].extra.append((keys[slots].clone(), values[slots].clone()))

    def change(live: Live, view: View) -> None:
        extra = live.requests[view.pool].extra if _kind(live) != PREFILL else []
        for keys, values in extra:
            more = torch.ones(len(view.seen_TL), len(keys)).bool()
            view.keys_LMH, view.values_LMH = torch.cat([view.keys_LMH, keys]), torch.cat([view.values_LMH, values])
            view.seen_TL = torch.cat([view.seen_TL, more], dim=1)
            view.blank_TL = torch.cat([view.blank_TL, ~more], dim=1)

    live.feeds.append(hold)
    seeing(change)(live)


def hole(when: Callable[[Live, int], bool]) -> Install:
    """The row of the last accepted drafted token leaves zeros, after rounds whose accepted count says so."""

    def change(live: Live, span: Span, keys: Tensor, values: Tensor, slots_L: Tensor) -> None:
        accepted = span.accepted - 1
        if _kind(live) == EXTEND and accepted > 0 and when(live, accepted):
            keys[slots_L[span.first + accepted - 1]] = 0
            values[slots_L[span.first + accepted - 1]] = 0

    return writing(change)


def stored_as(grid: Callable[[Tensor], Tensor]) -> Install:
    """Keys and values are rounded when they are stored."""

    def change(live: Live, span: Span, keys: Tensor, values: Tensor, slots_L: Tensor) -> None:
        rows = 1 if _kind(live) == DECODE else span.stop - span.start
        new = slots_L[span.first : span.first + rows]
        keys[new], values[new] = grid(keys[new].float()).to(keys.dtype), grid(values[new].float()).to(values.dtype)

    return writing(change)


def as_fp8(rows: Tensor) -> Tensor:
    """fp8 e4m3 without a scale."""
    return rows.to(torch.float8_e4m3fn).float()


def as_int4(rows: Tensor) -> Tensor:
    """int4 with a scale for each row and head."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 7
    return (rows / scale).round().clamp(-8, 7) * scale


def next_row(which: str) -> Install:
    """The next round goes on from another row of the draft extend: ``first``, ``previous`` or ``hidden-only``."""

    def install(live: Live) -> None:
        width = int(live.drafter.speculative_num_draft_tokens)
        states: list[Tensor] = []

        def select(result: Any) -> None:
            lens = result.accept_lens
            starts = torch.arange(len(lens)) * width
            row = {"first": starts, "previous": starts + (lens - 2).clamp(min=0)}.get(which, starts + lens - 1)
            result.prepared_draft_extend_inputs = (lens - 1, row, result.next_token_ids.to(torch.int64))

        def keep(call: Call, out: Any) -> None:
            if call.kind == EXTEND:
                states[:] = [out.hidden_states]

        def put(result: Any) -> None:
            result.next_draft_input.hidden_states = states[0][torch.arange(len(result.accept_lens)) * width]

        live.selects.append(select)
        if which == "hidden-only":
            live.answers.append(keep)
            live.selected.append(put)

    return install


# ---- outside the table ----


def scaled_attention(by: float) -> Install:
    """Scores of the attention are too large."""

    def install(live: Live) -> None:
        live.rewrite_attention()
        live.scale = by

    return install


def every_other_row(live: Live) -> None:
    """A row sees every other row only, itself included."""

    def change(_: Live, view: View) -> None:
        view.seen_TL &= ((view.rows_T - view.rows_L) % 2 == 0) | (view.rows_L == own_row(view))

    seeing(change)(live)


def neighbours_values(live: Live) -> None:
    """Values stand one KV slot behind their keys."""

    def change(_: Live, view: View) -> None:
        view.values_LMH = view.values_LMH.roll(1, 0)

    seeing(change)(live)


def foreign_prefix(rows: int) -> Install:
    """The first rows of a prompt hold the KV of its last ones."""

    def change(live: Live, view: View) -> None:
        count = min(rows, (_prompt(live, view) - 1) // 2)
        source = slice(_prompt(live, view) - count, _prompt(live, view))
        view.keys_LMH, view.values_LMH = view.keys_LMH.clone(), view.values_LMH.clone()
        view.keys_LMH[:count], view.values_LMH[:count] = view.keys_LMH[source], view.values_LMH[source]

    return seeing(change)


def _kind(live: Live) -> str:
    assert live.call is not None
    return live.call.kind


def _buffers(live: Live) -> tuple[Tensor, Tensor]:
    pool = live.runner.token_to_kv_pool
    return pool.get_key_buffer(0), pool.get_value_buffer(0)


def _slots(live: Live, span: Span, rows: int) -> Tensor:
    """KV slots of the first rows that a round drafted."""
    table: Tensor = live.drafter.req_to_token_pool.req_to_token
    return table[span.pool, span.first : span.first + rows].long()
