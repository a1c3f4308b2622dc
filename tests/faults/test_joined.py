"""Faults joined: what plays together, what is refused, and in which words."""

import re
from dataclasses import fields, replace

import pytest
import torch
from support.fault_cases import CASES, TWO_LAYERS, healthy_subject

from replay.engines.behaviour import HEALTHY, Behaviour
from replay.errors import UsageError
from replay.faults.joined import called, set_fields
from replay.faults.table import apply_faults, parse_faults
from replay.simulator.variant import Variant

# Everything that was stacked in another order, lost one after the other.
LAYOUT_LOST = "+".join(
    ["weights.layout", *(f"weights.missing=layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv")]
)


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
        (
            "position.offset=1+position.offset=2",
            "position.offset=1 and position.offset=2 both set the positions of drafted rows",
        ),
        ("position.offset=stuck:1+position.offset=2", "both set the positions of drafted rows"),
        ("kv.prefix-reuse=4+kv.handoff=empty", "kv.prefix-reuse=4 and kv.handoff=empty both set the prompt rows"),
        (
            "kv.prefix-reuse=4+kv.skip-draft=2:6:masked",
            "both set what stands in place of",
        ),  # the first one set what it was
        ("wiring.aux-missing=0+wiring.aux-missing=1", "both set the slots that are fed zeros"),
        ("wiring.aux-layer-id=2+wiring.aux-layer-id=default", "both set the wiring"),
        ("position.rope-params=theta:5+position.rope-params=theta:6", "both set the base of RoPE"),
        ("precision.dtype-cast=fp16+precision.dtype-cast=fp32", "both set the precision"),
        ("weights.missing=fc+weights.missing=fc.weight", "both set the tensor fc.weight"),
        ("vocab.d2t=absolute+vocab.d2t=identity", "vocab.d2t=absolute and vocab.d2t=identity both set the tensor d2t"),
        ("vocab.d2t=identity+weights.missing=d2t", "both set the tensor d2t"),
        (
            "weights.missing=fc+weights.missing=norm+weights.missing=fc.weight",
            "weights.missing=fc and weights.missing=fc.weight both set the tensor fc.weight",
        ),
        (
            "weights.missing=layers.0.self_attn.q_proj+weights.layout+weights.missing=layers.0.self_attn.q_proj.weight",
            "weights.missing=layers.0.self_attn.q_proj and weights.missing=layers.0.self_attn.q_proj.weight both set",
        ),
        (
            LAYOUT_LOST,
            "weights.layout=qkv-interleaved and weights.missing=layers.1.self_attn.v_proj both set the tensor layers",
        ),
        ("wiring.recycle-norm=post+wiring.recycle-norm=pre", "both set the state that is fed back"),
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


@pytest.mark.parametrize("case", CASES)
def test_what_a_fault_sets_has_words_for_people(case: str) -> None:
    healthy = healthy_subject(CASES[case])
    changed = apply_faults(healthy, parse_faults(case))
    for name in set_fields(healthy, changed):
        assert (
            called(name) == f"the tensor {name}" if name in changed.checkpoint.tensors else "tensor" not in called(name)
        )


@pytest.mark.parametrize("name", [field.name for field in fields(Behaviour)])
def test_every_field_of_the_behaviour_has_words_for_people(name: str) -> None:
    assert called(name) != f"the tensor {name}" and "_" not in called(name).replace("lm_head", "")


def test_no_two_fields_are_called_alike() -> None:
    said = [called(field.name) for field in fields(Behaviour)]
    assert len(set(said)) == len(said)
