"""Finer values around one that was tried, and round ones: worked out by hand."""

import math

import pytest

from replay.diagnosis.value_search import neighbours, number_in, put_number, rounded, spelled
from replay.faults.table import FAULTS, Fault

CONTINUOUS = {
    "position.rope-params": ("theta:10000", "theta:1000000", "theta:0.5", "theta:5e9"),
    "wiring.norm-eps": ("1e-6", "0.1", "0.00001"),
    "attn.scale": ("2", "0.125", "11.3137085"),
    "attn.window": ("1", "16", "2048", "513"),
    "position.max-len": ("64", "2048:dummy"),
    "kv.prefix-reuse": ("16", "9:masked"),
    "position.offset": ("1", "-1", "all:3", "stuck", "stuck:1"),
}


@pytest.mark.parametrize(
    ("kind", "value", "step", "expected"),
    [
        ("position.rope-params", "theta:10000", 0, ("theta:1000", "theta:100000")),
        ("position.rope-params", "theta:10000", 1, ("theta:3162", "theta:31620")),  # the square root of ten is 3.16228
        ("position.rope-params", "theta:10000", 2, ("theta:5623", "theta:17780")),
        ("wiring.norm-eps", "1e-6", 0, ("1e-7", "1e-5")),
        ("wiring.norm-eps", "0.1", 1, ("0.03162", "0.3162")),
        ("attn.scale", "2", 0, ("4",)),  # and 1, which is no fault
        ("attn.scale", "8", 0, ("4", "16")),
        ("attn.scale", "2", 1, ("1.414", "2.828")),
        ("attn.window", "64", 0, ("32", "96")),
        ("attn.window", "64", 5, ("63", "65")),
        ("attn.window", "64", 6, ()),
        ("attn.window", "1", 0, ("2",)),
        ("position.max-len", "48:dummy", 1, ("36:dummy", "60:dummy")),
        ("kv.prefix-reuse", "16", 0, ("8", "24")),
        ("position.offset", "1", 0, ("-3", "5")),
        ("position.offset", "1", 2, ("2",)),  # and 0, which is no fault
        ("position.offset", "all:-3", 1, ("all:-5", "all:-1")),
        ("position.offset", "all:1", 2, ("all:2",)),
        ("position.offset", "stuck", 2, ("stuck:-1", "stuck:1")),
        ("position.offset", "stuck:1", 2, ("stuck", "stuck:2")),
        ("position.offset", "1", 3, ()),
        ("position.rope-params", "scaling:none", 0, ()),
        ("kv.rollback", "stale", 0, ()),
        ("kv.skip-draft", "8:16", 1, ("8:24", "0:16", "0:8", "0:24", "16:24", "8:16:masked")),
        ("kv.skip-draft", "0:2:masked", 4, ("0:1:masked", "0:3:masked", "1:2:masked", "1:3:masked", "0:2")),
        ("kv.skip-draft", "8:16", 5, ()),
        ("state.hidden-row", "first", 0, ()),
    ],
)
def test_neighbours_come_closer_with_each_step(kind: str, value: str, step: int, expected: tuple[str, ...]) -> None:
    assert neighbours(kind, value, step) == expected


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind in CONTINUOUS for value in CONTINUOUS[kind]])
def test_the_kind_takes_all_that_is_proposed_and_the_steps_end(kind: str, value: str) -> None:
    number = number_in(kind, value)
    assert number is not None
    below: list[float] = []
    above: list[float] = []
    for step in range(40):
        proposed = neighbours(kind, value, step)
        assert [str(Fault(kind, text)) for text in proposed] == [f"{kind}={text}" for text in proposed]
        for other in [number_in(kind, text) for text in proposed]:
            assert other is not None and other != number
            (below if other < number else above).append(abs(other - number))
    for distances in (below, above):
        assert distances == sorted(distances, reverse=True) and len(set(distances)) == len(distances)
    assert below or above
    assert neighbours(kind, value, 39) == ()


