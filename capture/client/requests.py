"""Requests in flight: sent, their rows gathered from the spool, joined, and written to the trace in batches."""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from replay.capture.client.answers import generate
from replay.capture.client.api import RefusedError, ServerApi
from replay.capture.client.facts import ServerFacts
from replay.capture.client.join import (
    Answer,
    JoinedRequest,
    first_missing,
    histogram_of,
    join,
    lacks_feed,
    same_histogram,
)
from replay.capture.client.spool_reader import SpoolReader, rid_of
from replay.capture.client.watch import RecordingStoppedError, RecordingWatch
from replay.capture.encode import EncodedRequest
from replay.capture.events import CaptureProgress, CaptureResult, Event, Finished, Noted, Planned
from replay.capture.options import ServerOptions
from replay.errors import CaptureError, OutputError, TraceCorruptError
from replay.traces.captured import CapturedRequest

if TYPE_CHECKING:
    from replay.traces.writer import TraceWriter

_BATCH_REQUESTS = 16  # finished requests are written when they are so many,
_BATCH_BYTES = 1 << 28  # or so large,
_BATCH_SECONDS = 5.0  # or when the first of them is so old
_ROWS_SECONDS = 30.0  # how long rows may come after the answer
_FEED_SECONDS = 5.0  # how long what the draft was fed may come after the answer; other requests do not wait for it
_POLL_SECONDS = 0.05
_ATTEMPTS = 3  # for a request whose rows do not come whole
PROBE_TOKENS = 64  # of the first prompt, with which the way of the rows is tried
# Sentences of the header's ``missing`` begin so; a resumed capture says them anew.
_REFUSED = "the server refused request "
_STOPPED = "the requests that were not finished when the server stopped recording"


@dataclass(slots=True)
class _Waiting:
    """An answered request whose rows are still coming."""

    request: EncodedRequest
    rid: str
    attempt: int
    answer: Answer
    since: float


@dataclass(slots=True)
class _Refused:
    """A request that the server does not take, and why."""

    request: EncodedRequest
    reason: str


@dataclass(slots=True)
class _Batch:
    """Finished requests on their way to the trace."""

    requests: list[CapturedRequest] = field(default_factory=list)
    rounds: list[tuple[str, JoinedRequest]] = field(default_factory=list)
    rids: list[str] = field(default_factory=list)
    bytes: int = 0
    since: float = 0.0


