"""What a head holds of its weights: each once, and a sweep makes one head of all variants that share them."""

import pytest
import torch
from support.heads import INVENTED, random_tensors
from support.random_heads import make_head
from support.trace_maker import make_four, write_trace

import replay
from replay.checkpoint.config import parse_config
from replay.head.model import Head
from replay.head.products import Execution

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
