"""Layer ids and taps: a literal table of each engine's convention, round trips, and refusals by names and sizes."""

import itertools

import pytest

from replay.engines.wiring import Wiring, check_wiring, default_wiring, engine_ids, parse_wiring, sglang_wiring
from replay.errors import UsageError, WiringError
from replay.traces.taps import default_taps, parse_tap, parse_taps, sort_taps

LLAMA, QWEN3, GPT_OSS, GLM_LITE = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM", "Glm4MoeLiteForCausalLM"
)  # fmt: skip
DEEPSEEK_V2, DEEPSEEK, KIMI = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"

# ---- the grammar of taps ----


@pytest.mark.parametrize(
    ("text", "tap"),
    [("embed", "embed"), ("0", "embed"), ("in:0", "embed"), ("3", "3"), ("in:3", "3"), ("out:2", "3"), ("out:0", "1"),
     ("out:29", "30"), ("30", "30"), ("final", "final"), (" 3 ", "3"), ("007", "7")],
)  # fmt: skip
def test_each_spelling_of_a_tap(text: str, tap: str) -> None:
    assert parse_tap(text) == parse_tap(text, layers=30) == tap


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "+3", "3.0", "out:", "in:-1", "out:final", "out:embed", "Embed", "R3", "12345", "٣", "1 2"]
)
def test_what_is_no_tap_is_quoted(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a tap: .*type for example embed,3,31") as raised:
        parse_tap(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(("text", "index"), [("31", 31), ("out:30", 31), ("in:31", 31), ("out:9999", 10000)])
def test_a_tap_beyond_the_target_says_how_far_it_goes(text: str, index: int) -> None:
    with pytest.raises(UsageError, match=rf"tap {text} is R\[{index}\], the target has 30 layers: .* 1 to 30, and fin"):
        parse_tap(text, layers=30)


def test_a_wiring_keeps_order_and_repetitions() -> None:
    assert parse_wiring("31, embed,out:2,3,final").taps == ("31", "embed", "3", "3", "final")
    assert str(parse_wiring("in:0,out:2,16")) == "embed,3,16"
    assert parse_wiring(str(parse_wiring("final,9,0"))) == parse_wiring("final,9,embed")
    with pytest.raises(UsageError, match=r"'' is not a tap"):
        parse_wiring("3,,16")
    with pytest.raises(UsageError, match=r"tap 16 is R\[16\], the target has 15 layers"):
        parse_wiring("embed,3,16", layers=15)


def test_taps_sort_as_the_stream_runs() -> None:
    assert sort_taps(parse_taps("final,16,2,embed,16")) == ("embed", "2", "16", "final")


def test_default_taps_hold_the_default_wiring_and_its_neighbours() -> None:
    assert default_taps(30) == ("embed", "1", "2", "3", "14", "15", "16", "26", "27", "28", "final")
    for layers in range(1, 80):
        assert set(default_wiring(layers).taps) <= set(default_taps(layers))
        assert parse_taps(",".join(default_taps(layers)), layers=layers) == default_taps(layers)


# ---- SGLang's reading of a draft config's ids ----

# Conventions of sglang 0.5.23, one class per row. Llama and most others (models/llama.py): id k means the output of
# 0-based layer k, R[k+1]. DeepSeek and Kimi (models/deepseek_v2.py, glm4_moe_lite.py; sgl-project/sglang#25454): so
# only if the first id is 1, else R[k]. gpt-oss (models/gpt_oss.py; sgl-project/sglang#32334): R[k] if the largest
# id is the number of layers, else R[k+1].
FED: list[tuple[str, int, list[int] | None, str]] = [
    (LLAMA, 32, None, "2,16,29"),
    (LLAMA, 32, [1, 15, 28], "2,16,29"),
    (LLAMA, 32, [2, 16, 29], "3,17,30"),
    (LLAMA, 32, [-1, 2, 15], "embed,3,16"),
    (LLAMA, 32, [0, 2, 15], "1,3,16"),
    (LLAMA, 32, [30], "31"),
    (QWEN3, 36, [1, 17, 32], "2,18,33"),
    (LLAMA, 32, [28, 1, 15], "2,16,29"),  # in layer order, whatever the config's order
    (LLAMA, 32, [1, 1, 15], "2,16"),  # each once
    (DEEPSEEK_V2, 61, None, "2,30,58"),
    (DEEPSEEK, 61, None, "2,30,58"),
    (DEEPSEEK, 61, [2, 30, 58], "2,30,58"),
    (DEEPSEEK, 61, [1, 29, 57], "2,30,58"),
    (DEEPSEEK_V2, 61, [1, 30, 58], "2,31,59"),
    (DEEPSEEK_V2, 61, [2, 1, 3], "1,2,3"),  # it is the first id that decides, not the smallest
    (DEEPSEEK, 61, [0, 3, 31], "embed,3,31"),
    (KIMI, 61, [0, 3, 31], "embed,3,31"),
    (KIMI, 61, [2, 30, 58], "2,30,58"),
    (KIMI, 61, [3, 31, 59], "3,31,59"),
    (GLM_LITE, 47, [1, 22, 43], "2,23,44"),
    (GLM_LITE, 47, [2, 23, 44], "2,23,44"),
    (GPT_OSS, 36, None, "2,18,33"),
    (GPT_OSS, 36, [1, 17, 32], "2,18,33"),
    (GPT_OSS, 36, [24, 30, 36], "24,30,36"),
    (GPT_OSS, 36, [24, 30, 35], "25,31,36"),
    (GPT_OSS, 24, [-1, 2, 15], "embed,3,16"),
    (GPT_OSS, 24, [0, 12, 24], "embed,12,24"),
    # A subclass of DeepSeek's (models/glm4_moe.py); R[N] after the loop (models/gemma3_causal.py); the default list
    # with 1 added and without (models/minimax_m3_vl.py, minimax_m3.py); a layer marked from the end, as Python counts
    # below 0 (models/qwen2_moe.py)
    ("GlmMoeDsaForCausalLM", 78, [2, 39, 75], "2,39,75"),
    ("Gemma3ForCausalLM", 26, [1, 12, 25], "2,13,26"),
    ("Gemma3ForConditionalGeneration", 34, [1, 16, 33], "2,17,34"),
    ("Gemma4ForConditionalGeneration", 30, [29], "30"),
    ("MiniMaxM3SparseForConditionalGeneration", 60, None, "3,31,58"),
    ("MiniMaxM3SparseForConditionalGeneration", 60, [1, 29, 59], "2,30,60"),
    ("MiniMaxM3SparseForCausalLM", 60, None, "2,30,57"),
    ("Qwen3MoeForCausalLM", 48, [-2, 2, 15], "3,16,47"),
    ("Llama4ForConditionalGeneration", 48, [-1, 23, 46], "embed,24,47"),
]


@pytest.mark.parametrize(("architecture", "layers", "ids", "fed"), FED)
def test_what_sglang_feeds(architecture: str, layers: int, ids: list[int] | None, fed: str) -> None:
    assert str(sglang_wiring(ids, architecture=architecture, layers=layers)) == fed


@pytest.mark.parametrize(
    ("architecture", "layers", "ids", "read", "never", "last"),
    [
        (LLAMA, 32, [1, 15, 31], "[2, 16, 32]", "R[32] never fires", 31),  # nothing follows the last layer
        (LLAMA, 32, [-2, 2, 15], "[-1, 3, 16]", "R[-1] never fires", 31),
        (DEEPSEEK, 61, [-1, 2, 30], "[-1, 2, 30]", "R[-1] never fires", 60),
        (DEEPSEEK, 61, [2, 30, 61], "[2, 30, 61]", "R[61] never fires", 60),
        (KIMI, 61, [1, 30, 60], "[2, 31, 61]", "R[61] never fires", 60),
        (GPT_OSS, 36, [24, 30, 37], "[25, 31, 38]", "R[38] never fires", 36),
        (GPT_OSS, 36, [-1, 30, 36], "[-1, 30, 36]", "R[-1] never fires", 36),
        (LLAMA, 32, [40, 50], "[41, 51]", "R[41], R[51] never fire", 31),
    ],
)
def test_ids_that_never_fire_are_refused(
    architecture: str, layers: int, ids: list[int], read: str, never: str, last: int
) -> None:
    with pytest.raises(WiringError) as raised:
        sglang_wiring(ids, architecture=architecture, layers=layers)
    assert str(raised.value) == (
        f"the draft config states layer ids {ids}, which SGLang 0.5.23 reads as R{read} of {architecture}: {never}, "
        f"{architecture} captures R[0] to R[{last}]; say the wiring with --wiring"
    )


def test_ids_at_which_a_server_stops_are_refused() -> None:
    with pytest.raises(WiringError, match="marks layer 48, its layers are 0 to 47; say the wiring"):
        sglang_wiring([1, 23, 47], architecture="Qwen3MoeForCausalLM", layers=48)
    with pytest.raises(WiringError, match="expects 3 captured layers and gets 2; say the wiring"):
        sglang_wiring([2, 2, 30], architecture=DEEPSEEK, layers=61)


@pytest.mark.parametrize("ids", [None, [1, 7, 12]])
@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("Olmo2ForCausalLM", "SGLang 0.5.23 cannot capture layers of Olmo2ForCausalLM, and does not start with EAGLE3"),
        ("NoSuchModel", "SGLang 0.5.23 has no class NoSuchModel, cannot capture layers of what it takes instead, and "),
        ("MiniCPMV", "what SGLang 0.5.23 captures of MiniCPMV cannot be told from its code; say the wiring"),
    ],
)
def test_a_target_of_which_nothing_is_captured_or_known_is_refused(
    ids: list[int] | None, architecture: str, said: str
) -> None:
    with pytest.raises(WiringError) as raised:
        sglang_wiring(ids, architecture=architecture, layers=16)
    assert said in str(raised.value) and str(raised.value).endswith("; say the wiring with --wiring")
    assert ids_of("2,8,13", architecture, 16)["SGLang"] is None


