"""``replay capture --server``: drive a recording server with a prompt file, and make a trace of what it recorded.

Each request gets an id of this client's own and a cache salt of its own, so that no cached prefix takes the place of
rows. Its answer comes over HTTP, its rows through the spool; both are joined, and finished requests go into the trace
in batches. A server without the plugin gives answers only: see capture/stock.py.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import replay
from replay.capture.encode import EncodedRequest, Limits, encode_prompts
from replay.capture.events import CaptureResult, Event, Finished, Loading, Noted, Planned, Progress
from replay.capture.join import Answer, Joined, first_missing, histogram_of, join, same_histogram
from replay.capture.prompts import PromptFile, read_prompts
from replay.capture.server_api import ServerApi, TransientError, open_api
from replay.capture.server_facts import ServerFacts, read_facts
from replay.capture.spool import RID_PREFIX, read_manifests
from replay.capture.spool_reader import SpoolReader
from replay.errors import CaptureError, OutputError, PromptError, TraceError, UsageError
from replay.traces.captured import CapturedRequest, ServerCounters
from replay.traces.schema import CaptureSettings, TapInfo, TraceHeader
from replay.traces.taps import EMBED, FINAL, parse_taps, sort_taps

if TYPE_CHECKING:
    import torch

    from replay.traces.writer import TraceWriter

_BATCH_REQUESTS = 16  # finished requests are written when they are so many,
_BATCH_BYTES = 1 << 28  # or so large,
_BATCH_SECONDS = 5.0  # or when the first of them is so old
_ROWS_SECONDS = 30.0  # how long rows may come after the answer
_POLL_SECONDS = 0.05
_ATTEMPTS = 3  # for a request whose rows do not come whole
_PROBE_TOKENS = 64  # of the first prompt, with which the way of the rows is tried


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What to ask of which server. ``top_k`` below 1 and ``top_p`` 1 leave all tokens in; temperature 0 is greedy."""

    server: str
    prompts: Path
    out: Path
    taps: str | None = None  # of those the server records; None: all of them
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    raw: bool = False
    concurrency: int = 16  # requests in flight
    weights: bool = True  # write the target's embedding and lm_head beside the trace
    resume: bool = False
    force: bool = False
    api_key: str | None = None
    recording: Path | None = None  # where the server's recording folder is seen here
    timeout: float = 600.0  # seconds without an answer
    retries: int = 5


def capture_server(options: ServerOptions, on_event: Callable[[Event], None]) -> CaptureResult:
    """Capture every row of a prompt file from a server. Finished requests are safe; ``resume`` does what is missing.

    Raises UsageError, PromptError, CaptureError, OutputError and TraceError; what can be refused is refused before the
    first prompt is sent.
    """
    check_options(options)
    prompts = read_prompts(options.prompts)
    check_place(options)
    api = open_api(options.server, options.api_key, timeout=options.timeout, retries=options.retries)
    facts = read_facts(api, options.recording)
    requests = encode(prompts, facts, options)
    on_event(Loading(facts.model_path, len(requests)))
    if not facts.recording:
        from replay.capture.stock import capture_stock

        return capture_stock(options, api, facts, requests, on_event)
    return _capture_recorded(options, prompts, api, facts, requests, on_event)


def check_options(options: ServerOptions) -> None:
    """Raises UsageError."""
    checks = (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens >= 1, "1 or more"),
        ("--temperature", options.temperature, 0 <= options.temperature < float("inf"), "0 (greedy) or more"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "above 0 and at most 1"),
        ("--concurrency", options.concurrency, options.concurrency >= 1, "1 or more"),
        ("--timeout", options.timeout, options.timeout > 0, "above 0"),
        ("--retries", options.retries, options.retries >= 0, "0 or more"),
    )
    for name, value, good, possible in checks:
        if not good:
            raise UsageError(f"{name} {value} cannot be: type a number that is {possible}")
    if options.resume and options.force:
        raise UsageError("--resume goes on with a trace and --force replaces it: type one of them")


