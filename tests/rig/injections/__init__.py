"""Faults put into a running SGLang server, one after the other, without editing its source. See ../README.md."""

import os

# Names a file that holds the name of the injection; where it is set, the plugin reads it before each prefill.
INJECTION_VARIABLE = "REPLAY_RIG_INJECTION"
NONE = "none"
ACTIVE_SUFFIX = ".active"  # of the file in which the plugin says what it has put in


def activate() -> None:
    """The entry point, called in every process of a server; idle unless the environment asks for injections."""
    if INJECTION_VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .live import keep_target_rows, watch_server

    # Innermost: the recorder of replay cuts the target's hidden states back to what the draft is fed.
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward", keep_target_rows, HookType.AFTER
    )
    # Outermost: what the draft is fed under an injection is what the recorder sees it fed.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_model_worker", watch_server, HookType.AFTER)
