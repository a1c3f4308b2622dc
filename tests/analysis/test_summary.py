"""Summaries and intervals against published numbers, hand-made rounds and slow twins."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.rounds_maker import make_rounds, make_variant

from replay.analysis import bootstrap
from replay.analysis.bootstrap import percentile_interval, ratios, resampled_sums
from replay.analysis.gaps import Gap, gaps, observed_gaps
from replay.analysis.report.peers import peer_metrics
from replay.analysis.summary import summarise, to_json
from replay.errors import UsageError
from replay.traces.rounds import Rounds

NEAR, FAR = make_variant("near"), make_variant("far", steps=2, anchors=8, anchors_accepted=6, ties=2)


def story() -> Rounds:
    """Three requests, the last of one token; what each variant accepted in its rounds."""
    return make_rounds(
        {NEAR: [[3, 0, 1], [0, 2], []], FAR: [[2, 0, 0, 1], [2, 1], []]},
        observed=[[1, 0, 1, 1], [3], []],
        cut_last=True,
    )


def test_counts_and_ratios_of_a_small_story() -> None:
    near, far = summarise(story())
    assert (near.requests, near.played_requests, near.rounds, near.cut_rounds) == (3, 2, 5, 2)
    assert (near.accepted, near.drafted, near.output_tokens) == (6, 15, 8 + 5 + 1)
    assert near.histogram == (2, 1, 1, 1)
    assert near.accept_length == (6 + 5) / 5
    assert near.accept_rate == 6 / 15
    assert near.position_joint == (3 / 5, 2 / 5, 1 / 5)
    assert near.position_conditional == (3 / 5, 2 / 3, 1 / 2)
    assert near.accept_length_server == (8 + 5) / 5
    assert math.isnan(near.all_anchors_accept_length)
    assert (far.rounds, far.accepted, far.drafted, far.ties) == (6, 6, 12, 2)
    assert far.histogram == (2, 2, 2)
    assert far.all_anchors_accept_length == 1 + 6 / 8


def test_what_the_server_reported() -> None:
    seen = summarise(story())[0].observed
    assert seen is not None
    assert (seen.rounds, seen.accept_length, seen.histogram, seen.requests) == (5, 1 + 6 / 5, (1, 3, 0, 1), 2)
    rounds = story()
    bare = tuple(replace(request, observed_histogram=None) for request in rounds.requests)
    seen = summarise(replace(rounds, requests=bare))[0].observed
    assert seen is not None
    assert (seen.rounds, seen.accept_length, seen.histogram) == (5, (8 + 5) / 5, ())
    silent = tuple(replace(request, observed_rounds=None) for request in bare)
    assert summarise(replace(rounds, requests=silent))[0].observed is None


def test_published_position_vectors_give_the_published_length() -> None:
    """vLLM's acceptance test (tests/v1/spec_decode/test_acceptance_length.py) states both for the same run."""
    for joint, length in (((0.7296, 0.5208, 0.3545), 2.60), ((0.6541, 0.3993, 0.2020), 2.26)):
        total = 10_000
        reached = [total, *(round(total * share) for share in joint), 0]
        counts = [reached[place] - reached[place + 1] for place in range(4)]
        accepted = [[place] * count for place, count in enumerate(counts)]
        (summary,) = summarise(make_rounds({NEAR: accepted}), resamples=1)
        assert summary.position_joint == joint
        assert summary.accept_length == pytest.approx(length, abs=0.01)
        assert summary.accept_length == pytest.approx(1 + sum(joint))


def test_the_json_is_the_documented_one() -> None:
    document = to_json(story(), summarise(story()))
    assert list(document) == ["trace", "draft", "variants"]
    near, far = document["variants"]
    kinds = {
        "name": str, "draft": str, "wiring": list, "steps": int, "topk": int, "num_draft_tokens": int,
        "precision": str, "numerics": str, "kv": str, "verify": str, "temperature": float, "engine": str,
        "faults": list, "requests": int, "rounds": int, "drafted": int, "accepted": int, "output_tokens": int,
        "accept_length": float, "accept_length_ci95": list, "accept_length_server": float, "histogram": list,
        "position_joint": list, "position_conditional": list, "position_conditional_ci95": list,
        "all_anchors_accept_length": float, "ties": int, "seconds": float, "observed": dict,
        "expected": type(None), "agreement": type(None),
    }  # fmt: skip
    assert {key: type(value) for key, value in far.items()} == kinds
    assert list(far) == list(kinds)
    assert {key: type(value) for key, value in far["observed"].items()} == {
        "rounds": int, "accept_length": float, "histogram": list,
    }  # fmt: skip
    assert near["all_anchors_accept_length"] is None
    assert near["wiring"] == ["embed", "3", "16"]
    assert [type(value) for value in near["histogram"]] == [int] * 4
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_nothing_to_divide_by_is_null() -> None:
    document = to_json(*_with_summaries(make_rounds({NEAR: [[], []]})))
    (row,) = document["variants"]
    assert (row["rounds"], row["output_tokens"], row["histogram"]) == (0, 2, [0, 0, 0, 0])
    for key in ("accept_length", "accept_length_server", "all_anchors_accept_length", "observed"):
        assert row[key] is None
    assert row["accept_length_ci95"] is None
    assert row["position_joint"] == row["position_conditional"] == [None, None, None]
    json.dumps(document, allow_nan=False)


