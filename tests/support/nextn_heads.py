"""A small NextN head, and the same put together from Transformers' own DeepSeek-V3 decoder layer.

What lies around that layer follows SGLang 0.5.23 models/deepseek_nextn.py, line by line. No cache: every drafted row
runs the head over all rows so far.
"""

from collections.abc import Callable
from typing import Any

import torch
from support.heads import DEEPSEEK_YARN, random_tensors
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from replay.checkpoint.checkpoint import Checkpoint, check_checkpoint
from replay.checkpoint.config import parse_config

_LAYER, _MLP = "layers.0.", "layers.0.mlp."


def nextn_config(**changes: Any) -> dict[str, Any]:
    """Its config.json; None removes a field."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLMNextN"], "model_type": "deepseek_v3", "hidden_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 6, "num_nextn_predict_layers": 1,
        "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6,
        "intermediate_size": 48, "moe_intermediate_size": 12, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "vocab_size": 96, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_parameters": DEEPSEEK_YARN,
    } | changes  # fmt: skip
    return {key: value for key, value in config.items() if value is not None}


def nextn_checkpoint(seed: int = 0, **changes: Any) -> Checkpoint:
    """A checked random head."""
    config = parse_config(nextn_config(**changes))
    tensors = random_tensors(config, seed)
    bias = f"{_MLP}gate.e_score_correction_bias"
    tensors[bias] = (tensors[bias] - 1) / 2  # so that it decides now and then
    return check_checkpoint("tiny", config, tensors)


def as_written(tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Under the names that DeepSeek gives them, as a layer of this number."""
    names = {name: f"model.layers.{number}.{name.removeprefix(_LAYER)}" for name in tensors}
    names["norm.weight"] = f"model.layers.{number}.shared_head.norm.weight"
    return {names[name]: tensor for name, tensor in tensors.items()}


class NextNPeer:
    """Its own forward in fp32 of the tensors of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, document: dict[str, Any], embed_VE: Tensor, lm_head_VE: Tensor) -> None:
        self._tensors, self._eps = checkpoint.tensors, checkpoint.config.rms_norm_eps
        self._embed_VE, self._lm_head_VE = embed_VE, lm_head_VE
        fields = {name: value for name, value in document.items() if name not in ("architectures", "model_type")}
        stated = DeepseekV3Config(**fields, first_k_dense_replace=0, attn_implementation="eager")
        self._layer = deepseek.DeepseekV3DecoderLayer(stated, 0)
        self._rotary = deepseek.DeepseekV3RotaryEmbedding(stated)
        self._layer.load_state_dict(self._state(checkpoint))
        attention = self._layer.self_attn
        for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
            norm.variance_epsilon = self._eps  # SGLang 0.5.23 models/deepseek_v2.py; Transformers has 1e-6

    def _state(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        experts = checkpoint.config.experts
        assert experts is not None
        tensors = dict(self._tensors)
        every = [f"{_MLP}experts.{number}." for number in range(experts.count)]
        both = [torch.cat([tensors.pop(f"{one}{part}_proj.weight") for part in ("gate", "up")]) for one in every]
        down = [tensors.pop(f"{one}down_proj.weight") for one in every]
        joined = {"mlp.experts.gate_up_proj": torch.stack(both), "mlp.experts.down_proj": torch.stack(down)}
        rest = {name.removeprefix(_LAYER): part for name, part in tensors.items() if name.startswith(_LAYER)}
        return rest | joined

    def _norm(self, x: Tensor, name: str) -> Tensor:
        norm = deepseek.DeepseekV3RMSNorm(x.shape[-1], self._eps)
        norm.weight.data = self._tensors[f"{name}.weight"]
        normed: Tensor = norm(x)
        return normed

    def forward(self, ids_R: Tensor, state_RE: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, V] and the states fed on [R, E] of rows 0, 1, ..., each of which sees those before."""
        both = torch.cat([self._norm(self._embed_VE[ids_R], "enorm"), self._norm(state_RE, "hnorm")], -1)
        x = nn.functional.linear(both, self._tensors["eh_proj.weight"])[None]
        rows = len(ids_R)
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        out = self._layer(x, mask, position_embeddings=self._rotary(x, torch.arange(rows)[None]))
        normed_RE = self._norm((out[0] if isinstance(out, tuple) else out)[0], "norm")
        return normed_RE @ self._lm_head_VE.T, normed_RE

    @torch.no_grad()
    def logits(self, ids_R: Tensor, states_RE: Tensor, steps: int, next_id: Callable[[Tensor], int]) -> list[Tensor]:
        """Logits [R, V] of each step of the chain that each row drafts; ``next_id`` chooses from one row of them."""
        out: list[list[Tensor]] = [[] for _ in range(steps)]
        for row in range(len(ids_R)):
            ids, states = ids_R[: row + 1], states_RE[: row + 1]
            for step in range(steps):
                logits_RV, fed_RE = self.forward(ids, states)
                out[step].append(logits_RV[-1])
                ids = torch.cat([ids, torch.tensor([next_id(logits_RV[-1])])])
                states = torch.cat([states, fed_RE[-1:]])
        return [torch.stack(step) for step in out]
