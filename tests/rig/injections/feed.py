"""Injections of what the draft is fed: features, tokens, positions.

The features of committed rows are changed before the recorder copies what the draft is fed, as an engine's own mistake
would be. Shapes as in live.py; B requests, K taps of width H.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .live import DECODE, EXTEND, PREFILL, Call, Live, target_rows

Install = Callable[[Live], None]


def features(change: Callable[[Live, Call], Tensor]) -> Install:
    """Other features of committed rows."""

    def install(live: Live) -> None:
        def feed(call: Call) -> None:
            if call.kind != DECODE:
                call.features_RD = change(live, call)

        live.feeds.append(feed)

    return install


def slots_of(live: Live, features_RD: Tensor) -> list[Tensor]:
    """The taps of features [R, K*H], each [R, H]."""
    return list(features_RD.split(live.model.model.hidden_size_in, dim=-1))


# ---- of the table ----


def zero_slots(*slots: int) -> Install:
    """Some slots of fc are fed zeros; all where none is named."""

    def change(live: Live, call: Call) -> Tensor:
        parts = slots_of(live, call.features_RD)
        return torch.cat([part * 0 if not slots or i in slots else part for i, part in enumerate(parts)], dim=-1)

    return features(change)


def reversed_taps(live: Live) -> None:
    """The taps in reverse order."""
    features(lambda live, call: torch.cat(slots_of(live, call.features_RD)[::-1], dim=-1))(live)


def other_taps(indices: Sequence[int]) -> Install:
    """Other boundaries of the target's stream, of those that the server captures."""

    def change(live: Live, call: Call) -> Tensor:
        inner = live.target.model.model
        captured = sorted(inner.layers_to_capture)
        width = live.model.model.hidden_size_in
        columns = target_rows()["hidden"].unflatten(-1, (-1, width))
        assert columns.shape[1] == len(captured), f"{captured} captured, {columns.shape[1]} taps seen"
        return torch.cat([columns[:, captured.index(index)] for index in indices], dim=-1)

    return features(change)


def normed_taps(live: Live) -> None:
    """Taps are taken behind the norm at the entry of their layer."""
    layers = live.target.model.model.layers

    def change(live: Live, call: Call) -> Tensor:
        parts = slots_of(live, call.features_RD)
        return torch.cat([layers[i].input_layernorm(part) for i, part in zip((0, 3, 16), parts, strict=True)], dim=-1)

    features(change)(live)


def earlier_features(live: Live) -> None:
    """Each row is given the features of the position before; the first one zeros."""

    def change(live: Live, call: Call) -> Tensor:
        moved = call.features_RD.roll(1, 0)
        for span in call.spans:
            begun = call.kind == PREFILL and span.first == 0
            moved[span.start] = 0 if begun else live.requests[span.pool].last_D
        return moved

    features(change)(live)


def own_token(live: Live) -> None:
    """Each committed row embeds its own token and not the next one."""

    def feed(call: Call) -> None:
        if call.kind == PREFILL:
            assert call.before_R is not None
            call.ids_R = call.before_R.clone()
        if call.kind == EXTEND:
            ids_R = call.ids_R.roll(1)
            for span in call.spans:
                ids_R[span.start] = live.requests[span.pool].tokens[-1]
            call.ids_R = ids_R

    live.feeds.append(feed)


def chunk_tails(size: int) -> Install:
    """The last row of each prompt chunk embeds what the target would sample there."""

    def install(live: Live) -> None:
        def feed(call: Call) -> None:
            if call.kind != PREFILL:
                return
            final, head = target_rows()["final"], live.target.model.lm_head.weight
            call.ids_R = call.ids_R.clone()
            for span in call.spans:
                for row in range(span.start, span.stop - 1):
                    if (span.first + row - span.start + 1) % size == 0:
                        call.ids_R[row] = (final[row] @ head.T).argmax()

        live.feeds.append(feed)

    return install


def blind_start(live: Live) -> None:
    """The last row of the prompt has no features."""

    def change(_: Live, call: Call) -> Tensor:
        given = call.features_RD.clone()
        if call.kind == PREFILL:
            given[[span.stop - 1 for span in call.spans]] = 0
        return given

    features(change)(live)


