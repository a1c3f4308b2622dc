"""Logits of every position of a block equal those of z-lab's own package (dflash 0.1.0) and of SpecForge 0.2.0."""

from dataclasses import replace

import pytest
import torch
from support.dflash_heads import (
    HEADS,
    MASK,
    SIZE,
    SPECFORGE,
    ZLAB,
    dflash_checkpoint,
    dflash_config,
    dflash_peer,
    peer_states,
)
from support.heads import target_tables

from replay.drafting.chains import chain_steps
from replay.drafting.first_pass import first_pass
from replay.drafting.rows import DraftInput
from replay.engines.profiles import ENGINES
from replay.head.model import Head, TargetTables

TOKENS, PROMPT = 14, 3


# SpecForge masks windows and causal layers outside of its model, where it trains.
_UNMASKED = ("plain", "one layer, one tap", "ids spread over the target", "biases", "yarn rope")


@pytest.mark.parametrize(
    ("name", "numerics", "module"),
    [
        *((name, numerics, ZLAB) for name in HEADS for numerics in ("sglang", "hf")),
        *((name, "sglang", SPECFORGE) for name in _UNMASKED),
    ],
)
def test_logits_equal_the_peers_at_every_position(name: str, numerics: str, module: str) -> None:
    checkpoint = dflash_checkpoint(**HEADS[name])
    embed_VE, lm_head_VE = target_tables(checkpoint)
    head = Head(checkpoint, TargetTables(embed_VE, lm_head_VE), profile=replace(ENGINES["sglang"], numerics=numerics))
    generator = torch.Generator().manual_seed(7)
    tokens_T = torch.randint(96, (TOKENS,), generator=generator)
    features_RKD = torch.randn(TOKENS - 1, checkpoint.config.fc_inputs, generator=generator)
    item = DraftInput(tokens_T, features_RKD, PROMPT)
    steps = chain_steps(head, first_pass(head, [item]), SIZE - 1, lambda _: tokens_T)
    mine_ASW = torch.stack([head.logits(step.normed_AE) for step in steps], 1)
    peer = dflash_peer(dflash_config(**HEADS[name]), checkpoint, module)
    assert len(mine_ASW) == TOKENS - 1 - PROMPT
    for anchor, mine_SW in zip(range(PROMPT, TOKENS - 1), mine_ASW, strict=True):
        ids_B = torch.tensor([int(tokens_T[anchor]), *[MASK] * (SIZE - 1)])
        theirs_SW = peer_states(peer, features_RKD[:anchor], ids_B, embed_VE)[1:] @ lm_head_VE.T
        assert theirs_SW.std() > 1
        assert (mine_SW - theirs_SW).abs().max() < 1e-4
