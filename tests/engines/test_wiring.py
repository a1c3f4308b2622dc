"""Layer ids and taps: a literal table of each engine's convention, round trips, and refusals by names and sizes."""

import itertools

import pytest

from replay.engines.wiring import Wiring, check_wiring, default_wiring, engine_ids, parse_wiring, sglang_wiring
from replay.errors import UsageError, WiringError
from replay.traces.taps import default_taps, parse_tap, parse_taps, sort_taps

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
    ("llama", 32, None, "2,16,29"),
    ("llama", 32, [1, 15, 28], "2,16,29"),
    ("llama", 32, [2, 16, 29], "3,17,30"),
    ("llama", 32, [-1, 2, 15], "embed,3,16"),
    ("llama", 32, [0, 2, 15], "1,3,16"),
    ("llama", 32, [30], "31"),
    ("qwen3", 36, [1, 17, 32], "2,18,33"),
    ("llama", 32, [28, 1, 15], "2,16,29"),  # in layer order, whatever the config's order
    ("llama", 32, [1, 1, 15], "2,16"),  # each once
    ("deepseek_v2", 61, None, "2,30,58"),
    ("deepseek_v3", 61, None, "2,30,58"),
    ("deepseek_v3", 61, [2, 30, 58], "2,30,58"),
    ("deepseek_v3", 61, [1, 29, 57], "2,30,58"),
    ("deepseek_v2", 61, [1, 30, 58], "2,31,59"),
    ("deepseek_v2", 61, [2, 1, 3], "1,2,3"),  # it is the first id that decides, not the smallest
    ("kimi_k2", 61, [0, 3, 31], "embed,3,31"),
    ("kimi_k25", 61, [0, 3, 31], "embed,3,31"),
    ("kimi_k25", 61, [2, 30, 58], "2,30,58"),
    ("kimi_k25", 61, [3, 31, 59], "3,31,59"),
    ("glm4_moe_lite", 47, [1, 22, 43], "2,23,44"),
    ("glm4_moe_lite", 47, [2, 23, 44], "2,23,44"),
    ("gpt_oss", 36, None, "2,18,33"),
    ("gpt_oss", 36, [1, 17, 32], "2,18,33"),
    ("gpt_oss", 36, [24, 30, 36], "24,30,36"),
    ("gpt_oss", 36, [24, 30, 35], "25,31,36"),
    ("gpt_oss", 24, [-1, 2, 15], "embed,3,16"),
    ("gpt_oss", 24, [0, 12, 24], "embed,12,24"),
]


@pytest.mark.parametrize(("model_type", "layers", "ids", "fed"), FED)
def test_what_sglang_feeds(model_type: str, layers: int, ids: list[int] | None, fed: str) -> None:
    assert str(sglang_wiring(ids, model_type=model_type, layers=layers)) == fed


@pytest.mark.parametrize(
    ("model_type", "layers", "ids", "boundaries", "last"),
    [
        ("llama", 32, [1, 15, 31], "[2, 16, 32]", 31),  # nothing follows the last layer, so nothing records R[32]
        ("llama", 32, [-2, 2, 15], "[-1, 3, 16]", 31),
        ("deepseek_v3", 61, [-1, 2, 30], "[-1, 2, 30]", 60),
        ("deepseek_v3", 61, [2, 30, 61], "[2, 30, 61]", 60),
        ("kimi_k25", 61, [1, 30, 60], "[2, 31, 61]", 60),
        ("gpt_oss", 36, [24, 30, 37], "[25, 31, 38]", 36),
        ("gpt_oss", 36, [-1, 30, 36], "[-1, 30, 36]", 36),
    ],
)
def test_ids_that_never_fire_are_refused(
    model_type: str, layers: int, ids: list[int], boundaries: str, last: int
) -> None:
    with pytest.raises(WiringError) as raised:
        sglang_wiring(ids, model_type=model_type, layers=layers)
    assert str(raised.value) == (
        f"the draft config states layer ids {ids}, which SGLang reads as R{boundaries} of a {model_type} target, "
        f"where R[0] to R[{last}] can be fed; say the wiring with --wiring"
    )


