"""What a capture in this process is asked for, and what it tells while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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


@dataclass(frozen=True, slots=True)
class Planned:
    """The prompts are read and the target is loaded and checked; ``done`` requests were there already."""

    requests: int
    done: int
    prompt_tokens: int  # of the requests still to do
    most_output_tokens: int  # of the requests still to do


@dataclass(frozen=True, slots=True)
class Loading:
    """The target's weights are about to be read."""

    model: str
    requests: int


@dataclass(frozen=True, slots=True)
class Noted:
    """Something the user should know; capture goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """After each step of a batch. Requests count once they are safe on disk, tokens as soon as they are chosen."""

    requests_done: int
    requests: int
    output_tokens: int  # of this run
    output_tokens_left: int  # at most
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """What a finished capture has written; tokens and seconds are those of this run.

    ``refused``: requests that the server did not take, with its reasons; they are no part of the trace.
    """

    path: Path
    requests: int
    recorded: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    taps: tuple[str, ...]
    embed: str
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """The trace is complete."""

    result: CaptureResult


Event = Loading | Planned | Noted | Progress | Finished