def check_place(options: ServerOptions) -> None:
    """Refuse a taken place before the server is asked. Raises OutputError."""
    from replay.capture.spool import SPOOL

    taken = options.out.exists() and (
        not options.out.is_dir() or any(path.name != SPOOL for path in options.out.iterdir())
    )
    if taken and not (options.resume or options.force):
        raise OutputError(
            f"{options.out} exists already: type --resume to go on with it, --force to replace it, or another -o"
        )


def encode(prompts: PromptFile, facts: ServerFacts, options: ServerOptions) -> list[EncodedRequest]:
    """Token ids of every row, by the server's tokenizer. Raises PromptError, CaptureError."""
    forced = next((row for row in prompts.rows if row.response is not None or row.output_ids is not None), None)
    if forced is not None:
        raise PromptError(
            f"{prompts.place(forced)} gives the output, and a server only generates: take it out, or capture it with "
            "--model"
        )
    tokenizer, vocab_size = None, facts.vocab_size
    if any(row.input_ids is None for row in prompts.rows):
        from replay.capture.local_target import open_target

        files = open_target(facts.tokenizer_path)
        tokenizer, vocab_size = files.tokenizer, vocab_size or files.limits.vocab_size
    limits = Limits(vocab_size or (1 << 31) - 1, facts.context)
    return encode_prompts(prompts, tokenizer, limits, raw=options.raw, max_new_tokens=options.max_new_tokens)


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


def _capture_recorded(
    options: ServerOptions,
    prompts: PromptFile,
    api: ServerApi,
    facts: ServerFacts,
    requests: Sequence[EncodedRequest],
    on_event: Callable[[Event], None],
) -> CaptureResult:
    from replay.traces.writer import TraceWriter

    target = facts.target()
    taps = _wanted_taps(options, facts, target.layers)
    assert facts.spool is not None
    session = f"{RID_PREFIX}{secrets.token_hex(8)}"
    spool = SpoolReader(facts.spool, facts.taps, target.hidden_size, session)
    client = _Client(options, api, facts, spool, session, on_event)
    probe = client.probe(requests[0])
    header = _header(options, prompts, facts, taps)
    weights, lookup, lacking = _weights_and_lookup(options, header, probe, requests[0])
    if lacking:
        on_event(Noted(f"the trace will lack {lacking}"))
        header = replace(header, missing=(*header.missing, lacking))
    stored = sort_taps([FINAL, *(tap for tap in taps if tap != EMBED), *([] if lookup else [EMBED])])
    info = TapInfo(target.dtype, target.hidden_size)
    header = replace(header, taps={tap: info for tap in stored}, embed="lookup" if lookup else "stored")
    begin = TraceWriter.resume if options.resume else partial(TraceWriter.create, force=options.force)
    with begin(options.out, header) as writer:
        if weights is not None and options.weights:
            writer.write_target_weights(*weights)
        return client.run(requests, writer, stored)


def _wanted_taps(options: ServerOptions, facts: ServerFacts, layers: int) -> tuple[str, ...]:
    """What goes into the trace: what was asked for, and always what the draft is fed. Raises UsageError."""
    if options.taps is None:
        return facts.taps
    wanted = parse_taps(options.taps, layers=layers)
    lacking = [tap for tap in wanted if tap not in facts.taps]
    if lacking:
        raise UsageError(
            f"--taps {','.join(lacking)} are not recorded by the server (it records {','.join(facts.taps)}): start it "
            "by replay serve with these taps"
        )
    return sort_taps([FINAL, *wanted, *facts.manifests[0].wiring])


