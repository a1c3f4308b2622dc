"""The promise: what replay predicts from a server's trace is what that very server did, round for round.

Kernels differ from machine to machine, and with them the order of sums: every round is the server's, or it parts from
it at a near tie, whose margin is measured (support/near_ties.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from support.near_ties import (
    Anchor,
    Followed,
    Judged,
    chain_noise,
    count_in_production,
    first_difference,
    follow_chains,
    judge_chains,
    report_judged,
)
from support.served_traces import served_trace
from support.this_cpu import prompts_for
from twins.server_order import replay_in_order

import replay
from replay.simulator.binding import build_head, resolve
from replay.simulator.inputs import draft_input
from replay.traces.sample_files import sample_head

PROMPTS = prompts_for(8)
NEW_TOKENS = 32
STEPS = 5
RIGHT, WRONG = "embed,3,16", "3,16,28"

Capture = Callable[[str], replay.Trace]


def fp32(trace: replay.Trace, wiring: str) -> dict[Anchor, Followed]:
    """The replay in another rounding order."""
    return follow(trace, wiring, precision="fp32")


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


def variant(wiring: str, **changes: Any) -> replay.Variant:
    return replay.Variant("demo", replay.parse_wiring(wiring), steps=STEPS, **changes)


def predict(trace: replay.Trace, wiring: str) -> replay.Rounds:
    return replay.simulate(trace, {"demo": replay.load_head(sample_head())}, [variant(wiring)])


def follow(trace: replay.Trace, wiring: str, **changes: Any) -> dict[Anchor, Followed]:
    return follow_chains(trace, sample_head(), variant(wiring, **changes))


ORDERS: dict[str, dict[str, str]] = {"served": {}, "fp32": {"precision": "fp32"}, "hf": {"numerics": "hf"}}


def judge_orders(trace: replay.Trace, wiring: str) -> dict[str, Judged]:
    """The replay in three rounding orders, those that are not the server's by noise that is not their own."""
    followed = {name: follow(trace, wiring, **order) for name, order in ORDERS.items()}
    judged = {}
    for name, mine in followed.items():
        noise = chain_noise(followed["served"], followed["hf" if name == "fp32" else "fp32"])
        judged[name] = judge_chains(f"chains of {STEPS}, wiring {wiring}, order {name}", mine, noise)
    return judged


@pytest.mark.parametrize("wiring", [RIGHT, WRONG])
def test_every_round_is_the_servers(captured: Capture, wiring: str, record_property: Any) -> None:
    """In another rounding order fewer are, as where a server with other kernels is replayed here."""
    trace = captured(wiring)
    judged = judge_orders(trace, wiring)
    report_judged(record_property, list(judged.values()))
    assert [str(one) for one in judged.values() if one.unexplained] == []
    assert judged["served"].rounds == len(trace.served_rounds()) > PROMPTS * NEW_TOKENS / (STEPS + 1)
    assert judged["served"].alike > max(judged["fp32"].alike, judged["hf"].alike)


@pytest.mark.parametrize("wiring", [RIGHT, WRONG])
def test_the_simulation_says_so_itself(captured: Capture, wiring: str) -> None:
    """What `replay simulate` counts: as many alike as here, in every order none unexplained, otherwise wired many."""
    trace, judged = captured(wiring), judge_orders(captured(wiring), wiring)
    found = count_in_production(trace, sample_head(), [variant(wiring, **order) for order in ORDERS.values()])
    for order, one in zip(ORDERS, found, strict=True):
        assert (one.rounds, one.alike, one.unexplained) == (judged[order].rounds, judged[order].alike, 0)
        assert one.near_tie == len(judged[order].parted)
    other = WRONG if wiring == RIGHT else RIGHT
    (unfit,) = count_in_production(trace, sample_head(), [variant(other)])
    assert unfit.unexplained > unfit.rounds / 2


def test_another_wiring_is_told_from_rounding(captured: Capture) -> None:
    """The rounds of a server fed otherwise part far beyond rounding."""
    trace = captured(WRONG)
    mine = follow(trace, RIGHT)
    judged = judge_chains("the right wiring on the wrong server", mine, chain_noise(mine, fp32(trace, RIGHT)))
    assert judged.unexplained > judged.rounds / 2


@pytest.mark.parametrize("wiring", [RIGHT, WRONG])
def test_the_served_walk_is_the_servers(captured: Capture, wiring: str) -> None:
    """Round after round by itself, as `replay simulate` walks: the server's, up to a round that parts at a near tie."""
    trace = captured(wiring)
    followed, predicted = follow(trace, wiring), predict(trace, wiring).table
    for record in trace.records:
        mine, served = (
            table.filter(pl.col("request_id") == record.request_id).sort("round").rows(named=True)
            for table in (predicted, trace.served_rounds())
        )
        pairs = zip(mine, served, strict=False)
        for number, (one, other) in enumerate(pairs, start=1):
            assert one["anchor"] == other["anchor"]
            if first_difference(followed[record.request_id, other["anchor"]]) is not None:
                break
            assert (one["drafted"], one["accepted"]) == (other["drafted"], other["accepted"])
            assert number < len(mine) or number == len(served), "the walk ends where the server's ends"


@pytest.mark.parametrize("wiring", [RIGHT, WRONG])
def test_the_servers_own_order_of_rows(captured: Capture, wiring: str) -> None:
    """The twin that runs row after row as a server does drafts what every anchor at once drafts, but at near ties."""
    trace, checkpoint = captured(wiring), replay.load_head(sample_head())
    resolved = resolve(variant(wiring), checkpoint, trace)
    head, followed = build_head(checkpoint, resolved, trace), follow(trace, wiring)
    near = 2 * chain_noise(followed, fp32(trace, wiring))
    with torch.inference_mode():
        for index, record in enumerate(trace.records):
            rows = trace.read(index, resolved.wiring.taps)
            played = replay_in_order(head, draft_input(rows, resolved.wiring), STEPS, rows.tail_ids)
            served = trace.served_rounds().filter(pl.col("request_id") == record.request_id).sort("round")
            for number, (mine, theirs) in enumerate(zip(played, served.rows(named=True), strict=False), start=1):
                assert mine.anchor == theirs["anchor"]
                if list(mine.drafted) != theirs["drafted"]:
                    steps = enumerate(zip(mine.drafted, theirs["drafted"], strict=True))
                    step = next(step for step, (one, other) in steps if one != other)
                    assert followed[record.request_id, mine.anchor].margins[step] <= near
                    break
                assert mine.accepted == theirs["accepted"]
                assert number < len(played) or number == len(served), "the walk ends where the server's ends"


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
    for here, there in ((at_wrong, at_right), (at_right, at_wrong)):
        low, high = here.accept_length_ci95
        assert low <= there.observed.accept_length <= high
