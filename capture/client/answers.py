"""What is asked of a server for one request, and how its answer is read."""

from typing import Any

from replay.capture.client.api import ServerApi, TransientError
from replay.capture.client.join import Answer
from replay.capture.encode import EncodedRequest
from replay.capture.options import ServerOptions
from replay.errors import CaptureError
from replay.traces.captured import ServerCounters


def generate(api: ServerApi, request: EncodedRequest, rid: str, options: ServerOptions, *, logprobs: bool) -> Answer:
    """One try to have ``request`` answered. Raises TransientError, CaptureError."""
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "extra_key": rid,  # a radix tree of its own: every prompt row is computed
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k if options.top_k > 0 else -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
        },
    }
    if logprobs:
        body["return_logprob"] = True
    return read_answer(api.call("/generate", body), request.request_id)


def read_answer(value: Any, name: str) -> Answer:
    """An answer of ``/generate``. Raises TransientError where it was aborted, CaptureError for another shape."""
    meta = value.get("meta_info") if isinstance(value, dict) else None
    output = value.get("output_ids") if isinstance(value, dict) else None
    if not isinstance(meta, dict) or not isinstance(output, list) or any(type(token) is not int for token in output):
        raise CaptureError(
            f"the server's answer for {name!r} has no meta_info and output_ids, so it is no SGLang server that replay "
            f"knows: {str(value)[:200]}"
        )
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind == "abort" or not output:
        raise TransientError(f"the server aborted {name!r} ({str(reason)[:200]})")
    if kind not in ("stop", "length"):
        raise CaptureError(f"the server ended {name!r} by {kind!r}, possible are stop and length")
    counters = ServerCounters(
        completion_tokens=int(meta.get("completion_tokens") or len(output)),
        verify_rounds=int(meta.get("spec_verify_ct") or 0),
        histogram=tuple(int(count) for count in meta.get("spec_correct_drafts_histogram") or ()),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )
    return Answer(tuple(output), kind, str(value.get("text") or ""), counters, meta)
