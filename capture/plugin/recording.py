"""What a launch asks the plugin to record, and which servers can be asked. Knows no engine."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from replay.traces.fields import Fields, parse_json

RECORD_VARIABLE = "REPLAY_RECORD"
# What a launch asks of its schedulers, where RECORD_VARIABLE is the user's own: a script that sets it sets it again in
# each process that is spawned, which runs the script's first lines too.
LAUNCH_VARIABLE = "REPLAY_LAUNCH"
TRIED = (
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)  # versions of SGLang that were recorded and replayed; seams.py says what others need
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"  # of SGLang: a server that has it makes its accept lengths up


def asked_here(environment: Mapping[str, str]) -> str:
    """What this process is asked: a Recording, in schedulers, or a folder, as users type it; empty: nothing."""
    return environment.get(LAUNCH_VARIABLE) or environment.get(RECORD_VARIABLE, "")


def is_folder(asked: str) -> bool:
    """Whether that is a folder."""
    return not asked.startswith("{")


@dataclass(frozen=True, slots=True)
class Recording:
    """What a launch asks of the plugin in its schedulers, by one environment variable; taps and wiring as typed."""

    folder: str  # absolute
    launch: str
    taps: str | None
    wiring: str | None
    topk: int
    arguments: Sequence[str] = ()  # of the server, secrets left out

    def to_json(self) -> str:
        """The variable's value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Recording":
        """Parse the variable's value. Raises TraceCorruptError."""
        root = Fields(RECORD_VARIABLE, parse_json(text, RECORD_VARIABLE))
        return cls(
            folder=root.text("folder"),
            launch=root.text("launch"),
            taps=root.optional_text("taps"),
            wiring=root.optional_text("wiring"),
            topk=root.integer("topk", 1, 4096),
            arguments=root.texts("arguments"),
        )
