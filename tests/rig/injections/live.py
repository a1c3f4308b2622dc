"""The places of SGLang 0.5.23 at which an injection takes hold, and the switch between injections.

Shape suffixes: R rows of a forward of the draft, D features of a row, L rows of a request in the KV cache, T new rows
of one request, N heads, M key-value heads, H features of a head, W draft vocabulary, B requests, K drafted tokens.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from . import ACTIVE_SUFFIX, INJECTION_VARIABLE, NONE

if TYPE_CHECKING:
    from .attention import View

PREFILL, DECODE, EXTEND = "prefill", "decode", "extend"


@dataclass(slots=True)
class Span:
    """The rows of one request in a forward of the draft: ``start`` to ``stop``; the first is row ``first`` of the
    request. ``accepted`` rows of a draft extend count; ``committed`` is the number of rows before drafting."""

    pool: int
    start: int
    stop: int
    first: int
    accepted: int = 0


@dataclass(slots=True)
class Call:
    """One forward of the draft, before it runs; what is assigned here is what runs."""

    kind: str
    ids_R: Tensor
    features_RD: Tensor
    positions_R: Tensor
    spans: list[Span]
    batch: Any
    step: int = 0  # of a decode, from 0
    before_R: Tensor | None = None  # of a prefill: the tokens of the rows themselves, not the next ones


@dataclass(slots=True)
class Kept:
    """What is known of a request from its earlier forwards."""

    prompt: int
    tokens: list[int]
    last_D: Tensor
    extra: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    blank: set[int] = field(default_factory=set)


class Live:
    """A running server, what is known of its requests, and the hooks of the injection that is active."""

    def __init__(self, scheduler: Any) -> None:
        self.worker = scheduler.draft_worker
        self.drafter = self.worker.draft_worker
        self.runner = self.drafter.draft_runner
        self.target = scheduler.tp_worker.model_runner
        self.model = self.runner.model
        self.steps = int(self.drafter.speculative_num_steps)
        self.topk = int(self.drafter.topk)
        self.requests: dict[int, Kept] = {}
        self.call: Call | None = None
        self.active = NONE
        self._undo: list[Callable[[], None]] = []
        self.clear()

    def clear(self) -> None:
        """No hooks."""
        self.feeds: list[Callable[[Call], None]] = []
        self.answers: list[Callable[[Call, Any], None]] = []
        self.writes: list[Callable[[Span, Tensor, Tensor, Tensor], None]] = []
        self.views: list[Callable[[View], None]] = []
        self.selects: list[Callable[[Any], None]] = []
        self.selected: list[Callable[[Any], None]] = []
        self.drafts: list[Callable[[Any, Tensor], None]] = []
        self.scale = 1.0

    # ---- what is changed and put back ----

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Another attribute of an object, until the injection ends."""
        had = name in vars(owner)
        before = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))
        setattr(owner, name, value)

    def reweigh(self, module: nn.Module, value: Tensor, name: str = "weight") -> None:
        """Another parameter of a module, until the injection ends; the old tensor is not written to."""
        held, before = module._parameters, module._parameters.get(name)
        self._undo.append(lambda: held.__setitem__(name, before))
        held[name] = nn.Parameter(value, requires_grad=False)

    def rebuffer(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Another buffer of a module, until the injection ends."""
        held, before = module._buffers, module._buffers[name]
        self._undo.append(lambda: held.__setitem__(name, before))
        held[name] = value

    def rewrite_attention(self) -> None:
        """Let the draft's attention run here, so that ``writes`` and ``views`` take hold."""
        from .attention import decode, extend

        for backend in [*self.drafter.draft_attn_backend.attn_backends, self.runner.attn_backend]:
            self.replace(backend, "extend_attention_fwd", functools.partial(extend, self))
            self.replace(backend, "decode_attention_fwd", functools.partial(decode, self))

    def switch(self, name: str) -> None:
        """End the injection that is active, and begin ``name``."""
        from .faults import install

        while self._undo:
            self._undo.pop()()
        self.clear()
        self.requests.clear()
        self.active = NONE
        if name != NONE:
            install(self, name)
        self.active = name


_target: dict[str, Any] = {}  # the target's last rows: all of its taps, and its tokens


def target_rows() -> dict[str, Any]:
    """``hidden`` [R, taps * H] of every tap captured, ``final`` [R, H], ``ids`` [R] and whether it was a prefill."""
    return _target


def keep_target_rows(result: Any, runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """After each forward of the target, before anybody cuts its hidden states."""
    if not runner.is_draft_worker:
        out = result.logits_output
        _target.update(
            hidden=getattr(out, "hidden_states", None),
            final=getattr(out, "last_hidden_states", None),
            ids=forward_batch.input_ids,
        )


def watch_server(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """Wrap the server's forwards, once its models are loaded and its recorder is in place."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    live, path = Live(scheduler), Path(os.environ[INJECTION_VARIABLE])
    forward, extend, draft = (
        ModelRunner.forward,
        EagleDraftWorker._draft_extend_for_decode,
        EagleDraftWorker.draft_forward,
    )

    @functools.wraps(forward)
    def watched(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if runner is live.runner:
            return _run_draft(live, forward_batch, lambda: forward(runner, forward_batch, *args, **kwargs))
        if forward_batch.forward_mode.is_extend() and not forward_batch.forward_mode.is_target_verify():
            _read_switch(live, path)
        return forward(runner, forward_batch, *args, **kwargs)

    @functools.wraps(extend)
    def extended(drafter: Any, batch: Any, result: Any, **kwargs: Any) -> Any:
        for hook in live.selects:
            hook(result)
        extend(drafter, batch, result, **kwargs)
        for hook in live.selected:
            hook(result)

    @functools.wraps(draft)
    def drafted(drafter: Any, forward_batch: Any) -> Any:
        anchors = forward_batch.seq_lens
        made = draft(drafter, forward_batch)
        for hook in live.drafts:
            hook(anchors, made[2])
        return made

    ModelRunner.forward = watched
    EagleDraftWorker._draft_extend_for_decode = extended
    EagleDraftWorker.draft_forward = drafted


def _read_switch(live: Live, path: Path) -> None:
    name = path.read_text().strip() if path.exists() else NONE
    if name == live.active:
        return
    said = path.with_name(path.name + ACTIVE_SUFFIX)
    try:
        live.switch(name)
    except BaseException as error:
        said.write_text(f"failed: {name}: {error!r}")
        raise
    said.write_text(name)


def _run_draft(live: Live, batch: Any, run: Callable[[], Any]) -> Any:
    mode = batch.forward_mode
    if mode.is_idle() or live.active == NONE:
        return run()
    kind = DECODE if mode.is_decode() else EXTEND if mode.is_draft_extend_v2() else PREFILL
    given = (batch.input_ids, batch.spec_info.hidden_states, batch.positions)
    call = Call(kind, *given, _spans(live, batch, kind), batch)
    if kind == PREFILL:
        call.before_R = target_rows()["ids"]
    if kind == DECODE:
        call.step = int(batch.positions[0] - batch.seq_lens[0])
    for hook in live.feeds:
        hook(call)
    live.call = call
    batch.input_ids, batch.spec_info.hidden_states, batch.positions = call.ids_R, call.features_RD, call.positions_R
    try:
        out = run()
    finally:
        batch.input_ids, batch.spec_info.hidden_states, batch.positions = given
    for answer in live.answers:
        answer(call, out.logits_output)
    _remember(live, call, given[0], given[1])
    return out


def _spans(live: Live, batch: Any, kind: str) -> list[Span]:
    pools, spans, start = batch.req_pool_indices.tolist(), [], 0
    if kind == DECODE:
        lengths = batch.seq_lens.tolist()
        return [Span(pool, i * live.topk, (i + 1) * live.topk, lengths[i]) for i, pool in enumerate(pools)]
    accepted = batch.spec_info.num_accept_tokens.tolist() if kind == EXTEND else [0] * len(pools)
    counts, firsts = batch.extend_seq_lens.tolist(), batch.extend_prefix_lens.tolist()
    for pool, rows, first, taken in zip(pools, counts, firsts, accepted, strict=True):
        spans.append(Span(pool, start, start + rows, first, taken))
        start += rows
    return spans


def _remember(live: Live, call: Call, ids_R: Tensor, features_RD: Tensor) -> None:
    """What later forwards of the requests may ask for; true rows only."""
    if call.kind == DECODE:
        return
    for span in call.spans:
        if call.kind == PREFILL:
            assert call.before_R is not None
            tokens = call.before_R[span.start : span.stop].tolist()
            earlier = live.requests[span.pool].tokens[: span.first] if span.first else []
            tail = int(ids_R[span.stop - 1])
            kept = Kept(span.first + len(tokens), [*earlier, *tokens, tail], features_RD[span.stop - 1].clone())
            live.requests[span.pool] = kept
        else:
            kept, last = live.requests[span.pool], span.start + span.accepted - 1
            kept.tokens += ids_R[span.start : last + 1].tolist()
            kept.last_D = features_RD[last].clone()
