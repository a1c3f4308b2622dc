"""What is read of a running SGLang: its ranks and layout, its resolved arguments, and versions. Sets nothing."""

from typing import Any

from replay.capture.plugin.recording import SIMULATED
from replay.errors import CaptureError


def ranks() -> dict[str, int]:
    """This process's place in the server's parallel layout, by the names of spool.Manifest."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    names = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp")
    return {name: int(getattr(parallel, f"{name}_rank")) for name in names}


def world() -> int:
    """Scheduler processes that share a model: ``/server_info`` counts those of all data-parallel replicas."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_size) * int(parallel.pp_size)


def layout_problem() -> str | None:
    """What of the server's parallel layout cannot be recorded. Before 0.5.19 known only once a model is there."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    for name, flag in (("pp_size", "--pp-size"), ("attn_cp_size", "--attn-cp-size")):
        if getattr(parallel, name) != 1:
            return f"{flag} {getattr(parallel, name)} was seen, recording works with {flag} 1"
    return None


def simulation_problem() -> str | None:
    """Whether the server makes its accept lengths up."""
    from sglang.srt.speculative import spec_utils

    length = getattr(spec_utils, "SIMULATE_ACC_LEN", -1)  # where it is not there seams.py says so
    return f"{SIMULATED} is {length}, so its accept lengths are made up: unset it" if length > 0 else None


def drafting_problem(runner: Any) -> str | None:
    """What of the way the server drafts cannot be recorded."""
    algorithm = runner.spec_algorithm
    if not (algorithm.is_none() or algorithm.is_eagle3()):
        return f"the server drafts by {algorithm}, recording works with EAGLE3 or without a draft"
    if not algorithm.is_none() and resolved_arguments().get("enable_multi_layer_eagle"):
        return "enable_multi_layer_eagle is set, recording works with EAGLE3 of one draft model"
    return None


def states_problem(runner: Any) -> str | None:
    """Whether a server without a draft was told to keep other hidden states than those of all rows."""
    mode = resolved_arguments().get("return_hidden_states_mode") if runner.spec_algorithm.is_none() else None
    return f"--return-hidden-states-mode {mode} was seen, recording works with full" if mode == "last" else None


def given_wiring(runner: Any, core: Any) -> tuple[int, ...]:
    """What the draft would be fed without us, as R indices; () without a draft. Raises CaptureError."""
    told = getattr(runner, "spec_aux_config", runner)  # SGLang 0.5.15 model_executor/model_runner.py has it itself
    uses_aux = bool(told.eagle_use_aux_hidden_state)
    given = tuple(sorted(core.layers_to_capture)) if uses_aux else ()
    if runner.spec_algorithm.is_eagle3() and not given:
        raise CaptureError("the draft uses no auxiliary hidden states, so it has no wiring to record")
    return given


def resolved_arguments() -> dict[str, Any]:
    """The server's arguments by name, defaults and what SGLang made of them included.

    Before 0.5.17 the arguments themselves hold what became of them (managers/scheduler.py ``get_internal_state``).
    """
    from sglang.srt import runtime_context

    context = runtime_context.get_context()
    if hasattr(context, "resolved_server_args_dict"):
        return dict(context.resolved_server_args_dict())
    return dict(vars(runtime_context.get_server_args()))


def versions(runner: Any) -> dict[str, str]:
    """Of torch and transformers, and the accelerator's name; empty on a CPU."""
    import torch
    import transformers

    device = "" if runner.device == "cpu" else torch.get_device_module(runner.device).get_device_name()
    return {"torch": torch.__version__, "transformers": transformers.__version__, "accelerator": device}
