"""`replay time`: how long rounds of a running SGLang server take, at several batches and contexts.

Each load is asked for as one batch in one question, so that its requests start together, greedily and without an end
at the end of a text. Everything is asked once to warm up, then ``repeats`` times, load after load, so that a drift of
the machine falls on all of them alike. SGLang 0.5.23 has no way to ask one request not to draft: a plain step is timed
on a server that was started without drafting.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import replay
from replay.capture.client.api import NoSuchPathError, RefusedError, ServerApi, TransientError, open_api
from replay.capture.client.facts import ServerFacts, ask_facts
from replay.capture.client.rounds_timed import LEAST_ROUNDS, Window, read_chunks, time_rounds
from replay.capture.client.timed_prompts import Load, TimedPrompts, TimingOptions
from replay.capture.prompts import read_prompts
from replay.errors import CaptureError, UsageError
from replay.printable import counted
from replay.traces.fields import is_integer, show
from replay.traces.timings import Measured

MOST_BATCH, MOST_CONTEXT = 1 << 12, 1 << 20
_BATCHES = tuple(1 << power for power in range(7))  # that are timed where none are typed
_CONTEXT = 512
_SETTLE = 1.0  # seconds
_MOST_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """How the server drafts: 0, 1, 1 where it does not."""

    steps: int
    topk: int
    num_draft_tokens: int


Progress = Callable[[int, int], None]  # questions that were answered, of how many


def time_server(
    options: TimingOptions,
    on_progress: Progress = lambda done, total: None,
    on_note: Callable[[str], None] = lambda note: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """One timing for each load. Raises UsageError, PromptError and CaptureError, if it can before it asks anything.

    A server that records, that is busy, that drafts a changing number of steps or that is several copies is refused.
    """
    _check(options)
    texts = None if options.prompts is None else read_prompts(options.prompts)
    again = "type the same command again"
    api = open_api(
        options.server, options.api_key, timeout=options.timeout, retries=2, again=again, start="start the server"
    )
    facts = ask_facts(api, None)
    drafting = _drafting(facts.arguments, api.url)
    if facts.recording and not options.allow_recording:
        raise CaptureError(
            f"{api.url} records, which makes it slower than the server that is planned for; start it without replay "
            "serve, or type --allow-recording"
        )
    loads = _loads(options, facts, on_note)
    prompts = TimedPrompts(options, facts, texts)
    asked = options.repeats * max(load.batch for load in loads)
    if 0 < len(prompts.texts) < asked:
        on_note(
            f"--prompts has {counted(len(prompts.texts), 'text')}, and {counted(options.repeats, 'repeat')} of the "
            f"largest batch ask {asked}: some rounds are the same again, and count again; give more texts"
        )
    _check_idle(api, on_note, tries=1)
    windows: dict[Load, list[Window]] = {load: [] for load in loads}
    for repeat in range(options.repeats + 1):
        for place, load in enumerate(loads):
            window = _time_once(api, options, prompts, load, repeat, drafting.steps > 0, clock)
            windows[load] += [window] if repeat else []
            on_progress(repeat * len(loads) + place + 1, (options.repeats + 1) * len(loads))
    _check_idle(api, lambda note: None, tries=5)
    return [_measured(options, api, facts, drafting, prompts, load, found) for load, found in windows.items()]


def _check(options: TimingOptions) -> None:
    least = 2 * LEAST_ROUNDS
    if not least <= options.tokens <= MOST_CONTEXT:
        raise UsageError(f"--tokens is {options.tokens}; possible are {least} to {MOST_CONTEXT}")
    if not 1 <= options.repeats <= 1000:
        raise UsageError(f"--repeats is {options.repeats}; possible are 1 to 1000")
    for name, numbers, most in (
        ("--batch", options.batches, MOST_BATCH),
        ("--context", options.contexts, MOST_CONTEXT),
    ):
        if numbers is not None and not (numbers and all(1 <= number <= most for number in numbers)):
            raise UsageError(f"{name} is {show(list(numbers))}; type numbers from 1 to {most}, such as 1,8,32")
    if not 0 <= options.seed <= _MOST_SEED:
        raise UsageError(f"--seed is {options.seed}; possible are 0 to {_MOST_SEED}")
    if options.raw and options.prompts is None:
        raise UsageError("--raw is of texts, and none are asked; type --prompts FILE.jsonl, or leave --raw out")
    short = next((context for context in options.contexts or () if context <= options.tokens // 2), None)
    if short is not None:
        raise UsageError(
            f"--context {short} is the middle of the output, and half of --tokens {options.tokens} comes before it; "
            f"type at least {options.tokens // 2 + 1}, or fewer --tokens"
        )


def _drafting(arguments: Mapping[str, Any], url: str) -> Drafting:
    """Raises CaptureError for a server whose rounds are not all alike."""
    copies = arguments.get("dp_size")
    if is_integer(copies, 2, 1 << 20):
        raise CaptureError(f"{url} is {copies} copies that share a batch (dp_size); time a server with one")
    if arguments.get("disaggregation_mode") not in (None, "null"):
        raise CaptureError(f"{url} only prefills or only decodes (disaggregation_mode); time a server that does both")
    algorithm = arguments.get("speculative_algorithm")
    if algorithm in (None, "NONE"):
        return Drafting(0, 1, 1)
    if arguments.get("speculative_adaptive"):
        raise CaptureError(f"{url} changes its steps as it goes (speculative_adaptive); start it with fixed steps")
    told = [arguments.get(f"speculative_{name}") for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    steps, topk, nodes = told[0], told[1] or 1, told[2]
    if not (is_integer(steps, 1, 1 << 10) and is_integer(topk, 1, 1 << 16) and is_integer(nodes, 2, 1 << 16)):
        raise CaptureError(
            f"{url} drafts by {show(algorithm)} with steps, topk and draft tokens {show(told)}, and a timing needs all "
            "three as numbers"
        )
    assert isinstance(steps, int) and isinstance(topk, int) and isinstance(nodes, int)
    if topk == 1 and nodes != steps + 1:
        raise CaptureError(
            f"{url} drafts by {show(algorithm)} {counted(nodes, 'draft token')} in {counted(steps, 'step')}, and a "
            "plan knows chains and trees alone; time a server that drafts one of these"
        )
    return Drafting(steps, topk, nodes)


def _loads(options: TimingOptions, facts: ServerFacts, on_note: Callable[[str], None]) -> list[Load]:
    """Those that were typed, else those that the server takes. Raises UsageError for one that it cannot run."""
    running = _number(facts.arguments, "effective_max_running_requests_per_dp", "max_running_requests")
    memory = facts.arguments.get("memory_usage")
    tokens = _number(memory, "token_capacity") if isinstance(memory, dict) else None
    room = facts.context or _number(facts.arguments, "context_length")
    half = options.tokens - options.tokens // 2
    contexts = options.contexts or (min(_CONTEXT, (room or MOST_CONTEXT) - half),)
    if min(contexts) <= options.tokens // 2:
        raise UsageError(f"--tokens is {options.tokens}, too many beside a context of {min(contexts)}; type fewer")
    loads: list[Load] = []
    left_out: list[str] = []
    for context in dict.fromkeys(contexts):
        for batch in dict.fromkeys(options.batches or _BATCHES):
            why = _too_much(batch, context, half, running, tokens, room)
            if why and options.batches:
                raise UsageError(f"batch {batch} at context {context} is too much: {why}; type less")
            loads += [] if why else [Load(batch, context)]
            left_out += [f"batch {batch} at context {context}, since {why}"] if why else []
    if not loads:
        raise UsageError(f"no batch fits ({left_out[0]}); type a smaller --context, or fewer --tokens")
    if left_out:
        on_note(f"not timed: {left_out[0]}" + (" (and larger ones)" if len(left_out) > 1 else ""))
    return loads


def _too_much(batch: int, context: int, half: int, running: int | None, tokens: int | None, room: int | None) -> str:
    """Why a load does not fit; empty where nothing says so."""
    if running is not None and batch > running:
        return f"the server runs {running} requests at a time"
    if room is not None and context + half > room:
        return f"a request of {context + half} tokens is longer than the server's context of {room}"
    if tokens is not None and batch * (context + half) > tokens:
        return f"it needs {batch * (context + half)} tokens of KV cache, and the server has {tokens}"
    return ""


def _number(values: Mapping[str, Any], *names: str) -> int | None:
    found = (values.get(name) for name in names)
    return next((int(value) for value in found if is_integer(value, 1, 1 << 40) and isinstance(value, int)), None)


def _time_once(
    api: ServerApi,
    options: TimingOptions,
    prompts: TimedPrompts,
    load: Load,
    repeat: int,
    drafts: bool,
    clock: Callable[[], float],
) -> Window:
    length = load.context - options.tokens // 2
    body = {
        "input_ids": prompts.ids(load, length, repeat),
        "extra_key": [f"replay-time-{repeat}-{place}" for place in range(load.batch)],  # no rows are shared
        "stream": True,
        "sampling_params": {"max_new_tokens": options.tokens, "temperature": 0, "ignore_eos": True},
    }
    try:
        lines = api.stream("/generate", body, clock)
    except TransientError as error:  # what was asked twice would be timed twice
        raise CaptureError(f"{api.url}{error}; see to the server and type the same command again") from error
    except RefusedError as error:
        raise CaptureError(
            f"{api.url} refuses batch {load.batch} at context {load.context} ({error.reason}); type smaller ones, or "
            "--prompts with texts of its own"
        ) from error
    return time_rounds(read_chunks(lines, load.batch), load.batch, drafts=drafts)


def _check_idle(api: ServerApi, on_note: Callable[[str], None], tries: int) -> None:
    """Raises CaptureError where others' requests run. A server may take a moment to say that ours are over."""
    try:
        for left in reversed(range(tries)):
            busy = _busy(api.patiently(partial(_load_page, api), 2))
            if not busy:
                return
            if left:
                time.sleep(_SETTLE)
    except NoSuchPathError:
        on_note(f"{api.url} does not say whether others ask it too; see to it that nobody does")
        return
    raise CaptureError(
        f"{api.url} has {busy}, so it is not asked alone; type the same command again when nobody else asks it"
    )


