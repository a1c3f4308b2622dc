"""Scores of weights in memory: under the names of every trainer, equal to those of files, and training unchanged."""

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.heads import INVENTED, SPECULATORS, random_tensors, write_head
from support.modelopt_peer import eagle_module_class
from support.peer_heads import llama_config
from support.speculators_peer import importable
from support.trace_maker import H, make_four, make_weights, write_trace
from torch import Tensor, nn

import replay
from replay.checkpoint.checkpoint import check_checkpoint
from replay.checkpoint.config import parse_config
from replay.traces.reader import Trace

TENSORS = random_tensors(parse_config(INVENTED))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace.open(write_trace(tmp_path_factory.mktemp("score") / "trace", [make_four()]))


@pytest.fixture(scope="module")
def expected(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> replay.Rounds:
    """What the same head in a folder does."""
    head = replay.load_head(write_head(tmp_path_factory.mktemp("head") / "head", INVENTED, TENSORS))
    return replay.simulate(trace, {"h": head}, [replay.Variant("h", steps=2)])


def counts(score: Any) -> tuple[int, int, int, float]:
    return score.accepted, score.drafted, score.rounds, score.accept_length


class Named(nn.Module):
    """A module with these tensors by these names, all of them parameters where they can be."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            place: nn.Module = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            if tensor.is_floating_point():
                place.register_parameter(last, nn.Parameter(tensor.clone()))
            else:
                place.register_buffer(last, tensor.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x


def under(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in TENSORS.items()}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, as a training on one machine has it."""
    store = tmp_path_factory.mktemp("group") / "store"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


def wrapped_by_fsdp(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    divided = fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    assert type(next(divided.parameters())).__name__ == "DTensor"
    return divided


def checkpointed(module: Named) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module.layers = checkpoint_wrapper(module.layers)
    return module


WRAPPED: dict[str, Callable[[], Any]] = {
    "plain": lambda: Named(TENSORS),
    "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(Named(TENSORS)),
    "compiled": lambda: torch.compile(Named(TENSORS), backend="eager"),
    "compiled within DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(
        torch.compile(Named(under("draft_model.")), backend="eager")
    ),
    "FSDP": lambda: wrapped_by_fsdp(Named(TENSORS)),
    "activation checkpoints": lambda: checkpointed(Named(TENSORS)),
    "SpecForge, with the target": lambda: Named(under("draft_model.") | {"target_model.norm.weight": torch.ones(2)}),
    "SafeAILab": lambda: Named(
        {"target_model.norm.weight": torch.ones(2)}
        | {name.replace("layers.0.", "midlayer."): one for name, one in TENSORS.items()}
    ),
    "a function": lambda: lambda: TENSORS,
    "parameters": lambda: {name: nn.Parameter(one, one.is_floating_point()) for name, one in TENSORS.items()},
}  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_head_is_found_in_what_wraps_it(kind: str, trace: Trace, expected: replay.Rounds, group: None) -> None:
    score = replay.score(trace, WRAPPED[kind](), INVENTED, steps=2)
    (summary,) = replay.summarise(expected)
    assert counts(score) == counts(summary)
    assert (str(score.wiring), score.steps, score.device) == ("embed,2", 2, "cpu")


def test_the_module_of_model_optimizer_within_its_target(trace: Trace) -> None:
    """Its own class (0.47.0). Of a head without an lm_head the exporter writes the target's."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    whole = {**INVENTED, "draft_vocab_size": 64}
    tensors = random_tensors(parse_config(whole))
    lm_head = tensors.pop("lm_head.weight")
    head = check_checkpoint("h", parse_config(whole), {**tensors, "lm_head.weight": lm_head})
    stated = llama_config(
        head, {"rope_type": "default", "rope_theta": 1e4}, draft_vocab_size=64, has_lm_head=False,
        use_aux_hidden_state=True, use_last_layernorm=True, eagle_aux_hidden_state_layer_ids=[0, 2],
    )  # fmt: skip
    stated._attn_implementation = "eager"
    module = eagle_module_class()(stated, LlamaDecoderLayer).float()
    module.load_state_dict(tensors)
    target = Named({"model.layers.0.mlp.up_proj.weight": torch.ones(3, 2), "lm_head.weight": lm_head})
    target.eagle_module = module
    assert counts(replay.score(trace, target, whole, steps=2)) == counts(replay.score(trace, head, steps=2))


def test_the_model_of_speculators_beside_what_it_borrows(trace: Trace) -> None:
    """Its own class (0.9.0), which keeps the target's lm_head and norm and does not save them."""
    layer = {**SPECULATORS["transformer_layer_config"], "hidden_size": H, "vocab_size": 64, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 8, "model_type": "llama"}  # fmt: skip
    config = {**SPECULATORS, "transformer_layer_config": layer, "draft_vocab_size": 48, "norm_before_residual": False,
              "eagle_aux_hidden_state_layer_ids": [0, 2]}  # fmt: skip
    head = check_checkpoint("h", parse_config(config), random_tensors(parse_config(config)))
    layers = llama_config(head, {"rope_type": "default", "rope_theta": 1e4})
    layers._attn_implementation = "eager"
    with importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from speculators.models.eagle3 import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel

        model = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=layers, draft_vocab_size=48, norm_before_residual=False,
                eagle_aux_hidden_state_layer_ids=[0, 2],
            )
        )  # fmt: skip
    t2d = torch.zeros(64, dtype=torch.bool)
    t2d[torch.arange(48) + head.tensors["d2t"]] = True
    model.load_state_dict({**head.tensors, "t2d": t2d, "embed_tokens.weight": make_weights().float()}, strict=False)
    assert any(name.startswith("verifier_") for name in model.state_dict())
    wanted = replay.score(trace, head, wiring="embed,2", steps=2)
    assert counts(replay.score(trace, model, config, wiring="embed,2", steps=2)) == counts(wanted)


