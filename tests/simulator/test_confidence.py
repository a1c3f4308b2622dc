"""Depths and early stops from one replay: against simulate, against the obvious loop, and against plain enumeration."""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.heads import write_head
from support.served_maker import HEAD, WIRING, make_checkpoint, make_served

from replay.analysis.counts import ACCEPTED, ROUNDS, per_request
from replay.analysis.plan.costs import Machines
from replay.analysis.plan.policies import Played, judge_rules, mean_round, with_lengths
from replay.analysis.plan.settings import Load
from replay.cli.app import cli
from replay.drafting.confidence import draft_with_confidence
from replay.drafting.every_anchor import draft_every_anchor
from replay.errors import UsageError
from replay.simulator.binding import build_head, resolve
from replay.simulator.confidence import AnchorDrafts, draft_anchors, play_depths, play_thresholds
from replay.simulator.inputs import draft_input
from replay.simulator.simulation import simulate
from replay.simulator.variant import Variant
from replay.traces.reader import Trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_served(tmp_path_factory.mktemp("served") / "trace", make_checkpoint(), requests=5, output=20)


@pytest.fixture(scope="module")
def anchors(trace: Trace) -> list[AnchorDrafts]:
    return draft_anchors(trace, make_checkpoint(), Variant("head", wiring=WIRING, steps=4))


def test_drafts_are_those_of_every_anchor_and_chances_the_softmax_of_their_logits(trace: Trace) -> None:
    checkpoint = make_checkpoint()
    head = build_head(checkpoint, resolve(Variant("head", wiring=WIRING, steps=3), checkpoint, trace), trace, "cpu")
    inputs = [draft_input(trace.read(index, WIRING.taps), WIRING) for index in range(3)]
    with torch.inference_mode():
        for one, plain in zip(draft_with_confidence(head, inputs, 3), draft_every_anchor(head, inputs, 3), strict=True):
            assert torch.equal(one.drafted_AK, plain.drafted_AK)
            assert ((one.chance_AK > 1 / head.config.draft_vocab_size) & (one.chance_AK <= 1)).all()


def test_depths_are_what_simulate_plays(trace: Trace, anchors: list[AnchorDrafts]) -> None:
    checkpoint, depths = make_checkpoint(), [1, 2, 3, 4]
    variants = [Variant("head", wiring=WIRING, steps=depth) for depth in depths]
    rounds = simulate(trace, {"head": checkpoint}, variants)
    for variant, played in zip(rounds.variants, play_depths(anchors, depths), strict=True):
        counts = per_request(rounds)[variant.name]
        assert np.array_equal(played.counts, counts[:, [ROUNDS, ACCEPTED]])


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.05, 0.2, 1.1])
def test_a_threshold_is_played_as_the_obvious_loop_plays_it(anchors: list[AnchorDrafts], threshold: float) -> None:
    (played,) = play_thresholds(anchors, [threshold], 4)
    for row, one in enumerate(anchors):
        anchor, rounds, accepted = one.prompt_tokens, 0, 0
        while anchor < one.tokens - 1:
            place, verified = anchor - one.prompt_tokens, 0
            while verified < 4 and one.product_AK[place, verified] >= threshold:
                verified += 1
            taken = min(verified, int(one.accepted_A[place]))
            rounds, accepted, anchor = rounds + 1, accepted + taken, anchor + taken + 1
        assert tuple(played.counts[row]) == (rounds, accepted)
    if threshold == 0:
        assert played.verified[4] == played.verified.sum() and played.drafted[4] == played.drafted.sum()
    if threshold > 1:
        assert played.verified[0] == played.verified.sum() and played.drafted[1] == played.drafted.sum()


def test_a_batch_drafts_until_its_last_request_stops() -> None:
    """The mean of the largest of b, by all 3 ** b batches of rounds that draft 1, 2 or 4 steps."""
    drafted = np.array([0, 5, 3, 0, 2])
    played = Played(0.5, 4, np.array([[10, 7]]), drafted, np.array([4, 4, 0, 2, 0]))
    share = {depth: count / 10 for depth, count in enumerate(drafted) if count}
    for batch in (1, 2, 4):
        longest = sum(max(ones) * np.prod([share[one] for one in ones]) for ones in product(share, repeat=batch))
        found = mean_round(played, Load(batch))
        assert found[4] == pytest.approx(longest)
        assert found[1] == pytest.approx(batch * (1 + (4 * 1 + 2 * 3) / 10))


