"""What can be had from an SGLang server without the plugin: outputs, their log-probabilities, and its own counters.

A trace needs rows of the target, so this makes none. It writes ``responses.jsonl`` into the folder, one request a line
as soon as it is answered: ``id``, ``category``, ``input_ids`` and ``output_ids`` (so the file is a prompt file which
``replay capture --model`` follows, to get rows for these very outputs), ``finish_reason``, ``logprobs`` of the output,
``server`` with completion_tokens, verify_rounds, histogram and cached_tokens (what ``observed.py`` reads), and
``asked``: the target and the sampling, which ``--resume`` goes on with and with no other.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from replay.capture.client.api import ServerApi
from replay.capture.client.asking import Answered, Asker, Refused
from replay.capture.client.facts import ServerFacts
from replay.capture.encode import EncodedRequest
from replay.capture.events import CaptureProgress, CaptureResult, Event, Finished, Noted, Planned
from replay.capture.options import ServerOptions
from replay.capture.spool import RID_PREFIX
from replay.errors import CaptureError, OutputError, TraceCorruptError, TraceError
from replay.traces.fields import is_number, parse_json, show
from replay.traces.files import read_small

RESPONSES = "responses.jsonl"
_MOST = 1 << 32  # bytes of it


def capture_answers(
    options: ServerOptions,
    api: ServerApi,
    facts: ServerFacts,
    requests: Sequence[EncodedRequest],
    on_event: Callable[[Event], None],
) -> CaptureResult:
    """Ask for everything that is not in ``responses.jsonl`` yet. Raises CaptureError, OutputError."""
    path = options.out / RESPONSES
    asked = _asked(options, facts)
    done = _begin(path, options, requests, asked)
    todo = [one for one in requests if one.request_id not in done]
    on_event(
        Noted(
            f"{api.url} (SGLang {facts.version}) does not record: {path} gets its outputs and counters, and there will "
            "be no trace"
        )
    )
    prompt_tokens = sum(len(one.prompt_ids) for one in todo)
    so_far = _SoFar(len(requests), len(done), sum(one.max_new_tokens for one in todo))
    on_event(Planned(so_far.requests, so_far.done, prompt_tokens, so_far.tokens_left))
    asker = Asker(api, options, f"{RID_PREFIX}{secrets.token_hex(8)}", logprobs=True)
    asker.start(todo)
    try:
        _keep_answers(path, asker, asked, so_far, on_event)
    except KeyboardInterrupt:
        raise CaptureError(
            f"interrupted: {so_far.done} of {so_far.requests} answers are safe in {path}; type the same command with "
            "--resume to go on"
        ) from None
    except OSError as error:
        raise OutputError(f"cannot write to {path}: {error.strerror}; mend this and type --resume") from error
    finally:
        asker.stop()
    result = CaptureResult(
        options.out, so_far.requests, len(todo) - len(so_far.refused), prompt_tokens, so_far.tokens, so_far.seconds,
        (), "", so_far.refused,
    )  # fmt: skip
    on_event(Finished(result))
    return result


def _keep_answers(
    path: Path, asker: Asker, asked: dict[str, Any], so_far: "_SoFar", on_event: Callable[[Event], None]
) -> None:
    """Each answer is in the file before the next is looked at. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        while so_far.unfinished:
            for one in asker.new_answers():
                if isinstance(one, Answered):
                    file.write(json.dumps(_row(one, asked), ensure_ascii=False) + "\n")
                    file.flush()
                on_event(so_far.count(one))


@dataclass(slots=True)
class _SoFar:
    """How far the answers of a run are."""

    requests: int
    done: int
    tokens_left: int  # at most
    tokens: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def unfinished(self) -> bool:
        return self.done + len(self.refused) < self.requests

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def count(self, one: Answered | Refused) -> Event:
        """Take ``one`` into account; what is told of it."""
        self.tokens_left -= one.request.max_new_tokens
        if isinstance(one, Refused):
            self.refused[one.request.request_id] = one.reason
            return Noted(f"the server refused request {show(one.request.request_id)} ({one.reason})")
        self.done += 1
        self.tokens += len(one.answer.output_ids)
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return CaptureProgress(self.done, self.requests, self.tokens, self.tokens_left, self.seconds, rate)


def _asked(options: ServerOptions, facts: ServerFacts) -> dict[str, Any]:
    """What all answers of one file share."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k")
    return {"target": facts.model_path, **{name: getattr(options, name) for name in names}}


def _row(one: Answered, asked: dict[str, Any]) -> dict[str, Any]:
    request, answer = one.request, one.answer
    logprobs = answer.meta.get("output_token_logprobs")
    return {
        "id": request.request_id,
        "category": request.category,
        "input_ids": list(request.prompt_ids),
        "output_ids": list(answer.output_ids),
        "finish_reason": answer.finish_reason,
        "logprobs": [_logprob(token) for token in logprobs] if isinstance(logprobs, list) else None,
        "server": asdict(answer.counters),
        "asked": asked,
    }


def _logprob(token: object) -> float | None:
    """The log-probability in one of the server's entries; None where there is none."""
    value: Any = token[0] if isinstance(token, list) and token else None
    return float(value) if is_number(value, -1e30, 0) else None


def _begin(path: Path, options: ServerOptions, requests: Sequence[EncodedRequest], asked: dict[str, Any]) -> set[str]:
    """Make the folder; the ids that are answered already. A last line that was cut off is taken away.

    Raises OutputError; TraceError where the answers are to other prompts, or were asked for in another way.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if options.force:
            path.unlink(missing_ok=True)
        if not os.path.lexists(path):
            return set()
        data = read_small(path, _MOST)
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
    except (OSError, TraceCorruptError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"cannot write to {path}: {said}; choose another -o") from error
    try:
        lines: list[Any] = [parse_json(line, "it", ValueError) for line in whole.splitlines()]
        rows = {str(row["id"]): (row["input_ids"], row["asked"]) for row in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} holds other lines than answers: type --force, or another -o") from error
    prompts = {one.request_id: list(one.prompt_ids) for one in requests}
    for name, (prompt, before) in rows.items():
        _check_same(path, name, (prompts.get(name), asked), (prompt, before))
    return set(rows)


def _check_same(path: Path, name: str, now: tuple[Any, dict[str, Any]], begun: tuple[Any, Any]) -> None:
    """Raises TraceError where an answer is one to another question."""
    for key, value in now[1].items():
        before = begun[1].get(key) if isinstance(begun[1], dict) else None
        if before != value:
            raise TraceError(
                f"{path} was begun with {key} {show(before)}, now it is {show(value)}: resume with the former, or type "
                "--force to begin anew"
            )
    if now[0] != begun[0]:
        seen = "is not among the prompts" if now[0] is None else "has another prompt now"
        raise TraceError(
            f"{path} holds an answer to {show(name)}, which {seen}: resume with the same prompts, or type --force to "
            "begin anew"
        )