@pytest.mark.parametrize("architecture", [LLAMA, KIMI, GPT_OSS])
def test_no_ids_at_all_are_refused(architecture: str) -> None:
    with pytest.raises(WiringError, match="states no layer ids at all; say the wiring with --wiring"):
        sglang_wiring([], architecture=architecture, layers=32)


@pytest.mark.parametrize(
    ("layers", "fed"), [(80, "2,40,77"), (30, "2,15,27"), (8, "2,4,5"), (6, "2,3"), (4, "1,2"), (3, "embed,1,2")]
)
def test_default_wiring(layers: int, fed: str) -> None:
    """SGLang, vLLM and EAGLE test each layer for membership in [2, N//2, N-3]: in layer order, each once."""
    assert str(default_wiring(layers)) == fed


# ---- ids for each engine ----


@pytest.mark.parametrize("architecture", [LLAMA, KIMI, GLM_LITE, GPT_OSS])
@pytest.mark.parametrize("layers", [6, 9])
def test_sglang_ids_round_trip(architecture: str, layers: int) -> None:
    """Every rising wiring that ids can say is said, and said right; those that none say, no ids within reach feed."""
    reach = range(-2, layers + 2)
    for taps in itertools.combinations(range(layers + 1), 3):
        wiring = parse_wiring(",".join(map(str, taps)))
        said = next(
            each for each in engine_ids(wiring, architecture=architecture, layers=layers) if "SGLang" in each.engine
        )
        if said.ids is not None:
            assert sglang_wiring(said.ids, architecture=architecture, layers=layers) == wiring
            continue
        assert said.note == f"its {architecture} has no ids that feed this"
        for ids in itertools.permutations(reach, 3):
            try:
                assert sglang_wiring(ids, architecture=architecture, layers=layers) != wiring
            except WiringError:
                continue


