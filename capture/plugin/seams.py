"""What the plugin needs of an SGLang: a short list of seams, each with one way to have it or two. Imports no engine.

A seam is a place that is hooked or read. Which there are is looked up at start (``find_seams``), so that a release
counts by what it has and not by its number. The ways were read in the wheels of SGLang 0.5.15 to 0.5.23; a way that is
of some releases only says so.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay.capture.plugin.recording import TRIED

_SRT = "sglang.srt."


@dataclass(frozen=True, slots=True)
class Place:
    """A class, method or function by its module and name, with parameters or fields that it must have."""

    module: str
    name: str
    wanted: Sequence[str] = ()

    def owner(self) -> tuple[Any, str]:
        """What holds the place, and its name there. Raises ImportError, AttributeError."""
        owner: Any = importlib.import_module(self.module)
        *path, last = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, last

    def problem(self) -> str | None:
        """What is not there, in half a sentence. A module that cannot be imported here, for whatever reason, is not."""
        try:
            owner, last = self.owner()
            found = getattr(owner, last)
            has = inspect.signature(found).parameters if self.wanted else {}
        except Exception as error:  # an engine's module runs code of its own: a driver, a compiler, an assertion
            why = "" if isinstance(error, ImportError | AttributeError) else f" ({type(error).__name__})"
            return f"{self.name} in {self.module}{why}"
        lacking = [one for one in self.wanted if one not in has]
        return f"{self.name}({', '.join(lacking)}) in {self.module}" if lacking else None


@dataclass(frozen=True, slots=True)
class Seam:
    """``ways``: the first that is there counts. ``without``: what is not recorded where none is; empty: nothing is."""

    ways: tuple[Place, ...]
    without: str = ""


STATE, TAPS, FORWARD, VERIFY = "state", "taps", "forward", "verify"
FINAL, ACCEPTED, FEED, SIMULATION = "final", "accepted", "feed", "simulation"

SEAMS: Mapping[str, Seam] = {
    STATE: Seam((Place(f"{_SRT}managers.scheduler", "Scheduler.get_internal_state", ("self", "recv_req")),)),
    TAPS: Seam((Place(f"{_SRT}model_executor.model_runner", "ModelRunner.init_attention_backends", ("self",)),)),
    FORWARD: Seam((Place(f"{_SRT}model_executor.model_runner", "ModelRunner.forward", ("self", "forward_batch")),)),
    "output": Seam(
        (
            Place(
                f"{_SRT}layers.logits_processor", "LogitsProcessorOutput", ("next_token_logits", "hidden_states")
            ),
        )
    ),
    "result": Seam((Place(f"{_SRT}model_executor.model_runner", "ModelRunnerOutput", ("logits_output",)),)),
    "batch": Seam(
        (
            Place(
                f"{_SRT}model_executor.forward_batch_info",
                "ForwardBatch",
                ("forward_mode", "rids", "input_ids", "positions", "spec_info", "extend_seq_lens_cpu",
                 "extend_prefix_lens_cpu"),
            ),
        )
    ),
    "parallel": Seam((Place(f"{_SRT}runtime_context", "get_parallel"),)),
    "arguments": Seam(
        (
            Place(f"{_SRT}runtime_context", "RuntimeContext.resolved_server_args_dict"),  # from 0.5.17 on
            Place(f"{_SRT}runtime_context", "get_server_args"),
        )
    ),
    FINAL: Seam(
        (
            Place(f"{_SRT}layers.logits_processor", "LogitsProcessorOutput", ("last_hidden_states",)),  # from 0.5.23 on
            Place(f"{_SRT}layers.logits_processor", "LogitsProcessor.forward", ("hidden_states", "aux_hidden_states")),
        )
    ),
    VERIFY: Seam(
        (Place(f"{_SRT}speculative.eagle_worker_v2", "EAGLEWorkerV2.verify", ("self", "batch")),),
        "servers that draft",
    ),
    ACCEPTED: Seam(
        (
            Place(f"{_SRT}managers.utils", "GenerationBatchResult", ("accept_index",)),  # from 0.5.21 on
            Place(f"{_SRT}speculative.eagle_worker_common", "eagle_sample", ("verify_input", "batch")),
            Place(f"{_SRT}speculative.eagle_worker_v2", "eagle_sample", ("verify_input", "batch")),  # 0.5.15
        ),
        "servers that draft trees",
    ),
    FEED: Seam(
        (Place(f"{_SRT}speculative.eagle_info", "EagleDraftExtendInput", ("hidden_states",)),),
        "what the draft is fed",
    ),
    SIMULATION: Seam(
        (Place(f"{_SRT}speculative.spec_utils", "SIMULATE_ACC_LEN"),), "whether accept lengths are made up"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """The way of each seam that is there; ``lacking``: a sentence for each that is not, but need not be.

    ``problem``: why nothing can be recorded, in half a sentence; None where it can.
    """

    version: str
    ways: Mapping[str, Place]
    lacking: Mapping[str, str]
    problem: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: what is not recorded and why, and that this version has not been tried."""
        untried = () if self.version in TRIED else (untried_note(self.version),)
        return (*untried, *self.lacking.values())


def untried_note(version: str) -> str:
    """The line about a version that no test of ours has recorded."""
    return f"SGLang {version} has not been tried; recording was tried with {', '.join(TRIED)}"


def find_seams(version: str) -> Found:
    """Look which seams the SGLang of this process has."""
    ways: dict[str, Place] = {}
    lacking: dict[str, str] = {}
    problem = None
    for name, seam in SEAMS.items():
        told = [(way, way.problem()) for way in seam.ways]
        there = next((way for way, missed in told if missed is None), None)
        if there is not None:
            ways[name] = there
            continue
        said = f"SGLang {version} has no " + " and no ".join(str(missed) for _, missed in told)
        if seam.without:
            lacking[name] = f"{said}, so {seam.without} cannot be recorded"
        else:
            problem = problem or f"{said}, and recording needs it; it was tried with SGLang {', '.join(TRIED)}"
    return Found(version, ways, lacking, problem)
