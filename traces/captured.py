"""One captured request, and everything that must hold before it is written.

Shapes: L prompt tokens, n output tokens, T = L + n; row i of T - 1 is the target's state at position i, so row
L - 1 + j chose output token j; k = topk. See SPEC.md, section 5.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replay.errors import CaptureError
from replay.traces.cached import Piece, cached_problem
from replay.traces.feed import Feed, check_feed
from replay.traces.fp8 import quantise
from replay.traces.header import FP8, OLDEST, TAP_DTYPES, TraceHeader
from replay.traces.record_fields import pieces_problem
from replay.traces.records import FINISH_REASONS, MAX_ID, SOURCES, RequestRecord
from replay.traces.taps import FINAL, sort_taps

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """What the server itself counted for a request; ``histogram[a]`` is the number of rounds that accepted a tokens."""

    completion_tokens: int
    verify_rounds: int
    histogram: Sequence[int]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """A request as a capture hands it to ``TraceWriter.add``.

    ``taps``: name -> [T-1, width] in the dtype that the header announces, where that is fp8 in the target's; in a trace
    of version 2 some of the header's, and without their first ``first_row`` rows. ``scales``: of those of them that are
    in fp8 already, name -> [T-1]; ``topk_ids`` int32 [n, k] and
    ``topk_logprobs`` float32 [n, k], most likely first; ``logsumexp`` float32 [n]. ``tail_ids`` is what the target
    would choose after the last output token, where it was recorded; ``feed`` what a draft was fed in the prefill,
    where that was; ``pieces`` in what pieces the prompt was prefilled, where that is known; ``cached`` how many of the
    rows before them, which came from a server's cache, each forward made, and of how many rows it was.
    """

    request_id: str
    category: str | None
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    finish_reason: str
    source: str
    temperature: float
    top_p: float
    top_k: int
    taps: Mapping[str, "torch.Tensor"]
    topk_ids: "torch.Tensor"
    topk_logprobs: "torch.Tensor"
    logsumexp: "torch.Tensor"
    tail_ids: Sequence[int] = field(default_factory=list)
    server: ServerCounters | None = None
    feed: Feed | None = None
    pieces: Sequence[Piece] | None = None
    first_row: int = 0
    scales: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    cached: Sequence[Piece] | None = None

    def taps_of(self, header: TraceHeader) -> tuple[str, ...] | None:
        """Its taps as its record has them: None for all that ``header`` announces."""
        return None if set(self.taps) == set(header.taps) else sort_taps(list(self.taps))

    def record(self, header: TraceHeader) -> RequestRecord:
        """Its row of ``requests.parquet``, not yet placed in a shard."""
        server = self.server
        return RequestRecord(
            request_id=self.request_id,
            category=self.category,
            shard="",
            token_start=0,
            row_start=0,
            output_start=0,
            prompt_tokens=len(self.prompt_ids),
            output_tokens=len(self.output_ids),
            finish_reason=self.finish_reason,
            source=self.source,
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=self.top_k,
            tail_ids=tuple(self.tail_ids),
            server_completion_tokens=None if server is None else server.completion_tokens,
            server_verify_rounds=None if server is None else server.verify_rounds,
            server_histogram=None if server is None else tuple(server.histogram),
            server_cached_tokens=None if server is None else server.cached_tokens,
            server_prefill_rows=None if self.pieces is None else tuple(rows for rows, _ in self.pieces),
            server_prefill_forward_rows=None if self.pieces is None else tuple(whole for _, whole in self.pieces),
            prefix_requests=None,
            prefix_rows=None,
            shard_bytes=0,
            shard_sha256="",
            taps=self.taps_of(header),
            first_row=self.first_row or None,
            server_cached_rows=None if self.cached is None else tuple(rows for rows, _ in self.cached),
            server_cached_forward_rows=None if self.cached is None else tuple(whole for _, whole in self.cached),
        )


def request_tensors(request: CapturedRequest, header: TraceHeader) -> dict[str, "torch.Tensor"]:
    """Its part of every tensor of a shard; rows that ``header`` wants in fp8 are made so."""
    import torch

    return {
        "tokens": torch.tensor([*request.prompt_ids, *request.output_ids], dtype=torch.int32),
        "topk_ids": request.topk_ids,
        "topk_logprobs": request.topk_logprobs,
        "logsumexp": request.logsumexp,
        **{key: tensor for name in request.taps for key, tensor in _stored(request, name, header).items()},
    }


def _stored(request: CapturedRequest, name: str, header: TraceHeader) -> dict[str, "torch.Tensor"]:
    tap = request.taps[name]
    if header.taps[name].dtype != FP8:
        return {f"tap.{name}": tap}
    values, scale = (tap, request.scales[name]) if name in request.scales else quantise(tap)
    return {f"tap.{name}": values, f"scale.{name}": scale}


def check_request(request: CapturedRequest, header: TraceHeader, done: Container[str]) -> None:
    """Raises CaptureError, naming the request and what it holds, where ``request`` is not what ``header`` announces."""
    if request.request_id in done:
        raise CaptureError(
            f"request_id {request.request_id!r} is in the trace already: give every prompt an id of its own"
        )
    name = f"request {request.request_id!r}"
    _check_words(request, name)
    if not request.prompt_ids or not request.output_ids:
        raise CaptureError(
            f"{name} has {len(request.prompt_ids)} prompt and {len(request.output_ids)} output tokens, at least 1 of "
            "each is needed"
        )
    vocab = header.target.vocab_size
    for ids in (request.prompt_ids, request.output_ids, request.tail_ids):
        outside = next((token for token in ids if not 0 <= token < vocab), None)
        if outside is not None:
            raise CaptureError(f"{name} holds the token id {outside}, the target's are 0 to {vocab - 1}")
    _check_taps(request, header, name)
    _check_logits(request, header, name)
    if request.pieces is not None:
        rows, forward = ([piece[place] for piece in request.pieces] for place in (0, 1))
        problem = pieces_problem(rows, forward, len(request.prompt_ids))
        if problem is not None:
            raise CaptureError(f"{name}: {problem}")
    if request.cached is not None:
        rows, forward = ([piece[place] for piece in request.cached] for place in (0, 1))
        problem = cached_problem(rows, forward, request.pieces or (), len(request.prompt_ids))
        if problem is not None:
            raise CaptureError(f"{name}: {problem}")
    if request.feed is not None:
        check_feed(request.feed, header, len(request.prompt_ids) + len(request.output_ids), name)


def _check_words(request: CapturedRequest, name: str) -> None:
    if not 0 < len(request.request_id) <= MAX_ID:
        raise CaptureError(f"a request_id has {len(request.request_id)} characters, 1 to {MAX_ID} are possible")
    for field_name, value, possible in (
        ("finish_reason", request.finish_reason, FINISH_REASONS),
        ("source", request.source, SOURCES),
    ):
        if value not in possible:
            raise CaptureError(f"{name}: {field_name} is {value!r}, possible are {', '.join(possible)}")


def _check_taps(request: CapturedRequest, header: TraceHeader, name: str) -> None:
    some = header.version != OLDEST and FINAL in request.taps
    if not (set(request.taps) == set(header.taps) or (some and set(request.taps) < set(header.taps))):
        raise CaptureError(
            f"{name} holds the taps {', '.join(request.taps)}, the trace stores {', '.join(header.taps)}"
        )
    if not 0 <= request.first_row < len(request.prompt_ids) or (request.first_row and header.version == OLDEST):
        raise CaptureError(f"{name} has its rows from {request.first_row} on, the last one of its prompt must be there")
    rows = len(request.prompt_ids) + len(request.output_ids) - 1 - request.first_row
    for tap, tensor in request.taps.items():
        info = header.taps[tap]
        dtype = header.target.dtype if info.dtype == FP8 and tap not in request.scales else info.dtype
        _check_tensor(tensor, dtype, (rows, info.width), f"{name}: tap {tap}")
        if tap in request.scales:
            _check_tensor(request.scales[tap], "float32", (rows,), f"{name}: scale of tap {tap}")
            if bool((request.scales[tap] <= 0).any()):
                raise CaptureError(
                    f"{name}: scale of tap {tap} must be above 0, the least is {request.scales[tap].min():g}"
                )


def _check_logits(request: CapturedRequest, header: TraceHeader, name: str) -> None:
    count = len(request.output_ids)
    _check_tensor(request.topk_ids, "int32", (count, header.topk), f"{name}: topk_ids")
    _check_tensor(request.topk_logprobs, "float32", (count, header.topk), f"{name}: topk_logprobs")
    _check_tensor(request.logsumexp, "float32", (count,), f"{name}: logsumexp")
    low, high = int(request.topk_ids.min()), int(request.topk_ids.max())
    if low < 0 or high >= header.target.vocab_size:
        raise CaptureError(
            f"{name}: topk_ids reach from {low} to {high}, the target's ids are 0 to {header.target.vocab_size - 1}"
        )
    if bool((request.topk_logprobs.diff(dim=1) > 0).any()):
        raise CaptureError(f"{name}: topk_logprobs rise within a row; the most likely token must come first")


def _check_tensor(tensor: "torch.Tensor", dtype: str, shape: tuple[int, ...], name: str) -> None:
    """dtype, shape, and (for float dtypes) finiteness."""
    seen = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if seen != (dtype, shape):
        raise CaptureError(f"{name} is {seen[0]} {list(seen[1])}, must be {dtype} {list(shape)}")
    if tensor.is_floating_point() and tensor.element_size() > 1 and (bad := unfinite_row(tensor)) is not None:
        raise CaptureError(f"{name} holds NaN or Inf, first in row {bad}")


def unfinite_row(tensor: "torch.Tensor") -> int | None:
    """The first row of ``tensor`` [R, ...] with a NaN or Inf; None where all values are finite."""
    finite = tensor.isfinite()
    if bool(finite.all()):
        return None
    return int(finite.reshape(len(tensor), -1).all(dim=1).logical_not().nonzero()[0, 0])


def check_weights(embed: "torch.Tensor", lm_head: "torch.Tensor | None", header: TraceHeader) -> None:
    """Raises CaptureError unless both are [V, H] in a storable dtype, and ``lm_head`` is None exactly where tied."""
    shape = (header.target.vocab_size, header.target.hidden_size)
    for name, tensor in (("embed", embed), ("lm_head", lm_head)):
        if tensor is None:
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape or dtype not in TAP_DTYPES:
            raise CaptureError(
                f"the target's {name} is {dtype} {list(tensor.shape)}, must be {list(shape)} in {', '.join(TAP_DTYPES)}"
            )
    if (lm_head is None) != header.target.tie_word_embeddings:
        raise CaptureError(
            f"tie_word_embeddings is {header.target.tie_word_embeddings}, so lm_head must "
            + ("be None" if header.target.tie_word_embeddings else "be given")
        )
