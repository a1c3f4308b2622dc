"""What replay says about SGLang's layer ids, held against the model classes of the installed SGLang.

A class's own methods run here on an instance without weights: which R indices a server would record for which ids.
A new SGLang that reads ids in another way, or moves what the recording plugin sets, fails here by the name of a class.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig.inprocess import sglang_module

from replay.capture.plugin.model import capture_boundaries, capturing_parts
from replay.engines.wiring import engine_ids, parse_wiring, sglang_wiring
from replay.errors import CaptureError, WiringError
from replay.traces.taps import tap_index

LAYERS = 61
CLASSES = {  # model type in replay: module and class in sglang.srt.models
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "deepseek_v3": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "kimi_k25": ("kimi_k25", "KimiK25ForConditionalGeneration"),
}


def bare(model_type: str) -> Any:
    """The class's instance with what its capture methods read: a config, a last pipeline rank, a core with layers."""
    if model_type == "kimi_k25":  # a text model inside one that also sees
        outer = new(*CLASSES[model_type])
        outer.language_model = bare("deepseek_v3")
        return outer
    model = new(*CLASSES[model_type])
    model.config = SimpleNamespace(num_hidden_layers=LAYERS)
    model.pp_group = SimpleNamespace(is_last_rank=True)
    model.model = SimpleNamespace(layers=[None] * LAYERS, layers_to_capture=[])
    model.logits_processor = SimpleNamespace(keep_last_hidden_states=False)
    return model


def new(module: str, name: str) -> Any:
    model = object.__new__(getattr(sglang_module(f"srt.models.{module}"), name))
    torch.nn.Module.__init__(model)
    return model


def recorded(model: Any) -> list[int]:
    """The R indices that the model's forward would record, in the order of the columns."""
    return sorted(capturing_parts(model)[0].layers_to_capture)


def indices(taps: tuple[str, ...]) -> list[int | None]:
    return [tap_index(tap) for tap in taps]


@pytest.mark.parametrize("model_type", list(CLASSES))
@pytest.mark.parametrize("ids", [None, [2, 30, 58], [1, 29, 57], [29, 1, 57], [0, 3, 31], [0], [59], [1, 30, 59, 3]])
def test_ids_feed_what_replay_says(model_type: str, ids: list[int] | None) -> None:
    model = bare(model_type)
    model.set_eagle3_layers_to_capture(ids)
    assert recorded(model) == indices(sglang_wiring(ids, model_type=model_type, layers=LAYERS).taps)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_oss"])
def test_an_id_of_minus_one_feeds_the_embedding(model_type: str) -> None:
    model = bare(model_type)
    model.set_eagle3_layers_to_capture([-1, 2, 30])
    assert recorded(model) == [0, 3, 31]
    assert sglang_wiring([-1, 2, 30], model_type=model_type, layers=LAYERS).taps == ("embed", "3", "31")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k25"])
def test_an_id_of_minus_one_never_fires_in_deepseek(model_type: str) -> None:
    model = bare(model_type)
    model.set_eagle3_layers_to_capture([-1, 2, 30])
    assert recorded(model) == [-1, 2, 30]
    with pytest.raises(WiringError, match=r"R\[-1, 2, 30\]"):
        sglang_wiring([-1, 2, 30], model_type=model_type, layers=LAYERS)


def test_gpt_oss_feeds_its_last_output() -> None:
    model = bare("gpt_oss")
    model.set_eagle3_layers_to_capture([3, 31, LAYERS])
    assert recorded(model) == [3, 31, LAYERS]
    assert sglang_wiring([3, 31, LAYERS], model_type="gpt_oss", layers=LAYERS).taps == ("3", "31", str(LAYERS))


@pytest.mark.parametrize("model_type", list(CLASSES))
@pytest.mark.parametrize("wiring", ["embed,3,31", "3,31,59", "1,2,3", "2,30,58", "embed", "60"])
def test_the_ids_that_replay_prints_feed_the_wiring(model_type: str, wiring: str) -> None:
    wanted = parse_wiring(wiring, layers=LAYERS)
    sglang, *_ = engine_ids(wanted, model_type=model_type, layers=LAYERS)
    assert sglang.engine.startswith("SGLang")
    assert sglang.ids is not None
    model = bare(model_type)
    model.set_eagle3_layers_to_capture(list(sglang.ids))
    assert recorded(model) == indices(wanted.taps)


@pytest.mark.parametrize("model_type", list(CLASSES))
@pytest.mark.parametrize("boundaries", [[0, 3, 16], [0], [2], [1, 2, 30, 58], list(range(LAYERS))])
def test_the_plugin_sets_exactly_the_taps(model_type: str, boundaries: list[int]) -> None:
    model = bare(model_type)
    core, processor = capturing_parts(model)
    assert hasattr(processor, "keep_last_hidden_states")
    capture_boundaries(model, core, boundaries)
    assert recorded(model) == boundaries
    assert getattr(model, "language_model", model).capture_aux_hidden_states is True


@pytest.mark.parametrize("model_type", [name for name in CLASSES if name != "gpt_oss"])
def test_the_stream_after_the_last_layer_is_refused(model_type: str) -> None:
    model = bare(model_type)
    core, _ = capturing_parts(model)
    with pytest.raises(CaptureError, match=rf"R\[{LAYERS}\] cannot be recorded .* 1 to {LAYERS - 1}, and final"):
        capture_boundaries(model, core, [0, 3, LAYERS])
    assert core.layers_to_capture == []


def test_the_plugin_sets_the_last_output_of_gpt_oss() -> None:
    model = bare("gpt_oss")
    core, _ = capturing_parts(model)
    capture_boundaries(model, core, [0, 3, LAYERS])
    assert recorded(model) == [0, 3, LAYERS]
    with pytest.raises(CaptureError, match=rf"R\[{LAYERS + 1}\] cannot be recorded .* 1 to {LAYERS}, and final"):
        capture_boundaries(model, core, [0, LAYERS + 1])


def test_a_model_that_counts_ids_otherwise_is_refused() -> None:
    """Ids that are R indices already, as no class with both seams counts them today."""

    class Verbatim:
        def __init__(self) -> None:
            self.model = SimpleNamespace(layers=[None] * LAYERS, layers_to_capture=[])
            self.logits_processor = SimpleNamespace(keep_last_hidden_states=False)

        def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
            self.model.layers_to_capture = layer_ids

    model = Verbatim()
    with pytest.raises(CaptureError, match=r"Verbatim captures \[-1, 2\] where \[0, 3\] were asked for"):
        capture_boundaries(model, capturing_parts(model)[0], [0, 3])


def test_a_model_without_the_seams_is_refused() -> None:
    with pytest.raises(CaptureError, match="SimpleNamespace holds no layers_to_capture"):
        capturing_parts(SimpleNamespace())


def test_the_logits_processor_can_keep_the_final_states() -> None:
    processor = sglang_module("srt.layers.logits_processor").LogitsProcessor
    assert "keep_last_hidden_states" in processor.__init__.__code__.co_names
