"""An SGLang plugin, found through replay_rig-1.dist-info when this folder is on PYTHONPATH."""


def keep_intel_amx() -> None:
    """Tells SGLang that the machine has AMX.

    Without it ``_attention_backend_platform_fallbacks`` (sglang/srt/arg_groups/overrides.py) replaces the backend
    intel_amx, the only CPU backend which can draft, by torch_native. SGLang 0.5.23 asks for this fact there and for
    gpt-oss only. The layers ask ``cpu_has_amx_support()`` instead, which stays false.
    """
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()
    _wait_for_no_gpu()


def _wait_for_no_gpu() -> None:
    """SGLang 0.5.23 models/kimi_k25_eagle3.py ``set_embed`` waits for a GPU on any device, which raises without one."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
