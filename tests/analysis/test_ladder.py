"""The ladder's arithmetic against numbers made on paper, and what it says where something is missing."""

import io
import json
import math
import random
from dataclasses import replace
from itertools import permutations
from math import factorial

import numpy as np
import pytest
from rich.console import Console
from support.ladder_cases import COUNTS, VARIANTS, make_anchors, make_replays

from replay.analysis.ladder.ladder import Ladder, Replays, build_ladder, ladder_json
from replay.analysis.ladder.report import answer, render_ladder
from replay.analysis.ladder.shapley import shapley, subsets
from replay.errors import UsageError

LEVELS = {
    # 8 of 10 and 6 of 8 targets can be drafted, 5 and 3 are right, 2 of these at anchors whose first step was right.
    "training metric": 1 + 5 / 8 + 5 / 8 * 3 / 6,
    "out-of-vocabulary": 1 + 5 / 10 + 5 / 10 * 3 / 8,
    "joint": 1 + 5 / 10 + 2 / 8,
    # 4 rounds each; accepted 3, 2, 0.
    "served walk": 1 + 3 / 4,
    "precision": 1 + 2 / 4,
    "KV": 1 + 2 / 4,
    "wiring": 1.0,
    "configuration": 1.0,
    # 3 rounds of the server, 1 accepted token.
    "observed": 1 + 1 / 3,
}


@pytest.fixture
def ladder() -> Ladder:
    return build_ladder(make_anchors(), make_replays(observed=[[1], [0, 0]]))


def gap_is_spent(ladder: Ladder) -> bool:
    changes = math.fsum(rung.change for rung in ladder.rungs if not math.isnan(rung.change))
    gap = ladder.rung("observed").accept_length - ladder.rung("training metric").accept_length
    return math.isclose(changes, gap, abs_tol=1e-12)


# ---- numbers ----


def test_rungs_are_what_paper_gives(ladder: Ladder) -> None:
    measured = {rung.name: rung.accept_length for rung in ladder.rungs if not math.isnan(rung.accept_length)}
    assert measured == pytest.approx(LEVELS, abs=1e-12)
    assert list(measured) == list(LEVELS)
    levels = [LEVELS[name] for name in list(LEVELS)[:-1]]
    changes = [ladder.rung(name).change for name in list(LEVELS)[1:-1]]
    assert changes == pytest.approx(np.diff(levels).tolist(), abs=1e-12)
    assert ladder.rung("unexplained").change == pytest.approx(1 / 3, abs=1e-12)
    assert gap_is_spent(ladder)


def test_counts_stand_beside_each_level(ladder: Ladder) -> None:
    seen = {rung.name: (rung.counts.right, rung.counts.of) for rung in ladder.rungs if rung.counts is not None}
    assert seen["training metric"] == ((5, 3), (8, 6))
    assert seen["out-of-vocabulary"] == ((5, 3), (10, 8))
    assert seen["joint"] == ((5, 2), (10, 8))
    assert seen["served walk"] == ((2, 1), (4, 4))
    assert seen["observed"] == ((1,), (3,))
    for rung in ladder.rungs[3:]:
        if rung.counts is not None:
            rates = sum(right / of for right, of in zip(rung.counts.right, rung.counts.of, strict=True))
            assert rung.accept_length == pytest.approx(1 + rates, abs=1e-12)


def test_shares_are_what_paper_gives(ladder: Ladder) -> None:
    """Walks 1.75, low 1.5, rewired 1.25, both 1: each order gives precision -0.25 and wiring -0.5."""
    assert ladder.attribution is not None
    shares = {share.factor: share.change for share in ladder.attribution.shares}
    assert shares == pytest.approx({"precision": -0.25, "wiring": -0.5}, abs=1e-12)
    assert ladder.attribution.total == pytest.approx(-0.75, abs=1e-12)
    assert ladder.attribution.replays == 4


def test_shapley_is_the_mean_over_every_order() -> None:
    names = ["a", "b", "c", "d"]
    chance = random.Random(3)
    values = {chosen: np.array([chance.random(), chance.random()]) for chosen in subsets(names)}
    expected = {name: np.zeros(2) for name in names}
    for order in permutations(names):
        for place, name in enumerate(order):
            before = frozenset(order[:place])
            expected[name] += (values[before | {name}] - values[before]) / factorial(len(names))
    shares = shapley(values, names)
    for name in names:
        assert shares[name] == pytest.approx(expected[name], abs=1e-12)
    whole = values[frozenset(names)] - values[frozenset()]
    assert sum(shares.values()) == pytest.approx(whole, abs=1e-12)


# ---- intervals ----


