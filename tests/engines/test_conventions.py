"""Layer ids as engines count them: what was typed in front of the colon decides what the numbers mean."""

import pytest
import torch

from replay.engines.conventions import by_rule, hf
from replay.engines.wiring import engine_ids, parse_wiring
from replay.errors import UsageError, WiringError
from replay.targets.rules import capture_rule

LLAMA, DEEPSEEK = "LlamaForCausalLM", "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    ("text", "architecture", "layers", "taps"),
    [
        # SGLang: models/llama.py adds 1, deepseek_v2.py only where the first id is 1 (sgl-project/sglang#25454, after
        # 0.5.12: there it always adds 1)
        ("sglang:-1,2,15", LLAMA, 30, "embed,3,16"),
        ("sglang: 1, 14, 26 ", LLAMA, 30, "2,15,27"),
        ("sglang:26,1,14", LLAMA, 30, "2,15,27"),
        ("sglang:2,30,58", DEEPSEEK, 61, "2,30,58"),
        ("sglang@0.5.23:2,30,58", DEEPSEEK, 61, "2,30,58"),
        ("sglang@0.5.12:1,29,57", DEEPSEEK, 61, "2,30,58"),
        # vLLM 0.32 model_executor/models/llama.py: as they stand, in layer order
        ("vllm:0,3,16", LLAMA, 30, "embed,3,16"),
        ("vllm@0.32:16,3,3,30", LLAMA, 30, "3,16,30"),
        # SpecForge 0.2: outputs of layers
        ("specforge:1,14,26", DEEPSEEK, 61, "2,15,27"),
        # Transformers: hidden_states, whose last is after the norm
        ("hf:0,3,16", LLAMA, 30, "embed,3,16"),
        ("hf:16,-1,-2", LLAMA, 30, "16,final,29"),
        ("hf:30", LLAMA, 30, "final"),
        # places of single taps are no engines
        ("in:3", LLAMA, 30, "3"),
        ("out:2,in:16", LLAMA, 30, "3,16"),
    ],
)
def test_ids_of_an_engine(text: str, architecture: str, layers: int, taps: str) -> None:
    assert str(parse_wiring(text, layers=layers, architecture=architecture)) == taps


def test_the_same_ids_mean_other_taps_in_an_older_release() -> None:
    """#25454 again: 0.5.12 adds 1 to ids of DeepSeek whatever the first one is."""
    old, new = (by_rule([2, 30, 58], capture_rule(DEEPSEEK, release), 61).taps for release in ("0.5.12", "0.5.23"))
    assert (old, new) == (("3", "31", "59"), ("2", "30", "58"))


@pytest.mark.parametrize("taps", ["2,15,27", "3,16,28", "1,2,30"])
def test_what_engine_ids_prints_is_read_back(taps: str) -> None:
    for said in engine_ids(parse_wiring(taps), architecture=LLAMA, layers=30):
        engine = said.engine.split()[0].lower()
        if said.ids is not None:
            typed = f"{engine}:{','.join(map(str, said.ids))}"
            assert str(parse_wiring(typed, layers=30, architecture=LLAMA)) == taps


def test_hidden_states_of_transformers_are_counted_as_it_counts() -> None:
    """Held against a small Llama: the taps are seen by hooks, the list is the library's own."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
                        num_key_value_heads=2, vocab_size=32)  # fmt: skip
    model = LlamaModel(sizes).eval()
    seen: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.layers):
        name = "embed" if index == 0 else str(index)
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
    model.norm.register_forward_hook(lambda _, given, made: seen.update({"final": made}))
    with torch.inference_mode():
        states = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    for index in range(-len(states), len(states)):
        (tap,) = hf([index], LLAMA, 3).taps
        assert torch.equal(states[index], seen[tap]), (index, tap)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("specforge:-1,2,15", "takes three different ids from 0 to 29, the embedding has none"),
        ("specforge:1,14", "takes three different ids"),
        ("specforge:14,1,26", "out of layer order"),
        ("vllm:0,3,31", "vLLM 0.32 has taps 0 to 30"),
        ("vllm:-1,3,30", "vLLM 0.32 has taps 0 to 30"),
        ("hf:31", "hidden_states has 31 entries, 0 to 30 or -31 to -1"),
        ("sglang:1,15,29", "R[30] never fires"),
    ],
)
def test_ids_that_feed_nothing_are_refused(text: str, said: str) -> None:
    with pytest.raises(WiringError) as raised:
        parse_wiring(text, layers=30, architecture=LLAMA)
    assert said in str(raised.value) and str(raised.value).startswith(f"{text} feeds nothing: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("eagle:1,2,3", "'eagle' is no engine whose layer ids are known, possible are sglang, vllm, specforge, hf;"),
        ("sglang@0.5.13:1,2", "SGLang '0.5.13' counts is not known, possible are sglang@0.5.9, sglang@0.5.12,"),
        ("hf@4:1,2", "possible are no version; type one of them, hf: alone"),
        ("sglang:", "has no layer ids after the colon"),
        ("sglang:embed,2", "has no layer ids after the colon"),
        ("config", "stands for what a head states"),
    ],
)
def test_what_cannot_be_typed_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_wiring(text, layers=30, architecture=LLAMA)
    assert said in str(raised.value)


def test_a_plain_minus_one_is_explained() -> None:
    with pytest.raises(UsageError) as raised:
        parse_wiring("-1,2,15", layers=30, architecture=LLAMA)
    assert str(raised.value) == (
        "'-1,2,15' has numbers below 0, and no tap has: the embedding is embed, and layer ids are typed with their "
        "engine; type sglang:-1,2,15 (embed,3,16 of this target) or hf:-1,2,15 (final,2,15 of this target)"
    )
    with pytest.raises(UsageError, match="type hf:-1,2,30 ") as raised:  # no DeepSeek class captures for -1
        parse_wiring("-1,2,30", layers=61, architecture=DEEPSEEK)
    assert "sglang:" not in str(raised.value)
    with pytest.raises(UsageError, match="type sglang:-1,2,15, where -1 is the embedding, or embed,3,31"):
        parse_wiring("-1,2,15")


def test_ids_need_the_target_they_are_read_of() -> None:
    for architecture, layers in ((None, 30), (LLAMA, None)):
        with pytest.raises(UsageError, match="give layers and architecture, or type taps"):
            parse_wiring("sglang:1,14,26", layers=layers, architecture=architecture)
    assert str(parse_wiring("vllm:2,15,27", layers=30)) == "2,15,27"
