"""What is asked of a server for one request, and how its answer is read."""

from typing import Any

from replay.capture.client.api import ServerApi, TransientError
from replay.capture.client.join import Answer
from replay.capture.encode import EncodedRequest
from replay.capture.options import ServerOptions
from replay.errors import CaptureError
from replay.printable import one_line
from replay.traces.captured import ServerCounters
from replay.traces.fields import Fields, show
from replay.traces.header import MAX_COUNT, MAX_VOCAB
from replay.traces.records import MAX_STEPS

MAX_TOKENS = 1 << 24  # of one output
_SHOWN = 200  # characters of a reason


def generate(
    api: ServerApi,
    request: EncodedRequest,
    rid: str,
    options: ServerOptions,
    *,
    logprobs: bool,
    salt: str | None = None,
) -> Answer:
    """One try to have ``request`` answered; requests of one ``salt`` share the server's cache, without one none does.

    Raises TransientError, CaptureError.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "extra_key": salt or rid,  # by itself, a radix tree of its own: every prompt row is computed
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
    where = f"the server's answer for {show(name)}"
    answer = Fields(where, value, _no_answer)
    meta = answer.object("meta_info")
    output = answer.integers("output_ids", 0, MAX_VOCAB, MAX_TOKENS)
    reason = meta.values.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind == "abort" or not output:
        raise TransientError(f"the server aborted {show(name)} ({one_line(str(reason), _SHOWN)})")
    if kind not in ("stop", "length"):
        raise CaptureError(f"the server ended {show(name)} by {show(kind)}, possible are stop and length")
    counters = ServerCounters(
        completion_tokens=_count(meta, "completion_tokens") or len(output),
        verify_rounds=_count(meta, "spec_verify_ct"),
        histogram=_counts(meta, "spec_correct_drafts_histogram"),
        cached_tokens=_count(meta, "cached_tokens"),
    )
    text = answer.values.get("text")
    return Answer(output, kind, text if isinstance(text, str) else "", counters, meta.values)


def _no_answer(said: str) -> CaptureError:
    return CaptureError(f"{said}, so it is no SGLang server that replay knows")


def _count(meta: Fields, name: str) -> int:
    """0 where the server says nothing."""
    return 0 if meta.values.get(name) is None else meta.integer(name, 0, MAX_COUNT)


def _counts(meta: Fields, name: str) -> tuple[int, ...]:
    return () if not meta.values.get(name) else meta.integers(name, 0, MAX_COUNT, MAX_STEPS + 1)