def test_every_rung_is_resampled_with_the_same_requests() -> None:
    """10 anchors and 10 rounds a request, right at 1 to 9 anchors, one round less accepts: each request changes by the
    same, so the change is known exactly however much the requests differ."""
    chance = random.Random(5)
    hits = [chance.randint(1, 9) for _ in range(30)]
    anchors = make_anchors([((10,), (10,), (count,), (count,)) for count in hits])
    rounds = [[1] * (count - 1) + [0] * (11 - count) for count in hits]
    ladder = build_ladder(anchors, make_replays(dict.fromkeys(VARIANTS.values(), rounds), observed=rounds))
    walk = ladder.rung("served walk")
    assert walk.change == pytest.approx(-0.1) and walk.change_ci95 == pytest.approx((-0.1, -0.1))
    low, high = walk.ci95
    assert high - low > 0.1
    for name in ("precision", "wiring", "unexplained"):
        assert (ladder.rung(name).change_ci95, ladder.rung(name).verdict) == ((0.0, 0.0), "equal")
    assert walk.verdict == "worse"


def test_one_request_has_no_interval() -> None:
    walks = {name: [[1, 0]] for name in VARIANTS.values()}
    ladder = build_ladder(make_anchors(COUNTS[:1]), make_replays(walks))
    assert all(math.isnan(rung.ci95[0]) and math.isnan(rung.change_ci95[0]) for rung in ladder.rungs)
    assert ladder.rung("served walk").verdict == "cannot tell"


def test_an_accept_length_without_counts_has_no_interval_of_its_own() -> None:
    ladder = build_ladder(make_anchors(), make_replays(), observed=1.5)
    observed, left = ladder.rung("observed"), ladder.rung("unexplained")
    assert observed.accept_length == 1.5 and math.isnan(observed.ci95[0])
    assert left.change == pytest.approx(0.5)
    assert left.change_ci95 == pytest.approx((0.5, 0.5))  # the walk as served accepts nothing in any resample
    assert any("one number" in note for note in ladder.notes)
    assert gap_is_spent(ladder)


def test_causes_that_hide_each_other_are_said_to_interact() -> None:
    """Either cause alone loses all there is: the second one costs nothing where the first is there already."""
    walks = {"ideal": [[1, 1]] * 8, "low": [[0, 0]] * 8, "rewired": [[0, 0]] * 8, "served": [[0, 0]] * 8}
    ladder = build_ladder(make_anchors([COUNTS[0]] * 8), make_replays(walks))
    assert ladder.attribution is not None
    found = {share.factor: (share.in_order, share.change, share.interacts) for share in ladder.attribution.shares}
    assert found == {"precision": (-1.0, -0.5, True), "wiring": (0.0, -0.5, True)}
    assert "precision and wiring" in shown(ladder)


def test_causes_that_add_up_do_not_interact(ladder: Ladder) -> None:
    assert ladder.attribution is not None
    assert not any(share.interacts for share in ladder.attribution.shares)


# ---- what is missing ----


def test_what_was_not_measured_says_what_to_capture() -> None:
    ladder = build_ladder(make_anchors(), make_replays())
    for name, asked in (("own tokens", "`response`"), ("observed", "nothing was reported")):
        rung = ladder.rung(name)
        assert math.isnan(rung.accept_length) and rung.verdict is None and rung.counts is None
        assert rung.what.startswith("Not measured") and asked in rung.what
    assert math.isnan(ladder.rung("unexplained").change)
    # The change of the next rung is from the last one that was measured.
    assert ladder.rung("served walk").change == pytest.approx(LEVELS["served walk"] - LEVELS["joint"])


def with_sources(replays: Replays, *sources: str) -> Replays:
    requests = [
        replace(request, source=source) for request, source in zip(replays.rounds.requests, sources, strict=True)
    ]
    return replace(replays, rounds=replace(replays.rounds, requests=tuple(requests)))


def test_given_text_is_what_training_stands_on_and_own_text_what_is_served() -> None:
    ladder = build_ladder(make_anchors(), with_sources(make_replays(), "forced", "generated"))
    assert ladder.rung("training metric").accept_length == pytest.approx(1 + 3 / 4 + 3 / 4 * 1 / 2)
    assert ladder.rung("joint").accept_length == pytest.approx(1 + 3 / 4 + 1 / 3)
    own = ladder.rung("own tokens")
    assert own.accept_length == pytest.approx(1 + 2 / 6 + 1 / 5)
    assert own.change == pytest.approx(2 / 6 + 1 / 5 - 3 / 4 - 1 / 3)
    assert ladder.rung("served walk").accept_length == pytest.approx(1.5)  # rounds of 0 and 1
    assert ladder.rung("served walk").counts.of == (2, 2)  # type: ignore[union-attr]


