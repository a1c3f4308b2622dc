"""Model-Optimizer's own ``EagleModule`` (0.47.0) on the tensors of a checkpoint, as its Hugging Face trainer builds it.

No cache: every drafted row runs it over all rows so far.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from support.peer_heads import llama_config
from torch import Tensor

from replay.checkpoint.checkpoint import Checkpoint

MODULE = "modelopt/torch/speculative/plugins/modeling_eagle.py"


def eagle_module_class() -> Any:
    """The class out of its file: the package around it asks for a trainer's packages, the file for Transformers."""
    found = [path for path in importlib.metadata.files("nvidia-modelopt") or () if str(path) == MODULE]
    spec = importlib.util.spec_from_file_location("modelopt_eagle_module", found[0].locate())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EagleModule


class ModelOpt:
    """Its forward in fp32. ``rope``: transformers 5's ``rope_parameters``."""

    def __init__(self, checkpoint: Checkpoint, embed_VE: Tensor, rope: dict[str, Any]) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        config = checkpoint.config
        stated = llama_config(
            checkpoint, rope, draft_vocab_size=config.draft_vocab_size, has_lm_head=True, use_aux_hidden_state=True,
            use_last_layernorm=config.last_norm, eagle_aux_hidden_state_layer_ids=list(range(config.num_taps)),
            eagle_decoder_type="llama",
        )  # fmt: skip
        stated._attn_implementation = "eager"
        self._module = eagle_module_class()(stated, LlamaDecoderLayer).float()
        self._module.load_state_dict(dict(checkpoint.tensors))
        self._module.rotary_emb = LlamaRotaryEmbedding(stated)  # its own call names an argument that is gone
        self._embed_VE = embed_VE

    @torch.no_grad()
    def logits(self, ids_R: Tensor, features_RKD: Tensor, steps: int, next_id: Callable[[Tensor], int]) -> list[Tensor]:
        """Logits [R, W] of each step of the chain that each row drafts; ``next_id`` chooses from one row of them."""
        states_RE = self._module.fc(features_RKD)
        out: list[list[Tensor]] = [[] for _ in range(steps)]
        for row in range(len(ids_R)):
            ids, states = ids_R[: row + 1], states_RE[: row + 1]
            for step in range(steps):
                mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
                normed, stream, _ = self._module(states[None], self._embed_VE[ids][None], mask)
                logits_W = self._module.lm_head(normed[0, -1])
                out[step].append(logits_W)
                ids = torch.cat([ids, torch.tensor([next_id(logits_W)])])
                states = torch.cat([states, stream[0, -1:]])
        return [torch.stack(step) for step in out]
