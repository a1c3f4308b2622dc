"""What all hypotheses are held against: the noise, the rounds on which they are tried, the ways to divide rounds."""

from pathlib import Path

import pytest
from support.served_maker import make_checkpoint, make_served

from replay.analysis.diagnosis.drafted import noise_scales
from replay.analysis.followed import judge_rounds
from replay.diagnosis.case import Case
from replay.diagnosis.diagnose import open_case, served_variant
from replay.diagnosis.hypotheses import Hypothesis, singles
from replay.diagnosis.reference import Reference, follow, measure
from replay.diagnosis.search import unknowable
from replay.diagnosis.trials import GLANCE, SCREENING, WHOLE, run_trials
from replay.diagnosis.views import round_views

HEAD = make_checkpoint()
# A fault that shows in some requests more than in others.
FAULT = "kv.rollback=full-hole"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    trace = make_served(tmp_path_factory.mktemp("case"), HEAD, FAULT, requests=8, output=24)
    return open_case(trace, HEAD, served_variant(trace, "h"), None, None)


@pytest.fixture(scope="module")
def reference(case: Case) -> Reference:
    return measure(case)


def named(case: Case, name: str) -> Hypothesis:
    return next(item for item in singles(case) if item.name == name)


def test_the_healthy_replay_is_judged_at_the_scales_of_its_noise(reference: Reference) -> None:
    assert reference.scales == noise_scales(reference.noise.scale) == reference.healthy.scales
    assert reference.healthy.spread_NZ.shape == (len(reference.healthy.margin_N), len(reference.scales))
    assert reference.noise.tokens > 0 and reference.noise.largest[0] < 1e-3  # of a head in fp32


def test_rounds_to_try_are_of_the_requests_that_show_most_and_least(case: Case, reference: Reference) -> None:
    """The first ones of each, without a gap: what follows the walk has to be played from its start."""
    rounds = case.observation.rounds
    assert rounds is not None
    _, unexplained_R = judge_rounds(reference.healthy, reference.noise)
    number_R = reference.healthy.request_N[reference.healthy.depth_N == 1]
    shares = {
        case.trace.records[number].request_id: float(unexplained_R[number_R == number].mean())
        for number in set(number_R.tolist())
    }
    assert len(set(shares.values())) > 1
    for some, least in ((reference.glance, 2), (reference.screening, 4)):
        asked = some["request_id"].unique().to_list()
        assert least <= len(asked) and len(some) <= len(rounds)
        assert {max(shares.values()), min(shares.values())} <= {shares[name] for name in asked}
        for name in asked:
            numbers = some.filter(request_id=name)["round"].to_list()
            assert sorted(numbers) == rounds.filter(request_id=name)["round"].sort().to_list()[: len(numbers)]
    assert set(reference.glance["request_id"]) <= set(reference.screening["request_id"])


def test_every_extent_has_its_rounds(case: Case, reference: Reference) -> None:
    """The fault itself leaves nothing on any of them, the healthy replay some; progress is told."""
    told = []
    items = [named(case, "healthy"), named(case, FAULT)]
    rounds = case.observation.rounds
    assert rounds is not None
    for extent, some in ((GLANCE, reference.glance), (SCREENING, reference.screening), (WHOLE, rounds)):
        as_is, fault = run_trials(case, reference, told.append, "a stage", items, extent=extent)
        assert as_is.is_healthy and not fault.is_healthy
        assert as_is.scored.evidence.rounds == fault.scored.evidence.rounds == len(some)
        assert fault.scored.evidence.alike == len(some) and fault.scored.fits
        assert as_is.scored.evidence.unexplained > 0
    assert {(one.stage, one.total) for one in told} == {("a stage", 2)}
    assert [one.done for one in told if not one.part] == [2] * 3
    parts = [one.done + one.part for one in told]
    assert len(parts) > 6 and {0 < part <= 2 for part in parts} == {True}


def test_a_finalist_has_the_noise_of_its_own(case: Case, reference: Reference) -> None:
    """A cache of few bits rounds far more: what it leaves is explained by its own noise, not by the healthy one."""
    trace = make_served(Path(case.trace.path).parent / "kv", HEAD, "precision.draft-kv=fp8_e4m3", requests=4)
    rounded = open_case(trace, HEAD, served_variant(trace, "h"), None, None)
    measured = measure(rounded)
    item = named(rounded, "precision.draft-kv=fp8_e4m3")
    (found,) = run_trials(rounded, measured, lambda _: None, "a stage", [item], extent=WHOLE)
    assert found.scored.fits


def test_what_nobody_can_know_is_apart(case: Case) -> None:
    names = [item.name for item in unknowable(case)]
    assert "weights.missing=fc" in names and "wiring.aux-capture-stage=normed" in names
    assert not any("zero" in name for name in names)


def test_every_round_is_in_one_part_of_each_division(case: Case, reference: Reference) -> None:
    """In the order in which a replay follows them: its request's, and what the round before took."""
    rounds = case.observation.rounds
    assert rounds is not None
    views = round_views(case, rounds)
    assert all(len(parts) == reference.healthy.rounds for parts in views.values())
    numbers = reference.healthy.request_N[reference.healthy.depth_N == 1]
    assert views["request"] == [case.trace.records[number].request_id for number in numbers]
    taken = {
        (name, number): accepted
        for name, number, accepted in rounds.select("request_id", "round", "accepted").iter_rows()
    }
    said = {0: "nothing", case.served.steps: "everything"}
    expected, place = [], 0
    for number, name in enumerate(views["request"]):
        place = place + 1 if number and views["request"][number - 1] == name else 0
        expected.append("the prompt" if not place else said.get(taken[name, place - 1], "a part"))
    assert views["the round before took"] == expected
    assert set(views["requests verified together"]) == {"not recorded"}
    assert set(views["request's place in the trace"]) == {"early", "late"}


def test_variants_of_a_case_follow_the_same_rounds(case: Case, reference: Reference) -> None:
    variants = [case.served, named(case, FAULT).variant]
    as_is, fault = follow(case, variants, reference.glance, reference.scales)
    assert as_is.rounds == fault.rounds == len(reference.glance) and fault.alike_R.all() and not as_is.alike_R.all()
