"""Outputs that loop: found in tokens, and said in a report with the accept length of the others."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.heads import write_head
from support.hostile import run
from support.rounds_maker import make_rounds, make_variant
from support.served_maker import HEAD
from support.trace_maker import make_header, make_request, write_trace

import replay
from replay.analysis.report.report import assess
from replay.analysis.summary import summarise
from replay.simulator.loops import find_loop
from replay.traces.rounds import tokens_sha256


def _text(count: int, seed: int = 0) -> list[int]:
    """Tokens without a pattern."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ([7, 8] * 30, (60, 2)),
        ([5] * 40, (40, 1)),
        (_text(20) + [7, 8] * 30, (60, 2)),
        (_text(20) + [7, 8] * 30 + _text(20, 1), (60, 2)),
        (_text(30) + _text(9, 1) * 5, (45, 9)),
        ([7, 8] * 7, (0, 0)),  # 14 tokens
        (_text(12) * 3, (0, 0)),  # a refrain, three times
        (_text(100) + [7, 8] * 12, (0, 0)),  # less than a quarter of the output
        (_text(200), (0, 0)),
        (_text(65) * 8, (0, 0)),  # longer than what is looked for
        ([], (0, 0)),
        ([1], (0, 0)),
    ],
)
def test_the_longest_loop(output: list[int], found: tuple[int, int]) -> None:
    assert find_loop(output) == found


def test_the_example_of_the_function() -> None:
    assert find_loop([5, 6, 7] + [1, 2] * 10) == (20, 2)


def _doubts(accepted: list[list[int]], looped: dict[int, int]) -> tuple[str, ...]:
    rounds = make_rounds({make_variant("v"): accepted})
    requests = tuple(
        replace(one, loop_tokens=40 * (place in looped), loop_period=looped.get(place, 0))
        for place, one in enumerate(rounds.requests)
    )
    rounds = replace(rounds, requests=requests)
    return assess(rounds, summarise(rounds)).doubts


def test_the_accept_length_without_loops_is_told() -> None:
    """Two of four requests accept 3 in each of 10 rounds, the others 0 and 1: 1 + 65/40 with them, 1 + 5/20 without."""
    (said, *_) = _doubts([[3] * 10, [3] * 10, [0] * 10, [0, 1] * 5], {0: 2, 1: 2})
    assert said == (
        "2 of 4 outputs (r0, r1) say the same again and again (2 tokens over 40 at most), which a head soon drafts "
        "right: without them the accept length is 1.250, not 2.625."
    )


def test_loops_that_change_nothing_and_loops_everywhere() -> None:
    assert not any("again and again" in said for said in _doubts([[1] * 10] * 4, {0: 2}))
    assert not any("again and again" in said for said in _doubts([[1] * 10] * 4, {}))
    (said, *_) = _doubts([[3] * 10, [2] * 10], {0: 1, 1: 1})
    assert "there is no other, so that the accept length says nothing of ordinary text" in said


def test_simulate_finds_them_and_files_keep_them(tmp_path: Path) -> None:
    requests = [make_request(f"r{seed}", seed, output=32) for seed in range(4)]
    requests[1] = replace(requests[1], output_ids=[7, 8] * 16)
    trace = write_trace(tmp_path / "t", [requests], header=make_header())
    config = {
        **HEAD,
        "hidden_size": 16,
        "vocab_size": 64,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 1]},
    }
    head = write_head(tmp_path / "head", config)
    assert run("simulate", trace, "--draft", head, "-o", tmp_path / "r.parquet").code == 0
    told = {
        one.request_id: (one.loop_tokens, one.loop_period)
        for one in replay.read_rounds(tmp_path / "r.parquet").requests
    }
    kept = {one.request_id: one.tokens_sha256 for one in replay.read_rounds(tmp_path / "r.parquet").requests}
    assert kept == {one.request_id: tokens_sha256([*one.prompt_ids, *one.output_ids]) for one in requests}
    assert told == {"r0": (0, 0), "r1": (32, 2), "r2": (0, 0), "r3": (0, 0)}