@pytest.mark.parametrize("threshold", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("batch", [1, 3])
def test_verifying_fewer_costs_all_draft_steps_and_the_rows_that_are_sure(
    anchors: list[AnchorDrafts], threshold: float, batch: int
) -> None:
    """Against a loop that adds up what each round costs: 20 ms a pass, 3 a row, 2 a draft step, 1 a drafted row."""
    (played,) = play_thresholds(anchors, [threshold], 4)
    ms, rounds, tokens = 0.0, 0, 0
    for one in anchors:
        anchor = one.prompt_tokens
        while anchor < one.tokens - 1:
            place, verified = anchor - one.prompt_tokens, 0
            while verified < 4 and one.product_AK[place, verified] >= threshold:
                verified += 1
            ms += 20 + batch * 3 * (verified + 1) + 4 * (2 + batch * 1)
            taken = min(verified, int(one.accepted_A[place]))
            rounds, tokens, anchor = rounds + 1, tokens + taken + 1, anchor + taken + 1
    machine = Machines(np.array([[0.020, 0.003, 0.0, 0.0, 0.002, 0.001]]), 0.0, ())
    judged = with_lengths([*play_depths(anchors, [4]), played])
    (rule,) = judge_rules(judged, [Load(batch)], machine, drafting_on=True)
    (stop,) = judge_rules(judged, [Load(batch)], machine)
    assert rule.accept_length == pytest.approx(tokens / rounds) and rule.drafted == 4
    assert rule.verified == stop.verified and stop.drafted <= 4
    middle = float(np.median(batch * judged[1][1].draws / (ms / rounds / 1000)))
    assert rule.tokens_per_second[0] == pytest.approx(middle)
    assert rule.tokens_per_second[0] <= stop.tokens_per_second[0]  # what is drafted in vain costs time


def test_lengths_are_over_the_same_resampled_requests(anchors: list[AnchorDrafts]) -> None:
    (deepest,) = play_depths(anchors, [4])
    (one, first), (_, again) = with_lengths([deepest, deepest])
    assert np.array_equal(first.draws, again.draws)
    rounds, accepted = one.counts.sum(axis=0)
    assert first.value == pytest.approx(1 + accepted / rounds)
    assert first.ci95[0] <= first.value <= first.ci95[1]


@pytest.mark.parametrize(
    ("variant", "words"), [({"topk": 2, "num_draft_tokens": 6}, "greedy chains"), ({"kv": "stale"}, "healthy head")]
)
def test_what_is_no_plain_chain_is_refused(trace: Trace, variant: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        draft_anchors(trace, make_checkpoint(), Variant("head", wiring=WIRING, steps=3, **variant))  # type: ignore[arg-type]


def test_the_command_plans_from_a_trace(trace: Trace, tmp_path: Path) -> None:
    draft = write_head(tmp_path / "draft", HEAD)
    typed = ["plan", str(trace.path), "--draft", str(draft), "--wiring", str(WIRING), "--cost", "pass=20,draft=1"]
    shown = CliRunner().invoke(cli, [*typed, "--steps", "1,3"])
    assert shown.exit_code == 0, shown.output
    assert "Stopping by the head's own confidence" in shown.stdout
    assert "Verifying fewer, drafting all, by the head's own confidence" in shown.stdout
    for wrong in (typed[:2] + typed[6:], [typed[0], *typed[2:]]):
        done = CliRunner().invoke(cli, wrong)
        assert done.exit_code == 1 and "--draft" in done.stderr


@pytest.mark.parametrize(
    "wrong", [["--time", "garbage"], ["--bench", "/nosuch"], ["--steps", "0"], ["--batch", "x"], []]
)
def test_what_is_typed_wrong_is_said_before_the_trace_is_replayed(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    monkeypatch.setattr("replay.simulator.confidence.draft_anchors", lambda *_, **__: pytest.fail("it was replayed"))
    cost = ["--cost", "pass=20"] if wrong[:1] in (["--steps"], ["--batch"]) else []
    typed = ["plan", str(trace.path), "--draft", str(write_head(tmp_path / "draft", HEAD)), *cost, *wrong]
    done = CliRunner().invoke(cli, typed)
    assert done.exit_code == 1 and done.stderr.startswith("replay: ")


@pytest.mark.parametrize("wrong", [["--draft", "/nosuch"], ["--draft", "DRAFT", "--wiring", "embed,99"]])
def test_a_head_and_a_wiring_are_refused_before_torch_is_imported(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "replay.simulator.confidence", None)  # to import it is an error
    monkeypatch.setattr("replay.cli.plan.read_draft", lambda *_: pytest.fail("the head was read"))
    draft = str(write_head(tmp_path / "draft", HEAD))
    typed = ["plan", str(trace.path), "--cost", "pass=20", *(draft if word == "DRAFT" else word for word in wrong)]
    done = CliRunner().invoke(cli, typed)
    assert done.exit_code == 1 and ("/nosuch does not exist" in done.stderr or "tap 99 is R[99]" in done.stderr)