def ids_of(wiring: str, architecture: str = LLAMA, layers: int = 32) -> dict[str, tuple[int, ...] | None]:
    said = engine_ids(parse_wiring(wiring), architecture=architecture, layers=layers)
    assert all(each.ids is not None or each.note for each in said)
    return {each.engine.split()[0]: each.ids for each in said}


@pytest.mark.parametrize(
    ("wiring", "architecture", "sglang", "vllm", "specforge"),
    [
        ("2,16,29", LLAMA, (1, 15, 28), (2, 16, 29), (1, 15, 28)),
        ("embed,3,31", LLAMA, (-1, 2, 30), (0, 3, 31), None),
        ("embed,3,31", KIMI, (0, 3, 31), None, None),  # id 0 crashes vLLM's DeepSeek at its first forward
        ("embed,3,31", DEEPSEEK_V2, (0, 3, 31), None, None),
        ("1,3,31", KIMI, (3, 1, 31), (1, 3, 31), (0, 2, 30)),  # [1, 3, 31] would be read as R[2], R[4], R[32]
        ("1", KIMI, None, (1,), None),
        ("2,3,31", KIMI, (1, 2, 30), (2, 3, 31), (1, 2, 30)),
        ("2,16,32", LLAMA, None, (2, 16, 32), (1, 15, 31)),
        ("2,16,32", GPT_OSS, (1, 15, 31), (2, 16, 32), (1, 15, 31)),
        ("29,2,16", LLAMA, None, None, (28, 1, 15)),
        ("2,2,16", LLAMA, None, None, (1, 1, 15)),
        ("2,16", LLAMA, (1, 15), (2, 16), None),
        ("2,16,final", LLAMA, None, None, None),
    ],
)
def test_ids_of_each_engine(
    wiring: str,
    architecture: str,
    sglang: tuple[int, ...] | None,
    vllm: tuple[int, ...] | None,
    specforge: tuple[int, ...] | None,
) -> None:
    assert ids_of(wiring, architecture) == {"SGLang": sglang, "vLLM": vllm, "SpecForge": specforge}


