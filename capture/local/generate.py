"""One batch of requests through a local target: generation, or following a forced output, with every row recorded.

Row i of a request is the target's state once it has consumed tokens x_0..x_i; with L prompt and n output tokens there
are rows 0..L+n-2, and row L-1+j is the one that chose output token j. Rows are kept as they were computed on the way:
the prompt's in one pass, then one a step. Prompts are padded on the left, so that a batch decodes in one cache slot.
What a prompt has in common with others is computed once (prefixes.py), and its pass begins behind that.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replay.capture.encode import EncodedRequest
from replay.capture.local.prefixes import Prefix, Prefixes, stack_prefixes
from replay.capture.local.sampling import Sampling, choose
from replay.capture.local.target import LocalTarget
from replay.capture.logits import summarise_logits
from replay.traces.taps import FINAL
from replay.traces.writer import CapturedRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from replay.capture.logits import LogitsSummary

_LOGIT_ROWS = 256  # rows of [V] logits held at once when many are wanted

OnStep = Callable[[int, int], None]  # output tokens of the batch so far, and how many may still come


@dataclass(slots=True)
class _Growing:
    """A request on its way: rows by tap (each [rows, width]), logits summaries by step, tokens chosen."""

    request: EncodedRequest
    generator: "torch.Generator"
    rows: "dict[str, list[Tensor]]"
    summaries: "list[LogitsSummary]" = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


def run_batch(
    target: LocalTarget,
    requests: Sequence[EncodedRequest],
    taps: Sequence[str],
    *,
    sampling: Sampling,
    topk: int,
    on_step: OnStep,
    prefixes: Prefixes,
) -> list[CapturedRequest]:
    """Record a batch, all of it generated or all of it forced; the results stand in the order of ``requests``."""
    import torch

    with torch.inference_mode(), target.recording(taps):
        begun = prefixes.of_batch({request.request_id: request.prompt_ids for request in requests})
        if requests[0].forced_ids is not None:
            return _force(target, requests, begun, taps, topk, on_step)
        growing = [_Growing(request, request_generator(sampling.seed, request.request_id), {}) for request in requests]
        _generate(target, growing, begun, sampling, topk, on_step)
    return [_captured(one, taps, sampling) for one in growing]


def request_generator(seed: int, request_id: str) -> "torch.Generator":
    """Random numbers of one request: the same whatever else is in its batch, and whenever it runs."""
    import torch

    digest = hashlib.sha256(f"{seed}\0{request_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _pad_left(target: LocalTarget, prompts: Sequence[Sequence[int]]) -> "tuple[Tensor, Tensor, Tensor]":
    """Ids, mask and positions, each [B, S]; padding has id 0, mask 0 and position 0."""
    import torch

    width = max(len(ids) for ids in prompts)
    ids_BS = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts], device=target.device)
    mask_BS = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=target.device)
    return ids_BS, mask_BS, (mask_BS.cumsum(1) - 1).clamp(min=0)


def _rest(
    target: LocalTarget, begun: Sequence[Prefix | None], texts: Sequence[Sequence[int]]
) -> "tuple[Tensor, Tensor, Tensor, Any]":
    """Ids and positions [B, S] of ``texts`` behind their prefixes, the mask [B, P + S] of both, the cache of these."""
    import torch

    cache, before_BP, lengths_B1 = stack_prefixes(target, begun)
    rest = [ids[0 if one is None else one.length :] for ids, one in zip(texts, begun, strict=True)]
    ids_BS, mask_BS, positions_BS = _pad_left(target, rest)
    return ids_BS, torch.cat([before_BP, mask_BS], dim=1), positions_BS + lengths_B1 * mask_BS, cache


def _rows(seen: "Mapping[str, Tensor]", b: int, length: int, prefix: Prefix | None) -> "dict[str, list[Tensor]]":
    """Of request ``b`` of a batch the rows of a text of ``length`` tokens by tap, those of its prefix first."""
    before = {} if prefix is None else prefix.rows
    own = length - (0 if prefix is None else prefix.length)
    return {name: [*before.get(name, ()), rows_BSW[b, -own:].cpu()] for name, rows_BSW in seen.items()}


def _generate(
    target: LocalTarget,
    growing: Sequence[_Growing],
    begun: Sequence[Prefix | None],
    sampling: Sampling,
    topk: int,
    on_step: OnStep,
) -> None:
    import torch

    ids_BS, mask_BM, positions_BS, cache = _rest(target, begun, [one.request.prompt_ids for one in growing])
    seen = target.forward(ids_BS, mask_BM, positions_BS, cache)
    for b, (one, prefix) in enumerate(zip(growing, begun, strict=True)):
        one.rows = _rows(seen, b, len(one.request.prompt_ids), prefix)
    live, position_B1, tokens = list(growing), positions_BS[:, -1:], 0
    while True:
        chosen = _choose_tokens(target, live, seen[FINAL][:, -1], sampling, topk)
        tokens += len(live)
        kept = [i for i, one in enumerate(live) if not one.finish_reason]
        on_step(tokens, sum(live[i].request.max_new_tokens - len(live[i].output_ids) for i in kept))
        if not kept:
            return
        if len(kept) < len(live):
            index = torch.tensor(kept, device=target.device)
            cache.batch_select_indices(index)
            mask_BM, position_B1, live = mask_BM[index], position_B1[index], [live[i] for i in kept]
        ids_B1 = torch.tensor([[chosen[i]] for i in kept], device=target.device)
        mask_BM, position_B1 = torch.cat([mask_BM, mask_BM.new_ones(len(live), 1)], dim=1), position_B1 + 1
        seen = target.forward(ids_B1, mask_BM, position_B1, cache)
        for name, rows_B1W in seen.items():
            for one, rows_1W in zip(live, rows_B1W.cpu().unbind(), strict=True):
                one.rows[name].append(rows_1W)


def _choose_tokens(
    target: LocalTarget, live: Sequence[_Growing], final_BH: "Tensor", sampling: Sampling, topk: int
) -> list[int]:
    """The next token of every live request, from its last row; notes those that have ended with it."""
    logits_BV = target.lm_head(final_BH)
    summary = summarise_logits(logits_BV, topk)
    greedy = summary.topk_ids[:, 0].tolist()
    chosen: list[int] = []
    for b, one in enumerate(live):
        token = greedy[b] if sampling.temperature == 0 else choose(logits_BV[b].float().cpu(), sampling, one.generator)
        one.summaries.append(summary.rows(b, b + 1))
        one.output_ids.append(token)
        if token in target.eos_ids:
            one.finish_reason = "stop"
        elif len(one.output_ids) == one.request.max_new_tokens:
            one.finish_reason = "length"
        chosen.append(token)
    return chosen


def _force(
    target: LocalTarget,
    requests: Sequence[EncodedRequest],
    begun: Sequence[Prefix | None],
    taps: Sequence[str],
    topk: int,
    on_step: OnStep,
) -> list[CapturedRequest]:
    """All rows of given outputs in one pass."""
    import torch

    consumed = [(*request.prompt_ids, *(request.forced_ids or ()))[:-1] for request in requests]
    ids_BS, mask_BM, positions_BS, cache = _rest(target, begun, consumed)
    seen = target.forward(ids_BS, mask_BM, positions_BS, cache if any(begun) else None)
    result: list[CapturedRequest] = []
    for b, request in enumerate(requests):
        count = len(request.forced_ids or ())
        final_NH = seen[FINAL][b, -count:]
        parts = [summarise_logits(target.lm_head(part_NH), topk) for part_NH in torch.split(final_NH, _LOGIT_ROWS)]
        one = _Growing(request, torch.Generator(), {}, parts, list(request.forced_ids or ()), "forced")
        one.rows = _rows(seen, b, len(consumed[b]), begun[b])
        result.append(_captured(one, taps, Sampling()))
    on_step(sum(request.max_new_tokens for request in requests), 0)
    return result


def _captured(one: _Growing, taps: Sequence[str], sampling: Sampling) -> CapturedRequest:
    import torch

    return CapturedRequest(
        request_id=one.request.request_id,
        category=one.request.category,
        prompt_ids=list(one.request.prompt_ids),
        output_ids=one.output_ids,
        finish_reason=one.finish_reason,
        source="generated" if one.request.forced_ids is None else "forced",
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        taps={name: torch.cat(one.rows[name]) for name in taps},
        topk_ids=torch.cat([part.topk_ids for part in one.summaries]),
        topk_logprobs=torch.cat([part.topk_logprobs for part in one.summaries]),
        logsumexp=torch.cat([part.logsumexp for part in one.summaries]),
        tail_ids=[],
        server=None,
    )