class ServerClient:
    """Sends requests, gathers their rows and writes them; everything but the HTTP calls happens in one thread."""

    def __init__(
        self,
        options: ServerOptions,
        api: ServerApi,
        facts: ServerFacts,
        spool: SpoolReader,
        on_event: Callable[[Event], None],
    ) -> None:
        self.options, self.api, self.facts, self.spool, self.on_event = options, api, facts, spool, on_event
        self.tasks: queue.SimpleQueue[tuple[EncodedRequest, int]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[_Waiting | _Refused | BaseException] = queue.SimpleQueue()
        self.refused: dict[str, str] = {}
        self.watch = RecordingWatch(api, spool.folder, facts.no_feed)
        self.started = time.monotonic()
        self.output_tokens = self.most_left = self.differing = self.cached = self.unfed = 0
        self.stop = False

    def probe(self, request: EncodedRequest) -> JoinedRequest:
        """Rows of a short prompt, all the way: the server, its plugin, the folder and this process work together."""
        short = replace(request, prompt_ids=request.prompt_ids[:PROBE_TOKENS], max_new_tokens=1)
        rid = partial(rid_of, self.spool.client, "probe")
        answer = self.api.patiently(
            lambda attempt: generate(self.api, short, rid(attempt), self.options, logprobs=False)
        )
        deadline = time.monotonic() + _ROWS_SECONDS
        tokens = len(short.prompt_ids) + len(answer.output_ids)
        while time.monotonic() < deadline:
            self.spool.poll()
            for attempt in range(self.options.retries + 1):
                recorded = self.spool.rows(rid(attempt))
                if first_missing(recorded, tokens - 1) is None:
                    joined = join("the probe", short.prompt_ids, answer.output_ids, recorded, self.facts.taps)
                    self.spool.drop([rid(attempt)])
                    return joined
            self.watch.check()
            time.sleep(_POLL_SECONDS)
        raise CaptureError(
            f"{self.api.url} answers, but no rows of it came into {self.spool.folder} within {_ROWS_SECONDS:.0f} s: "
            f"see its log{_also(self.spool.problems)}"
        )

    def run(self, requests: Sequence[EncodedRequest], writer: "TraceWriter", taps: tuple[str, ...]) -> CaptureResult:
        """Everything that is not in the trace yet; completes it."""
        done = writer.done_ids
        todo = [one for one in requests if one.request_id not in done]
        self.most_left = sum(one.max_new_tokens for one in todo)
        prompt_tokens = sum(len(one.prompt_ids) for one in todo)
        self.on_event(Planned(len(requests), len(done), prompt_tokens, self.most_left))
        for one in todo:
            self.tasks.put((one, 0))
        for _ in range(min(self.options.concurrency, len(todo))):
            threading.Thread(target=self._work, name="replay-request", daemon=True).start()
        try:
            self._gather(todo, len(requests), writer, taps)
        except KeyboardInterrupt:
            raise CaptureError(
                f"interrupted: {len(writer.done_ids)} of {len(requests)} requests are safe in {self.options.out}; type "
                "the same command with --resume to go on"
            ) from None
        except RecordingStoppedError as error:
            self._note_end(writer, f"{_STOPPED} ({error.reason})")
            raise
        finally:
            self.stop = True
        if self.refused and not writer.done_ids:
            first = next(iter(self.refused.values()))
            raise CaptureError(f"{self.api.url} refused all {len(self.refused)} requests, the first: {first}")
        self._note_doubts(writer)
        writer.finish()
        seconds = time.monotonic() - self.started
        result = CaptureResult(
            self.options.out, len(requests), len(todo) - len(self.refused), prompt_tokens, self.output_tokens, seconds,
            taps, writer.header.embed, dict(self.refused),
        )  # fmt: skip
        self.on_event(Finished(result))
        return result

    def _work(self) -> None:
        """A thread's life: one task after another, until the run ends."""
        while not self.stop:
            try:
                request, attempt = self.tasks.get(timeout=1)
            except queue.Empty:
                continue
            self._ask(request, attempt)

    def _ask(self, request: EncodedRequest, attempt: int) -> None:
        """One request until it is answered, each try under an id of its own."""
        tag = secrets.token_hex(6)
        rid = ""

        def once(again: int) -> Answer:
            nonlocal rid
            rid = rid_of(self.spool.client, tag, again)
            return generate(self.api, request, rid, self.options, logprobs=False)

        try:
            answer = self.api.patiently(once)
        except RefusedError as error:
            self.answers.put(_Refused(request, error.reason))
        except BaseException as error:  # handed to the gathering thread, which raises it
            self.answers.put(error)
        else:
            self.answers.put(_Waiting(request, rid, attempt, answer, time.monotonic()))

    def _gather(
        self,
        todo: Sequence[EncodedRequest],
        requests: int,
        writer: "TraceWriter",
        taps: Sequence[str],
    ) -> None:
        waiting: list[_Waiting] = []
        batch = _Batch()
        left = len(todo)
        try:
            while left:
                for answer in self._new_answers():
                    if isinstance(answer, _Refused):
                        self._refuse(answer)
                        left -= 1
                    else:
                        waiting.append(answer)
                self.spool.poll()
                still: list[_Waiting] = []
                for one in waiting:
                    if self._is_whole(one):
                        self._finish(one, batch, taps)
                        left -= 1
                    elif time.monotonic() - one.since > _ROWS_SECONDS:
                        self.watch.check()
                        self._again(one)
                    else:
                        still.append(one)
                waiting = still
                if batch.requests and (not left or _is_full(batch)):
                    self._write(batch, writer, requests)
                    batch = _Batch()
                if waiting and time.monotonic() - waiting[0].since > 1:
                    self.watch.check()
        finally:
            if batch.requests:  # what is whole is kept, whatever ends the run
                self._write(batch, writer, requests)

    def _is_whole(self, one: _Waiting) -> bool:
        """Whether all its rows are there, and what the draft was fed with it, which is waited for only so long."""
        recorded = self.spool.rows(one.rid)
        tokens = len(one.request.prompt_ids) + len(one.answer.output_ids)
        if first_missing(recorded, tokens - 1) is not None:
            return False
        if not self.facts.drafts or self.watch.no_feed or time.monotonic() - one.since > _FEED_SECONDS:
            return True
        return not lacks_feed([it.entry for it in recorded])

    def _new_answers(self) -> list[_Waiting | _Refused]:
        """Those that have come; waits a little for the first. Raises what ended a request for good."""
        answers: list[_Waiting | _Refused] = []
        try:
            one = self.answers.get(timeout=_POLL_SECONDS)
            while True:
                if isinstance(one, BaseException):
                    raise one
                answers.append(one)
                one = self.answers.get_nowait()
        except queue.Empty:
            return answers

    def _finish(self, one: _Waiting, batch: _Batch, taps: Sequence[str]) -> None:
        request, answer = one.request, one.answer
        name = f"request {request.request_id!r}"
        try:
            joined = join(name, request.prompt_ids, answer.output_ids, self.spool.rows(one.rid), taps)
        except TraceCorruptError:
            self.watch.check()  # rows that vanish while they are read are those of a server started anew
            raise
        if not same_histogram(histogram_of(joined.rounds), answer.counters.histogram):
            self.differing += 1
        self.cached += answer.counters.cached_tokens > 0
        self.unfed += self.facts.drafts and joined.feed is None
        batch.requests.append(
            CapturedRequest(
                request_id=request.request_id,
                category=request.category,
                prompt_ids=list(request.prompt_ids),
                output_ids=list(answer.output_ids),
                finish_reason=answer.finish_reason,
                source="generated",
                temperature=self.options.temperature,
                top_p=self.options.top_p,
                top_k=self.options.top_k,
                taps=joined.taps,
                topk_ids=joined.topk_ids,
                topk_logprobs=joined.topk_logprobs,
                logsumexp=joined.logsumexp,
                tail_ids=list(joined.tail_ids),
                server=answer.counters,
                feed=joined.feed,
            )
        )
        batch.rounds.append((request.request_id, joined))
        batch.rids.append(one.rid)
        batch.bytes += sum(tap.nbytes for tap in joined.taps.values())
        batch.since = batch.since or time.monotonic()
        self.output_tokens += len(answer.output_ids)
        self.most_left -= request.max_new_tokens

    def _refuse(self, one: _Refused) -> None:
        """Leave a request out; the others go on."""
        self.refused[one.request.request_id] = one.reason
        self.most_left -= one.request.max_new_tokens
        self.on_event(Noted(f"{_REFUSED}{one.request.request_id!r} ({one.reason}); the trace goes on without it"))

    def _again(self, one: _Waiting) -> None:
        """Ask for a request anew whose rows did not come whole."""
        self.spool.drop([one.rid])
        if one.attempt + 1 == _ATTEMPTS:
            raise CaptureError(
                f"the rows of request {one.request.request_id!r} did not come whole in {_ATTEMPTS} tries: see the "
                f"server's log{_also(self.spool.problems)}; type the same command with --resume to go on"
            )
        self.on_event(Noted(f"the rows of request {one.request.request_id!r} did not come whole; asking again"))
        self.tasks.put((one.request, one.attempt + 1))

    def _write(self, batch: _Batch, writer: "TraceWriter", requests: int) -> None:
        if any(joined.rounds for _, joined in batch.rounds):
            writer.add_rounds(_rounds_frame(batch.rounds))
        writer.add(batch.requests)
        self.spool.drop(batch.rids)
        seconds = time.monotonic() - self.started
        rate = self.output_tokens / seconds if seconds > 0 else 0.0
        self.on_event(
            CaptureProgress(len(writer.done_ids), requests, self.output_tokens, self.most_left, seconds, rate)
        )

    def _note_end(self, writer: "TraceWriter", sentence: str) -> None:
        try:
            writer.set_missing([*self._lasting(writer), sentence])
        except OutputError:
            pass  # what ended the capture is told anyway, and matters more

    def _note_doubts(self, writer: "TraceWriter") -> None:
        doubts = []
        if self.differing:
            doubts.append(
                f"{self.differing} requests whose recorded rounds differ from the histogram the server counted for them"
            )
        if self.cached:
            doubts.append(f"{self.cached} requests of which the server took a prefix from its cache")
        if self.unfed:
            why = f" ({self.watch.no_feed})" if self.watch.no_feed else ""
            doubts.append(f"{self.unfed} requests of which it was not recorded what the draft was fed{why}")
        for text in doubts:
            self.on_event(Noted(text))
        refused = [f"{_REFUSED}{name!r} ({reason})" for name, reason in self.refused.items()]
        missing = (*self._lasting(writer), *refused, *doubts)
        if missing != writer.header.missing:
            writer.set_missing(missing)

    def _lasting(self, writer: "TraceWriter") -> list[str]:
        """What was said to be missing, but for what this run says anew."""
        return [text for text in writer.header.missing if not text.startswith((_REFUSED, _STOPPED))]


def _is_full(batch: _Batch) -> bool:
    return (
        len(batch.requests) >= _BATCH_REQUESTS
        or batch.bytes >= _BATCH_BYTES
        or time.monotonic() - batch.since >= _BATCH_SECONDS
    )


def _rounds_frame(rounds: Sequence[tuple[str, JoinedRequest]]) -> Any:
    """The table of served rounds (SPEC.md, section 6)."""
    import polars as pl

    from replay.traces.server_rounds import served_schema

    rows = [
        (request_id, number, one.anchor, list(one.drafted), one.accepted, list(one.parents) or None, one.batch or None)
        for request_id, joined in rounds
        for number, one in enumerate(joined.rounds)
    ]
    return pl.DataFrame(rows, schema=served_schema(), orient="row")


def _also(problems: Sequence[str]) -> str:
    return f" ({len(problems)} files were refused, the first: {problems[0]})" if problems else ""