def test_all_defaults_are_one_wiring() -> None:
    for architecture, layers in itertools.product((LLAMA, DEEPSEEK, GPT_OSS), (12, 30, 61)):
        wiring = default_wiring(layers)
        assert ids_of(str(wiring), architecture, layers)["vLLM"] == (2, layers // 2, layers - 3)
        assert ids_of(str(wiring), architecture, layers)["SpecForge"] == (1, layers // 2 - 1, layers - 4)
        assert sglang_wiring(None, architecture=architecture, layers=layers) == wiring


# ---- does a wiring fit? ----

AVAILABLE = ("embed", "2", "3", "15", "16", "final")


def fit(wiring: str, fc_inputs: int, hidden_size: int = 576) -> None:
    check_wiring(Wiring(tuple(wiring.split(","))), available=AVAILABLE, hidden_size=hidden_size, fc_inputs=fc_inputs)


@pytest.mark.parametrize(("wiring", "taps"), [("embed,3,16", 3), ("16,3,embed", 3), ("final", 1), ("3,3,3,3", 4)])
def test_a_wiring_that_fits_passes(wiring: str, taps: int) -> None:
    fit(wiring, taps * 576)


def test_taps_that_were_not_recorded_are_named_with_what_to_capture() -> None:
    with pytest.raises(WiringError) as raised:
        fit("embed,31,4", 3 * 576)
    assert str(raised.value) == (
        "wiring embed,31,4 asks for tap 31, 4, the trace has embed, 2, 3, 15, 16, final; "
        "capture again with --taps embed,2,3,15,16,final,31,4"
    )


@pytest.mark.parametrize(
    ("wiring", "fc_inputs", "message"),
    [
        ("embed,3", 1728, "wiring embed,3 gives 2 taps x 576 = 1152 features, the head's fc takes 1728 (3 taps)"),
        ("3,16,2,15", 1728, "gives 4 taps x 576 = 2304 features, the head's fc takes 1728 (3 taps)"),
        ("embed,3,16", 1536, "3 taps x 576 = 1728 features, the head's fc takes 1536 (no whole number of them)"),
    ],
)
def test_a_wiring_of_another_width_is_told_in_numbers(wiring: str, fc_inputs: int, message: str) -> None:
    with pytest.raises(WiringError) as raised:
        fit(wiring, fc_inputs)
    assert message in str(raised.value) and "give --wiring as many taps as the head was trained on" in str(raised.value)
