"""replay: predict the accept length that a server would show, offline, and name what keeps it short.

The public names below load what they need on first use, so that importing the package costs nothing.
See docs/python.md for a runnable example of each.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "ReplayError": "replay.errors",
    "CaptureOptions": "replay.capture.options",
    "capture_local": "replay.capture.local.record",
    "Trace": "replay.traces.reader",
    "load_head": "replay.checkpoint.checkpoint",
    "head_from_tensors": "replay.checkpoint.checkpoint",
    "Wiring": "replay.engines.wiring",
    "parse_faults": "replay.faults.table",
    "parse_wiring": "replay.engines.wiring",
    "Variant": "replay.simulator.variant",
    "sweep": "replay.simulator.variant",
    "simulate": "replay.simulator.simulation",
    "Rounds": "replay.traces.rounds",
    "read_rounds": "replay.traces.rounds",
    "write_rounds": "replay.traces.rounds",
    "summarise": "replay.analysis.summary",
    "render": "replay.analysis.report.report",
}

__all__ = [
    "CaptureOptions",
    "ReplayError",
    "Rounds",
    "Trace",
    "Variant",
    "Wiring",
    "capture_local",
    "head_from_tensors",
    "load_head",
    "parse_faults",
    "parse_wiring",
    "read_rounds",
    "render",
    "simulate",
    "summarise",
    "sweep",
    "write_rounds",
]

if TYPE_CHECKING:
    from replay.analysis.report.report import render
    from replay.analysis.summary import summarise
    from replay.capture.local.record import capture_local
    from replay.capture.options import CaptureOptions
    from replay.checkpoint.checkpoint import head_from_tensors, load_head
    from replay.engines.wiring import Wiring, parse_wiring
    from replay.errors import ReplayError
    from replay.faults.table import parse_faults
    from replay.simulator.simulation import simulate
    from replay.simulator.variant import Variant, sweep
    from replay.traces.reader import Trace
    from replay.traces.rounds import Rounds, read_rounds, write_rounds


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'replay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