def test_one_request_has_a_length_and_no_interval() -> None:
    (summary,) = summarise(make_rounds({NEAR: [[3, 0], []]}))
    assert summary.accept_length == 2.5
    assert all(math.isnan(bound) for bound in summary.accept_length_ci95)
    (summary,) = summarise(make_rounds({NEAR: [[0]]}))
    assert (summary.accept_length, summary.position_conditional[0]) == (1.0, 0.0)
    assert math.isnan(summary.position_conditional[1])


def _with_summaries(rounds: Rounds) -> tuple[Rounds, list]:  # type: ignore[type-arg]
    return rounds, summarise(rounds)


def _random_requests(seed: int, requests: int, steps: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(0, steps) for _ in range(rng.randint(0, 9))] for _ in range(requests)]


def _slow_sums(counts: list[list[int]], seed: int, resamples: int) -> list[list[int]]:
    """The obvious bootstrap: draw requests one resample at a time, add their counts up."""
    rng = np.random.default_rng(seed)
    sums = []
    for _ in range(resamples):
        drawn = [counts[place] for place in rng.integers(len(counts), size=len(counts))]
        sums.append([sum(column) for column in zip(*drawn, strict=True)])
    return sums


def _slow_interval(samples: list[float]) -> tuple[float, float]:
    """The 2.5 and 97.5 percentile, linear between order statistics."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return at(0.025), at(0.975)


def test_resampled_sums_equal_the_slow_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [[place, 3 * place % 7, 1] for place in range(11)]
    slow = _slow_sums(counts, seed=4, resamples=50)
    assert resampled_sums(counts, seed=4, resamples=50).tolist() == slow
    monkeypatch.setattr(bootstrap, "_BLOCK_CELLS", 40)  # three resamples a block, the last block shorter
    assert resampled_sums(counts, seed=4, resamples=50).tolist() == slow


def test_intervals_equal_the_slow_twin() -> None:
    played = {NEAR: _random_requests(1, 30, 3), FAR: _random_requests(2, 30, 2)}
    for requests, summary in zip(played.values(), summarise(make_rounds(played), seed=7, resamples=400), strict=True):
        counts = [[sum(accepted) + len(accepted), len(accepted)] for accepted in requests if accepted]
        lengths = [emitted / rounds for emitted, rounds in _slow_sums(counts, seed=7, resamples=400)]
        assert summary.accept_length_ci95 == pytest.approx(_slow_interval(lengths), rel=1e-12)
        low, high = summary.accept_length_ci95
        assert low < summary.accept_length < high


def test_gaps_are_paired_and_equal_the_slow_twin() -> None:
    played = {NEAR: _random_requests(1, 30, 3), FAR: _random_requests(2, 30, 2)}
    gap = gaps(make_rounds(played), "near", seed=7, resamples=400)["far"]
    both = [(near, far) for near, far in zip(played[NEAR], played[FAR], strict=True) if near and far]
    counts = [[sum(near) + len(near), len(near), sum(far) + len(far), len(far)] for near, far in both]
    slow = [f / fr - n / nr for n, nr, f, fr in _slow_sums(counts, seed=7, resamples=400)]
    n, nr, f, fr = (sum(column) for column in zip(*counts, strict=True))
    assert gap.difference == pytest.approx(f / fr - n / nr, rel=1e-12)
    assert gap.ci95 == pytest.approx(_slow_interval(slow), rel=1e-12)


def test_gap_verdicts() -> None:
    nan = math.nan
    verdicts = {(0.2, 0.1, 0.3): "better", (-0.2, -0.3, -0.1): "worse", (0.1, -0.1, 0.3): "cannot tell",
                (0.0, 0.0, 0.0): "equal", (0.3, nan, nan): "cannot tell", (0.0, -0.1, 0.1): "cannot tell"}  # fmt: skip
    for (difference, low, high), verdict in verdicts.items():
        assert Gap("far", difference, (low, high)).verdict == verdict


def test_gap_to_the_server_is_over_the_same_requests() -> None:
    rounds = make_rounds({NEAR: [[3, 0], [1, 1], [2]]}, observed=[[3, 0], [1, 1], [2]])
    assert observed_gaps(rounds)["near"].verdict == "equal"
    partly = (*rounds.requests[:2], replace(rounds.requests[2], observed_rounds=None, observed_histogram=None))
    assert observed_gaps(replace(rounds, requests=partly))["near"].difference == 0
    assert observed_gaps(make_rounds({NEAR: [[3, 0]]})) == {}


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """200 samples of 40 requests from a known law: 95 % intervals hold its accept length in 90 to 99 % of them."""
    rng = random.Random(0)
    held = 0
    for _ in range(200):
        counts = []
        for _ in range(40):
            rate = rng.choice((0.2, 0.8))  # requests differ, rounds of one request are alike
            accepted = sum(rng.random() < rate for _ in range(10))
            counts.append([10 + accepted, 10])
        sums = resampled_sums(counts, seed=0, resamples=400)
        low, high = percentile_interval(ratios(sums[:, 0], sums[:, 1]))
        held += low <= 1.5 <= high
    assert 180 <= held <= 198


def test_other_projects_metrics_from_the_same_rounds() -> None:
    rows = {(row.project, row.metric): row for row in peer_metrics(story(), "near").metrics}
    values = {metric: row.values for (_, metric), row in rows.items()}
    assert values["accept len"] == values["mean acceptance length"] == values["tau"] == (11 / 5,)
    assert values["spec_accept_length"] == (13 / 5,)
    assert values["accept rate"] == values["acceptance rate"] == (6 / 15,)
    assert values["per-position acceptance"] == values["full_acc_k"] == (3 / 5, 2 / 5, 1 / 5)
    assert values["n-alpha"] == values["cond_acc_k"] == (3 / 5, 2 / 3, 1 / 2)
    assert values["tau_sim"] == pytest.approx((11 / 5,))
    assert values["simulated_acc_len"] == pytest.approx((6 / 5,))
    assert values["AR"] == values["num accepted tokens"] == (6 / 5,)
    assert values["Average_AL"] == pytest.approx(((7 / 3 + 4 / 2) / 2,))
    assert rows["SGLang meta_info", "spec_accept_length"].counts == "13 / 5"
    with pytest.raises(UsageError, match=r"no variant 'other' .* near, far"):
        peer_metrics(story(), "other")


def test_other_projects_metrics_without_rounds() -> None:
    for row in peer_metrics(make_rounds({NEAR: [[]]}), "near").metrics:
        assert all(math.isnan(value) for value in row.values), row.metric


def test_analysis_runs_without_torch() -> None:
    script = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from support.rounds_maker import make_rounds, make_variant\n"
        "from rich.console import Console\n"
        "from replay.analysis.summary import summarise, to_json\n"
        "from replay.analysis.report.peers import peer_metrics, render_peers\n"
        "from replay.analysis.report.report import render\n"
        "rounds = make_rounds({make_variant('near'): [[3, 0], [1]]})\n"
        "to_json(rounds, summarise(rounds))\n"
        "Console().print(render(rounds, summarise(rounds)), render_peers(peer_metrics(rounds, 'near')))\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-I", "-c", script, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- intervals of positions ----


def test_intervals_of_positions_are_those_of_resampled_requests() -> None:
    """A twin that draws requests and counts their rounds one by one; two more of mean size accept all and nothing."""
    rng = random.Random(3)
    played = [[rng.choice((0, 0, 1, 1, 2)) for _ in range(rng.randint(1, 6))] for _ in range(9)]
    (row,) = summarise(make_rounds({make_variant("v", steps=2): played}), resamples=300)
    for place, found in enumerate(row.position_conditional_ci95, 1):
        got = [sum(count >= place - 1 for count in request) for request in played]
        took = [sum(count >= place for count in request) for request in played]
        mean = sum(got) / sum(count > 0 for count in got)
        shares = []
        for drawn in np.random.default_rng(0).integers(11, size=(300, 11)):
            rounds = sum([*got, mean, mean][request] for request in drawn)
            shares.append(sum([*took, mean, 0][request] for request in drawn) / rounds if rounds else math.nan)
        assert found == pytest.approx(percentile_interval(np.array(shares)))


@pytest.mark.parametrize("requests", [8, 20, 40])
def test_all_are_as_sure_as_a_binomial_of_requests_and_hardly_less_than_nearly_all(requests: int) -> None:
    """The reference is scipy's exact interval of a binomial, a request being a trial."""
    from scipy.stats import binomtest

    exact = binomtest(requests, requests).proportion_ci(method="exact").low
    found = []
    for first in (1, 0):
        played = [[first, *[1] * 19], *[[1] * 20] * (requests - 1)]
        (row,) = summarise(make_rounds({make_variant("v", steps=1): played}))
        ((low, high),) = row.position_conditional_ci95
        assert low < row.position_conditional[0] <= high
        found.append(low)
    assert abs(found[0] - exact) < 0.3 * (1 - exact)
    assert 0 <= found[0] - found[1] < 0.01


def test_positions_that_few_requests_reached_have_no_interval() -> None:
    """Two of 40 got to position 2, each with 2 of 3 rounds accepted: their resamples never differ."""
    rounds = make_rounds({make_variant("v", steps=3): [[2, 2, 1], [2, 2, 1], *[[0, 0, 0]] * 38]})
    (row,) = summarise(rounds, resamples=50)
    assert [math.isnan(low) for low, _ in row.position_conditional_ci95] == [False, True, True]
    assert to_json(rounds, [row])["variants"][0]["position_conditional_ci95"][2] is None
