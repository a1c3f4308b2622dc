"""What `replay serve` asks the plugin to record, and which servers can be asked. Knows no engine."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from replay.traces.fields import Fields, parse_json

RECORD_VARIABLE = "REPLAY_RECORD"
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


@dataclass(frozen=True, slots=True)
class Recording:
    """What ``replay serve`` asks of the plugin, by one environment variable; taps and wiring as typed."""

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
