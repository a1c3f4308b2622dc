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
    "capture_engine": "replay.capture.client.engine",
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
    "read_rounds": "replay.traces.rounds_file",
    "write_rounds": "replay.traces.rounds_file",
    "summarise": "replay.analysis.summary",
    "render": "replay.analysis.report.report",
    "compare": "replay.analysis.compare.compare",
    "diagnose": "replay.diagnosis.diagnose",
    "plan": "replay.analysis.plan.ask",
    "check_head": "replay.check.run",
    "inspect": "replay.check.inspection",
    "Part": "replay.traces.parts",
    "take_part": "replay.traces.rounds_sets",
    "pool_rounds": "replay.traces.rounds_sets",
    "summarise_by": "replay.analysis.report.by_group",
    "charts": "replay.analysis.page.notebook",
    "score": "replay.training.score",
    "score_training": "replay.training.trainer",
}

__all__ = [
    "CaptureOptions",
    "Part",
    "ReplayError",
    "Rounds",
    "Trace",
    "Variant",
    "Wiring",
    "capture_engine",
    "capture_local",
    "charts",
    "check_head",
    "compare",
    "diagnose",
    "head_from_tensors",
    "inspect",
    "load_head",
    "parse_faults",
    "parse_wiring",
    "plan",
    "pool_rounds",
    "read_rounds",
    "render",
    "score",
    "score_training",
    "simulate",
    "summarise",
    "summarise_by",
    "sweep",
    "take_part",
    "write_rounds",
]

if TYPE_CHECKING:
    from replay.analysis.compare.compare import compare
    from replay.analysis.page.notebook import charts
    from replay.analysis.plan.ask import plan
    from replay.analysis.report.by_group import summarise_by
    from replay.analysis.report.report import render
    from replay.analysis.summary import summarise
    from replay.capture.client.engine import capture_engine
    from replay.capture.local.record import capture_local
    from replay.capture.options import CaptureOptions
    from replay.check.inspection import inspect
    from replay.check.run import check_head
    from replay.checkpoint.checkpoint import head_from_tensors, load_head
    from replay.diagnosis.diagnose import diagnose
    from replay.engines.wiring import Wiring, parse_wiring
    from replay.errors import ReplayError
    from replay.faults.table import parse_faults
    from replay.simulator.simulation import simulate
    from replay.simulator.variant import Variant, sweep
    from replay.traces.parts import Part
    from replay.traces.reader import Trace
    from replay.traces.rounds import Rounds
    from replay.traces.rounds_file import read_rounds, write_rounds
    from replay.traces.rounds_sets import pool_rounds, take_part
    from replay.training.score import score
    from replay.training.trainer import score_training


def __getattr__(name: str) -> object:
    if name in _HOMES:
        try:
            home = import_module(_HOMES[name])
        except ModuleNotFoundError as error:  # in a checkout where replay is installed, and not with -e
            if not (error.name or "").startswith("replay."):
                raise
            raise ImportError(
                "this folder hides the installed replay; run Python in another folder, or type pip install -e . here"
            ) from error
        return getattr(home, name)
    raise AttributeError(f"module 'replay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
