"""Depths and early stops from one replay: against simulate, against the obvious loop, and against plain enumeration."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.heads import write_head
from support.here import Here
from support.served_maker import HEAD, WIRING, make_checkpoint, make_served

from replay.analysis.counts import ACCEPTED, ROUNDS, per_request
from replay.analysis.plan.costs import Machines
from replay.analysis.plan.policies import Played, judge_rules, mean_rounds, with_lengths
from replay.analysis.plan.report import rule_sentence
from replay.analysis.plan.settings import Load
from replay.cli.app import cli
from replay.drafting.confidence import draft_with_confidence
from replay.drafting.every_anchor import draft_every_anchor
from replay.errors import UsageError
from replay.simulator.binding import build_head, resolve
from replay.simulator.confidence import AnchorDrafts, draft_anchors, play_depths, play_thresholds
from replay.simulator.inputs import draft_input
from replay.simulator.progress import ReplayProgress
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


def test_workers_draft_the_same(trace: Trace, anchors: list[AnchorDrafts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", 40)
    hands = Here(trace, {"head": make_checkpoint()})
    events = list[ReplayProgress]()
    found = draft_anchors(
        trace, make_checkpoint(), Variant("head", wiring=WIRING, steps=4), workers=hands, on_event=events.append
    )
    assert len(hands.asked) > 1 and events[-1].done == len(trace)
    assert [one.request_id for one in found] == [one.request_id for one in anchors]
    for ours, one in zip(found, anchors, strict=True):
        assert (ours.prompt_tokens, ours.tokens) == (one.prompt_tokens, one.tokens)
        assert np.array_equal(ours.accepted_A, one.accepted_A) and np.array_equal(ours.product_AK, one.product_AK)


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
        assert (played.verified[:, 4] == played.counts[:, 0]).all()
        assert (played.drafted[:, 4] == played.counts[:, 0]).all()
    if threshold > 1:
        assert (played.verified[:, 0] == played.counts[:, 0]).all()
        assert (played.drafted[:, 1] == played.counts[:, 0]).all()


def test_a_batch_drafts_until_its_last_request_stops() -> None:
    """The mean of the largest of b, by all 3 ** b batches of rounds that draft 1, 2 or 4 steps."""
    drafted = np.array([0, 5, 3, 0, 2])
    share = {depth: count / 10 for depth, count in enumerate(drafted) if count}
    for batch in (1, 2, 4):
        longest = sum(max(ones) * np.prod([share[one] for one in ones]) for ones in product(share, repeat=batch))
        (found,) = mean_rounds(np.array([[10, 7, 4 * 1 + 2 * 3, *drafted]], dtype=float), Load(batch))
        assert found[4] == pytest.approx(longest)
        assert found[1] == pytest.approx(batch * (1 + (4 * 1 + 2 * 3) / 10))


MACHINE = Machines(np.array([[0.020, 0.003, 0.0, 0.0, 0.002, 0.001]]), 0.0, ())


def loop(one: AnchorDrafts, threshold: float, depth: int, batch: int, stops: bool) -> tuple[float, int, int]:
    """Milliseconds, rounds and tokens of a request: 20 ms a pass, 3 a row, 2 a draft step, 1 a drafted row."""
    ms, rounds, tokens, anchor = 0.0, 0, 0, one.prompt_tokens
    while anchor < one.tokens - 1:
        place, verified = anchor - one.prompt_tokens, 0
        while verified < depth and one.product_AK[place, verified] >= threshold:
            verified += 1
        drafted = min(verified + 1, depth) if stops else depth
        ms += 20 + batch * 3 * (verified + 1) + drafted * (2 + batch * 1)
        taken = min(verified, int(one.accepted_A[place]))
        rounds, tokens, anchor = rounds + 1, tokens + taken + 1, anchor + taken + 1
    return ms, rounds, tokens


def drawn_speeds(per_request: list[tuple[float, int, int]], batch: int) -> list[float]:
    """Tokens a second, requests drawn again with their costs."""
    n = len(per_request)
    found = []
    for draw in np.random.default_rng(0).integers(n, size=(2000, n)):
        ms, _, tokens = (sum(per_request[row][place] for row in draw) for place in range(3))
        found.append(1000 * batch * tokens / ms)
    return found


@pytest.mark.parametrize("threshold", [0.02, 0.05, 0.2])
@pytest.mark.parametrize(("batch", "stops"), [(1, True), (1, False), (3, False)])
def test_a_rule_s_speed_and_gain_are_those_of_requests_drawn_with_their_costs(
    anchors: list[AnchorDrafts], threshold: float, batch: int, stops: bool
) -> None:
    """Against a loop that adds up what each round of each request costs."""
    judged = with_lengths([*play_depths(anchors, [4]), *play_thresholds(anchors, [threshold], 4)])
    (rule,) = judge_rules(judged, [Load(batch)], MACHINE, drafting_on=not stops)
    costs = [loop(one, threshold, 4, batch, stops) for one in anchors]
    plain = [loop(one, 0, 4, batch, stops) for one in anchors]
    speeds, against = drawn_speeds(costs, batch), drawn_speeds(plain, batch)
    gains = [one / other for one, other in zip(speeds, against, strict=True)]
    assert rule.accept_length == pytest.approx(sum(one[2] for one in costs) / sum(one[1] for one in costs))
    for found, drawn in ((rule.tokens_per_second, speeds), (rule.gain, gains)):
        assert found == pytest.approx(tuple(np.quantile(drawn, [0.5, 0.025, 0.975])))
    assert stops or rule.drafted == 4


def test_a_gain_is_judged_on_requests_that_did_not_choose_the_rule(anchors: list[AnchorDrafts]) -> None:
    """Five requests, so each is left out once: the rule of the others, by a loop that tries every one."""
    thresholds = [0.0, 0.01, 0.02, 0.05, 0.2, 1.1]
    played = with_lengths([*play_depths(anchors, [4]), *play_thresholds(anchors, thresholds, 4)])
    (rule,) = judge_rules(played, [Load(1)], MACHINE)

    def speed(requests: list[AnchorDrafts], threshold: float) -> float:
        costs = [loop(one, threshold, 4, 1, True) for one in requests]
        return sum(one[2] for one in costs) / sum(one[0] for one in costs)

    chosen = [max(thresholds, key=lambda one: speed([*anchors[:out], *anchors[out + 1 :]], one)) for out in range(5)]
    held = [loop(one, threshold, 4, 1, True) for one, threshold in zip(anchors, chosen, strict=True)]
    fixed = drawn_speeds([loop(one, 0, 4, 1, True) for one in anchors], 1)
    gains = [one / other for one, other in zip(drawn_speeds(held, 1), fixed, strict=True)]
    assert rule.gain == pytest.approx(tuple(np.quantile(gains, [0.5, 0.025, 0.975])))
    assert rule.threshold == max(thresholds, key=lambda one: speed(anchors, one))


def test_of_chance_no_rule_is_said_to_gain() -> None:
    """60 requests whose 13 rules differ from the fixed depth by noise alone: the best of them gains on itself only."""
    rng = np.random.default_rng(5)
    noise = rng.binomial(40, 0.5, size=(14, 60))
    depth = np.tile([0, 40], (60, 1))
    counts = [np.stack([np.full(60, 40), accepted], axis=1) for accepted in noise]
    one = [Played(place / 14 if place else None, 1, rows, depth, depth) for place, rows in enumerate(counts)]
    (rule,) = judge_rules(with_lengths(one), [Load(1)], MACHINE)
    best = max(noise[1:].sum(axis=1)) / 2400
    assert (1 + best) / (1 + noise[0].sum() / 2400) > rule.gain[0]
    assert rule.gain[1] < 1


def test_a_single_request_has_no_range_of_a_gain(anchors: list[AnchorDrafts]) -> None:
    played = with_lengths([*play_depths(anchors[:1], [4]), *play_thresholds(anchors[:1], [0.05], 4)])
    (rule,) = judge_rules(played, [Load(1)], MACHINE)
    assert rule.gain[0] > 0 and np.isnan(rule.gain[1:]).all()
    assert "one request alone" in rule_sentence(rule)


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
    page = tmp_path / "plan.html"
    shown = CliRunner().invoke(cli, [*typed, "--steps", "1,3", "--html", str(page)])
    assert shown.exit_code == 0, shown.output
    # The page holds the terminal's text too, in its one <pre>; what is looked for stands before it.
    sections, _, _ = unescape(page.read_text()).rpartition("<pre")
    for said in ("Stopping", "Verifying fewer, drafting all,"):
        assert f"{said} by the head's own confidence" in shown.stdout
        assert f"{said} by the head's own confidence" in sections
    assert sections.count("times its tok/s (") == " ".join(shown.stdout.split()).count("times its tok/s (") == 2
    for wrong in (typed[:2] + typed[6:], [typed[0], *typed[2:]]):
        done = CliRunner().invoke(cli, wrong)
        assert done.exit_code == 1 and "--draft" in done.stderr
    for wrong in (["--workers", "2"], ["--ray", "auto"]):
        done = CliRunner().invoke(cli, ["plan", "--cost", "pass=20,draft=1", "--length", "steps=3,accept=2", *wrong])
        assert done.exit_code == 1 and "--workers and --ray replay a trace" in done.stderr
    assert "workers were asked for" in CliRunner().invoke(cli, [*typed, "--workers", "0"]).stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ["--time", "garbage"],
        ["--bench", "/nosuch"],
        ["--steps", "0"],
        ["--steps", "65"],
        ["--batch", "x"],
        [],
        ["--steps", "2", "--workers", "0"],
        ["--steps", "2", "--ray", "a:b:c"],
    ],
)
def test_what_is_typed_wrong_is_said_before_the_trace_is_replayed(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    monkeypatch.setattr("replay.simulator.confidence.draft_anchors", lambda *_, **__: pytest.fail("it was replayed"))
    monkeypatch.setattr("replay.cli.plan.open_whole", lambda *_, **__: pytest.fail("it was opened"))
    cost = ["--cost", "pass=20"] if wrong[:1] in (["--steps"], ["--batch"]) else []
    typed = ["plan", str(trace.path), "--draft", str(write_head(tmp_path / "draft", HEAD)), *cost, *wrong]
    done = CliRunner().invoke(cli, typed)
    assert done.exit_code == 1 and done.stderr.startswith("replay: ")


def test_a_cluster_that_replays_is_quiet_on_stdout_and_its_notes_are_said(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray prints pages of a lost node on stdout, where a document is awaited."""

    @contextmanager
    def lose_a_node(*given: Any) -> Iterator[Here]:
        *_, on_note = given
        print("ray::Pages of a node")
        on_note("note: node a was lost")
        yield Here(trace, {"draft": make_checkpoint()})

    monkeypatch.setattr("replay.simulator.confidence.use_workers", lose_a_node)
    typed = ["plan", str(trace.path), "--draft", str(write_head(tmp_path / "draft", HEAD)), "--wiring", str(WIRING)]
    done = CliRunner().invoke(cli, [*typed, "--cost", "pass=20,draft=1", "--steps", "1,2", "--ray", "auto", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["schema_version"]
    assert "note: node a was lost" in done.stderr and "Pages" not in done.output


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
