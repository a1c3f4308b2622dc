"""Sampled acceptance against brute force on the real target: an independent sampler's own rounds and probabilities."""

from pathlib import Path

import numpy as np
import pytest
from support.sampled_traces import Sampled, sample_trace

import replay
from replay.drafting.path_probability import force_every_anchor, path_tokens
from replay.simulator.binding import build_head, resolve
from replay.simulator.inputs import draft_input
from replay.simulator.variant import Variant
from replay.traces.sample_files import sample_head
from replay.verify.estimator import target_probability
from replay.verify.expectation import expected_walk, keep_probabilities

STEPS = 3
WIRING = replay.parse_wiring("embed,3,16")


@pytest.fixture(scope="module")
def target_only(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    return sample_trace(
        target_dir, tmp_path_factory.mktemp("target-only"), rule="target-only", temperature=0.8, top_k=20, top_p=0.95,
        prompts=2, new_tokens=20, steps=STEPS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rejection(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    return sample_trace(
        target_dir, tmp_path_factory.mktemp("rejection"), rule="rejection", temperature=0.9, prompts=2, new_tokens=20,
        steps=STEPS,
    )  # fmt: skip


def play(sampled: Sampled, verify: str) -> replay.Rounds:
    head = replay.load_head(sample_head())
    variant = Variant("demo", wiring=WIRING, steps=STEPS, verify=verify, precision="fp32")
    return replay.simulate(sampled.trace, {"demo": head}, [variant])


def test_the_walk_is_the_samplers_and_its_expectation_made_of_the_samplers_own_p(target_only: Sampled) -> None:
    """With an argmax draft the rounds follow from the text: every one of them, and p along every drafted prefix."""
    played = play(target_only, "target-only")
    (variant,) = played.variants
    assert variant.expected is not None and variant.expected.exact
    accepted = 0
    for number, (request_id, rounds) in enumerate(target_only.rounds.items()):
        mine = played.table.filter(request_id=request_id)
        assert mine["anchor"].to_list() == [one.anchor for one in rounds]
        assert mine["drafted"].to_list() == [one.drafted for one in rounds]
        assert mine["accepted"].to_list() == [one.accepted for one in rounds]
        output = target_only.trace.records[number].tokens
        offered = [min(one.accepted + 1, STEPS, output - 1 - one.anchor) for one in rounds]
        by_hand = sum(sum(one.drafted_p[:count]) for one, count in zip(rounds, offered, strict=True))
        row = variant.expected.sums[number]
        np.testing.assert_allclose(row, [len(rounds), by_hand] * 3, rtol=1e-3)
        accepted += sum(one.accepted for one in rounds)
    assert accepted > 5


def test_a_sampled_draft_is_kept_with_the_samplers_own_p_and_q(rejection: Sampled) -> None:
    """q of the emitted tokens from the head fed with them, p of them from the trace: at each round of the sampler.

    The coins are the sampler's. Given the text its accepted tokens are independent draws with these probabilities, so
    their sum has a known mean and variance: five standard errors are a false alarm in 1.7 million.
    """
    head = build_head(*_resolved(rejection), rejection.trace)
    mean = variance = total = 0.0
    widths: list[np.ndarray] = []
    for number, rounds in enumerate(rejection.rounds.values()):
        item = draft_input(rejection.trace.read(number, WIRING.taps), WIRING)
        (q_AK,) = force_every_anchor(head, [item], [0.9], STEPS)
        path_AK, target = path_tokens(item, STEPS).numpy(), target_probability(rejection.trace, number)
        assert target is not None
        for one in rounds:
            anchor = one.anchor - item.prompt_tokens
            count = len(one.p)
            rows, ids = anchor + 1 + np.arange(count), path_AK[anchor, :count]
            found = target.of(rows, ids)
            assert (found.low <= np.array(one.p) * 1.001).all() and (np.array(one.p) <= found.high * 1.001).all()
            widths.append((found.high - found.low) / found.high)
            # A step behind the first refused one read another token than the text's.
            same = min(one.accepted + 1, count)
            np.testing.assert_allclose(q_AK[anchor, :same], one.q[:same], rtol=1e-3, atol=1e-7)
            reach = path_AK[anchor] >= 0
            p = np.where(reach, 1.0, 0.0)
            p[:count] = one.p
            missing = reach & (np.arange(STEPS) >= count)
            p[missing] = target.of(anchor + 1 + np.nonzero(missing)[0], path_AK[anchor][missing]).high
            kept = keep_probabilities(q_AK[anchor : anchor + 1].numpy(), p[None])[0]
            exactly = -np.diff(np.concatenate([[1.0], kept, [0.0]]))
            counts = np.arange(STEPS + 1)
            mean += exactly @ counts
            variance += exactly @ counts**2 - (exactly @ counts) ** 2
            total += one.accepted
    assert abs(total - mean) < 5 * variance**0.5
    assert total > 5
    # At this temperature the mass of the tail is not known exactly, and yet bounded well.
    assert np.median(np.concatenate(widths)) < 0.05


def test_rounds_of_a_sampled_draft_are_one_draw_of_the_expectation(rejection: Sampled) -> None:
    played, again = play(rejection, "rejection"), play(rejection, "rejection")
    assert played.table.equals(again.table)
    (variant,) = played.variants
    assert variant.expected is not None and variant.expected.exact
    assert "whole vocabulary" in variant.expected.note
    head = build_head(*_resolved(rejection), rejection.trace)
    for number, row in enumerate(variant.expected.sums):
        item = draft_input(rejection.trace.read(number, WIRING.taps), WIRING)
        (q_AK,) = force_every_anchor(head, [item], [0.9], STEPS)
        target, path_AK = target_probability(rejection.trace, number), path_tokens(item, STEPS).numpy()
        assert target is not None
        known = path_AK >= 0
        p = np.ones(q_AK.shape)
        found = target.of((1 + np.arange(len(p))[:, None] + np.arange(STEPS))[known], path_AK[known])
        p[known] = (found.low + found.high) / 2
        np.testing.assert_allclose(row[:2], expected_walk(keep_probabilities(q_AK.numpy(), p)), rtol=1e-5)
    places = {record.request_id: place for place, record in enumerate(rejection.trace.records)}
    for one in played.table.iter_rows(named=True):
        text = rejection.trace.read(places[one["request_id"]], ["embed"]).tokens.tolist()
        taken = one["drafted"][: one["accepted"]]
        assert taken == text[one["anchor"] + 1 : one["anchor"] + 1 + one["accepted"]]
        assert one["drafted"][one["accepted"] :] == [-1] * (STEPS - one["accepted"])


def _resolved(sampled: Sampled) -> tuple[object, Variant]:
    checkpoint = replay.load_head(sample_head())
    return checkpoint, resolve(Variant("demo", wiring=WIRING, steps=STEPS, precision="fp32"), checkpoint, sampled.trace)
