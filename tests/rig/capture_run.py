"""SGLang's own capture code run on stand-ins: the setter of a target's class, then the forward of its decoder.

The layers of the stand-in add 1 to a stream that begins at 0, so that a captured value is the R index of the place it
was captured at. What the forward needs beside layers (embedding, norm, residual bookkeeping) stands in as well.
"""

import functools
import inspect
import types
import warnings
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rig.inprocess import sglang_module

from replay.targets.rules import CaptureRule

SETTER = "set_eagle3_layers_to_capture"
# Classes that hold another whole text model, and its class
INNER = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}
# Decoders whose layers return the stream with something else
_PAIRS = ("DeepseekV2Model", "Gemma3TextModel", "Glm5NextModel", "LongcatFlashModel")


@cache
def registry() -> dict[str, type]:
    """Every target class that this environment can import, by architecture.

    Some files ask for kernels while they are imported, which the rig lacks. None of them runs here.
    """
    module = sglang_module("srt.models.registry")
    namespace: Any = type(torch.ops.sgl_kernel)
    found = namespace.__getattr__
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(namespace, "__getattr__", functools.partialmethod(_any_kernel, found))
        return dict(module.import_model_classes.__wrapped__("sglang.srt.models"))


def _any_kernel(self: Any, found: Any, name: str) -> Any:
    try:
        return found(self, name)
    except AttributeError:
        if self.name != "sgl_kernel" or name == "convert_weight_packed":  # by which SGLang knows its CPU build
            raise
        return MagicMock()


def captured(rule: CaptureRule, ids: list[int] | None, layers: int) -> list[int]:
    """R indices of what the class captures for ``ids``, in order. Raises what the class raises, and ValueError where
    its forward gives no captured states."""
    model, core = _model(rule, layers)
    getattr(model, SETTER)(ids)
    given = _forward(core)
    if not isinstance(given, tuple):
        raise ValueError("no captured states")
    states = given[-1]
    values = states.flatten() if isinstance(states, torch.Tensor) else [state.flatten()[0] for state in states]
    return [int(value) for value in values]


class _Layer:
    """Hands on what it is given, plus 1; captures its input where it is told to, as SGLang's layers do."""

    def __init__(self, pair: bool) -> None:
        self.pair = pair

    def __call__(self, *args: Any, **named: Any) -> Any:
        stream = named.get("hidden_states", next((one for one in args if _is_stream(one)), None))
        for name in ("capture_output", "captured_last_layer_outputs"):
            collector = named.get(name)
            if collector is not None:
                (collector if callable(collector) else collector.capture)(stream)
        return (stream + 1, None) if self.pair else stream + 1


def _is_stream(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _Residual:
    """SGLang's ``residual_batch`` where nothing is owed: the stream is what it is."""

    def start(self, *args: Any) -> None:
        pass

    def final_norm(self, stream: Any, *args: Any, capture: Any = None, **named: Any) -> Any:
        if capture is not None:
            capture(stream)
        return stream

    def complete_output(self, stream: Any, *args: Any) -> Any:
        return stream

    snapshot = complete_output


class _Core:
    """A decoder without weights: layers, the setter of its class if that has one, and stand-ins for all else."""

    def __init__(self, kind: type, layers: int) -> None:
        self.kind = kind
        self.layers = [_Layer(kind.__name__ in _PAIRS) for _ in range(layers)]
        self.start_layer, self.end_layer = 0, layers
        self.layers_to_capture: list[int] = []
        self.config = SimpleNamespace(num_hidden_layers=layers, mhc=False)
        self.gemm_output_zero_allocator_size = 0
        self.llama_4_scaling_config = None
        self.norm = lambda stream, *args: (stream, None)
        self._prepare_aux_hidden_state = lambda stream: stream
        self.dflash_capture = self.enable_a2a_moe = self.use_hf_deepstack_order = self.use_dsa = False

    def __getattr__(self, name: str) -> Any:
        if name == SETTER and hasattr(self.kind, name):
            return types.MethodType(getattr(self.kind, name), self)
        if name.startswith("set_"):
            raise AttributeError(name)
        return MagicMock()


def _model(rule: CaptureRule, layers: int) -> tuple[Any, _Core]:
    kind = registry()[rule.architecture]
    model = object.__new__(kind)
    torch.nn.Module.__init__(model)
    if rule.architecture in INNER:
        model.language_model, core = _model(replace(rule, architecture=INNER[rule.architecture]), layers)
        return model, core
    core = _Core(_decoder(rule), layers)
    model.config = SimpleNamespace(num_hidden_layers=layers)
    model.config.text_config = model.config
    model.pp_group = SimpleNamespace(is_last_rank=True)
    model.model = model.language_model = core
    scope = inspect.unwrap(getattr(kind, SETTER)).__globals__
    if "get_parallel" in scope:  # the setter asks the server for its place in the pipeline
        scope["get_parallel"] = lambda: SimpleNamespace(pp_group=model.pp_group)
    return model, core


def _decoder(rule: CaptureRule) -> type:
    """The class whose forward holds the loop that the rule names."""
    file, _, line = rule.where.split()[1].partition(":")
    module = sglang_module(f"srt.models.{file.removesuffix('.py')}")
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__ and "forward" in vars(kind):
            lines, first = inspect.getsourcelines(inspect.unwrap(kind.forward))
            if first <= int(line) < first + len(lines):
                return kind
    raise LookupError(f"{rule.where} is in no forward")


def _forward(core: _Core) -> Any:
    """The decoder's own forward over the stand-in layers."""
    method = inspect.unwrap(core.kind.forward)
    scope = {**method.__globals__, "residual_batch": _Residual()}
    for name in ("get_global_expert_distribution_recorder", "check_cuda_graph_backend", "get_parallel",
                 "is_in_breakable_cuda_graph"):  # fmt: skip
        if name in scope:
            scope[name] = MagicMock()
    run = types.FunctionType(method.__code__, scope, method.__name__, method.__defaults__, method.__closure__)
    batch = MagicMock(can_run_tbo=False, aux_hidden_states_buffer=None)
    batch.forward_mode.is_idle.return_value = False
    given = {"positions": torch.zeros(1, dtype=torch.long), "forward_batch": batch, "input_ids": None}
    streams = ("input_embeds", "inputs_embeds")
    names = list(inspect.signature(method).parameters)
    return run(core, **{name: given.get(name, torch.zeros(1, 1)) for name in names if name in (*given, *streams)})
