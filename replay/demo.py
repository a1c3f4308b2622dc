"""The demo: the story of a head trained on one wiring and served another, on a target that fits in a laptop."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import OutputError

if TYPE_CHECKING:
    from replay.capture.local.record import CaptureOptions

# What the head was trained on; what a server feeds for config ids [2, 15, 27] under the +1 convention; the engines'
# default taps; the right taps in another order; one tap off by one on either side.
WIRINGS = ("embed,3,16", "3,16,28", "2,15,27", "3,embed,16", "embed,2,16", "embed,3,15")


def sample_head() -> Path:
    """Folder of the draft head for SmolLM2-135M-Instruct that comes with replay."""
    return _samples() / "smollm2-eagle3"


def sample_prompts() -> Path:
    """The prompts that come with replay: our own, of mixed kinds, in the row format of ``replay capture --prompts``."""
    return _samples() / "prompts.jsonl"


def _samples() -> Path:
    import replay.traces

    return Path(replay.traces.__path__[0]) / "samples"


def demo_options(
    folder: Path, max_new_tokens: int, *, force: bool, tell: Callable[[str], None]
) -> "CaptureOptions | None":
    """How to capture the demo's trace into ``folder``/trace; None where a whole one lies there already.

    An unfinished trace is gone on with. Raises CaptureError where the target's package is missing, OutputError where
    something else lies there.
    """
    from replay.capture.demo_target import smollm2
    from replay.capture.local.record import CaptureOptions
    from replay.capture.prompts import read_prompts
    from replay.traces.writer import read_header

    trace = folder / "trace"
    recorded = read_header(trace) if (trace / "trace.json").is_file() and not force else None
    if recorded is not None:
        asked = (read_prompts(sample_prompts()).sha256, max_new_tokens)
        if (recorded.capture.prompts_sha256, recorded.capture.max_new_tokens) != asked:
            raise OutputError(
                f"{trace} is not the demo's trace of {max_new_tokens} output tokens a prompt; "
                "name another folder with -o, or --force to replace it"
            )
        if recorded.state == "complete":
            return None
    target = smollm2(tell=tell)
    return CaptureOptions(
        model=str(target),
        prompts=sample_prompts(),
        out=trace,
        max_new_tokens=max_new_tokens,
        resume=recorded is not None,
        force=force,
    )