def _header(options: ServerOptions, prompts: PromptFile, facts: ServerFacts, taps: Sequence[str]) -> TraceHeader:
    target = facts.target()
    missing = [
        "for each request, the target's choices beyond its last verify (those within it are its tail_ids)",
        *(["verify rounds of a server: it drafts nothing"] if not facts.manifests[0].wiring else []),
        *(["the server's random numbers: it draws its own, --seed has no effect"] if options.temperature > 0 else []),
    ]
    return TraceHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        replay_version=replay.__version__,
        target=target,
        engine=facts.engine(),
        taps={tap: TapInfo(target.dtype, target.hidden_size) for tap in taps},
        topk=min(facts.manifests[0].topk, target.vocab_size),
        capture=CaptureSettings(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            raw=options.raw,
            prompts_sha256=prompts.sha256,
        ),
        missing=tuple(missing),
    )


def _weights_and_lookup(
    options: ServerOptions, header: TraceHeader, probe: Joined, request: EncodedRequest
) -> "tuple[tuple[torch.Tensor, torch.Tensor | None] | None, bool, str]":
    """The target's weights, whether R[0] is a lookup in its embedding, and what is missing of them, in words."""
    import torch

    from replay.traces.weights import load_weight

    try:
        embed = load_weight(options.out, header, EMBED)
        lm_head = None if header.target.tie_word_embeddings else load_weight(options.out, header, "lm_head")
    except TraceError as error:
        return None, False, f"the target's embedding and output rows ({error})"
    ids = torch.tensor(request.prompt_ids[:_PROBE_TOKENS])
    lookup = torch.equal(embed[ids].to(probe.taps[EMBED].dtype), probe.taps[EMBED][: len(ids)])
    return (embed, lm_head), lookup, ""


@dataclass(slots=True)
class _Waiting:
    """An answered request whose rows are still coming."""

    request: EncodedRequest
    rid: str
    attempt: int
    answer: Answer
    since: float


@dataclass(slots=True)
class _Batch:
    """Finished requests on their way to the trace."""

    requests: list[CapturedRequest] = field(default_factory=list)
    rounds: list[tuple[str, Joined]] = field(default_factory=list)
    rids: list[str] = field(default_factory=list)
    bytes: int = 0
    since: float = 0.0


