"""What some kinds of fault mean, worked out in another way than by the code that plays them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_cases import TWO_LAYERS, healthy_subject
from support.heads import INVENTED, SPECULATORS, invented_checkpoint, target_tables
from support.trace_maker import make_requests, write_trace
from twins.trees import draft_one_tree

import replay
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.rows import DraftInput, committed_rows
from replay.drafting.tree_shape import TreeSize
from replay.drafting.trees import draft_every_tree
from replay.engines.behaviour import HEALTHY, Behaviour
from replay.engines.profiles import ENGINES
from replay.errors import CheckpointError, UsageError
from replay.faults.change import Subject
from replay.faults.table import apply_faults, parse_faults
from replay.head.model import Head, TargetTables
from replay.head.products import Execution
from replay.simulator.binding import resolve
from replay.simulator.groups import group_variants
from replay.simulator.variant import Variant
from replay.traces.reader import Trace


def changed(fault: str, options: dict[str, Any]) -> Subject:
    return apply_faults(healthy_subject(options), parse_faults(fault))


def drafts(subject: Subject) -> tuple[list[list[int]], torch.Tensor]:
    """What a head drafts at every anchor of a request, all in double precision, and its states [A, E]."""
    tables = TargetTables(*target_tables(subject.checkpoint))
    head = Head(subject.checkpoint, tables, profile=ENGINES["eagle"], execution=Execution(torch.float64),
                behaviour=subject.behaviour)  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    tokens_T = torch.randint(96, (20,), generator=generator)
    item = DraftInput(tokens_T, torch.randn(19, 96, generator=generator), 4)
    seen: list[torch.Tensor] = []
    forward = head.forward

    def spy(*arguments: Any, **named: Any) -> Any:
        output = forward(*arguments, **named)
        seen.append(output.feedback_RE)
        return output

    head.forward = spy  # type: ignore[method-assign]
    (made,) = draft_every_anchor(head, [item], 4)
    return made.drafted_AK.tolist(), torch.cat(seen)


@pytest.mark.parametrize(
    ("dropped", "empty"),
    [
        ("attention:0", ["layers.0.self_attn.o_proj"]),
        ("mlp:1", ["layers.1.mlp.down_proj"]),
        ("attention", ["layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"]),
        ("mlp", ["layers.0.mlp.down_proj", "layers.1.mlp.down_proj"]),
    ],
)
def test_a_dropped_block_is_one_whose_last_matrix_is_zero(dropped: str, empty: list[str]) -> None:
    zeros = "+".join(f"weights.missing={name}:zero" for name in empty)
    one, other = (drafts(changed(fault, TWO_LAYERS)) for fault in (f"state.dropped={dropped}", zeros))
    assert one[0] == other[0] and torch.equal(one[1], other[1])


@pytest.mark.parametrize(("typed", "seen"), [("3", 3), ("5", 5), ("9", 5)])
def test_a_window_never_widens_that_of_the_head(typed: str, seen: int) -> None:
    """Of two windows on one row the narrower one tells what it sees."""
    layer = {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
    head = SPECULATORS | {"transformer_layer_config": SPECULATORS["transformer_layer_config"] | layer}
    assert healthy_subject(head).config.window == 5
    assert changed(f"attn.window={typed}", head).behaviour.window == seen
    assert changed(f"attn.window={typed}", {}).behaviour.window == int(typed)


@pytest.mark.parametrize("factor", ["2", "0.5", "0.3"])
def test_scores_scaled_are_queries_scaled(factor: str) -> None:
    """(c q) k = c (q k), and RoPE is linear: the rows of q_proj times the factor do the same."""
    healthy = healthy_subject(TWO_LAYERS)
    names = [f"layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    scaled = {name: healthy.checkpoint.tensors[name].double() * float(factor) for name in names}
    one, other = drafts(changed(f"attn.scale={factor}", TWO_LAYERS)), drafts(healthy.with_tensors(scaled))
    assert one[0] == other[0] and torch.allclose(one[1], other[1], rtol=1e-9, atol=1e-9)


def test_a_tree_has_the_scale_of_the_fault() -> None:
    """Its twin, given queries that are scaled already."""
    healthy, factor = healthy_subject(TWO_LAYERS), 0.3
    names = [f"layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    scaled = healthy.with_tensors({name: healthy.checkpoint.tensors[name] * factor for name in names})
    tables, subject = TargetTables(*target_tables(healthy.checkpoint)), changed(f"attn.scale={factor}", TWO_LAYERS)
    faulty = Head(subject.checkpoint, tables, behaviour=subject.behaviour)
    generator = torch.Generator().manual_seed(5)
    tokens_T, features_RKD = torch.randint(96, (12,), generator=generator), torch.randn(11, 96, generator=generator)
    item = DraftInput(tokens_T, features_RKD, 3)
    ((trees,),) = draft_every_tree(faulty, [item], topk=2, sizes=[TreeSize(3, 6)], kv="slot")
    for place, anchor in enumerate(item.anchors_A.tolist()):
        tree = draft_one_tree(Head(scaled.checkpoint, tables), tokens_T, features_RKD, anchor, topk=2, steps=3,
                              num_draft_tokens=6, kv="slot")  # fmt: skip
        assert [node.token for node in tree] == trees.drafted_AN[place].tolist()
        assert [node.parent for node in tree] == trees.parents_AN[place].tolist()


def test_a_tensor_never_loaded_is_noise_unless_zeros_are_asked_for() -> None:
    plain, noise, zero = (
        changed(f"weights.missing=fc{fill}", {}).checkpoint.tensors["fc.weight"] for fill in ("", ":noise", ":zero")
    )
    assert torch.equal(plain, noise) and 0.015 < float(plain.std()) < 0.025
    assert not zero.any()
    norm = changed("weights.missing=norm:zero", {}).checkpoint.tensors["norm.weight"]
    assert bool((norm == 1).all())  # a module makes it so, whatever the memory was


@pytest.mark.parametrize("value", ["fc:ones", "fc:", ":zero", "fc:zero:noise"])
def test_other_fillings_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match=":zero or :noise"):
        parse_faults(f"weights.missing={value}")


def test_a_layer_that_a_head_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match="layers 0 to 1; type another layer than 2"):
        changed("state.dropped=mlp:2", TWO_LAYERS)


def test_noise_is_of_its_size_and_of_nothing_but_row_and_token() -> None:
    generator = torch.Generator().manual_seed(1)
    tokens_T, features_RKD = torch.randint(96, (40,), generator=generator), torch.randn(39, 96, generator=generator)
    features_RKD[:, :32] *= 100  # the first tap is far larger than the others, and has noise of its own size
    noisy = Behaviour(noise=0.25)

    def fed(tokens_T: torch.Tensor, prompt: int, behaviour: Behaviour) -> torch.Tensor:
        return committed_rows(DraftInput(tokens_T, features_RKD, prompt), behaviour, 32).features_RKD

    whole_RKD = fed(tokens_T, 5, noisy)
    noise_RKd = (whole_RKD - fed(tokens_T, 5, HEALTHY)).unflatten(1, (3, 32))
    rms_RK = features_RKD[:38].unflatten(1, (3, 32)).pow(2).mean(-1).sqrt()
    size_K = (noise_RKd.pow(2).mean(-1).sqrt() / rms_RK).mean(0)
    assert torch.allclose(size_K, torch.tensor(0.25), rtol=0.1)
    assert torch.equal(fed(tokens_T[:20], 9, noisy), whole_RKD[:18])
    other_T = tokens_T.clone()
    other_T[10] = (other_T[10] + 1) % 96
    differs_R = (fed(other_T, 5, noisy) != whole_RKD).any(1)
    assert differs_R.nonzero().flatten().tolist() == [9]  # the row that embeds the token


def test_heads_of_another_epsilon_or_scale_share_their_weights(tmp_path: Path) -> None:
    trace = Trace.open(write_trace(tmp_path / "trace", [make_requests(2)]))
    checkpoint = invented_checkpoint()
    faults = ("none", "wiring.norm-eps=0.1", "attn.scale=2", "state.dropped=mlp", "state.noise=0.5")
    variants = [resolve(Variant("h", faults=replay.parse_faults(fault)), checkpoint, trace) for fault in faults]
    groups = group_variants(variants, {"h": checkpoint}, trace, "cpu")
    assert len({id(group.head._weights) for group in groups}) == 1
    assert len({group.stem for group in groups}) == len(faults)  # and no first pass
    by_fault = dict(zip(faults, sorted(groups, key=lambda group: group.members), strict=True))
    assert by_fault["wiring.norm-eps=0.1"].head.config.rms_norm_eps == 0.1
    assert by_fault["none"].head.config.rms_norm_eps == INVENTED["rms_norm_eps"]
    assert [by_fault[fault].head.numerics.score_factor for fault in faults] == [1, 1, 2, 1, 1]