def test_a_config_comes_as_a_dictionary_a_folder_or_an_object(trace: Trace, tmp_path: Path) -> None:
    from transformers import PretrainedConfig

    write_head(tmp_path / "head", INVENTED, TENSORS)
    forms = (INVENTED, tmp_path / "head", str(tmp_path / "head"), PretrainedConfig(**INVENTED))
    assert len({counts(replay.score(trace, TENSORS, form, steps=2)) for form in forms}) == 1


# ---- training does not notice ----


def _loops_own() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
    }


def test_a_loops_own_defaults_neither_change_the_score_nor_are_changed(trace: Trace, expected: replay.Rounds) -> None:
    module = Named(TENSORS).train()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    (summary,) = replay.summarise(expected)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            own = _loops_own()
            score = replay.score(trace, module, INVENTED, steps=2)
            assert _loops_own() == own
    finally:
        torch.set_default_dtype(torch.float32)
    assert counts(score) == counts(summary)
    assert module.training and all(torch.equal(before[name], one) for name, one in module.state_dict().items())
    assert all(one.requires_grad and one.grad is None and one.grad_fn is None for one in module.parameters())


def test_defaults_are_as_before_where_scoring_fails(trace: Trace) -> None:
    own = _loops_own()
    with pytest.raises(replay.ReplayError):
        replay.score(trace, {**TENSORS, "fc.weight": torch.full_like(TENSORS["fc.weight"], torch.nan)}, INVENTED)
    assert _loops_own() == own


def test_no_tensor_is_kept(trace: Trace) -> None:
    held: list[weakref.ref[Tensor]] = []

    def weights() -> dict[str, Tensor]:
        given = {name: tensor.clone() for name, tensor in TENSORS.items()}
        held.extend(map(weakref.ref, given.values()))
        return given

    score = replay.score(trace, weights, INVENTED, steps=1)
    gc.collect()
    assert score.rounds and len(held) == len(TENSORS) and all(one() is None for one in held)


