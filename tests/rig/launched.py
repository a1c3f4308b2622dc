"""What SGLang itself makes of launch lines, without a GPU: its parser, its resolution, its checks, and the head built
with no memory behind it.

    python -P tests/rig/launched.py CASES ANSWERS

CASES and ANSWERS are JSON files: a list of {"words", "environment"}, and as long a list of answers. An answer holds
what the arguments resolve to, or "stop": the stage and what SGLang said. The machine passes for one with a Hopper GPU
(runtime_context.override_platform, which SGLang's own tests use), so that device-dependent defaults are those of CUDA.
"""

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "0"}
sys.path.append(str(Path(__file__).resolve().parent))
# Of rotary embeddings on a machine without CUDA; nothing here calls it.
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm._custom_ops"] = types.ModuleType("vllm._custom_ops")
sys.modules["vllm._custom_ops"].rotary_embedding = None  # type: ignore[attr-defined]

HOPPER = {
    "is_cuda": True, "is_hip": False, "is_npu": False, "is_xpu": False, "is_musa": False, "is_mps": False,
    "is_sm90": True, "is_sm100": False, "is_sm100_or_sm110": False, "is_sm110": False, "is_sm120": False,
    "is_blackwell": False, "is_hopper_with_cuda_12_3": True, "has_amx": False, "has_flashinfer": True, "device_sm": 90,
    "device_capability": (9, 0),
}  # fmt: skip
RESOLVED = ("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
            "attention_backend", "page_size", "tp_size", "attn_dp_size")  # fmt: skip


def answer(words: list[str]) -> dict[str, Any]:
    """Stage by stage, until one stops."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    told: dict[str, Any] = {}
    stage = "parser"
    try:
        arguments = prepare_server_args(["--device", "cuda", *words])
        stage = "resolution"
        arguments.resolve_once()
        arguments.check_server_args()
        view = resolved_view(arguments)
        told |= {name: getattr(view, name) for name in RESOLVED}
        stage = "target"
        target = ModelConfig.from_server_args(arguments)
        told["target"] = _model(target)
        if view.speculative_algorithm == "EAGLE3":
            stage = "head"
            head = ModelConfig.from_server_args(
                arguments, model_path=view.speculative_draft_model_path, is_draft_model=True,
                context_length=target.context_len,
            )  # fmt: skip
            told["head"] = _model(head)
            publish(arguments, role="scheduler")
            told["layers"] = _layers(head, view)
    except SystemExit as stop:
        told["stop"] = [stage, f"exit code {stop.code}"]
    except (Exception, RecursionError) as stop:
        told["stop"] = [stage, f"{type(stop).__name__}: {stop}"[:300]]
    return told


def _model(config: Any) -> dict[str, Any]:
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    theta, rope = get_rope_config(config.hf_text_config)
    return {
        "dtype": str(config.dtype).removeprefix("torch."), "context": config.context_len, "theta": theta,
        "rope": (rope or {}).get("rope_type", "default"), "quantization": config.quantization,
    }  # fmt: skip


def _layers(config: Any, view: Any) -> list[str]:
    """The methods that the head's linear layers compute by."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.runtime_context import get_parallel

    parts = view.tp_size // view.attn_dp_size if view.attn_dp_size > 1 else view.tp_size
    load = LoadConfig(load_format=view.load_format, draft_model_idx=0 if view.enable_multi_layer_eagle else None)
    with get_parallel().override(**_one_rank(parts)), torch.device("meta"):
        head = _initialize_model(config, load, _get_quantization_config(config, load))
    return sorted({type(part.quant_method).__name__ for part in head.modules() if isinstance(part, LinearBase)})


def _one_rank(parts: int) -> dict[str, Any]:
    """The first of ``parts`` GPUs that share the head."""

    def group(size: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            world_size=size, rank_in_group=0, is_first_rank=True, is_last_rank=True, cpu_group=None
        )

    sizes = {"tp_size": parts, "attn_tp_size": parts, "moe_tp_size": parts}
    ones = dict.fromkeys(("attn_dp_size", "attn_cp_size", "moe_ep_size", "moe_dp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "pp_rank"), 0)
    groups = {"tp_group": group(parts), "attn_tp_group": group(parts), "pp_group": group(1)}
    return {**sizes, **ones, **ranks, **groups}


def main(cases: Path, answers: Path) -> None:
    """Each case in an environment of its own."""
    from sglang.srt.runtime_context import override_platform

    override_platform(**HOPPER).install()
    before = dict(os.environ)
    told = []
    for case in json.loads(cases.read_text()):
        os.environ |= case["environment"]
        told.append(answer(case["words"]))
        os.environ.clear()
        os.environ |= before
    answers.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
