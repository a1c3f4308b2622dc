"""The promise: what replay predicts from a server's trace is what that very server did, round for round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from support.served_traces import served_trace
from twins.server_order import replay_in_order

import replay
from replay.simulator.binding import build_head, resolve
from replay.simulator.inputs import draft_input
from replay.traces.sample_files import sample_head

PROMPTS = 8
NEW_TOKENS = 32
STEPS = 5
RIGHT, WRONG = "embed,3,16", "3,16,28"

Capture = Callable[[str], replay.Trace]


@pytest.fixture(scope="module")
def captured(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Traces of a server that was given a wiring; each server runs once, by itself, one request at a time."""
    made: dict[str, replay.Trace] = {}

    def of(wiring: str) -> replay.Trace:
        if wiring not in made:
            made[wiring] = served_trace(
                target_dir, tmp_path_factory.mktemp("served"), taps="embed,3,16,28", wiring=wiring, steps=STEPS,
                num_draft_tokens=STEPS + 1, prompts=PROMPTS, new_tokens=NEW_TOKENS,
            )  # fmt: skip
        return made[wiring]

    return of


def predict(trace: replay.Trace, wiring: str, **changes: Any) -> replay.Rounds:
    variant = replay.Variant("demo", replay.parse_wiring(wiring), steps=STEPS, **changes)
    return replay.simulate(trace, {"demo": replay.load_head(sample_head())}, [variant])


def side_by_side(predicted: replay.Rounds, trace: replay.Trace) -> pl.DataFrame:
    """Predicted and served rounds of the same request and number; null where only one side has it."""
    return predicted.table.join(trace.served_rounds(), on=["request_id", "round"], how="full", suffix="_served")


@pytest.mark.parametrize("wiring", [RIGHT, WRONG])
def test_every_round_in_the_servers_own_order(captured: Capture, wiring: str) -> None:
    trace, checkpoint = captured(wiring), replay.load_head(sample_head())
    variant = resolve(replay.Variant("demo", replay.parse_wiring(wiring), steps=STEPS), checkpoint, trace)
    head = build_head(checkpoint, variant, trace)
    with torch.inference_mode():
        for index, record in enumerate(trace.records):
            rows = trace.read(index, variant.wiring.taps)
            played = replay_in_order(head, draft_input(rows, variant.wiring), STEPS, rows.tail_ids)
            served = trace.served_rounds().filter(pl.col("request_id") == record.request_id).sort("round")
            assert [one.anchor for one in played] == served["anchor"].to_list()
            assert [list(one.drafted) for one in played] == served["drafted"].to_list()
            assert [one.accepted for one in played] == served["accepted"].to_list()


@pytest.mark.parametrize("wiring", [RIGHT, WRONG])
def test_the_engine_predicts_the_server(captured: Capture, wiring: str) -> None:
    trace = captured(wiring)
    predicted = predict(trace, wiring)
    rounds = side_by_side(predicted, trace)
    same = rounds.filter(
        (pl.col("drafted") == pl.col("drafted_served")) & (pl.col("accepted") == pl.col("accepted_served"))
    )
    assert len(same) / len(rounds) >= 0.998
    (summary,) = replay.summarise(predicted)
    assert summary.observed is not None
    assert summary.accept_length == pytest.approx(summary.observed.accept_length, rel=1e-3)


def test_what_the_server_reports_is_what_was_recorded(captured: Capture) -> None:
    """Its counters come over HTTP, its rounds from inside the scheduler: two ways to one number."""
    trace = captured(RIGHT)
    for record in trace.records:
        accepted = trace.served_rounds().filter(pl.col("request_id") == record.request_id)["accepted"].to_list()
        assert record.server_histogram is not None
        counted = [accepted.count(number) for number in range(len(record.server_histogram))]
        assert counted == list(record.server_histogram)
        assert record.server_verify_rounds == len(accepted)


def test_the_story_live(captured: Capture) -> None:
    """A server fed the wrong taps accepts little, and its own trace says what the right ones would give."""
    served_right, served_wrong = captured(RIGHT), captured(WRONG)
    (at_right,) = replay.summarise(predict(served_right, WRONG))
    (at_wrong,) = replay.summarise(predict(served_wrong, RIGHT))
    assert at_right.observed is not None and at_wrong.observed is not None
    assert at_wrong.observed.accept_length < 1.2 < 1.5 < at_right.observed.accept_length
    # The target's own text is the same but for near ties, so each trace predicts the other server closely.
    assert at_wrong.accept_length == pytest.approx(at_right.observed.accept_length, rel=0.1)
    assert at_right.accept_length == pytest.approx(at_wrong.observed.accept_length, rel=0.1)


def test_another_rounding_order_costs_a_few_drafts(captured: Capture) -> None:
    """What --numerics shows: in Transformers' order some drafted tokens differ, in fp32 too."""
    trace = captured(RIGHT)
    differing = {}
    for name, changes in {"hf": {"numerics": "hf"}, "fp32": {"precision": "fp32"}}.items():
        rounds = side_by_side(predict(trace, RIGHT, **changes), trace)
        pairs = [
            (mine, theirs)
            for drafted, served in rounds.select("drafted", "drafted_served").iter_rows()
            if drafted is not None and served is not None
            for mine, theirs in zip(drafted, served, strict=True)
        ]
        differing[name] = sum(mine != theirs for mine, theirs in pairs) / len(pairs)
    assert 0 < differing["hf"] < 0.1
    assert 0 < differing["fp32"] < 0.1
