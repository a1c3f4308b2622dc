"""What to type against a fault: braces filled in, slot by slot and engine by engine."""

import pytest

from replay.engines.wiring import Wiring
from replay.faults.remedies import remedy

WIRING = Wiring(("embed", "3", "16"))


def fix(name: str, wiring: Wiring = WIRING, architecture: str = "LlamaForCausalLM") -> str:
    return remedy(name, wiring, architecture=architecture, layers=30)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0", "tap embed is missing from slot 0: see that every layer id fires;"),
        ("1", "tap 3 is missing from slot 1: see that every layer id fires;"),
        ("2", "tap 16 is missing from slot 2: see that every layer id fires;"),
        ("all", "all taps are missing, embed,3,16: see that every layer id fires;"),
    ],
)
def test_a_missing_tap_is_named_with_its_slot(value: str, said: str) -> None:
    found = fix(f"wiring.aux-missing={value}")
    assert found.startswith(said) and "`replay serve --wiring embed,3,16`" in found
    assert "last layer" not in found


def test_only_the_last_layer_is_said_never_to_fire() -> None:
    last = Wiring(("2", "16", "30"))
    assert fix("wiring.aux-missing=2", last).startswith(
        "tap 30 is missing from slot 2: see that every layer id fires (in SGLang the last layer's never does);"
    )
    assert "never does" in fix("wiring.aux-missing=all", last)
    assert "never does" not in fix("wiring.aux-missing=1", last)
    assert "never does" not in fix("wiring.aux-missing=2", last, "GptOssForCausalLM")  # whose ids reach the last output


def test_another_wiring_is_written_for_each_engine() -> None:
    said = fix("wiring.aux-layer-id=3,16,28")
    assert said.startswith("feed embed,3,16: `replay serve --wiring embed,3,16 -- ...`, or write for SGLang 0.5.23: ")
    assert "[-1, 2, 15]; vLLM 0.32: eagle_aux_hidden_state_layer_ids [0, 3, 16]" in said


def test_joined_faults_have_a_remedy_each() -> None:
    """Each with its own value."""
    said = fix("weights.missing=fc+wiring.aux-missing=1").split("; then ")
    assert said[0].startswith("export the head again with fc; SGLang skips")
    assert said[1].startswith("tap 3 is missing from slot 1")


def test_the_ids_of_a_head_of_blocks_are_outputs_of_layers() -> None:
    found = remedy("wiring.aux-layer-id=1", Wiring(("2", "10", "18")), architecture="", layers=30, blocks=True)
    assert found == "write dflash_config.target_layer_ids [1, 9, 17] into the draft config, which feeds 2,10,18"
    missing = remedy("wiring.aux-missing=1", Wiring(("2", "10", "18")), architecture="", layers=30, blocks=True)
    assert missing.startswith("tap 10 is missing from slot 1: see that every id")