def test_given_text_alone_is_walked_all_the_same_and_said() -> None:
    ladder = build_ladder(make_anchors(), with_sources(make_replays(), "forced", "forced"))
    assert ladder.rung("served walk").accept_length == pytest.approx(1.75)
    assert "without `response`" in ladder.rung("own tokens").what
    assert any("given" in note for note in ladder.notes)


def test_requests_that_reported_nothing_are_on_no_rung() -> None:
    ladder = build_ladder(make_anchors(), make_replays(), observed={"r1": [1, 2]})
    assert ladder.rung("observed").accept_length == pytest.approx(1 + 2 / 3)
    assert ladder.rung("served walk").accept_length == pytest.approx(1.5)
    assert ladder.rung("joint").counts.of == (6, 5)  # type: ignore[union-attr]
    assert any("1 request;" in note for note in ladder.notes)
    assert gap_is_spent(ladder)


def test_rounds_without_histograms_count_the_tokens_after_the_first() -> None:
    replays = make_replays()
    rounds = replays.rounds
    # 5 and 4 output tokens (the ideal walk's) in 2 rounds each: 4 + 3 tokens after the first over 4 rounds.
    requests = tuple(replace(request, observed_rounds=2) for request in rounds.requests)
    ladder = build_ladder(make_anchors(), replace(replays, rounds=replace(rounds, requests=requests)))
    assert [request.output_tokens for request in requests] == [5, 4]
    assert ladder.rung("observed").accept_length == pytest.approx(7 / 4)


def test_choices_that_cannot_be_played_leave_the_rungs() -> None:
    replays = make_replays()
    some = {chosen: name for chosen, name in replays.variants.items() if name != "rewired"}
    ladder = build_ladder(make_anchors(), replace(replays, variants=some, unplayable="the trace has no tap 4"))
    assert ladder.attribution is None
    assert ladder.rung("wiring").accept_length == 1.0
    assert any("no tap 4" in note for note in ladder.notes)


def test_sampled_outputs_are_said() -> None:
    ladder = build_ladder(make_anchors(), make_replays(temperature=0.7))
    assert any("temperature 0.7" in note for note in ladder.notes)


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        (0.9, "accept length 0.9 was observed"),
        (math.nan, "accept length nan"),
        ({"other": [1]}, "none of the trace's 2"),
    ],
)
def test_what_cannot_have_been_observed_is_refused(observed: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_ladder(make_anchors(), make_replays(), observed=observed)  # type: ignore[arg-type]


# ---- showing ----


def shown(ladder: Ladder, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(render_ladder(ladder))
    return out.getvalue()


def test_json_has_null_where_nothing_was_measured() -> None:
    document = ladder_json(build_ladder(make_anchors(), make_replays()))
    text = json.dumps(document, allow_nan=False)
    assert set(document) == {"ladder", "attribution", "notes"}
    rungs = {rung["name"]: rung for rung in json.loads(text)["ladder"]}
    assert rungs["own tokens"]["accept_length"] is None and rungs["own tokens"]["change_ci95"] is None
    assert rungs["joint"]["counts"] == {"right": [5, 2], "of": [10, 8], "unit": "anchors"}
    assert (rungs["KV"]["change"], rungs["KV"]["verdict"]) == (0.0, "equal")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_waterfall_survives_its_width(ladder: Ladder, width: int) -> None:
    text = shown(ladder, width)
    assert max(map(len, text.splitlines())) <= width
    for rung in ladder.rungs:
        assert rung.name in text


def test_bars_lose_and_gain(ladder: Ladder) -> None:
    """24 cells from 1 to the highest level, 1.9375: 18 at 1.6875, 19 at 1.75, 13 at 1.5, 9 at 4/3."""
    bars = {line.split("  ")[0].strip(): line.split()[-1] for line in shown(ladder).splitlines()[5:17]}
    assert bars["training metric"] == "█" * 24
    assert bars["out-of-vocabulary"] == "█" * 18 + "░" * 6
    assert bars["joint"] == "█" * 18 + "▓"
    assert bars["precision"] == "█" * 13 + "░" * 6
    assert bars["observed"] == "▓" * 9


def test_the_answer_names_the_rung_that_loses_most() -> None:
    walks = {"ideal": [[2, 2]] * 8, "low": [[2, 2]] * 8, "rewired": [[0, 1]] * 8, "served": [[0, 1]] * 8}
    ladder = build_ladder(make_anchors([COUNTS[0]] * 8), make_replays(walks), observed=1.5)
    most = "most is lost at wiring, 1.500 (95 % interval 1.50 to 1.50)."
    assert answer(ladder) == f"From training metric 2.125 to observed 1.500: {most}"
    unseen = build_ladder(make_anchors([COUNTS[0]] * 8), make_replays(walks))
    assert answer(unseen) == f"From training metric 2.125 to the replay as served 1.500: {most}"
