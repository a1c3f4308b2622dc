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
LLAMA, QWEN3, GPT_OSS = "LlamaForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM"
DEEPSEEK, KIMI, GEMMA4 = "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Gemma4ForCausalLM"
CLASSES = {  # its module in sglang.srt.models
    LLAMA: "llama", QWEN3: "qwen3", DEEPSEEK: "deepseek_v2", "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    GPT_OSS: "gpt_oss", KIMI: "kimi_k25", GEMMA4: "gemma4_causal",
}  # fmt: skip
TO_LAST = (GPT_OSS, GEMMA4)


def bare(architecture: str) -> Any:
    """The class's instance with what its capture methods read: a config, a last pipeline rank, a core with layers."""
    if architecture == KIMI:  # a text model inside one that also sees
        outer = new(architecture)
        outer.language_model = bare(DEEPSEEK)
        return outer
    model = new(architecture)
    model.config = SimpleNamespace(num_hidden_layers=LAYERS)
    model.pp_group = SimpleNamespace(is_last_rank=True)
    model.model = SimpleNamespace(layers=[None] * LAYERS, layers_to_capture=[])
    model.logits_processor = SimpleNamespace(keep_last_hidden_states=False)
    return model


def new(architecture: str) -> Any:
    model = object.__new__(getattr(sglang_module(f"srt.models.{CLASSES[architecture]}"), architecture))
    torch.nn.Module.__init__(model)
    return model


def recorded(model: Any) -> list[int]:
    """The R indices that the model's forward would record, in the order of the columns."""
    return sorted(capturing_parts(model)[0].layers_to_capture)


def indices(taps: tuple[str, ...]) -> list[int | None]:
    return [tap_index(tap) for tap in taps]


@pytest.mark.parametrize("architecture", list(CLASSES))
@pytest.mark.parametrize("ids", [None, [2, 30, 58], [1, 29, 57], [29, 1, 57], [0, 3, 31], [0], [59], [1, 30, 59, 3]])
def test_ids_feed_what_replay_says(architecture: str, ids: list[int] | None) -> None:
    model = bare(architecture)
    model.set_eagle3_layers_to_capture(ids)
    assert recorded(model) == indices(sglang_wiring(ids, architecture=architecture, layers=LAYERS).taps)


@pytest.mark.parametrize("architecture", [LLAMA, QWEN3, GPT_OSS])
def test_an_id_of_minus_one_feeds_the_embedding(architecture: str) -> None:
    model = bare(architecture)
    model.set_eagle3_layers_to_capture([-1, 2, 30])
    assert recorded(model) == [0, 3, 31]
    assert sglang_wiring([-1, 2, 30], architecture=architecture, layers=LAYERS).taps == ("embed", "3", "31")


@pytest.mark.parametrize("architecture", [DEEPSEEK, KIMI])
def test_an_id_of_minus_one_never_fires_in_deepseek(architecture: str) -> None:
    model = bare(architecture)
    model.set_eagle3_layers_to_capture([-1, 2, 30])
    assert recorded(model) == [-1, 2, 30]
    with pytest.raises(WiringError, match=r"R\[-1, 2, 30\]"):
        sglang_wiring([-1, 2, 30], architecture=architecture, layers=LAYERS)


@pytest.mark.parametrize(("architecture", "ids"), [(GPT_OSS, [3, 31, LAYERS]), (GEMMA4, [2, 30, LAYERS - 1])])
def test_the_last_output_is_fed(architecture: str, ids: list[int]) -> None:
    model = bare(architecture)
    model.set_eagle3_layers_to_capture(ids)
    assert recorded(model) == [3, 31, LAYERS]
    assert sglang_wiring(ids, architecture=architecture, layers=LAYERS).taps == ("3", "31", str(LAYERS))


@pytest.mark.parametrize("architecture", list(CLASSES))
@pytest.mark.parametrize("wiring", ["embed,3,31", "3,31,59", "1,2,3", "2,30,58", "embed", "60"])
def test_the_ids_that_replay_prints_feed_the_wiring(architecture: str, wiring: str) -> None:
    wanted = parse_wiring(wiring, layers=LAYERS)
    sglang, *_ = engine_ids(wanted, architecture=architecture, layers=LAYERS)
    assert sglang.engine.startswith("SGLang")
    assert sglang.ids is not None
    model = bare(architecture)
    model.set_eagle3_layers_to_capture(list(sglang.ids))
    assert recorded(model) == indices(wanted.taps)


@pytest.mark.parametrize("architecture", list(CLASSES))
@pytest.mark.parametrize("boundaries", [[0, 3, 16], [0], [2], [1, 2, 30, 58], list(range(LAYERS))])
def test_the_plugin_sets_exactly_the_taps(architecture: str, boundaries: list[int]) -> None:
    model = bare(architecture)
    core, processor = capturing_parts(model)
    assert hasattr(processor, "keep_last_hidden_states")
    capture_boundaries(model, core, boundaries)
    assert recorded(model) == boundaries
    assert getattr(model, "language_model", model).capture_aux_hidden_states is True


@pytest.mark.parametrize("architecture", [name for name in CLASSES if name not in TO_LAST])
def test_the_stream_after_the_last_layer_is_refused(architecture: str) -> None:
    model = bare(architecture)
    core, _ = capturing_parts(model)
    with pytest.raises(CaptureError, match=rf"R\[{LAYERS}\] cannot be recorded .* 1 to {LAYERS - 1}, and final"):
        capture_boundaries(model, core, [0, 3, LAYERS])
    assert core.layers_to_capture == []


@pytest.mark.parametrize("architecture", TO_LAST)
def test_the_plugin_sets_the_last_output_where_it_is_captured(architecture: str) -> None:
    model = bare(architecture)
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
