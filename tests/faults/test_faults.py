"""Every fault of the table: the twin and both ways to draft agree under it, and it changes what it should."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.fault_cases import (
    CASES,
    INVISIBLE,
    LATENT_CASES,
    LATENT_HEAD,
    LAYERS,
    TAPS,
    TWO_LAYERS,
    healthy_subject,
)
from support.heads import target_tables
from support.products import products_seen
from twins.rounds import Twin, TwinRound, draft_one_round, replay_request

from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.round_by_round import walk
from replay.drafting.rows import DraftInput, committed_rows
from replay.drafting.tree_shape import TreeSize
from replay.drafting.trees import draft_every_tree
from replay.engines.behaviour import HEALTHY, Behaviour
from replay.engines.profiles import ENGINES
from replay.faults.change import Subject
from replay.faults.table import apply_faults, parse_faults
from replay.head.model import Head, TargetTables
from replay.head.products import Execution

STEPS = 4
SHAPES = ((7, 16), (3, 10), (2, 1), (5, 2))
# By prompt, the pieces in which it was prefilled; of the prompt of 5 the first row came from a cache.
PIECES = {7: [(2, 2), (1, 6), (4, 4)], 3: [(1, 6), (2, 2)], 2: [(2, 6)], 5: [(3, 3), (1, 8)]}


def bound(changed: Subject) -> Head:
    embed_VE, lm_head_VE = target_tables(changed.checkpoint)
    # In double precision no rounding can part the ways to draft; of precision faults the rounding is the matter.
    plain = changed.precision == healthy_subject({}).precision
    dtype = torch.float64 if plain else torch.float16 if changed.precision.base == "fp16" else torch.float32
    profile = ENGINES["sglang"]
    if changed.own_embedding is not None:
        profile = replace(profile, own_embedding=changed.own_embedding)
    return Head(
        changed.checkpoint,
        TargetTables(embed_VE, lm_head_VE),
        profile=profile,
        execution=Execution(dtype),
        behaviour=changed.behaviour,
        precision=changed.precision,
    )


@cache
def request(prompt: int, output: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Tokens, every tap of the imagined target, and what it would sample after each position."""
    generator = torch.Generator().manual_seed(prompt)
    tokens_T = torch.randint(96, (prompt + output,), generator=generator)
    names = ["embed", *map(str, range(1, LAYERS + 1))]
    taps = {name: torch.randn(prompt + output - 1, 32, generator=generator) for name in names}
    return tokens_T, taps, torch.randint(96, (prompt + output,), generator=generator)


_OUTPUTS: dict[int, tuple[torch.Tensor, ...]] = {}


def outputs(healthy: Subject) -> tuple[torch.Tensor, ...]:
    """``follow_drafts``, once for each head (``subject`` keeps them, so that ids stay theirs)."""
    if id(healthy) not in _OUTPUTS:
        _OUTPUTS[id(healthy)] = follow_drafts(healthy)
    return _OUTPUTS[id(healthy)]


def follow_drafts(healthy: Subject) -> tuple[torch.Tensor, ...]:
    """Tokens that follow the healthy head's drafts for a while, so that rounds accept 0 to K tokens."""
    head = bound(healthy)
    made = []
    for prompt, output in SHAPES:
        tokens_T, taps, _ = request(prompt, output)
        straight = torch.cat([taps[tap] for tap in TAPS], dim=-1)
        tokens_T = tokens_T.clone()
        anchor, turn = prompt, 0
        while anchor < len(tokens_T) - 1:
            drafted = draft_one_round(head, tokens_T, straight, anchor, STEPS)
            wanted = (2, STEPS, 0, 1, 3)[turn % 5]
            room = len(tokens_T) - 1 - anchor
            tokens_T[anchor + 1 : anchor + 1 + min(wanted, room)] = torch.tensor(drafted[: min(wanted, room)])
            anchor, turn = anchor + wanted + 1, turn + 1
        made.append(tokens_T)
    return tuple(made)


def inputs(changed: Subject, healthy: Subject) -> list[DraftInput]:
    """Requests as the changed wiring feeds them, with the outputs that the healthy head follows."""
    made = []
    for (prompt, output), tokens_T in zip(SHAPES, outputs(healthy), strict=True):
        _, taps, sampled_T = request(prompt, output)
        features_RKD = torch.cat([taps[tap] for tap in changed.wiring.taps], dim=-1)
        made.append(DraftInput(tokens_T, features_RKD, prompt, sampled_T, pieces=PIECES[prompt]))
    return made


