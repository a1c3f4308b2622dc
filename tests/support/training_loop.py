"""A small training of a real head class on a small trace, as a training loop holds both.

The head is SpecForge 0.2.0's own module under the name that its loop gives it. It learns the texts by heart.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.heads import random_tensors, tiny_config
from support.trace_maker import H, V, changed, make_four, make_header, write_trace
from torch import Tensor, nn
from torch.nn import functional

from replay.checkpoint.config import parse_config
from replay.traces.header import TapInfo
from replay.traces.reader import Trace

WIRING = "embed,1,2"
CONFIG = tiny_config(
    hidden_size=H, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=V, draft_vocab_size=48,
    eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]},
)  # fmt: skip


def loop_trace(folder: Path) -> Trace:
    """Four requests of 14 tokens, with taps 1, 2 and final."""
    header = make_header()
    requests = []
    for seed, one in enumerate(make_four()):
        rows = torch.randn(one.taps["2"].shape, generator=torch.Generator().manual_seed(50 + seed))
        requests.append(changed(one, taps={**one.taps, "1": rows.bfloat16()}))
    taps = {name: TapInfo("bfloat16", H) for name in ("1", "2", "final")}
    return Trace.open(write_trace(folder, [requests], header=replace(header, taps=taps)))


class Loop(nn.Module):
    """The head as ``draft_model`` with the loss of its first step."""

    def __init__(self, draft_model: Any) -> None:
        super().__init__()
        self.draft_model = draft_model

    def forward(self, ids: Tensor, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Rows [B, R] of tokens and draft ids (-100 for none), features [B, R, K*D] → the loss."""
        model, rows = self.draft_model, ids.shape[1]
        state = model.project_hidden_states(features)
        state = model.backbone(
            input_embeds=model.embed_input_ids(ids),
            hidden_states=state,
            cache_hidden=[[], []],
            attention_mask=model.prepare_decoder_attention_mask(torch.ones(ids.shape).bool(), state, len(ids), rows, 0),
            position_ids=torch.arange(rows).expand(len(ids), -1),
        )
        return {"loss": functional.cross_entropy(model.compute_logits(state).flatten(0, 1), labels.flatten())}


def make_loop(trace: Trace) -> Loop:
    """A loop with the same random head whenever it is called; the embedding is the target's and stays as it is."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    config = {key: value for key, value in CONFIG.items() if key not in ("architectures", "eagle_config", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": CONFIG["rope_theta"]}
    stated = LlamaConfig(**config, rope_parameters=rope, pad_token_id=None, pretraining_tp=1, target_hidden_size=H)
    model = LlamaForCausalLMEagle3(stated, attention_backend="sdpa").float()
    tensors = random_tensors(parse_config(CONFIG))
    t2d_V = torch.zeros(V, dtype=torch.bool)
    t2d_V[torch.arange(48) + tensors["d2t"]] = True
    tensors |= {"t2d": t2d_V, "embed_tokens.weight": trace.embed_weight().float()}
    model.load_state_dict({name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()})
    model.embed_tokens.weight.requires_grad_(False)
    return Loop(model)


def texts(trace: Trace, loop: Loop) -> list[dict[str, Tensor]]:
    """Each request as rows: token i + 1 and features i, to predict token i + 2."""
    d2t_W = loop.draft_model.d2t
    draft_ids_V = torch.full((V,), -100)
    draft_ids_V[torch.arange(len(d2t_W)) + d2t_W] = torch.arange(len(d2t_W))
    found = []
    for index in range(len(trace)):
        rows = trace.read(index, WIRING.split(","))
        features = torch.cat([rows.taps[tap] for tap in WIRING.split(",")], -1).float()
        labels = draft_ids_V[rows.tokens[2:]]
        found.append({"ids": rows.tokens[1:-1], "features": features[:-1], "labels": labels})
    return found
