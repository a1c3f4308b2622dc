"""The entry point of the SGLang plugin (group ``sglang.srt.plugins``), and the places of SGLang that it hooks.

Idle unless ``replay serve`` asked for it by the environment. In every scheduler process of SGLang 0.5.23 (SEAMS):

- after ``ModelRunner.init_attention_backends``, before graphs are captured: the target captures the wanted taps beside
  those the draft is fed, and keeps its final hidden states;
- before ``ModelRunner.forward`` of the draft's prefill: a few rows of what it is fed are copied, whatever was meant;
- after ``ModelRunner.forward`` of the target, before the sampler may write to the logits: rows are copied, and the
  hidden states are cut back to the columns that the draft is fed, on every rank;
- around ``EAGLEWorkerV2.verify``: which rows were accepted;
- ``Scheduler.get_internal_state``: where the rows lie, for clients that ask ``/server_info``.

Every process of a server imports this module, so it imports nothing heavy.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from replay.capture.plugin.recording import RECORD_VARIABLE, VERSIONS, Recording

# what is hooked or read: module, attribute, and the parameters or fields it must have
SEAMS = (
    ("sglang.srt.managers.scheduler", "Scheduler.init_model_worker", ("self",)),
    ("sglang.srt.managers.scheduler", "Scheduler.get_internal_state", ("self", "recv_req")),
    ("sglang.srt.model_executor.model_runner", "ModelRunner.init_attention_backends", ("self",)),
    ("sglang.srt.model_executor.model_runner", "ModelRunner.forward", ("self", "forward_batch")),
    ("sglang.srt.speculative.eagle_worker_v2", "EAGLEWorkerV2.verify", ("self", "batch")),
    (
        "sglang.srt.layers.logits_processor",
        "LogitsProcessorOutput",
        ("next_token_logits", "hidden_states", "last_hidden_states"),
    ),
    (
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch",
        (
            "forward_mode",
            "rids",
            "input_ids",
            "positions",
            "spec_info",
            "extend_seq_lens_cpu",
            "extend_prefix_lens_cpu",
        ),
    ),
    ("sglang.srt.speculative.eagle_info", "EagleDraftExtendInput", ("hidden_states",)),
)


def activate() -> None:
    """The entry point, called in every process of a server."""
    if RECORD_VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_model_worker", _install, HookType.BEFORE)


def problem_of(version: str) -> str | None:
    """Why this SGLang cannot be recorded, in half a sentence; None where it can."""
    if version not in VERSIONS:
        return f"SGLang {version} was seen, recording works with {', '.join(VERSIONS)}"
    for module, name, wanted in SEAMS:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        lacking = [one for one in wanted if found is None or one not in inspect.signature(found).parameters]
        if lacking:
            return (
                f"SGLang {version} has no {name}({', '.join(lacking)}) in {module} any more; recording works with "
                f"{', '.join(VERSIONS)}"
            )
    return None


def _install(scheduler: Any) -> None:
    """Hook this scheduler process; runs before its model is loaded."""
    import sglang

    from replay.capture.plugin.plugin import Plugin
    from replay.capture.plugin.reporter import Reporter
    from replay.capture.plugin.server_state import layout_problem, simulation_problem

    recording = Recording.from_json(os.environ[RECORD_VARIABLE])
    plugin = Plugin(recording, Reporter(recording, sglang.__version__))
    problem = problem_of(sglang.__version__) or layout_problem() or simulation_problem()
    if problem is not None:
        plugin.refuse(problem)
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    plugin.reporter.tell(state="loading")
    _after(ModelRunner, "init_attention_backends", plugin.after_attention)
    _before(ModelRunner, "forward", plugin.before_forward)
    _after(ModelRunner, "forward", plugin.after_forward)
    _after(EAGLEWorkerV2, "verify", plugin.after_verify)
    _after(Scheduler, "get_internal_state", plugin.after_internal_state)


def _after(owner: type, name: str, hook: Callable[..., None]) -> None:
    """Let ``hook(result, *args)`` run after each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        hook(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def _before(owner: type, name: str, hook: Callable[..., None]) -> None:
    """Let ``hook(*args)`` run before each call of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)