def twin_rounds(head: Head, items: list[DraftInput]) -> list[list[TwinRound]]:
    return [
        replay_request(
            head,
            item.tokens_T,
            item.features_RKD,
            item.prompt_tokens,
            STEPS,
            sampled_T=item.sampled_T,
            piece_rows=[rows for rows, _ in item.pieces],
        )
        for item in items
    ]


@pytest.mark.parametrize("case", [*CASES, *INVISIBLE])
def test_drafts_equal_the_twins_under_each_fault(case: str) -> None:
    assert_drafts_are_the_twins(case, {**CASES, **INVISIBLE}[case])


@pytest.mark.parametrize("case", LATENT_CASES)
def test_drafts_of_a_latent_head_equal_the_twins_under_faults(case: str) -> None:
    assert_drafts_are_the_twins(case, LATENT_HEAD)


@pytest.mark.parametrize("case", LATENT_CASES)
def test_faults_of_a_latent_head_show_in_what_is_computed(case: str) -> None:
    assert_it_shows(case, LATENT_HEAD)


def assert_drafts_are_the_twins(case: str, options: dict[str, Any]) -> None:
    healthy = healthy_subject(options)
    changed = apply_faults(healthy, parse_faults(case))
    head = bound(changed)
    items = inputs(changed, healthy)
    expected = twin_rounds(head, items)
    walked = walk(head, items, STEPS)
    for rounds, played in zip(expected, walked, strict=True):
        assert [item.anchor for item in rounds] == list(played.anchors)
        assert [list(item.drafted) for item in rounds] == played.drafted_RK.tolist()
        assert [item.accepted for item in rounds] == list(played.accepted)
    if not head.behaviour.follows_walk:
        for rounds, drafts, item in zip(expected, draft_every_anchor(head, items, STEPS), items, strict=True):
            drafted = [drafts.drafted_AK[item_round.anchor - item.prompt_tokens].tolist() for item_round in rounds]
            assert [list(item_round.drafted) for item_round in rounds] == drafted


@pytest.mark.parametrize("case", CASES)
def test_each_fault_shows_in_what_is_computed(case: str) -> None:
    """Not in the tokens, which a small change may leave as they are, but in what they are chosen from."""
    assert_it_shows(case, CASES[case])


def assert_it_shows(case: str, options: dict[str, Any]) -> None:
    healthy = healthy_subject(options)
    changed = apply_faults(healthy, parse_faults(case))
    items = inputs(changed, healthy)
    straight = inputs(healthy, healthy)
    assert _traces(bound(healthy), straight) != _traces(bound(changed), items)


@pytest.mark.parametrize("case", INVISIBLE)
def test_an_offset_of_all_rows_changes_no_token(case: str) -> None:
    healthy = healthy_subject({})
    changed = apply_faults(healthy, parse_faults(case))
    items = inputs(healthy, healthy)
    assert twin_rounds(bound(changed), items) == twin_rounds(bound(healthy), items)
    assert changed.behaviour.offset == 3


def test_a_walk_runs_prompts_in_products_of_their_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server does, whatever the most rows of its decodes: sums are rounded by how many rows there are."""
    healthy = healthy_subject({})
    head = Head(healthy.checkpoint, TargetTables(*target_tables(healthy.checkpoint)),
                execution=Execution(product_rows=4), behaviour=Behaviour(rewrite="stale"))  # fmt: skip
    sizes = products_seen(monkeypatch)
    tokens_T, taps, _ = request(7, 16)
    features_RKD = torch.cat([taps[tap] for tap in TAPS], dim=-1).to(head.dtype)
    walk(head, [DraftInput(tokens_T, features_RKD, 7)], STEPS)
    assert {size for size in sizes if size > 4} == {7}


def _traces(head: Head, items: list[DraftInput]) -> list[object]:
    """Every number that a walk makes: the logits' inputs and the states, round by round, and the drafted ids."""
    numbers: list[object] = []
    forward = head.forward

    def spy(*arguments: Any, **named: Any) -> Any:
        output = forward(*arguments, **named)
        numbers.append(head.logits(output.normed_RE).double().sum().item())
        numbers.append(output.feedback_RE.double().sum().item())
        return output

    head.forward = spy  # type: ignore[method-assign]
    rounds = walk(head, items, STEPS)
    return [*numbers, [item.drafted_RK.tolist() for item in rounds]]


