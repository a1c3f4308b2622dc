"""A latent head put together from Transformers' own DeepSeek-V3 modules: attention, rotary embedding, norms and MLP.

What lies around them follows SGLang 0.5.23 models/kimi_k25_eagle3.py, line by line. No cache: every drafted row runs
the head over all rows so far.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from replay.checkpoint.checkpoint import Checkpoint

_ATTENTION = "layers.0.self_attn."


class LatentPeer:
    """Its own forward in fp32 of the tensors of a checkpoint; ``rope`` as the config states it."""

    def __init__(self, checkpoint: Checkpoint, embed_VE: Tensor, lm_head_WE: Tensor, rope: dict[str, Any]) -> None:
        config, latent = checkpoint.config, checkpoint.config.latent
        assert latent is not None
        self._checkpoint, self._embed_VE, self._lm_head_WE = checkpoint, embed_VE, lm_head_WE
        stated = DeepseekV3Config(
            hidden_size=2 * config.hidden_size,  # what attention takes in; o_proj gives half of it
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            q_lora_rank=latent.q_rank,
            kv_lora_rank=latent.kv_rank,
            qk_nope_head_dim=latent.nope,
            qk_rope_head_dim=latent.rope,
            v_head_dim=latent.value,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(rope),
            rope_interleave=latent.interleaved,
            attn_implementation="eager",
        )
        self._attention = deepseek.DeepseekV3Attention(stated, layer_idx=0)
        self._attention.o_proj = nn.Linear(config.num_heads * latent.value, config.hidden_size, bias=False)
        self._rotary = deepseek.DeepseekV3RotaryEmbedding(stated)
        tensors = checkpoint.tensors
        self._attention.load_state_dict(
            {name.removeprefix(_ATTENTION): part for name, part in tensors.items() if name.startswith(_ATTENTION)}
        )
        for norm in (self._attention.q_a_layernorm, self._attention.kv_a_layernorm):
            norm.variance_epsilon = config.rms_norm_eps  # SGLang 0.5.23 models/deepseek_v2.py; Transformers has 1e-6
        stated.hidden_size = config.hidden_size
        self._mlp = deepseek.DeepseekV3MLP(stated)
        mlp = "layers.0.mlp."
        self._mlp.load_state_dict(
            {name.removeprefix(mlp): part for name, part in tensors.items() if name.startswith(mlp)}
        )

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._checkpoint.tensors[f"{name}.weight"]
        norm = deepseek.DeepseekV3RMSNorm(len(weight), self._checkpoint.config.rms_norm_eps)
        norm.weight.data = weight
        normed: Tensor = norm(x)
        return normed

    def fuse(self, features_RKD: Tensor) -> Tensor:
        """The state [R, E] of rows of features."""
        config, tensors = self._checkpoint.config, self._checkpoint.tensors
        chunks = list(features_RKD.chunk(config.num_taps, dim=-1))
        if config.fc_norm:
            chunks = [self._norm(chunk, f"fc_norm.{tap}") for tap, chunk in enumerate(chunks)]
        return nn.functional.linear(torch.cat(chunks, -1), tensors["fc.weight"], tensors.get("fc.bias"))

    def forward(self, ids_R: Tensor, state_RE: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, W] and the states fed on [R, E] of rows 0, 1, ..., each of which sees those before."""
        embeds_RE = self._embed_VE[ids_R]
        parts = [self._norm(embeds_RE, "layers.0.input_layernorm"), self._norm(state_RE, "layers.0.hidden_norm")]
        inputs = torch.cat(parts, -1)[None]
        rows = len(ids_R)
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        mixed = self._attention(inputs, self._rotary(inputs, torch.arange(rows)[None]), mask)[0][0]
        stream_RE = mixed + state_RE
        stream_RE = stream_RE + self._mlp(self._norm(stream_RE, "layers.0.post_attention_layernorm"))
        normed_RE = self._norm(stream_RE, "norm")
        return normed_RE @ self._lm_head_WE.T, normed_RE if self._checkpoint.config.norm_output else stream_RE

    @torch.no_grad()
    def logits(self, ids_R: Tensor, features_RKD: Tensor, steps: int, next_id: Callable[[Tensor], int]) -> list[Tensor]:
        """Logits [R, W] of each step of the chain that each row drafts; ``next_id`` chooses from one row of them."""
        states_RE = self.fuse(features_RKD)
        out: list[list[Tensor]] = [[] for _ in range(steps)]
        for row in range(len(ids_R)):
            ids, states = ids_R[: row + 1], states_RE[: row + 1]
            for step in range(steps):
                logits_RW, fed_RE = self.forward(ids, states)
                out[step].append(logits_RW[-1])
                ids = torch.cat([ids, torch.tensor([next_id(logits_RW[-1])])])
                states = torch.cat([states, fed_RE[-1:]])
        return [torch.stack(step) for step in out]
