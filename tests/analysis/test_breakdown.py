"""Where a server parts from its replay, and what would tell more: numbers by hand or from a publication."""

import math

import numpy as np
import pytest
from support.followed_maker import make_followed

from replay.analysis.diagnosis.breakdown import (
    Depth,
    Profile,
    Stratum,
    length_range,
    profile,
    profile_json,
    say_profile,
    separate,
    wilson,
)
from replay.analysis.followed import Noise

NOISE = Noise((0.05,), 0.02, 100)
FAR = 1.0  # a margin that no rounding explains


def rounds(unexplained: list[bool]) -> list[list[float]]:
    return [[FAR if one else 0.0] for one in unexplained]


# ---- intervals ----


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_a_share_has_the_interval_of_wilson(count: int, total: int, low: float, high: float) -> None:
    """Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3."""
    assert wilson(count, total) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(total - count, total)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_of_nothing_there_is_no_interval() -> None:
    assert all(map(math.isnan, wilson(0, 0)))


# ---- divisions ----


def test_a_division_tells_as_much_as_its_mutual_information_less_its_bias() -> None:
    """One half of 200 rounds is unexplained always, the other never: 1 bit, less Miller's (1955) 1 / (2 n log 2)."""
    bad = [number < 100 for number in range(200)]
    names = ["late" if one else "early" for one in bad]
    found = profile(make_followed(rounds(bad)), NOISE, {"place": names})
    information = 1 - 1 / (2 * 200 * math.log(2))
    assert [(part.by, part.value, part.rounds, part.agreeing) for part in found.strata] == [
        ("place", "late", 100, 0), ("place", "early", 100, 100),
    ]  # fmt: skip
    assert all(part.information == pytest.approx(information) for part in found.strata)
    assert found.strata[0].ci95 == pytest.approx(wilson(100, 100))
    assert found.strata[1].ci95 == pytest.approx(wilson(0, 100))


def test_a_division_in_part_by_hand() -> None:
    """60 of 80 and 20 of 120: entropies of 0.4, 0.75 and 1/6 are 0.971, 0.811 and 0.650 bits."""
    bad = [number < 60 or 80 <= number < 100 for number in range(200)]
    names = ["a" if number < 80 else "b" for number in range(200)]
    (part, _) = profile(make_followed(rounds(bad)), NOISE, {"half": names}).strata
    assert part.information == pytest.approx(0.97095 - 0.4 * 0.81128 - 0.6 * 0.65002 - 0.00361, abs=1e-4)


def test_an_independent_division_is_left_out() -> None:
    """The same share in both parts has no information; of one part there is none either."""
    bad = [number % 4 == 0 for number in range(200)]
    views = {"half": ["a" if number < 100 else "b" for number in range(200)], "all": ["same"] * 200}
    assert profile(make_followed(rounds(bad)), NOISE, views).strata == ()


@pytest.mark.parametrize("parts", [2, 5, 20])
def test_by_luck_a_division_tells_nothing_on_average(parts: int) -> None:
    """Random parts of random rounds: 2 n log(2) times the information is chi-square of parts - 1 degrees of freedom.

    Without the correction (Miller, 1955) each would be above 0. With it half of them are, or less, as chi-square is
    skewed; and what is left, 0 taken for less, is on average 0.4 of its deviation.
    """
    generator, size, degrees = np.random.default_rng(5), 1000, parts - 1
    told = []
    for _ in range(300):
        bad = generator.random(size) < 0.3
        names = [str(one) for one in generator.integers(parts, size=size)]
        strata = profile(make_followed(rounds(bad.tolist())), NOISE, {"luck": names}).strata
        told.append(2 * size * math.log(2) * strata[0].information if strata else 0.0)
    assert 0.2 < np.mean(np.array(told) > 0) < 0.5 + 3 * 0.029  # three errors of 300 draws
    assert np.mean(told) == pytest.approx(0.4 * math.sqrt(2 * degrees), rel=0.3)