def test_no_fault_is_a_healthy_server() -> None:
    assert parse_faults("none") == ()
    healthy = healthy_subject({})
    assert apply_faults(healthy, ()) is healthy
    items = inputs(healthy, healthy)
    plain = Head(
        healthy.checkpoint, TargetTables(*target_tables(healthy.checkpoint)), execution=Execution(torch.float64)
    )
    assert twin_rounds(plain, items) == twin_rounds(bound(healthy), items)
    accepted = [item.accepted for item in twin_rounds(plain, items)[0]]
    assert accepted == [2, 4, 0, 1, 3]


@pytest.mark.parametrize(
    ("hiding", "hidden"),
    [
        ("weights.overwritten=lm_head", "weights.missing=lm_head"),
        ("wiring.norm=skip:norm", "weights.missing=norm"),
        ("wiring.aux-missing=0", "wiring.aux-layer-id=0:1"),
    ],
)
def test_a_fault_of_what_is_never_read_plays_as_none(hiding: str, hidden: str) -> None:
    """docs/faults.md says so: whether the head reads what a fault changed is not looked at, in either order."""
    healthy = healthy_subject({})
    played = []
    for text in (hiding, f"{hiding}+{hidden}", f"{hidden}+{hiding}"):
        changed = apply_faults(healthy, parse_faults(text))
        played.append(_traces(bound(changed), inputs(changed, healthy)))
    assert played[0] == played[1] == played[2]
    alone = apply_faults(healthy, parse_faults(hidden))
    assert _traces(bound(alone), inputs(alone, healthy)) != _traces(bound(healthy), inputs(healthy, healthy))


def test_a_first_pass_serves_variants_that_differ_later() -> None:
    healthy = healthy_subject(TWO_LAYERS)
    head = bound(healthy)
    items = inputs(healthy, healthy)
    first = first_pass(head, items)
    for later in (HEALTHY, Behaviour(chain="overwrite"), Behaviour(drafted_offset=2), Behaviour(advance=0)):
        assert later.of_first_pass() == HEALTHY
        variation = head.variation(later, head.config)
        shared = draft_every_anchor(variation, items, STEPS, first=first)
        alone = draft_every_anchor(bound(replace(healthy, behaviour=later)), items, STEPS)
        assert [drafts.drafted_AK.tolist() for drafts in shared] == [drafts.drafted_AK.tolist() for drafts in alone]


def _spied(head: Head) -> tuple[Head, list[torch.Tensor]]:
    """The head once more, and the list into which its copy puts what its forwards give."""
    seen: list[torch.Tensor] = []
    copied = head.variation(head.behaviour, head.config)

    def spy(*arguments: Any, **named: Any) -> Any:
        output = head.forward(*arguments, **named)
        seen.extend((output.normed_RE, output.feedback_RE))
        return output

    copied.forward = spy  # type: ignore[method-assign]
    return copied, seen


@pytest.mark.parametrize("case", [*CASES, *INVISIBLE])
def test_a_first_pass_of_what_it_reads_serves_every_fault(case: str) -> None:
    """A sweep shares a first pass among variants of one ``of_first_pass()``: none of their other fields is read there.

    A field that is and stands in ``_LATER`` of replay/engines/behaviour.py gives other states than a pass of one's own.
    """
    healthy = healthy_subject({**CASES, **INVISIBLE}[case])
    changed = apply_faults(healthy, parse_faults(case))
    head, items = bound(changed), inputs(changed, healthy)
    if head.behaviour.follows_walk:
        return  # drafts are made round by round, without a first pass
    made = []
    for behaviour in (head.behaviour, head.behaviour.of_first_pass()):
        first = first_pass(head.variation(behaviour, head.config), items)
        spied, seen = _spied(head)
        drafts = draft_every_anchor(spied, items, STEPS, first=first)
        ids = [item.drafted_AK.tolist() for item in drafts]
        made.append((ids, [first.output.normed_RE, first.output.feedback_RE, *seen]))
    (own, own_states), (shared, shared_states) = made
    said = "the first pass reads a field of it: take that out of _LATER of replay/engines/behaviour.py"
    assert shared == own, said
    assert all(torch.allclose(*pair) for pair in zip(shared_states, own_states, strict=True)), said


