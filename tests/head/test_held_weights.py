"""What a head holds of its weights: each once, and a sweep makes one head of all variants that share them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.heads import INVENTED, random_tensors, target_tables, tiny_checkpoint
from support.random_heads import HEADS, make_head
from support.trace_maker import make_four, write_trace

import replay
from replay.checkpoint.config import parse_config
from replay.head.held import Held, address_of, stack_rows
from replay.head.model import Head, TargetTables
from replay.head.products import Execution
from replay.simulator.binding import resolve
from replay.simulator.groups import group_variants

STACKS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize("name", ["two layers", "latent"])
def test_stacked_weights_are_held_once(name: str) -> None:
    head = make_head(name, execution=Execution(torch.bfloat16))
    latent = head.config.latent is not None
    own = [key for key in head._weights if key.split(".")[-2] in STACKS]
    stacks = [head._attention.weights.down_OI] if latent else [*head._attention.weights]
    stacks += head._parts.gate_up.values()
    held = {stack.untyped_storage().data_ptr() for stack in stacks}
    assert len(own) == (4 if latent else 10)
    assert {head._weights[key].untyped_storage().data_ptr() for key in own} == held


def test_a_sweep_makes_one_head_of_the_same_weights(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = replay.Trace.open(write_trace(tmp_path / "trace", [make_four()]))
    head = replay.head_from_tensors(INVENTED, random_tensors(parse_config(INVENTED)))
    made, make = [], Head.__init__
    monkeypatch.setattr(
        Head, "__init__", lambda self, *rest, **named: (made.append(self), make(self, *rest, **named))[1]
    )
    wirings = [replay.parse_wiring(text) for text in ("embed,2", "2,embed", "2,final")]
    variants = [replay.Variant("head", wiring=one, steps=steps) for one in wirings for steps in (1, 2, 3)]
    rounds = replay.simulate(trace, {"head": head}, variants)
    assert len(rounds.variants) == 9
    assert len(made) == 1


def storages(head: Head) -> dict[int, int]:
    """What the head's weights lie in, stacks and tables included: bytes by address."""
    latent = head.config.latent is not None
    stacks = [head._attention.weights.down_OI] if latent else [*head._attention.weights]
    every = [*head._weights.values(), *stacks, *head._parts.gate_up.values(), head._embed_VE, head._lm_head_WE]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in every}


def heads_of_sweep(
    config: dict[str, Any], variants: list[replay.Variant], tmp_path: Path, dtype: torch.dtype = torch.bfloat16
) -> list[Head]:
    trace = replay.Trace.open(write_trace(tmp_path / "trace", [make_four()]))
    tensors = {
        name: one if name == "d2t" else one.to(dtype) for name, one in random_tensors(parse_config(config)).items()
    }
    checkpoints = {"head": replay.head_from_tensors(config, tensors)}
    resolved = [resolve(variant, checkpoints["head"], trace) for variant in variants]
    return [group.head for group in group_variants(resolved, checkpoints, trace, "cpu")]


def varied(**options: Any) -> replay.Variant:
    return replay.Variant("head", wiring=replay.parse_wiring("embed,2"), **options)


def bytes_of(heads: list[Head]) -> int:
    return sum({address: size for head in heads for address, size in storages(head).items()}.values())


def test_a_sweep_holds_one_copy_of_the_weights(tmp_path: Path) -> None:
    """Whatever its variants round of what passes, and whichever engine or numerics they name."""
    variants = [
        varied(steps=1), varied(steps=3, topk=2, num_draft_tokens=4),
        varied(faults=replay.parse_faults("attn.window=5")),
        replay.Variant("head", wiring=replay.parse_wiring("2,embed")), varied(precision="bf16+kv=fp8"),
        varied(precision="bf16+features=fp8"), varied(numerics="hf"), varied(precision="bf16+kv=fp8", numerics="hf"),
    ]  # fmt: skip
    heads = heads_of_sweep(INVENTED, variants, tmp_path)
    assert len({id(head._parts.product) for head in heads}) == 5, "heads that cannot be one head"
    assert bytes_of(heads) == bytes_of(heads[:1])
    assert bytes_of(heads_of_sweep(INVENTED, variants[:1], tmp_path / "alone")) == bytes_of(heads)


def test_a_precision_copies_what_it_rounds_and_a_fault_what_it_changes(tmp_path: Path) -> None:
    plain = varied()
    rounded = varied(precision="bf16+layers.0.mlp.down_proj.weight=int8")
    broken = varied(faults=replay.parse_faults("weights.missing=fc:zero"))
    (one, two, three) = heads_of_sweep(INVENTED, [plain, rounded, broken], tmp_path)
    for other, name in ((two, "layers.0.mlp.down_proj.weight"), (three, "fc.weight")):
        own = storages(other).keys() - storages(one).keys()
        assert own == {other._weights[name].untyped_storage().data_ptr()}
        assert not torch.equal(other._weights[name], one._weights[name])


