"""Step logits of SGLang's own draft classes, run by itself in fp32, for tests/head/test_engine_heads.py.

    python tests/rig/head_logits.py PAIRS...

Each of PAIRS is a folder with ``target``, ``draft`` and ``inputs.safetensors``: ``ids`` [R], ``features`` [R, K*D], the
target's ``embed`` [V, D] and ``lm_head`` [V, D], and ``drafted`` [R, S-1], the target ids that each row goes on with.
``logits.safetensors`` [S, R, W] is written beside them. Resolving the configs, the class, its load_weights and its
forward are SGLang's. Attention alone is not: a row's queries over the keys and values of all rows before it, without a
cache, so that every drafted row runs the head over all rows so far.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
import torch
from heads import make_ready
from safetensors.torch import load_file, save_file
from torch import Tensor


def build(pair: Path) -> Any:
    """SGLang's model of the draft, loaded."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import ServerArgs

    algorithm = (pair / "algorithm").read_text().strip()
    arguments = ServerArgs(
        model_path=str(pair / "target"), speculative_draft_model_path=str(pair / "draft"), device="cpu",
        attention_backend="torch_native", speculative_algorithm=algorithm, speculative_num_steps=3,
        speculative_eagle_topk=1, speculative_num_draft_tokens=4, dtype="float32",
    )  # fmt: skip
    arguments.resolve_once()
    config = ModelConfig.from_server_args(arguments, model_path=str(pair / "draft"), is_draft_model=True)
    files = loader.DefaultModelLoader(LoadConfig())
    with loader.set_default_torch_dtype(torch.float32), torch.device("cpu"):
        model = loader._initialize_model(config, files.load_config, None)
    with torch.no_grad():
        model.load_weights(iter(list(files._get_all_weights(config, model))))
    return model


def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """In place of ``RadixAttention.forward``: causal, over the rows of this call."""
    rows = len(q)
    q_NRH = q.view(rows, self.tp_q_head_num, self.qk_head_dim).transpose(0, 1)
    k_NRH = k.view(rows, self.tp_k_head_num, self.qk_head_dim).transpose(0, 1)
    v_NRH = v.view(rows, self.tp_v_head_num, self.v_head_dim).transpose(0, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q_NRH, k_NRH, v_NRH, is_causal=True, scale=self.scaling, enable_gqa=True
    )
    return out.transpose(0, 1).flatten(1)


class Batch(SimpleNamespace):
    """A forward batch that has nothing but what is set."""

    def __getattr__(self, name: str) -> None:
        return None


def replace_attention() -> None:
    """By ``attend``; MLA runs absorbed, as a server's draft does."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    RadixAttention.forward = attend
    DeepseekV2AttentionMLA.dispatch_attn_forward_method = lambda *arguments: AttnForwardMethod.MLA
    set_forward_context(ForwardContext(attn_backend=Batch()))


def step(model: Any, ids_R: Tensor, states_RD: Tensor) -> tuple[Tensor, Tensor]:
    """What lm_head takes in, and the states fed on [R, E]."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = Batch(
        spec_info=SimpleNamespace(hidden_states=states_RD), forward_mode=ForwardMode.EXTEND, input_ids=ids_R,
        contains_mm_inputs=lambda: False,
    )  # fmt: skip
    out = model.model(ids_R, torch.arange(len(ids_R)), batch)
    return (out[0], out[1][0]) if isinstance(out, tuple) else (out, out)


@torch.no_grad()
def run(pair: Path) -> None:
    """Writes the logits of one pair."""
    model, inputs = build(pair), load_file(pair / "inputs.safetensors")
    model.model.embed_tokens.weight.data = inputs["embed"]
    own = getattr(model, "load_lm_head_from_target", True)
    table = inputs["lm_head"] if own else model.lm_head.weight.data
    steps = 1 + inputs["drafted"].shape[1]
    out: list[list[Tensor]] = [[] for _ in range(steps)]
    for row in range(len(inputs["ids"])):
        ids, states = inputs["ids"][: row + 1], inputs["features"][: row + 1]
        for number in range(steps):
            normed, fed = step(model, ids, states)
            out[number].append(normed[-1] @ table.T)
            if number + 1 < steps:
                ids = torch.cat([ids, inputs["drafted"][row, number : number + 1]])
                states = extended(model, states, fed[-1:])
    save_file({"logits": torch.stack([torch.stack(rows) for rows in out])}, pair / "logits.safetensors")


def extended(model: Any, states: Tensor, fed: Tensor) -> Tensor:
    """The states of the rows so far with that of one more behind them, all as wide as the head."""
    if states.shape[1] != fed.shape[1]:
        states = fused(model.model, states)
    return torch.cat([states, fed])


def fused(model: Any, features: Tensor) -> Tensor:
    """What an EAGLE-3 class makes of features before its first layer (models/llama_eagle3.py ``forward``)."""
    if getattr(model, "input_norm", None) is not None:
        features = model.input_norm(features)
    if model.fc_norm is not None:
        chunks = features.chunk(model.num_aux_hidden_states, dim=-1)
        features = torch.cat([norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)], dim=-1)
    out = model.fc(features)
    return out[0] if isinstance(out, tuple) else out


if __name__ == "__main__":
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *arguments, **named: None  # type: ignore[assignment]
    make_ready()
    replace_attention()
    for folder in sys.argv[1:]:
        run(Path(folder))