def test_no_other_kind_has_neighbours() -> None:
    others = {kind: FAULTS[kind].default for kind in FAULTS if kind not in (*CONTINUOUS, "kv.skip-draft")}
    assert not any(neighbours(kind, value, 0) for kind, value in others.items() if value)


@pytest.mark.parametrize(
    ("kind", "value", "number"),
    [("position.offset", "stuck:-2", -2), ("position.offset", "stuck", 0), ("position.offset", "all:7", 7),
     ("position.offset", "-1", -1), ("position.rope-params", "theta:1e6", 1e6), ("attn.window", "5", 5),
     ("position.max-len", "48:dummy", 48)],
)  # fmt: skip
def test_a_number_is_found_and_put_back(kind: str, value: str, number: float) -> None:
    assert number_in(kind, value) == number
    again = put_number(kind, value, spelled(number) if number > 0 else str(int(number)))
    assert number_in(kind, again) == number and again.partition(":")[0] == (
        value.partition(":")[0] if ":" in value else again if value != "stuck" else "stuck"
    )


@pytest.mark.parametrize(
    ("kind", "low", "best", "high", "expected"),
    [
        ("position.rope-params", 8000, 9400, 13000, "10000"),
        ("position.rope-params", 3e5, 6e5, 2e6, "1000000"),  # a power of ten, though 600000 is nearer
        ("position.rope-params", 4.1e5, 4.9e5, 6.2e5, "500000"),
        ("position.rope-params", 4.1e5, 5.9e5, 6.2e5, "600000"),
        (
            "position.rope-params",
            10300,
            10450,
            10600,
            "10500",
        ),  # 1.0048 times 10450; 10400 goes into it 1.0048077 times
        ("position.rope-params", 9e9, 1.1e10, 1.2e10, "1e10"),
        ("wiring.norm-eps", 4e-7, 8e-7, 3e-6, "1e-6"),
        ("wiring.norm-eps", 0.0, 0.09, 0.2, "0.1"),
        ("wiring.norm-eps", 2e-6, 7e-6, math.inf, "1e-5"),
        ("wiring.norm-eps", 1e-5, 1e-5, 1e-5, "1e-5"),
        ("attn.scale", 7.2, 8.1, 8.9, "8"),
        ("attn.scale", 0.121, 0.124, 0.129, "0.125"),
        ("attn.scale", 5.61, 5.652, 5.69, "5.65"),
        ("attn.scale", 0.4, 0.6, 1.2, "0.5"),
        ("attn.window", 1500, 1700, 3000, "2048"),
        ("attn.window", 500, 700, 1100, "512"),  # 512 and 1024: the nearer by ratio
        ("attn.window", 2049, 2051.2, 2100, "2100"),
        ("attn.window", 33.2, 34.4, 34.9, "34"),
        ("attn.window", 33.2, 33.4, 33.6, "33"),  # no integer lies inside
        ("position.offset", -0.4, 0.9, 1.3, "1"),
        ("position.offset", -2.6, -1.8, -0.5, "-2"),
        ("position.offset", -0.4, 0.1, 0.4, "0"),
        ("position.offset", 18, 21.4, 23, "20"),
    ],
)
def test_the_roundest_number_in_an_interval(kind: str, low: float, best: float, high: float, expected: str) -> None:
    assert rounded(kind, low, best, high) == expected


@pytest.mark.parametrize("kind", ["position.rope-params", "wiring.norm-eps", "attn.scale", "attn.window"])
def test_what_was_round_is_found_again(kind: str) -> None:
    """Any interval that holds one power, from a little below it to a little above."""
    powers = [float(f"1e{n}") for n in range(-8, 9)]
    if kind.startswith("attn."):
        powers = [2.0**n for n in range(0 if kind == "attn.window" else -8, 12)]
    for power in powers:
        for best in (0.92, 1.0, 1.08):
            text = rounded(kind, power * 0.9, power * best, power * 1.1)
            assert float(text) == power