@pytest.mark.parametrize("precision", ["fp32", "fp32+int8", "fp32+w4a16:g32", "bf16+weights=fp8"])
def test_shared_weights_are_those_of_a_head_by_itself(precision: str, tmp_path: Path) -> None:
    """Cast or rounded once for both, bit for bit what a head that shares with nobody makes; a scale per tensor too."""
    variants = [varied(precision=precision), varied(precision=f"{precision}+kv=fp8")]
    shared = heads_of_sweep(INVENTED, variants, tmp_path)
    assert bytes_of(shared) == bytes_of(shared[:1])
    for number, head in enumerate(shared):
        (alone,) = heads_of_sweep(INVENTED, variants[number : number + 1], tmp_path / str(number))
        assert alone._weights.keys() == head._weights.keys()
        assert all(torch.equal(alone._weights[name], one) for name, one in head._weights.items())
        assert all(map(torch.equal, alone._attention.weights, head._attention.weights))
        assert all(torch.equal(alone._parts.gate_up[name], one) for name, one in head._parts.gate_up.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as stored", "cast"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_a_part_that_is_rounded_takes_the_others_from_nobody(
    dtype: torch.dtype, order: tuple[int, ...], tmp_path: Path
) -> None:
    """Heads of the same q, k and v have one stack of them, whoever stacked k and v with another q before."""
    precisions = ("bf16", "bf16+layers.0.self_attn.q_proj.weight=int8", "bf16+kv=fp8")
    variants = [varied(precision=precisions[number]) for number in order]
    found = dict(zip(order, heads_of_sweep(INVENTED, variants, tmp_path, dtype), strict=True))
    (plain,), (rounded,), (third,) = (found[number]._attention.weights for number in range(3))
    assert third is plain and bytes_of(list(found.values())) == bytes_of([found[0], found[1]])
    assert not torch.equal(rounded, plain) and rounded.data_ptr() != plain.data_ptr()


def test_rows_that_lie_so_are_not_joined_anew() -> None:
    whole = torch.arange(48.0).reshape(12, 4)
    assert whole.data_ptr() % 64 == 0
    parts = list(whole.split([4, 7, 1]))
    for some, rows in ((parts, whole), (parts[:2], whole[:11]), (parts[1:], whole[4:]), ([whole], whole)):
        found = stack_rows(some)
        assert found.data_ptr() == rows.data_ptr() and torch.equal(found, rows) and found.stride() == rows.stride()
    leaf = whole.clone().requires_grad_()
    q, k, v = parts
    strange = (parts[::-1], [q, v], [q, k.clone(), v], [q[:3], k, v], [whole.T], list(leaf.split([4, 7, 1])))
    for some in (*strange, [whole[1:4], whole[4:]]):
        found = stack_rows(some)
        assert torch.equal(found, torch.cat(some)) and found.data_ptr() not in {one.data_ptr() for one in some}


def test_what_no_head_runs_is_forgotten() -> None:
    """Of two stacks one goes, and what both had is now a row of the other; nothing is made again for that one."""
    held, (q, k) = Held(), (torch.rand(2, 16), torch.rand(3, 16))

    def ready(one: torch.Tensor, how: str) -> torch.Tensor:
        return held.ready(one, how, lambda: one + len(how))

    first = held.join([ready(q, "round"), ready(k, "")])
    second = held.join([ready(q, ""), ready(k, "")])
    assert address_of(ready(k, "")) == address_of(first) != address_of(second)
    held.keep({address_of(second)})
    assert held.join([ready(q, ""), ready(k, "")]) is second and address_of(ready(k, "")) == address_of(second)
    assert torch.equal(ready(k, ""), k) and address_of(ready(q, "round")) != address_of(first)
    held.keep(set())
    assert not held._ready and not held._sources and not held._stacks and not held._keys


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same values 8 bytes behind where torch would have them, as in a mapped file."""
    moved = torch.empty(tensor.nbytes + 8, dtype=torch.uint8)[8:].view(tensor.dtype).view(tensor.shape)
    moved.copy_(tensor)
    assert moved.data_ptr() % 64 == 8
    return moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_has_the_same_bits_wherever_its_tensors_lie(dtype: torch.dtype) -> None:
    """fp32 products of one row sum in another order where a weight begins amid 16 bytes."""
    plain = tiny_checkpoint(**HEADS["two layers"])
    tensors = {name: one if name == "d2t" else one.to(dtype) for name, one in plain.tensors.items()}
    moved = {name: elsewhere(one) for name, one in tensors.items()}
    one, other = (
        Head(replace(plain, tensors=lie), TargetTables(*target_tables(plain)), execution=Execution(dtype))
        for lie in (tensors, moved)
    )
    made = torch.Generator().manual_seed(1)
    for _ in range(20):
        row_RE = torch.randn(1, one.config.hidden_size, generator=made).to(dtype)
        taps_RKD = torch.randn(1, one.config.fc_inputs, generator=made).to(dtype)
        assert torch.equal(one.logits(row_RE), other.logits(row_RE))
        assert torch.equal(one.fuse(taps_RKD), other.fuse(taps_RKD))
