"""What SGLang makes of pairs of folders: run by itself, as a CPU server would, for tests/check/test_engine_agrees.py.

    python tests/rig/heads.py PAIRS...

Each of PAIRS is a folder with ``target`` and ``draft``. For each a line of JSON: where SGLang stops and why, or the
dtype, context and quantisation that it gives the head, and the parameters that no tensor of the checkpoint reached.
Resolving the arguments, both configs, the model's class and its load_weights are SGLang's; attention, draft KV and
kernels stay out, so that neither a GPU nor a server is needed.
"""

import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.path.append(str(Path(__file__).resolve().parent))
warnings.simplefilter("ignore")
import torch  # noqa: E402

RANKS = (
    "tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "moe_ep_rank", "moe_tp_rank", "moe_dp_rank", "attn_dp_rank",
    "launch_world_rank",
)  # fmt: skip
Seen = dict[str, Any]


def make_ready() -> None:
    """One process that is the whole tensor-parallel group."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state

    logging.disable(logging.CRITICAL)
    runtime_context.get_context().override_server_args(device="cpu").install()
    runtime_context.get_context().config_bag("device")._set("gpu_id", 0)
    runtime_context.get_parallel().override_permanently(**dict.fromkeys(RANKS, 0))
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{meeting}", backend="gloo"
    )
    parallel_state.initialize_model_parallel(backend="gloo")


def judge(pair: Path) -> Seen:
    """What happens to one pair."""
    seen: Seen = {"pair": pair.name, "stage": "arguments"}
    try:
        _read(pair, seen)
    except Exception as error:
        seen["stop"] = f"{type(error).__name__}: {error}"[:400]
    return seen


def _read(pair: Path, seen: Seen) -> None:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(pair / "target"), speculative_draft_model_path=str(pair / "draft"), device="cpu",
        attention_backend="intel_amx", speculative_algorithm="EAGLE3", speculative_num_steps=3,
        speculative_eagle_topk=1, speculative_num_draft_tokens=4,
    )  # fmt: skip
    arguments.resolve_once()
    seen["stage"] = "target"
    target = ModelConfig.from_server_args(arguments)
    seen |= {"target_dtype": str(target.dtype), "served": target.context_len}
    seen["stage"] = "draft"
    alone = ModelConfig.from_server_args(arguments, model_path=str(pair / "draft"), is_draft_model=True)
    seen |= {"dtype": str(alone.dtype), "context": alone.context_len, "quantisation": alone.quantization}
    draft = ModelConfig.from_server_args(
        arguments, model_path=str(pair / "draft"), is_draft_model=True, context_length=target.context_len
    )
    _load(draft, seen)


def _load(config: Any, seen: Seen) -> None:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    seen["stage"] = "build"
    files = loader.DefaultModelLoader(LoadConfig())
    with loader.set_default_torch_dtype(config.dtype), torch.device("cpu"):
        model = loader._initialize_model(
            config, files.load_config, loader._get_quantization_config(config, files.load_config)
        )
    marked = {name: _mark(value) for name, value in model.named_parameters()}
    seen["stage"] = "load"
    with torch.no_grad():
        model.load_weights(iter(list(files._get_all_weights(config, model))))
    seen["untouched"] = [name for name, value in model.named_parameters() if _holes(value, marked[name])]
    seen["rope"] = _rotation(model)


def _mark(value: torch.Tensor) -> bool:
    """Fills a parameter with what no checkpoint holds; scales of the KV cache have a meaning as they begin."""
    if value.is_floating_point() and not value.dtype.is_complex and value.dtype.itemsize > 1:
        value.data.fill_(float("nan"))
        return True
    return False


def _holes(value: torch.Tensor, marked: bool) -> bool:
    """Whether any of it is as it was; rows that pad a vocabulary are zero after loading."""
    return marked and bool(torch.isnan(value).any())


def _rotation(model: torch.nn.Module) -> Seen:
    for module in model.modules():
        if hasattr(module, "rotary_dim") and hasattr(module, "base"):
            return {"class": type(module).__name__, "theta": module.base, "features": module.rotary_dim}
    return {}


if __name__ == "__main__":
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *arguments, **named: None  # type: ignore[assignment]
    make_ready()
    for folder in sys.argv[1:]:
        print(json.dumps(judge(Path(folder))), flush=True)