@pytest.mark.parametrize("model_type", ["llama", "kimi_k25", "gpt_oss"])
def test_no_ids_at_all_are_refused(model_type: str) -> None:
    with pytest.raises(WiringError, match="states no layer ids at all; say the wiring with --wiring"):
        sglang_wiring([], model_type=model_type, layers=32)


@pytest.mark.parametrize(
    ("layers", "fed"), [(80, "2,40,77"), (30, "2,15,27"), (8, "2,4,5"), (6, "2,3"), (4, "1,2"), (3, "embed,1,2")]
)
def test_default_wiring(layers: int, fed: str) -> None:
    """SGLang, vLLM and EAGLE test each layer for membership in [2, N//2, N-3]: in layer order, each once."""
    assert str(default_wiring(layers)) == fed


# ---- ids for each engine ----


@pytest.mark.parametrize("model_type", ["llama", "kimi_k25", "glm4_moe_lite", "gpt_oss"])
@pytest.mark.parametrize("layers", [6, 9])
def test_sglang_ids_round_trip(model_type: str, layers: int) -> None:
    """Every rising wiring that ids can say is said, and said right; those that none say, no ids within reach feed."""
    reach = range(-2, layers + 2)
    for taps in itertools.combinations(range(layers + 1), 3):
        wiring = parse_wiring(",".join(map(str, taps)))
        said = next(
            each for each in engine_ids(wiring, model_type=model_type, layers=layers) if "SGLang" in each.engine
        )
        if said.ids is not None:
            assert sglang_wiring(said.ids, model_type=model_type, layers=layers) == wiring
            continue
        assert said.note == f"its {model_type} class has no ids that feed this"
        for ids in itertools.permutations(reach, 3):
            try:
                assert sglang_wiring(ids, model_type=model_type, layers=layers) != wiring
            except WiringError:
                continue


def ids_of(wiring: str, model_type: str = "llama", layers: int = 32) -> dict[str, tuple[int, ...] | None]:
    said = engine_ids(parse_wiring(wiring), model_type=model_type, layers=layers)
    assert all(each.ids is not None or each.note for each in said)
    return {each.engine.split()[0]: each.ids for each in said}


@pytest.mark.parametrize(
    ("wiring", "model_type", "sglang", "vllm", "specforge"),
    [
        ("2,16,29", "llama", (1, 15, 28), (2, 16, 29), (1, 15, 28)),
        ("embed,3,31", "llama", (-1, 2, 30), (0, 3, 31), None),
        ("embed,3,31", "kimi_k25", (0, 3, 31), (0, 3, 31), None),
        ("1,3,31", "kimi_k25", (3, 1, 31), (1, 3, 31), (0, 2, 30)),  # [1, 3, 31] would be read as R[2], R[4], R[32]
        ("1", "kimi_k25", None, (1,), None),
        ("2,3,31", "kimi_k25", (1, 2, 30), (2, 3, 31), (1, 2, 30)),
        ("2,16,32", "llama", None, (2, 16, 32), (1, 15, 31)),
        ("2,16,32", "gpt_oss", (1, 15, 31), (2, 16, 32), (1, 15, 31)),
        ("29,2,16", "llama", None, None, (28, 1, 15)),
        ("2,2,16", "llama", None, None, (1, 1, 15)),
        ("2,16", "llama", (1, 15), (2, 16), None),
        ("2,16,final", "llama", None, None, None),
    ],
)
def test_ids_of_each_engine(
    wiring: str,
    model_type: str,
    sglang: tuple[int, ...] | None,
    vllm: tuple[int, ...] | None,
    specforge: tuple[int, ...] | None,
) -> None:
    assert ids_of(wiring, model_type) == {"SGLang": sglang, "vLLM": vllm, "SpecForge": specforge}


def test_all_defaults_are_one_wiring() -> None:
    for model_type, layers in itertools.product(("llama", "kimi_k2", "gpt_oss"), (12, 30, 61)):
        wiring = default_wiring(layers)
        assert ids_of(str(wiring), model_type, layers)["vLLM"] == (2, layers // 2, layers - 3)
        assert ids_of(str(wiring), model_type, layers)["SpecForge"] == (1, layers // 2 - 1, layers - 4)
        assert sglang_wiring(None, model_type=model_type, layers=layers) == wiring


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