def _busy(told: Any) -> str:
    """What runs there, by its /v1/loads (SGLang 0.5.23, managers/load_snapshot.py); empty where nothing does."""
    loads = told.get("loads") if isinstance(told, dict) else None
    found = [0, 0]
    for one in loads if isinstance(loads, list) else []:
        for place, name in enumerate(("num_running_reqs", "num_waiting_reqs")):
            found[place] += _number(one, name) or 0 if isinstance(one, dict) else 0
    return f"{counted(found[0], 'request')} running and {found[1]} waiting" if any(found) else ""


def _load_page(api: ServerApi, _: int) -> Any:
    return api.call("/v1/loads")


def _measured(
    options: TimingOptions,
    api: ServerApi,
    facts: ServerFacts,
    drafting: Drafting,
    prompts: TimedPrompts,
    load: Load,
    windows: Sequence[Window],
) -> Measured:
    rounds, tokens = (sum(getattr(window, name) for window in windows) for name in ("rounds", "tokens"))
    length = 1.0 if not drafting.steps else tokens / rounds if prompts.sha256 is not None else None
    return Measured(
        batch=load.batch,
        context=load.context,
        steps=drafting.steps,
        topk=drafting.topk,
        num_draft_tokens=drafting.num_draft_tokens,
        round_ms=tuple(1000 * window.seconds for window in windows),
        rounds=rounds,
        accept_length=length,
        prompts=prompts.sha256,
        server=api.url,
        engine=f"sglang {facts.version}".strip(),
        model=facts.model_path,
        algorithm=_said(facts.arguments, "speculative_algorithm"),
        draft=_said(facts.arguments, "speculative_draft_model_path"),
        recording=facts.recording,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        replay=replay.__version__,
    )


def _said(arguments: Mapping[str, Any], name: str) -> str | None:
    value = arguments.get(name)
    return value if isinstance(value, str) else None