def positions(change: Callable[[Call], Tensor]) -> Install:
    """Other positions; slots of the KV cache stay."""

    def install(live: Live) -> None:
        def feed(call: Call) -> None:
            call.positions_R = change(call)

        live.feeds.append(feed)

    return install


def drafted_offset(by: int) -> Install:
    """Drafted rows stand elsewhere."""
    return positions(lambda call: call.positions_R + by * (call.kind == DECODE))


def stuck(by: int = 0) -> Install:
    """All drafted rows stand ``by`` behind their anchor row."""
    return positions(lambda call: call.positions_R - (call.step + 1 - by) * (call.kind == DECODE))


def most_positions(limit: int) -> Install:
    """Positions end at a maximum."""
    return positions(lambda call: call.positions_R.clamp(max=limit - 1))


def dummy_from(limit: int) -> Install:
    """Drafts of anchors beyond ``limit`` are token 0."""

    def install(live: Live) -> None:
        def replace(anchors: Tensor, drafted_BK: Tensor) -> None:
            drafted_BK[anchors - 1 >= limit] = 0

        live.drafts.append(replace)

    return install


def crossed_states(source: Callable[[int, int], int], *, once: bool = False) -> Install:
    """While several requests draft together, each goes on from another one's state: row i of n from ``source(i, n)``.

    ``once``: only in the first step."""

    def install(live: Live) -> None:
        def feed(call: Call) -> None:
            if call.kind == DECODE and not (once and call.step):
                rows = list(call.features_RD.split(live.topk))
                call.features_RD = torch.cat([rows[source(i, len(rows))] for i in range(len(rows))])

        live.feeds.append(feed)

    return install


# ---- outside the table ----


def noise(size: float, *, recycled: bool = False) -> Install:
    """Gaussian noise, ``size`` times a row's root mean square, on features or on the states fed back."""

    def install(live: Live) -> None:
        generator = torch.Generator().manual_seed(5)

        def feed(call: Call) -> None:
            if (call.kind == DECODE) == recycled:
                given = call.features_RD.float()
                rms = given.pow(2).mean(-1, keepdim=True).sqrt()
                drawn = torch.randn(given.shape, generator=generator)
                call.features_RD = (given + size * rms * drawn).to(call.features_RD.dtype)

        live.feeds.append(feed)

    return install


def crossed_features(live: Live) -> None:
    """While several requests are verified together, each is given the features of another one."""
    features(lambda _, call: call.features_RD.roll(call.spans[0].stop, 0) if call.kind == EXTEND else call.features_RD)(
        live
    )


def scaled_features(by: float) -> Install:
    """Features too large."""
    return features(lambda _, call: call.features_RD * by)


def dead_channels(every: int) -> Install:
    """One channel in so many is zero, in every tap."""

    def change(_: Live, call: Call) -> Tensor:
        given = call.features_RD.clone()
        given[:, ::every] = 0
        return given

    return features(change)


def stale_rows(every: int) -> Install:
    """One row in so many, by position, is given the features of the row before it."""

    def change(_: Live, call: Call) -> Tensor:
        stale = call.positions_R % every == every - 1
        stale[[span.start for span in call.spans]] = False
        return torch.where(stale[:, None], call.features_RD.roll(1, 0), call.features_RD)

    return features(change)


def coarse_features(bits: int) -> Install:
    """Features rounded to so many bits of mantissa."""

    def change(_: Live, call: Call) -> Tensor:
        mantissa, exponent = torch.frexp(call.features_RD.float())
        return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(call.features_RD.dtype)

    return features(change)


def next_embedding(live: Live) -> None:
    """Each token is embedded by the row behind its own."""

    def feed(call: Call) -> None:
        call.ids_R = (call.ids_R + 1) % live.model.model.vocab_size

    live.feeds.append(feed)


def doubled_positions(live: Live) -> None:
    """Every position counts twice."""
    positions(lambda call: call.positions_R * 2)(live)


def same_drafted_token(live: Live) -> None:
    """Every drafted row embeds the first drafted token."""
    first: dict[int, int] = {}

    def feed(call: Call) -> None:
        if call.kind == DECODE:
            if call.step == 0:
                first.update({span.pool: int(call.ids_R[span.start]) for span in call.spans})
            call.ids_R = torch.tensor([first[span.pool] for span in call.spans]).repeat_interleave(live.topk)

    live.feeds.append(feed)
