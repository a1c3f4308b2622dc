"""Injections into what is made of the draft's logits, all of them outside the table. Shapes as in live.py."""

from collections.abc import Callable
from typing import Any

import torch

from .live import DECODE, EXTEND, PREFILL, Call, Live, Span

Install = Callable[[Live], None]


def second_best(live: Live) -> None:
    """The first drafted token is the second best."""

    def answer(call: Call, out: Any) -> None:
        if call.kind != DECODE:
            logits_RW = out.next_token_logits.clone()
            logits_RW.scatter_(1, logits_RW.argmax(-1, keepdim=True), float("-inf"))
            out.next_token_logits = logits_RW

    live.answers.append(answer)


def repetition_penalty(by: float, last: int = 32) -> Install:
    """Logits of tokens among the last ones are made smaller, as a sampler's penalty does."""

    def install(live: Live) -> None:
        place = {token: row for row, token in enumerate(live.drafter.hot_token_id.tolist())}

        def answer(call: Call, out: Any) -> None:
            logits_RW = out.next_token_logits.clone()
            for number, span in enumerate(call.spans):
                rows = [number] if call.kind == PREFILL else range(span.start, span.stop)
                known = _known(live, call, span)[-last:]
                columns = sorted({place[token] for token in known if token in place})
                for row in rows:
                    chosen = logits_RW[row, columns]
                    logits_RW[row, columns] = torch.where(chosen > 0, chosen / by, chosen * by)
            out.next_token_logits = logits_RW

        live.answers.append(answer)

    return install


def _known(live: Live, call: Call, span: Span) -> list[int]:
    """Tokens of a request before the one that is drafted now, as far as the server has them."""
    start, stop, pool = span.start, span.stop, span.pool
    new = call.ids_R[start:stop].tolist()
    if call.kind == PREFILL:
        return list(new)
    if call.kind == EXTEND:
        return [*live.requests[pool].tokens, *new[: span.accepted]]
    return [*live.requests[pool].tokens, *new]


def lost_vocabulary(every: int) -> Install:
    """One draft id of so many can never be drafted."""

    def install(live: Live) -> None:
        def answer(_: Call, out: Any) -> None:
            logits_RW = out.next_token_logits.clone()
            logits_RW[:, ::every] = float("-inf")
            out.next_token_logits = logits_RW

        live.answers.append(answer)

    return install
