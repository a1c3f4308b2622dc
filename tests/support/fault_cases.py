"""Every kind of fault with values to try, and the small head on which each is tried."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from support.heads import DEEPSEEK_YARN, LATENT, SPECULATORS, tiny_checkpoint

from replay.engines.behaviour import HEALTHY
from replay.engines.precision import Precision
from replay.engines.wiring import Wiring
from replay.faults.change import Subject

LAYERS = 8
TAPS = ("1", "3", "4")
TWO_LAYERS = {"num_hidden_layers": 2}
EVERY_NORM = {"fc_norm": True, "norm_output": True, "eagle_config": {"norm_before_fc": True}}
OWN_EMBEDDING = {"own": True}
# Kind and value -> the head to try it on. Every kind of the table, and every form that its values have.
CASES: dict[str, dict[str, Any]] = {
    "wiring.aux-layer-id=1": {},
    "wiring.aux-layer-id=-1": {},
    "wiring.aux-layer-id=2:-1": {},
    "wiring.aux-layer-id=default": {},
    "wiring.aux-missing=1": {},
    "wiring.aux-missing=all": {},
    "wiring.aux-capture-stage=normed": {},
    "wiring.concat-order=qkv": {},
    "wiring.concat-order=fc": {},
    "wiring.norm=residual": {},
    "wiring.norm=twice": {},
    "wiring.norm=skip:q_norm": SPECULATORS,
    "wiring.norm=skip:k_norm": SPECULATORS,
    "wiring.norm=skip:input_norm": EVERY_NORM,
    "wiring.norm=skip:fc_norm": EVERY_NORM,
    "wiring.norm=skip:hidden_norm": {},
    "wiring.norm=skip:input_layernorm": {},
    "wiring.norm=skip:post_attention_layernorm": {},
    "wiring.norm=skip:norm": {},
    "wiring.norm=skip:q_a_layernorm": LATENT,
    "wiring.norm=skip:kv_a_layernorm": LATENT,
    "wiring.norm-eps=0.1": {},
    "wiring.norm-eps=1e-6": {},
    "wiring.recycle-norm=other": {},
    "wiring.recycle-norm=pre": EVERY_NORM,
    "wiring.recycle-norm=post": {},
    "wiring.multi-layer=input_layernorm": TWO_LAYERS,
    "wiring.multi-layer=no-residual": TWO_LAYERS,
    "shift.alignment=token": {},
    "shift.alignment=features": {},
    "shift.stale-row=anchor": {},
    "shift.stale-row=previous": {},
    "shift.stale-row=first": TWO_LAYERS,
    "shift.stale-row=last": TWO_LAYERS,
    "shift.stale-row=first+kv.rollback=stale": TWO_LAYERS,
    "shift.stale-row=anchor+kv.handoff=hidden": {},
    "position.offset=1": {},
    "position.offset=-1": {},
    "position.offset=stuck": {},
    "position.offset=stuck:1": {},
    "position.rope-params=theta:50": {},
    "position.rope-params=scaling:none": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "position.rope-geometry=interleaved": {},
    "position.rope-geometry=halves": LATENT,
    "position.rope-geometry=partial:0.5": {},
    "position.max-len=9": {},
    "position.max-len=9:dummy": {},
    "position.max-len=config": {"max_position_embeddings": 8},
    "attn.window=1": {},
    "attn.window=5": TWO_LAYERS,
    "attn.scale=0.25": {},
    "attn.scale=3.5": TWO_LAYERS,
    "attn.scale=2+kv.prefix-reuse=4": TWO_LAYERS,
    "vocab.d2t=absolute": {},
    "vocab.d2t=identity": {},
    "vocab.d2t=offset:1": {},
    "weights.overwritten=lm_head": {},
    "weights.overwritten=embed:own": OWN_EMBEDDING,
    "weights.missing=lm_head": {},
    "weights.missing=fc.weight": {},
    "weights.missing=layers.0.hidden_norm": {},
    "weights.missing=fc:zero": {},
    "weights.missing=layers.0.self_attn.o_proj:noise": {},
    "weights.layout=qkv-interleaved": {},
    "kv.rollback=stale": TWO_LAYERS,
    "kv.rollback=accumulate": TWO_LAYERS,
    "kv.rollback=hole": TWO_LAYERS,
    "kv.rollback=full-hole": TWO_LAYERS,
    "kv.rollback=stale+kv.rollback=full-hole": TWO_LAYERS,
    "kv.prefix-reuse=4": TWO_LAYERS,
    "kv.prefix-reuse=4:masked": TWO_LAYERS,
    "kv.slot-write=overwrite": TWO_LAYERS,
    "kv.slot-write=unseen": {},
    "kv.chunk-boundary=3": {},
    "kv.chunk-boundary=recorded": {},
    "kv.skip-draft=2:6": {},
    "kv.skip-draft=2:6:masked": TWO_LAYERS,
    "kv.handoff=empty": {},
    "kv.handoff=hidden": {},
    "kv.handoff=kv": {},
    "kv.none=alone": {},
    "state.hidden-row=drafted": {},
    "state.hidden-row=first": TWO_LAYERS,
    "state.hidden-row=previous": {},
    "state.hidden-row=hidden-only": TWO_LAYERS,
    "state.dropped=attention": TWO_LAYERS,
    "state.dropped=mlp": {},
    "state.dropped=attention:1": TWO_LAYERS,
    "state.dropped=mlp:0": TWO_LAYERS,
    "state.dropped=attention:0+state.dropped=mlp:1": TWO_LAYERS,
    "state.noise=0.5": {},
    "state.noise=0.5+shift.alignment=features": {},
    "precision.draft-weights=fp8": {},
    "precision.draft-weights=fp8:channel": {},
    "precision.draft-weights=w4a16:g32:asym": {},
    "precision.draft-weights=w4a16:g32": TWO_LAYERS,
    "precision.draft-kv=fp8_e4m3": TWO_LAYERS,
    "precision.dtype-cast=fp16": {},
}
# What a fault of the draft KV, of positions or of numbers does where a row stores a latent and a rope key.
LATENT_HEAD = LATENT | {"rope_parameters": DEEPSEEK_YARN}
LATENT_CASES = (
    "wiring.aux-missing=1", "wiring.concat-order=qkv", "wiring.norm=residual", "wiring.norm=skip:kv_a_layernorm",
    "wiring.recycle-norm=other", "shift.stale-row=first+kv.rollback=stale", "position.offset=1",
    "position.rope-params=scaling:none", "position.rope-geometry=halves", "position.rope-geometry=partial:0.5",
    "position.max-len=9:dummy", "attn.window=5", "attn.scale=0.25", "weights.missing=layers.0.self_attn.kv_b_proj",
    "kv.rollback=stale", "kv.rollback=accumulate", "kv.rollback=hole", "kv.rollback=full-hole", "kv.prefix-reuse=4",
    "kv.prefix-reuse=4:masked", "kv.slot-write=overwrite", "kv.slot-write=unseen", "kv.chunk-boundary=recorded",
    "kv.skip-draft=2:6", "kv.handoff=empty", "kv.none=alone", "state.hidden-row=drafted", "state.dropped=attention",
    "precision.draft-weights=fp8:channel", "precision.draft-kv=fp8_e4m3",
)  # fmt: skip
# Not of chains: tests/simulator/test_tree_variants.py holds both layouts against the tree's own twin.
TREES_ONLY = {"tree.parent-kv"}
# Not of a walk, which has no batches: tests/drafting/test_crossed.py and tests/simulator/test_crossed.py hold them
# against their own twin.
BATCHES_ONLY = {"state.crossed"}
# Not of heads that draft token by token: tests/drafting/test_blocks.py holds them against the twin of blocks.
BLOCKS_ONLY = {"block.attention", "block.mask-token", "block.size", "block.late-context"}
# Kinds whose numbers may be any, and those whose numbers start at 0. All other numbers are at least 1, or above 0.
ANY_NUMBER = {"wiring.aux-layer-id", "position.offset", "vocab.d2t"}
FROM_ZERO = {"wiring.aux-missing", "state.dropped", "block.mask-token"}
# RoPE only knows distances, so the same offset on every row is not to be seen.
INVISIBLE = {"position.offset=all:3": {}}


@cache
def subject(options: str) -> Subject:
    given = json.loads(options)
    own = given.pop("own", False)
    checkpoint = tiny_checkpoint(**given)
    if own:
        table = torch.randn(96, 32, generator=torch.Generator().manual_seed(8))
        checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, "embed_tokens.weight": table})
    return Subject(Wiring(TAPS), checkpoint, HEALTHY, LAYERS, Precision("bf16"))


def healthy_subject(options: dict[str, Any]) -> Subject:
    return subject(json.dumps(options))