class _Client:
    """Sends requests, gathers their rows and writes them; everything but the HTTP calls happens in one thread."""

    def __init__(
        self,
        options: ServerOptions,
        api: ServerApi,
        facts: ServerFacts,
        spool: SpoolReader,
        session: str,
        on_event: Callable[[Event], None],
    ) -> None:
        self.options, self.api, self.facts, self.spool = options, api, facts, spool
        self.session, self.on_event = session, on_event
        self.tasks: queue.SimpleQueue[tuple[EncodedRequest, int]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[_Waiting | BaseException] = queue.SimpleQueue()
        self.started = time.monotonic()
        self.output_tokens = self.most_left = self.differing = self.cached = 0
        self.stop = False

    def probe(self, request: EncodedRequest) -> Joined:
        """Rows of a short prompt, all the way: the server, its plugin, the folder and this process work together."""
        short = replace(request, prompt_ids=request.prompt_ids[:_PROBE_TOKENS], max_new_tokens=1)
        rid = f"{self.session}-probe"
        answer = self.api.patiently(
            lambda attempt: generate(self.api, short, f"{rid}-{attempt}", self.options, logprobs=False)
        )
        deadline = time.monotonic() + _ROWS_SECONDS
        tokens = len(short.prompt_ids) + len(answer.output_ids)
        while time.monotonic() < deadline:
            self.spool.poll()
            for attempt in range(self.options.retries + 1):
                recorded = self.spool.rows(f"{rid}-{attempt}")
                if first_missing(recorded, tokens - 1) is None:
                    joined = join("the probe", short.prompt_ids, answer.output_ids, recorded, self.facts.taps)
                    self.spool.drop([f"{rid}-{one}" for one in range(self.options.retries + 1)])
                    return joined
            self._check_recording()
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
        finally:
            self.stop = True
        self._note_doubts(writer)
        writer.finish()
        seconds = time.monotonic() - self.started
        result = CaptureResult(
            self.options.out, len(requests), len(todo), prompt_tokens, self.output_tokens, seconds, taps,
            writer.header.embed,
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
        number = attempt * (self.options.retries + 1)
        tag = secrets.token_hex(6)
        rid = ""

        def once(again: int) -> Answer:
            nonlocal rid
            rid = f"{self.session}-{tag}-{number + again}"
            return generate(self.api, request, rid, self.options, logprobs=False)

        try:
            answer = self.api.patiently(once)
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
                waiting += self._new_answers()
                self.spool.poll()
                still: list[_Waiting] = []
                for one in waiting:
                    tokens = len(one.request.prompt_ids) + len(one.answer.output_ids)
                    if first_missing(self.spool.rows(one.rid), tokens - 1) is None:
                        self._finish(one, batch, taps)
                        left -= 1
                    elif time.monotonic() - one.since > _ROWS_SECONDS:
                        self._check_recording()
                        self._again(one)
                    else:
                        still.append(one)
                waiting = still
                if batch.requests and (not left or _is_full(batch)):
                    self._write(batch, writer, requests)
                    batch = _Batch()
                if waiting and time.monotonic() - waiting[0].since > 1:
                    self._check_recording()
        finally:
            if batch.requests:  # what is whole is kept, whatever ends the run
                self._write(batch, writer, requests)

    def _new_answers(self) -> list[_Waiting]:
        """Those that have come; waits a little for the first. Raises what ended a request for good."""
        answers: list[_Waiting] = []
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
        joined = join(name, request.prompt_ids, answer.output_ids, self.spool.rows(one.rid), taps)
        if not same_histogram(histogram_of(joined.rounds), answer.counters.histogram):
            self.differing += 1
        self.cached += answer.counters.cached_tokens > 0
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
            )
        )
        batch.rounds.append((request.request_id, joined))
        batch.rids.append(one.rid)
        batch.bytes += sum(tap.nbytes for tap in joined.taps.values())
        batch.since = batch.since or time.monotonic()
        self.output_tokens += len(answer.output_ids)
        self.most_left -= request.max_new_tokens

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
        self.on_event(Progress(len(writer.done_ids), requests, self.output_tokens, self.most_left, seconds, rate))

    def _check_recording(self) -> None:
        """Raises CaptureError where the server has stopped recording."""
        manifests = read_manifests(self.spool.folder)
        if not manifests:
            raise CaptureError(
                f"{self.spool.folder} is gone: the server was started anew; type the same command with --resume"
            )
        for one in manifests:
            if one.state != "recording":
                raise CaptureError(
                    f"the server goes on but has stopped recording ({one.reason}): mend this, restart it by replay "
                    "serve and type the same command with --resume"
                )

    def _note_doubts(self, writer: "TraceWriter") -> None:
        doubts = []
        if self.differing:
            doubts.append(
                f"{self.differing} requests whose recorded rounds differ from the histogram the server counted for them"
            )
        if self.cached:
            doubts.append(f"{self.cached} requests of which the server took a prefix from its cache")
        for text in doubts:
            self.on_event(Noted(text))
        writer.header = replace(writer.header, missing=(*writer.header.missing, *doubts))


def _is_full(batch: _Batch) -> bool:
    return (
        len(batch.requests) >= _BATCH_REQUESTS
        or batch.bytes >= _BATCH_BYTES
        or time.monotonic() - batch.since >= _BATCH_SECONDS
    )


def _rounds_frame(rounds: Sequence[tuple[str, Joined]]) -> Any:
    """The table of served rounds (SPEC.md, section 6)."""
    import polars as pl

    from replay.traces.served import served_schema

    rows = [
        (request_id, number, one.anchor, list(one.drafted), one.accepted)
        for request_id, joined in rounds
        for number, one in enumerate(joined.rounds)
    ]
    return pl.DataFrame(rows, schema=served_schema(), orient="row")


def _also(problems: Sequence[str]) -> str:
    return f" ({len(problems)} files were refused, the first: {problems[0]})" if problems else ""
