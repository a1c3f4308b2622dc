"""What a capture in this process is asked for, and what it tells while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from replay.capture.size import Room
from replay.traces.taps import EMBED, sort_taps


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
class Sized:
    """What the capture will take at most, before the target is loaded or the first prompt sent."""

    room: Room


@dataclass(frozen=True, slots=True)
class Noted:
    """Something the user should know; capture goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class CaptureProgress:
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

    ``taps`` are those whose rows are stored: none where a server without the plugin gave answers only. ``refused``:
    requests that the server did not take, with its reasons; they are no part of the trace. ``left_out``: prompts that
    are too long for the target, with the reasons; they are not asked and not counted.
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
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_trace(self) -> bool:
        """Whether ``path`` holds a trace."""
        return bool(self.taps)

    @property
    def readable_taps(self) -> tuple[str, ...]:
        """``taps``, and ``embed`` where it is a lookup, as ``Trace.taps`` has them (traces/reader.py)."""
        return sort_taps([*self.taps, *([EMBED] if self.embed == "lookup" else [])])


@dataclass(frozen=True, slots=True)
class Finished:
    """The trace is complete."""

    result: CaptureResult


Event = Loading | Sized | Planned | Noted | CaptureProgress | Finished
