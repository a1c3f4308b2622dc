"""What both ways of capturing are asked for: possible numbers, a free output folder, and the settings a trace keeps."""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from replay.capture.prompts import PromptFile
from replay.errors import UsageError
from replay.traces.files import HEADER, as_path
from replay.traces.given import check_given
from replay.traces.header import MAX_COUNT, ROWS, CaptureSettings, TraceHeader, read_header
from replay.traces.place import FORCE, NEW, RESUME, check_equal, check_place, check_settings
from replay.traces.taps import EMBED, FINAL, parse_taps, sort_taps

OWN, SHARED = "own", "shared"  # values of --server-cache


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What to record, and how. ``top_k`` below 1 and ``top_p`` 1 leave all tokens in; temperature 0 is greedy."""

    model: str  # a folder or hub id
    prompts: Path
    out: Path
    taps: str | None = None  # comma-separated; None: traces.taps.default_taps
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    raw: bool = False
    dtype: str = "auto"
    device: str = "auto"
    concurrency: int = 64  # requests in a batch, at most
    topk: int = 32
    weights: bool = True  # write the target's embedding and lm_head beside the trace
    resume: bool = False
    force: bool = False
    taps_for: int | None = None  # all taps of so many requests, the first ones; of the others then_taps
    then_taps: str | None = None
    rows: str = "exact"  # or fp8
    prompt_rows: int | None = None  # of each prompt so many rows, the last ones; None: all
    go_on: str = "type the same command with --resume"  # how whoever is interrupted goes on, for messages


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
    taps_for: int | None = None  # all taps of so many requests, the first ones; of the others then_taps
    then_taps: str | None = None  # None: what the server's draft is fed
    rows: str = "exact"  # or fp8
    prompt_rows: int | None = None  # of each prompt so many rows, the last ones; None: all
    server_cache: str = OWN  # or SHARED: prefixes of the requests of this capture come from the server's cache


Check = tuple[str, float, bool, str]  # option, its value, whether it can be, and which numbers can


def check_options(options: CaptureOptions | ServerOptions, *more: Check) -> None:
    """Refuse numbers that cannot be, those of ``more`` last, both of --resume and --force, and taps by their form.

    Nothing is opened or asked for it. Raises UsageError.
    """
    _check_kinds(options)
    for path in (options.prompts, options.out):
        as_path(path)
    checks: tuple[Check, ...] = (
        ("--max-new-tokens", options.max_new_tokens, 1 <= options.max_new_tokens <= MAX_COUNT, f"1 to {MAX_COUNT}"),
        ("--temperature", options.temperature, 0 <= options.temperature < float("inf"), "0 (greedy) or more"),
        ("--seed", options.seed, -(1 << 63) <= options.seed < 1 << 64, "one of 64 bits"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "above 0 and at most 1"),
        ("--concurrency", options.concurrency, options.concurrency >= 1, "1 or more"),
        ("--taps-for", options.taps_for or 0, _is_count(options.taps_for), f"1 to {MAX_COUNT} requests"),
        ("--prompt-rows", options.prompt_rows or 0, _is_count(options.prompt_rows), f"1 to {MAX_COUNT} rows"),
        *more,
    )
    for name, value, good, possible in checks:
        if not good:
            raise UsageError(f"{name} {value} cannot be: type a number that is {possible}")
    if options.resume and options.force:
        raise UsageError("--resume goes on with a trace and --force replaces it: type one of them")
    if options.rows not in ROWS:
        raise UsageError(f"--rows {options.rows} is not one of {', '.join(ROWS)}: type one of these")
    if options.taps is not None:
        parse_distinct_taps(options.taps)
    if options.then_taps is not None:
        parse_distinct_taps(options.then_taps, option="--then-taps")
    _check_tiers(options)
    if isinstance(options, ServerOptions):
        _check_cache(options)


# What a field holds where it is not one of a few texts, for Python callers whom no type checker has told.
_NUMBERS = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "concurrency")
_FLAGS = ("raw", "weights", "resume", "force")


def _check_kinds(options: CaptureOptions | ServerOptions) -> None:
    for name in _NUMBERS:
        kinds = (int, float) if name in ("temperature", "top_p") else int
        check_given(name, getattr(options, name), kinds, "a number was expected")
    for name in _FLAGS:
        check_given(name, getattr(options, name), bool, "True or False was expected")
    if isinstance(options, CaptureOptions):
        for name in ("dtype", "device"):
            check_given(name, getattr(options, name), str, "a text was expected; pass auto")
        check_given("topk", options.topk, int, "a number was expected")
        check_given("model", options.model, (str, PurePath), "a target's folder or hub id was expected")


def _is_count(number: int | None) -> bool:
    return number is None or (type(number) is int and 1 <= number <= MAX_COUNT)


def _check_tiers(options: CaptureOptions | ServerOptions) -> None:
    """Raises UsageError where only one of the two options of tiers is there."""
    if options.then_taps is not None and options.taps_for is None:
        raise UsageError(
            f"--then-taps {options.then_taps} says what to record after the first requests: type --taps-for N, how "
            "many these are"
        )
    if options.taps_for is not None and options.then_taps is None and isinstance(options, CaptureOptions):
        raise UsageError(
            f"--taps-for {options.taps_for} records all taps of {options.taps_for} requests: type --then-taps T, those "
            "of the others, for example the head's own wiring"
        )


def _check_cache(options: ServerOptions) -> None:
    """Raises UsageError where rows that later requests take from the cache would not be there as they were computed."""
    if options.server_cache not in (OWN, SHARED):
        raise UsageError(f"--server-cache {options.server_cache} is neither {OWN} nor {SHARED}: type one of these")
    if options.server_cache == OWN:
        return
    if options.rows != "exact":
        raise UsageError(
            f"--server-cache {SHARED} takes rows of earlier requests as they were computed, and --rows {options.rows} "
            "keeps none so: leave one of them out"
        )
    if options.prompt_rows is not None:
        raise UsageError(
            f"--server-cache {SHARED} takes whole prefixes of earlier requests, and --prompt-rows "
            f"last:{options.prompt_rows} keeps none: leave one of them out"
        )


def parse_distinct_taps(text: str, *, layers: int | None = None, option: str = "--taps") -> tuple[str, ...]:
    """Canonical names of the taps to record, in the order of ``text``. Raises UsageError, also for one named twice."""
    names = parse_taps(text, layers=layers)
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise UsageError(f"{option} {text} names {twice} twice: name each tap once")
    return names


def check_output_folder(
    options: CaptureOptions | ServerOptions, *, beside: Collection[str] = (), resumable: Collection[str] = ()
) -> None:
    """Refuse an output folder before anything is loaded, fetched or asked; the writer looks again.

    ``beside`` and ``resumable`` as ``check_place`` has them, which raises OutputError.
    """
    way = RESUME if options.resume else FORCE if options.force else NEW
    check_place(as_path(options.out), way, beside=beside, resumable=resumable)


def check_resumed(options: CaptureOptions | ServerOptions, prompts: PromptFile, engine: str) -> TraceHeader | None:
    """The header of the trace that is gone on with, held against what is asked now; None where none was begun.

    Taps are compared where they were typed. Raises TraceError naming both values, before a target is opened or asked.
    """
    if not options.resume or not os.path.lexists(options.out / HEADER):
        return None
    begun = read_header(options.out)
    check_equal("engine.name", begun.engine.name, engine, options.out)
    check_settings(begun, settings_of(options, prompts, begun.capture.then_taps), options.out)
    if isinstance(options, CaptureOptions):
        check_equal("topk", begun.topk, min(options.topk, begun.target.vocab_size), options.out)
        if options.dtype != "auto":
            check_equal("target.dtype", begun.target.dtype, options.dtype, options.out)
        if options.taps is not None:
            asked = parse_distinct_taps(options.taps, layers=begun.target.layers) + then_taps_of(options)
            check_equal("taps", without_embed(begun.taps), without_embed([FINAL, *asked]), options.out)
    return begun


def without_embed(taps: Iterable[str]) -> tuple[str, ...]:
    """``taps`` in the order of the stream, less the embedding: whether that is stored only the target says."""
    return tuple(tap for tap in sort_taps(list(taps)) if tap != EMBED)


def then_taps_of(
    options: CaptureOptions | ServerOptions, usual: Sequence[str] = (), *, layers: int | None = None
) -> tuple[str, ...]:
    """The taps of the requests after the first ones, as they are asked for; ``usual`` where nobody says which.

    None where all have the same. Raises UsageError.
    """
    if options.taps_for is None:
        return ()
    asked = usual if options.then_taps is None else parse_distinct_taps(
        options.then_taps, layers=layers, option="--then-taps"
    )  # fmt: skip
    return tuple(tap for tap in sort_taps(list(asked)) if tap != FINAL)


def settings_of(
    options: CaptureOptions | ServerOptions, prompts: PromptFile, then_taps: Sequence[str] = ()
) -> CaptureSettings:
    """What a trace's header says of how it was asked for; ``then_taps`` where the options do not say them."""
    return CaptureSettings(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        raw=options.raw,
        prompts_sha256=prompts.sha256,
        taps_for=options.taps_for,
        then_taps=then_taps_of(options, then_taps),
        rows=options.rows,
        prompt_rows=options.prompt_rows,
    )