def test_half_precision_and_full_precision_are_served_alike(trace: Trace) -> None:
    """A server casts to the target's dtype, so that what training keeps beyond it is not seen; --precision is."""
    rounded = {name: one.bfloat16() if one.is_floating_point() else one for name, one in TENSORS.items()}
    assert counts(replay.score(trace, rounded, INVENTED)) == counts(replay.score(trace, TENSORS, INVENTED))
    assert replay.score(trace, TENSORS, INVENTED, precision="fp32").precision == "fp32"


# ---- what a score says ----


def test_metrics_are_floats_and_leave_out_what_is_not_known(trace: Trace) -> None:
    score = replay.score(trace, TENSORS, INVENTED, steps=3)
    found = score.metrics("draft/")
    assert all(type(value) is float for value in found.values())
    assert found["draft/accept_length"] == 1 + score.accepted / score.rounds
    unknown = replace(score, ci95=(float("nan"), float("nan")), positions=(0.5, float("nan")))
    assert set(unknown.metrics()) == {"accept_length", "accept_position_1", "accept_rounds", "accept_seconds"}
    assert repr(score).startswith("Score(accept length 1.") and score._repr_html_().endswith("</table>")


class Stated:
    """A config that is asked for its class."""

    def to_dict(self) -> dict[str, Any]:
        return INVENTED


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no trace": ({"trace": "trace"}, "the trace is 'trace'"),
    "no weights": ({"weights": None}, "the weights are None"),
    "a path": ({"weights": "head"}, "the weights are 'head'"),
    "a class": ({"weights": Named}, "the weights are <class"),
    "a function of nothing": ({"weights": lambda: None}, "the weights are None"),
    "names that are none": ({"weights": {1: torch.ones(1)}}, "the weights are {1:"),
    "no tensor": ({"weights": {**TENSORS, "norm.weight": 3}}, "norm.weight is 3, a tensor was expected"),
    "nothing": ({"weights": {}}, "lacks"),
    "two heads": ({"weights": under("a.draft_model.") | under("b.draft_model.")}, "hold several heads"),
    "one name twice": ({"weights": TENSORS | under("module.")}, "twice"),
    "no config": ({"config": None}, "no config was given"),
    "a config that is none": ({"config": 3}, "a path was expected"),
    "a config's class": ({"config": Stated}, "a path was expected"),
    "a folder that is none": ({"config": "/nowhere"}, "/nowhere"),
    "a config beside a head": ({"weights": "loaded"}, "leave config out"),
    "a wiring": ({"wiring": "embed,7"}, "7"),
    "another wiring": ({"wiring": 3}, "wiring of a variant is 3"),
    "steps": ({"steps": 0}, "0 steps"),
    "steps in words": ({"steps": "3"}, "steps of a variant is '3'"),
    "a tree without a size": ({"topk": 4}, "number of draft tokens was not given"),
    "a precision": ({"precision": "fp3"}, "fp3"),
    "a device": ({"device": "tpu"}, "device 'tpu' cannot be used here"),
    "a device of another type": ({"device": 1.5}, "device 1.5 cannot be used here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str, trace: Trace) -> None:
    given: dict[str, Any] = {"trace": trace, "weights": TENSORS, "config": INVENTED, **REFUSED[case][0]}
    if given["weights"] == "loaded":
        given["weights"] = replay.head_from_tensors(INVENTED, TENSORS)
    with pytest.raises(replay.ReplayError) as caught:
        replay.score(**given)
    assert REFUSED[case][1] in str(caught.value) and "\n" not in str(caught.value)


def test_parameters_that_deepspeed_divides_are_refused(trace: Trace) -> None:
    module = Named(TENSORS)
    next(module.parameters()).ds_id = 0  # type: ignore[attr-defined]  # its mark of a divided parameter
    with pytest.raises(replay.ReplayError, match="ZeRO-3"):
        replay.score(trace, module, INVENTED)