def test_the_most_telling_division_comes_first() -> None:
    bad = [number < 50 for number in range(200)]
    views = {
        "weak": ["a" if number < 100 else "b" for number in range(200)],
        "strong": ["a" if number < 50 else "b" for number in range(200)],
    }
    found = profile(make_followed(rounds(bad)), NOISE, views)
    assert [part.by for part in found.strata] == ["strong", "strong", "weak", "weak"]
    lines = list(say_profile(found))
    assert lines[1].startswith("strong: 100% of 50 rounds with a, 0% of 150 with b (0.8")
    assert lines[2].startswith("weak: 50% of 100 rounds with a, 0% of 100 with b (0.3")


# ---- depths ----


def test_depths_count_tokens_and_margins() -> None:
    """Margins of 0.02 and 0.06 differ and are rounding; the median is over what differs."""
    found = profile(make_followed([[0.0, 0.02, FAR], [0.0, 0.06], [0.0]]), NOISE, {})
    assert found.depths[:2] == (
        Depth(1, 3, 0, 0, pytest.approx(math.nan, nan_ok=True)), Depth(2, 2, 0, 2, pytest.approx(0.04)),
    )  # fmt: skip
    assert found.depths[2] == Depth(3, 1, 1, 1, FAR)
    assert next(say_profile(found)) == (
        "not in the first drafted token: it begins at token 3, with what is fed back or kept in the KV"
    )


@pytest.mark.parametrize(
    ("last", "said"),
    [(4, "and it grows with depth (40% of the last)"), (2, "and not more with depth (20% of the last)")],
)
def test_what_is_there_from_the_first_token_on_is_said(last: int, said: str) -> None:
    margins = [[FAR if number < 2 else 0.0, FAR if number < last else 0.0] for number in range(10)]
    (line,) = say_profile(profile(make_followed(margins), NOISE, {}))
    assert line == f"from the first drafted token on (20%), {said}"


def test_a_profile_of_nothing_says_nothing() -> None:
    empty = profile(make_followed([]), NOISE, {})
    assert empty == Profile((), ()) and list(say_profile(empty)) == []
    assert profile_json(None) == {"depths": [], "strata": []} == profile_json(empty)


def test_a_document_has_no_nan() -> None:
    document = profile_json(
        Profile((Depth(1, 2, 0, 0, math.nan),), (Stratum("a", "b", 0, 0, 0.1, (math.nan, math.nan)),))
    )
    assert document["depths"] == [
        {"depth": 1, "tokens": 2, "unexplained": 0, "differing": 0, "median_margin": None}
    ]  # fmt: skip
    assert document["strata"][0]["ci95"] is None


# ---- what would tell ----


def first_words(*given: object, **more: object) -> list[str]:
    return [sentence.split(":")[0] for sentence in separate(*given, **{"gains": False, "steps": 3, **more})]  # type: ignore[arg-type]


def test_what_would_tell_follows_from_what_was_not_told() -> None:
    alike = ["kv.rollback=stale", "weights.missing=norm"]
    assert first_words("drafted", "fault", alike, steps=2) == [
        "the server's log from its start", "longer prompts and outputs", "more steps", "more requests",
    ]  # fmt: skip
    assert first_words("drafted", "fault", alike) == [
        "the server's log from its start", "longer prompts and outputs", "more requests",
    ]  # fmt: skip
    assert first_words("drafted", "healthy", ()) == []
    assert first_words("drafted", "fault", alike, gains=True)[0].startswith("say with --wiring")


def test_an_engine_is_asked_for_the_same_prompts_one_at_a_time() -> None:
    said = first_words("drafted", "engine", ())
    assert len(said) == 2 and said[0].startswith("the same prompts one at a time (--concurrency 1)")
    assert first_words("histogram", "engine", ()) == []


def test_less_evidence_asks_for_more() -> None:
    assert [line[:30] for line in separate("length", "undetermined", (), gains=False, steps=3)] == [
        "an accept length alone tells f", "start the server with `replay ",
    ]  # fmt: skip
    assert first_words("histogram", "undetermined", ()) == [
        "start the server with `replay serve`, which records what it drafts round by round"
    ]


def test_ranges_of_lengths_are_powers_of_four() -> None:
    ends = [length_range(tokens) for tokens in (0, 63, 64, 255, 256, 1023, 1024)]
    assert ends == ["0-63", "0-63", "64-255", "64-255", "256-1023", "256-1023", "1024-4095"]
