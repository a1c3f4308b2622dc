"""An SGLang plugin, found through replay_rig-1.dist-info when this folder is on PYTHONPATH."""

import functools
from collections.abc import Callable
from typing import Any


def keep_intel_amx() -> None:
    """Tells SGLang that the machine has AMX.

    Without it ``_attention_backend_platform_fallbacks`` (sglang/srt/arg_groups/overrides.py) replaces the backend
    intel_amx, the only CPU backend which can draft, by torch_native. SGLang asks for this fact there and for gpt-oss
    only. The layers ask ``cpu_has_amx_support()`` of sglang/srt/utils instead, which stays false.
    """
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "override_platform"):  # from 0.5.19 on
        runtime_context.override_platform(has_amx=True).install()
    else:
        from sglang.srt.arg_groups import overrides

        overrides.cpu_has_amx_support = lambda: True  # its own name for it
        _give_lengths()
    _wait_for_no_gpu()


def _give_lengths() -> None:
    """SGLang 0.5.16 to 0.5.18 layers/attention/intel_amx_backend.py works out how many rows a verify or a draft's step
    sees, and then takes the lengths of the committed tokens instead. A GPU's backends do not, and 0.5.19 does not.
    """
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

    if hasattr(IntelAMXAttnBackend, "_build_extend_metadata"):  # not in 0.5.15, which cannot draft on a CPU
        IntelAMXAttnBackend.forward_extend = _seeing(IntelAMXAttnBackend.forward_extend, "extend_metadata", 0)
        IntelAMXAttnBackend.forward_decode = _seeing(IntelAMXAttnBackend.forward_decode, "draft_decode_metadata", 1)


def _seeing(original: Callable[..., Any], metadata: str, place: int) -> Callable[..., Any]:
    """The method with the lengths of its own metadata in the batch while it runs."""

    @functools.wraps(original)
    def method(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **named: Any) -> Any:
        committed, told = forward_batch.seq_lens, getattr(self, metadata)
        forward_batch.seq_lens = committed if told is None else told[place]
        try:
            return original(self, q, k, v, layer, forward_batch, *args, **named)
        finally:
            forward_batch.seq_lens = committed

    return method


def _wait_for_no_gpu() -> None:
    """SGLang 0.5.23 models/kimi_k25_eagle3.py ``set_embed`` waits for a GPU on any device, which raises without one."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
