"""Blocks of mask tokens: all anchors at once equal the twin, one by one; under each fault that a block can have."""

from functools import cache

import pytest
import torch
from support.dflash_heads import MASK, SIZE, SLIDING, dflash_checkpoint
from support.fault_cases import BLOCKS_ONLY
from support.heads import target_tables
from twins.blocks import draft_one_block

from replay.drafting import blocks
from replay.drafting.chains import chain_steps
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.margins import margins_along
from replay.drafting.rows import DraftInput
from replay.engines.behaviour import HEALTHY
from replay.engines.precision import Precision
from replay.engines.wiring import Wiring
from replay.errors import CheckpointError
from replay.faults.change import Subject
from replay.faults.table import apply_faults, parse_faults
from replay.head import block as block_head
from replay.head.model import Head, TargetTables
from replay.head.products import Execution

STEPS = SIZE - 1
TAPS = ("1", "3", "4")
SHAPES = ((6, 5), (3, 4), (2, 1))
HEADS = {"plain": {}, "sliding": SLIDING, "causal": {"is_causal": True}, "biases": {"attention_bias": True}}
# Every form of a fault that a block can have, with the head on which it shows.
CASES = {
    "none": "plain",
    "wiring.aux-layer-id=1": "plain",
    "wiring.aux-missing=1": "plain",
    "wiring.aux-capture-stage=normed": "plain",
    "wiring.concat-order=fc": "plain",
    "wiring.norm=skip:hidden_norm": "plain",
    "wiring.norm=skip:q_norm": "plain",
    "wiring.norm=skip:k_norm": "sliding",
    "wiring.norm=skip:input_layernorm": "plain",
    "wiring.norm-eps=0.1": "plain",
    "shift.alignment=features": "plain",
    "position.offset=1": "plain",
    "position.offset=stuck": "sliding",
    "position.rope-params=theta:50": "plain",
    "position.rope-geometry=interleaved": "plain",
    "position.rope-geometry=partial:0.5": "plain",
    "position.max-len=9": "plain",
    "position.max-len=9:dummy": "plain",
    "attn.window=5": "sliding",
    "attn.scale=0.25": "plain",
    "weights.missing=fc": "plain",
    "weights.layout=qkv-interleaved": "biases",
    "kv.prefix-reuse=4": "sliding",
    "kv.prefix-reuse=4:masked": "plain",
    "kv.skip-draft=2:6": "plain",
    "kv.handoff=empty": "plain",
    "kv.none=alone": "sliding",
    "state.dropped=attention:1": "plain",
    "state.noise=0.5": "plain",
    "precision.draft-weights=fp8:channel": "plain",
    "precision.draft-kv=fp8_e4m3": "plain",
    "precision.dtype-cast=fp16": "plain",
    "block.attention=causal": "plain",
    "block.attention=bidirectional": "sliding",
    "block.mask-token=3": "plain",
    f"block.size={SIZE + 3}": "sliding",
    "block.late-context=2": "plain",
    "block.late-context=2+kv.prefix-reuse=4": "sliding",
}


@cache
def subject(name: str) -> Subject:
    """Of another seed than the noise of ``weights.missing``, which would else be a multiple of the head's own fc."""
    return Subject(Wiring(TAPS), dflash_checkpoint(1, **HEADS[name]), HEALTHY, 8, Precision("bf16"))


def bound(changed: Subject) -> Head:
    """In double precision no rounding can part the ways to draft; of precision faults the rounding is the matter."""
    plain = changed.precision == Precision("bf16")
    dtype = torch.float64 if plain else torch.float16 if changed.precision.base == "fp16" else torch.float32
    tables = TargetTables(*target_tables(changed.checkpoint))
    return Head(changed.checkpoint, tables, execution=Execution(dtype), behaviour=changed.behaviour,
                precision=changed.precision)  # fmt: skip


@cache
def taps_of(prompt: int, output: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(prompt)
    tokens_T = torch.randint(96, (prompt + output,), generator=generator)
    names = ["embed", *map(str, range(1, 9))]
    return tokens_T, {name: torch.randn(prompt + output - 1, 32, generator=generator) for name in names}


def inputs(changed: Subject) -> list[DraftInput]:
    made = []
    for prompt, output in SHAPES:
        tokens_T, taps = taps_of(prompt, output)
        made.append(DraftInput(tokens_T, torch.cat([taps[tap] for tap in changed.wiring.taps], dim=-1), prompt))
    return made


def logits_of(changed: Subject) -> torch.Tensor:
    """Of every anchor and step [A, S, W]."""
    head, items = bound(changed), inputs(changed)
    states = chain_steps(head, first_pass(head, items), STEPS, lambda step: torch.zeros(1))
    return torch.stack([head.logits(state.normed_AE) for state in states], 1)


@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_twins_under_each_fault(case: str) -> None:
    changed = apply_faults(subject(CASES[case]), parse_faults(case))
    head, items, made = bound(changed), inputs(changed), logits_of(changed)
    drafts, anchor_number = draft_every_anchor(head, items, STEPS), 0
    for item, drafted in zip(items, drafts, strict=True):
        for place, anchor in enumerate(item.anchors_A.tolist()):
            ids, logits_SW = draft_one_block(head, item, anchor, STEPS)
            assert drafted.drafted_AK[place].tolist() == ids
            assert torch.allclose(made[anchor_number], logits_SW, atol=0.05 if head.dtype == torch.float16 else 1e-4)
            anchor_number += 1
    assert anchor_number == sum(output - 1 for _, output in SHAPES)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("none", "position.max-len=9:dummy")])
def test_each_fault_of_a_block_shows_in_its_logits(case: str) -> None:
    healthy = subject(CASES[case])
    changed = apply_faults(healthy, parse_faults(case))
    assert (logits_of(healthy).double() - logits_of(changed).double()).abs().max() > 1e-3


def test_every_kind_of_blocks_has_a_case() -> None:
    assert {case.partition("=")[0] for case in CASES} >= BLOCKS_ONLY


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = logits_of(subject("sliding"))
    monkeypatch.setattr(blocks, "_ROWS", 3 * SIZE)  # a piece holds anchors of two requests
    monkeypatch.setattr(block_head, "_PIECE_SCORES", 1)
    assert torch.allclose(logits_of(subject("sliding")), whole, atol=1e-5)  # attention is in fp32


def test_what_a_server_drafted_is_not_fed() -> None:
    """Along its own drafts every margin is 0, and along others the preferred tokens stay the same."""
    head, items = bound(subject("plain")), inputs(subject("plain"))
    drafts = [drafts.drafted_AK for drafts in draft_every_anchor(head, items, STEPS)]
    for own, other in zip(
        margins_along(head, items, drafts), margins_along(head, items, [(d + 1) % 96 for d in drafts]), strict=True
    ):
        assert (own.margin_AK == 0).all()
        assert torch.equal(own.preferred_AK, other.preferred_AK)
        assert (other.margin_AK > 0).all()


def test_the_token_of_the_masks_in_their_own_place_is_refused() -> None:
    with pytest.raises(CheckpointError, match=f"has token {MASK} where the masks are already"):
        apply_faults(subject("plain"), parse_faults(f"block.mask-token={MASK}"))