@pytest.mark.parametrize("case", [*CASES, *INVISIBLE])
def test_rows_in_blocks_play_every_fault(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row is fed and sees is the same, whichever block it comes in (drafting/row_blocks.py)."""
    healthy = healthy_subject({**CASES, **INVISIBLE}[case])
    changed = apply_faults(healthy, parse_faults(case))
    head, items = bound(changed), inputs(changed, healthy)
    for item in items:
        rows = committed_rows(item, head.behaviour, 32)
        pieces = [rows.features(range(start, min(start + 3, item.rows))) for start in range(0, item.rows, 3)]
        assert not item.rows or torch.equal(torch.cat(pieces), rows.features_RKD)
    if head.behaviour.follows_walk:
        return  # drafts are made round by round, without a first pass
    made = []
    for block in (1 << 20, 7):
        monkeypatch.setattr("replay.drafting.row_blocks.BLOCK_ROWS", block)
        first = first_pass(head, items)
        drafts = draft_every_anchor(head, items, STEPS, first=first)
        made.append(([item.drafted_AK.tolist() for item in drafts], first.output))
    (whole, output), (blocks, other) = made
    assert blocks == whole
    # Products over fewer rows sum in another order. Norms and softmax are fp32; a number that is quantised may take the
    # next place of its grid.
    tolerance = 5e-6 if head.dtype == torch.float64 else 0.05
    for one, another in ((output.normed_RE, other.normed_RE), (output.feedback_RE, other.feedback_RE)):
        assert (one - another).abs().max() <= tolerance * one.abs().max()


@pytest.mark.parametrize("kv", ["slot", "path"])
@pytest.mark.parametrize("case", [*CASES, *INVISIBLE])
def test_trees_play_a_fault_wholly_or_refuse_it(case: str, kv: str) -> None:
    """A tree of one column is the chain, under a fault too; where it is not, ``chains_only`` has trees refuse it."""
    healthy = healthy_subject({**CASES, **INVISIBLE}[case])
    changed = apply_faults(healthy, parse_faults(case))
    head, items = bound(changed), inputs(changed, healthy)
    if head.behaviour.chains_only:
        return  # refused: tests/simulator/test_tree_variants.py
    steps = 3  # states of the fourth, a norm left out, are no fp32 any more, in which a tree's probabilities are
    first = first_pass(head, items)
    (in_tree, tree_states), (in_chain, chain_states) = _spied(head), _spied(head)
    (trees,) = draft_every_tree(in_tree, items, topk=1, sizes=[TreeSize(steps, steps + 1)], kv=kv, first=first)
    chains = draft_every_anchor(in_chain, items, steps, first=first)
    said = "trees do not play a field of it: put that into _DRAFTED of replay/engines/behaviour.py"
    assert [item.drafted_AN.tolist() for item in trees] == [item.drafted_AK.tolist() for item in chains], said
    assert all(torch.allclose(*pair) for pair in zip(tree_states, chain_states, strict=True)), said


@pytest.mark.parametrize("case", ["none", "kv.rollback=stale", "state.hidden-row=first", "attn.window=5"])
def test_following_another_run_drafts_at_its_anchors(case: str) -> None:
    """The twin, made to accept what the other run accepted."""
    healthy = healthy_subject(TWO_LAYERS)
    head = bound(apply_faults(healthy, parse_faults(case)))
    items = inputs(healthy, healthy)
    led = [[item.accepted for item in rounds] for rounds in twin_rounds(bound(healthy), items)]
    assert led[0] == [2, 4, 0, 1, 3]
    for item, accepted, played in zip(items, led, walk(head, items, STEPS, follow=led), strict=True):
        twin = Twin(head, item.tokens_T, item.features_RKD, item.prompt_tokens)
        for place, taken in enumerate(accepted):
            assert (played.anchors[place], played.drafted_RK[place].tolist()) == (twin.anchor, twin.draft(STEPS))
            if place < len(accepted) - 1:
                twin.commit(STEPS, taken)
        anchors_A = torch.tensor(played.anchors, dtype=torch.long)
        if not head.behaviour.follows_walk and len(anchors_A):
            (only,) = draft_every_anchor(head, [replace(item, only=anchors_A)], STEPS)
            assert only.drafted_AK.tolist() == played.drafted_RK.tolist()
