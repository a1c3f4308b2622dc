"""Every fault of the table: the twin and both ways to draft agree under it, and it changes what it should."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.heads import target_tables, tiny_checkpoint
from support.products import products_seen
from twins.rounds import Twin, TwinRound, draft_one_round, replay_request

from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.round_by_round import walk
from replay.drafting.rows import DraftInput
from replay.engines.behaviour import HEALTHY, Behaviour
from replay.engines.precision import Precision
from replay.engines.profiles import ENGINES
from replay.engines.wiring import Wiring
from replay.errors import ReplayError, UsageError
from replay.faults.change import Subject, set_fields
from replay.faults.table import FAULTS, Fault, apply_faults, parse_faults, parse_policy
from replay.head.model import Head, TargetTables
from replay.head.products import Execution
from replay.simulator.variant import Variant

STEPS = 4
LAYERS = 8
TAPS = ("1", "3", "4")
SHAPES = ((7, 16), (3, 10), (2, 1), (5, 2))
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
    "wiring.norm=skip:input_norm": EVERY_NORM,
    "wiring.norm=skip:fc_norm": EVERY_NORM,
    "wiring.norm=skip:hidden_norm": {},
    "wiring.norm=skip:input_layernorm": {},
    "wiring.norm=skip:post_attention_layernorm": {},
    "wiring.norm=skip:norm": {},
    "wiring.recycle-norm=other": {},
    "wiring.recycle-norm=pre": EVERY_NORM,
    "wiring.recycle-norm=post": {},
    "wiring.multi-layer=input_layernorm": TWO_LAYERS,
    "wiring.multi-layer=no-residual": TWO_LAYERS,
    "shift.alignment=token": {},
    "shift.alignment=features": {},
    "position.offset=1": {},
    "position.offset=-1": {},
    "position.offset=stuck": {},
    "position.offset=stuck:1": {},
    "position.rope-params=theta:50": {},
    "position.rope-params=scaling:none": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "position.rope-geometry=interleaved": {},
    "position.rope-geometry=partial:0.5": {},
    "position.max-len=9": {},
    "position.max-len=9:dummy": {},
    "position.max-len=config": {"max_position_embeddings": 8},
    "attn.window=1": {},
    "attn.window=5": TWO_LAYERS,
    "vocab.d2t=absolute": {},
    "vocab.d2t=identity": {},
    "vocab.d2t=offset:1": {},
    "weights.overwritten=lm_head": {},
    "weights.overwritten=embed:own": OWN_EMBEDDING,
    "weights.missing=lm_head": {},
    "weights.missing=fc.weight": {},
    "weights.missing=layers.0.hidden_norm": {},
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
    "precision.draft-weights=fp8": {},
    "precision.draft-weights=w4a16:g32": TWO_LAYERS,
    "precision.draft-kv=fp8_e4m3": TWO_LAYERS,
    "precision.dtype-cast=fp16": {},
}
# Everything that was stacked in another order, lost one after the other.
LAYOUT_LOST = "+".join(
    ["weights.layout", *(f"weights.missing=layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv")]
)
# Not of chains: tests/test_tree_variants.py holds both layouts against the tree's own twin.
TREES_ONLY = {"tree.parent-kv"}
# RoPE only knows distances, so the same offset on every row is not to be seen.
INVISIBLE = {"position.offset=all:3": {}}


@cache
def subject(options: tuple[tuple[str, Any], ...]) -> Subject:
    given = {key: dict(value) if isinstance(value, tuple) else value for key, value in options}
    own = given.pop("own", False)
    checkpoint = tiny_checkpoint(**given)
    if own:
        table = torch.randn(96, 32, generator=torch.Generator().manual_seed(8))
        checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, "embed_tokens.weight": table})
    return Subject(Wiring(TAPS), checkpoint, HEALTHY, LAYERS, Precision("bf16"))


def healthy_subject(options: dict[str, Any]) -> Subject:
    frozen = {key: tuple(value.items()) if isinstance(value, dict) else value for key, value in options.items()}
    return subject(tuple(frozen.items()))


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
        made.append(DraftInput(tokens_T, features_RKD, prompt, sampled_T))
    return made


def twin_rounds(head: Head, items: list[DraftInput]) -> list[list[TwinRound]]:
    return [
        replay_request(head, item.tokens_T, item.features_RKD, item.prompt_tokens, STEPS, sampled_T=item.sampled_T)
        for item in items
    ]


def test_every_kind_has_a_case() -> None:
    tried = {case.partition("=")[0] for case in CASES}
    assert tried | TREES_ONLY == set(FAULTS)


@pytest.mark.parametrize("case", [*CASES, *INVISIBLE])
def test_engines_equal_the_twin_under_each_fault(case: str) -> None:
    healthy = healthy_subject({**CASES, **INVISIBLE}[case])
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
    healthy = healthy_subject(CASES[case])
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


def test_faults_join() -> None:
    both = parse_faults("kv.rollback=stale+position.offset=1")
    assert [str(fault) for fault in both] == ["kv.rollback=stale", "position.offset=1"]
    behaviour = apply_faults(healthy_subject({}), both).behaviour
    assert (behaviour.rewrite, behaviour.drafted_offset) == ("stale", 1)
    assert behaviour == replace(HEALTHY, rewrite="stale", drafted_offset=1)


def test_a_fault_named_twice_is_refused() -> None:
    for text in ("none+kv.rollback=stale", "none+none"):
        with pytest.raises(UsageError, match="none stands alone; leave it out"):
            parse_faults(text)
    for text in ("", "+", "kv.rollback=stale+"):
        with pytest.raises(UsageError, match="one is empty"):
            parse_faults(text)
    with pytest.raises(UsageError, match=r"kv full-hole is the fault kv.rollback=full-hole, .* type one of them"):
        Variant("h", kv="full-hole", faults=parse_faults("kv.rollback=full-hole"))
    with pytest.raises(UsageError, match="name one twice"):
        parse_faults("kv.rollback+kv.rollback=stale")


@pytest.mark.parametrize(
    ("text", "both"),
    [
        ("position.offset=1+position.offset=2", "position.offset=1 and position.offset=2 both set drafted_offset"),
        ("position.offset=stuck:1+position.offset=2", "both set drafted_offset"),
        ("kv.prefix-reuse=4+kv.handoff=empty", "kv.prefix-reuse=4 and kv.handoff=empty both set blank_prefix"),
        ("kv.prefix-reuse=4+kv.skip-draft=2:6:masked", "both set blank_fill"),  # the first one set what it was
        ("wiring.aux-missing=0+wiring.aux-missing=1", "both set zero_slots"),
        ("wiring.aux-layer-id=2+wiring.aux-layer-id=default", "both set wiring"),
        ("position.rope-params=theta:5+position.rope-params=theta:6", "both set rope.theta"),
        ("precision.dtype-cast=fp16+precision.dtype-cast=fp32", "both set precision"),
        ("weights.missing=fc+weights.missing=fc.weight", "both set fc.weight"),
        ("vocab.d2t=absolute+vocab.d2t=identity", "vocab.d2t=absolute and vocab.d2t=identity both set d2t"),
        ("vocab.d2t=identity+weights.missing=d2t", "both set d2t"),
        (
            "weights.missing=fc+weights.missing=norm+weights.missing=fc.weight",
            "weights.missing=fc and weights.missing=fc.weight both set fc.weight",
        ),
        (
            "weights.missing=layers.0.self_attn.q_proj+weights.layout+weights.missing=layers.0.self_attn.q_proj.weight",
            "weights.missing=layers.0.self_attn.q_proj and weights.missing=layers.0.self_attn.q_proj.weight both set",
        ),
        (
            LAYOUT_LOST,
            "weights.layout=qkv-interleaved and weights.missing=layers.1.self_attn.v_proj both set layers.1.",
        ),
        ("wiring.recycle-norm=post+wiring.recycle-norm=pre", "both set feedback"),
    ],
)
def test_of_two_faults_that_set_one_field_neither_is_chosen(text: str, both: str) -> None:
    with pytest.raises(UsageError, match=re.escape(both) + ".*; type one of them"):
        apply_faults(healthy_subject(TWO_LAYERS), parse_faults(text))


@pytest.mark.parametrize(
    "text",
    [
        "position.offset=stuck+position.offset=2",
        "kv.prefix-reuse=4+kv.skip-draft=2:6",
        "wiring.norm=skip:norm+wiring.norm=skip:hidden_norm",
        "wiring.aux-layer-id=0:1+wiring.aux-layer-id=1:1",
        "wiring.aux-layer-id=1+wiring.concat-order=fc",
        "position.rope-params=theta:5+position.rope-geometry=partial:0.5",
        "weights.missing=fc+weights.missing=norm",
        "weights.missing=layers.0.self_attn.q_proj+weights.layout",
        "weights.layout+weights.missing=layers.0.self_attn.q_proj",  # the keys and values stay interleaved
        "vocab.d2t=identity+vocab.d2t=offset:1",
        "weights.missing=d2t+vocab.d2t=offset:1",
        "precision.draft-weights=fp8+precision.draft-kv=fp8_e4m3",
    ],
)
def test_faults_that_leave_something_of_each_other_play_together(text: str) -> None:
    healthy = healthy_subject(TWO_LAYERS)
    first, second = parse_faults(text)
    alone = [set_fields(healthy, apply_faults(healthy, (one,))) for one in (first, second)]
    assert set_fields(healthy, apply_faults(healthy, (first, second))) == alone[0] | alone[1]
    assert all(alone)


def test_an_offset_builds_on_the_map_it_finds() -> None:
    """Over no map at all, whichever fault took it away, each draft id is read as the next one."""
    healthy = healthy_subject({})
    for text in ("vocab.d2t=identity+vocab.d2t=offset:1", "weights.missing=d2t+vocab.d2t=offset:1"):
        d2t_W = apply_faults(healthy, parse_faults(text)).checkpoint.tensors["d2t"]
        assert d2t_W.tolist() == [1] * len(d2t_W)


def test_rows_are_stacked_anew_whatever_they_hold() -> None:
    healthy = healthy_subject({})
    names = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
    missing = f"weights.missing={names[0]}"
    first, second, stacked, lost = (
        torch.cat([apply_faults(healthy, parse_faults(text)).checkpoint.tensors[f"{name}.weight"] for name in names])
        for text in (f"{missing}+weights.layout", f"weights.layout+{missing}", "weights.layout", missing)
    )
    as_rows = lambda rows_OI: sorted(map(tuple, rows_OI.tolist()))  # noqa: E731
    assert as_rows(first) == as_rows(lost) and not torch.equal(first, lost)
    queries = len(healthy.checkpoint.tensors[f"{names[0]}.weight"])
    assert torch.equal(second, torch.cat([lost[:queries], stacked[queries:]]))


@pytest.mark.parametrize(
    ("hiding", "hidden"),
    [
        ("weights.overwritten=lm_head", "weights.missing=lm_head"),
        ("wiring.norm=skip:norm", "weights.missing=norm"),
        ("wiring.aux-missing=0", "wiring.aux-layer-id=0:1"),
    ],
)
def test_a_fault_of_what_is_never_read_plays_as_none(hiding: str, hidden: str) -> None:
    """README says so: whether the head reads what a fault changed is not looked at, in either order."""
    healthy = healthy_subject({})
    played = []
    for text in (hiding, f"{hiding}+{hidden}", f"{hidden}+{hiding}"):
        changed = apply_faults(healthy, parse_faults(text))
        played.append(_traces(bound(changed), inputs(changed, healthy)))
    assert played[0] == played[1] == played[2]
    alone = apply_faults(healthy, parse_faults(hidden))
    assert _traces(bound(alone), inputs(alone, healthy)) != _traces(bound(healthy), inputs(healthy, healthy))


def test_a_name_without_value_takes_the_usual_one() -> None:
    assert parse_faults("position.offset") == (Fault("position.offset", "1"),)
    with pytest.raises(UsageError, match=r"kv\.prefix-reuse needs a value"):
        parse_faults("kv.prefix-reuse")


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    "value", ["", "x", "-", ":", "1:2:3:4", "nan", "9" * 40, "theta:-1", "partial:2", "0x10", "\u0661"]
)
def test_values_that_mean_nothing_are_refused(kind: str, value: str) -> None:
    if value == "" or (kind == "weights.missing"):
        with pytest.raises(ReplayError):
            apply_faults(healthy_subject({}), parse_faults(f"{kind}={value}xyz"))
        return
    with pytest.raises(UsageError, match=r"possible|type "):
        parse_faults(f"{kind}={value}")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("wiring.aux-layer-id=6", r"R\[3\].*possible are R\[0\] to R\[8\]"),
        ("wiring.aux-layer-id=3:1", "slots 0 to 2"),
        ("wiring.aux-missing=3", "slots 0 to 2"),
        ("wiring.multi-layer", "one layer"),
        ("wiring.norm=skip:fc_norm", "no fc_norm to leave out"),
        ("weights.missing=layers.7", "no tensor layers.7; it has"),
        ("weights.overwritten=embed:own", "no embed_tokens"),
        ("position.rope-geometry=partial:0.3", "even number"),
    ],
)
def test_a_fault_that_does_not_fit_the_head_is_refused(case: str, said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        apply_faults(healthy_subject({}), parse_faults(case))


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("stale", "kv.rollback=stale"),
        ("hole:16", "kv.prefix-reuse=16"),
        ("hole:16:masked", "kv.prefix-reuse=16:masked"),
        ("chunk:8", "kv.chunk-boundary=8"),
        ("window:4", "attn.window=4"),
        ("full-hole", "kv.rollback=full-hole"),
        ("row:first", "state.hidden-row=first"),
        ("none", "kv.none=alone"),
    ],
)
def test_a_kv_policy_is_a_fault(policy: str, fault: str) -> None:
    assert str(parse_policy(policy)) == fault


@pytest.mark.parametrize("policy", ["fresh", "hole", "stale:2", "hole:", "window:-1", ""])
def test_a_kv_policy_that_is_none_is_refused(policy: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(policy)


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
