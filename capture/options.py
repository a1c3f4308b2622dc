"""What both ways of capturing are asked for: numbers that can be, a free place, and the settings a trace keeps."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from replay.capture.prompts import PromptFile
from replay.errors import OutputError, UsageError
from replay.traces.header import CaptureSettings

if TYPE_CHECKING:
    from replay.capture.client.answers import ServerOptions
    from replay.capture.events import CaptureOptions

Check = tuple[str, float, bool, str]  # option, its value, whether it can be, and which numbers can


def check_numbers(options: "CaptureOptions | ServerOptions", *more: Check) -> None:
    """Refuse numbers that cannot be, those of ``more`` last, and both of --resume and --force. Raises UsageError."""
    checks: tuple[Check, ...] = (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens >= 1, "1 or more"),
        ("--temperature", options.temperature, 0 <= options.temperature < float("inf"), "0 (greedy) or more"),
        ("--top-p", options.top_p, 0 < options.top_p <= 1, "above 0 and at most 1"),
        ("--concurrency", options.concurrency, options.concurrency >= 1, "1 or more"),
        *more,
    )
    for name, value, good, possible in checks:
        if not good:
            raise UsageError(f"{name} {value} cannot be: type a number that is {possible}")
    if options.resume and options.force:
        raise UsageError("--resume goes on with a trace and --force replaces it: type one of them")


def check_place(options: "CaptureOptions | ServerOptions", *, beside: Collection[str] = ()) -> None:
    """Refuse a taken folder before anything is loaded or asked; the writer looks again. Raises OutputError.

    What is called as in ``beside`` may lie there.
    """
    if not (options.resume or options.force) and _is_taken(options.out, beside):
        raise OutputError(
            f"{options.out} exists already: type --resume to go on with it, --force to replace it, or another -o"
        )


def _is_taken(folder: Path, beside: Collection[str]) -> bool:
    return folder.exists() and (not folder.is_dir() or any(path.name not in beside for path in folder.iterdir()))


def settings_of(options: "CaptureOptions | ServerOptions", prompts: PromptFile) -> CaptureSettings:
    """What a trace's header says of how it was asked for."""
    return CaptureSettings(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        raw=options.raw,
        prompts_sha256=prompts.sha256,
    )
