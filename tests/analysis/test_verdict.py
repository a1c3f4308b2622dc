"""The verdict from numbers: which hypothesis is named, which cannot be told apart, and what would tell."""

import dataclasses
import json
import math

import pytest

from replay.analysis.diagnosis.breakdown import separate
from replay.analysis.diagnosis.evidence import Evidence, RoundDraft, accepted_evidence, drafted_evidence, lead
from replay.analysis.diagnosis.scored import DECISIVE, Scored, rank
from replay.analysis.diagnosis.verdict import Gain, judge, to_json


def scored(name: str, agreeing: int, log_likelihood: float, *, log_prior: float = -3.0) -> Scored:
    kind, _, value = name.partition("=")
    return Scored(name, kind, value, log_prior, Evidence("drafted", 100, agreeing, log_likelihood, 2.0, 1.9))


def test_probabilities_add_up_and_odds_are_those_of_the_likelihoods() -> None:
    ranked = rank(
        [scored("healthy", 95, -10.0), scored("kv.rollback=stale", 96, -9.0), scored("attn.window=4", 0, -90)]
    )
    assert math.isclose(sum(item.probability for item in ranked), 1.0)
    assert [item.kind for item in ranked] == ["kv.rollback", "healthy", "attn.window"]
    assert math.isclose(ranked[0].probability / ranked[1].probability, math.e)


@pytest.mark.parametrize(("ahead", "verdict"), [(DECISIVE - 0.1, "head"), (DECISIVE + 0.1, "fault")])
def test_a_fault_needs_decisive_odds(ahead: float, verdict: str) -> None:
    found = judge([scored("healthy", 95, -10.0), scored("kv.rollback=stale", 99, -10.0 + ahead)], first_rate=0.4)
    assert found.verdict == verdict


def drafted(differing: range, rounds: int = 400) -> Evidence:
    """Of a hypothesis that drafts otherwise than the server in these rounds; every round takes one token."""
    served = {("a", anchor): RoundDraft((1, 2), 1) for anchor in range(rounds)}
    ours = {key: RoundDraft((1, 9) if key[1] in differing else (1, 2), 1) for key in served}
    return drafted_evidence(ours, served, 2)


@pytest.mark.parametrize(
    ("ours", "theirs", "chance"),
    [(range(10, 20), range(0, 20), 0.693), (range(0, 8), range(8, 20), None), (range(0, 10), range(10, 20), 0.0)],
)
def test_rounds_that_only_one_gets_right_count_by_their_split(ours: range, theirs: range, chance: float | None) -> None:
    """Golden: the likelihood ratio of a binomial split against 1/2, by hand: 10 of 10, 12 of 20, 10 of 20."""
    first, second = drafted(ours), drafted(theirs)
    assert first.log_likelihood >= second.log_likelihood
    nats = 20 * (math.log(2) + 0.6 * math.log(0.6) + 0.4 * math.log(0.4)) if chance is None else 10 * chance
    assert lead(first, second) == pytest.approx(nats, abs=0.01)
    assert lead(second, first) == pytest.approx(-nats, abs=0.01)


def test_luck_in_near_ties_names_no_fault() -> None:
    """A precision that drafts as the head does but for near ties: 26 fell its way and 14 the other."""
    healthy = Scored("healthy", "healthy", "", math.log(0.5), drafted(range(0, 66)))
    other = drafted(range(26, 80))
    fp16 = Scored("precision.dtype-cast=fp16", "precision.dtype-cast", "fp16", math.log(0.01), other)
    assert fp16.log_posterior - healthy.log_posterior > DECISIVE  # were every round to count in full
    found = judge([healthy, fp16], first_rate=0.7)
    assert (found.named, found.ranked[0].kind) == (None, "healthy")
    assert found.undecided == ("precision.dtype-cast=fp16",)


def test_a_pair_does_not_come_before_the_fault_it_adds_nothing_to() -> None:
    alone = Scored("kv.rollback=stale", "kv.rollback", "stale", -5.0, drafted(range(0, 6)))
    name = "kv.rollback=stale+precision.dtype-cast=fp16"
    pair = Scored(name, "kv.rollback+precision.dtype-cast", name, -8.0, drafted(range(2, 6)))
    found = judge([Scored("healthy", "healthy", "", -0.7, drafted(range(0, 90))), pair, alone])
    assert (found.verdict, found.named, found.undecided) == ("fault", "kv.rollback=stale", (name,))


def test_noise_is_told_by_what_is_accepted() -> None:
    """A tensor that was never loaded: nobody knows its drafts, only that none is taken; another fault knows them."""
    nothing = {("a", anchor): RoundDraft((8, 9), 0) for anchor in range(100)}
    served = {("a", anchor): RoundDraft((4, 5), 0) for anchor in range(100)}
    some = {("a", anchor): RoundDraft((1, 2), anchor % 3) for anchor in range(100)}
    noise = Scored("weights.missing=fc", "weights.missing", "fc", -5.0, accepted_evidence(nothing, served, 2))
    wrong = Scored("vocab.d2t=identity", "vocab.d2t", "identity", -5.0, drafted_evidence(nothing, served, 2))
    right = Scored("vocab.d2t=absolute", "vocab.d2t", "absolute", -5.0, drafted_evidence(served, served, 2))
    healthy = Scored("healthy", "healthy", "", -0.7, drafted_evidence(some, served, 2))
    assert (judge([healthy, wrong, noise]).named, noise.evidence.agreeing) == ("weights.missing=fc", 100)
    assert judge([healthy, wrong, noise, right]).named == "vocab.d2t=absolute"
    fed = Scored("weights.missing=fc", "weights.missing", "fc", -5.0, accepted_evidence(nothing, some, 2))
    assert fed.evidence.agreeing == 34
    as_is = Scored("healthy", "healthy", "", -0.7, drafted_evidence(some, some, 2))
    assert judge([as_is, fed], first_rate=0.7).verdict == "healthy"


def test_faults_that_explain_equally_well_are_all_said() -> None:
    alike = [scored("kv.rollback=stale", 99, -5.0), scored("kv.none=alone", 99, -5.5), scored("attn.window=4", 40, -99)]
    found = judge([scored("healthy", 30, -200.0), *alike])
    assert (found.verdict, found.named, found.undecided) == ("fault", "kv.rollback=stale", ("kv.none=alone",))


@pytest.mark.parametrize(
    ("agreeing", "length", "verdict"), [(80, 1.91, "head"), (80, 2.0, "engine"), (60, 1.9, "engine")]
)
def test_near_ties_that_fall_otherwise_are_no_engine_fault(agreeing: int, length: float, verdict: str) -> None:
    evidence = Evidence("drafted", 100, agreeing, -60.0, length, 1.9)
    assert judge([Scored("healthy", "healthy", "", -0.7, evidence)], first_rate=0.4).verdict == verdict


def test_a_fault_that_explains_little_is_none() -> None:
    found = judge([scored("healthy", 30, -200.0), scored("kv.rollback=stale", 50, -150.0)])
    assert (found.verdict, found.named) == ("engine", None)


ZEROS = "slot 0: zeros in 96 of 96 rows"


def test_bits_weigh_more_than_near_ties() -> None:
    """A slot of zeros that costs next to nothing: the rounds cannot tell, the bits do."""
    healthy = dataclasses.replace(scored("healthy", 95, -10.0), contradicted=ZEROS)
    missing = dataclasses.replace(scored("wiring.aux-missing=0", 94, -11.0), borne_out=True)
    other = dataclasses.replace(scored("wiring.aux-layer-id=1", 99, -2.0), contradicted=ZEROS)
    found = judge([healthy, missing, other], first_rate=0.7)
    assert (found.verdict, found.named, found.undecided) == ("fault", "wiring.aux-missing=0", ())
    assert found.certainty > 0.999 and ZEROS in found.why


def test_what_prompts_were_fed_is_told_where_the_rounds_hold_more() -> None:
    healthy = dataclasses.replace(scored("healthy", 30, -200.0), contradicted=ZEROS)
    missing = dataclasses.replace(scored("wiring.aux-missing=0", 40, -190.0), borne_out=True)
    pair = dataclasses.replace(scored("wiring.aux-missing=0+position.offset=1", 45, -185.0), borne_out=True)
    found = judge([healthy, missing, pair])
    assert (found.verdict, found.named) == ("fault", "wiring.aux-missing=0")
    assert "not explained by that alone" in found.why and math.isnan(found.certainty)
    unseen = [dataclasses.replace(item, borne_out=False) for item in (missing, pair)]
    engine = judge([healthy, *unseen])
    assert (engine.verdict, engine.named) == ("engine", None) and ZEROS in engine.why


def test_rounds_that_say_otherwise_than_the_prompts_are_heard() -> None:
    """Only prompts are in the feed: a server may feed its rounds something else, and this is no fault of weights."""
    denied = "slot 2: R[5], and not R[6]"
    healthy = scored("healthy", 20, -240.0)
    moved = dataclasses.replace(scored("wiring.aux-layer-id=2:1", 100, -5.0), contradicted=denied)
    missing = scored("weights.missing=fc", 60, -150.0)
    found = judge([healthy, moved, missing])
    assert (found.verdict, found.named) == ("fault", "wiring.aux-layer-id=2:1")
    assert f"but what the draft was fed in its prompts shows {denied}" in found.why


def test_a_healthy_replay_that_the_feed_contradicts_is_not_called_healthy() -> None:
    healthy = dataclasses.replace(scored("healthy", 99, -5.0), contradicted=ZEROS)
    stale = dataclasses.replace(scored("kv.rollback=stale", 60, -150.0), contradicted=ZEROS)
    found = judge([healthy, stale], first_rate=0.7)
    assert (found.verdict, found.named) == ("engine", None) and ZEROS in found.why


def test_what_the_feed_contradicts_is_no_longer_undecided() -> None:
    near = scored("wiring.aux-layer-id=0:1", 99, -5.5)
    assert judge([scored("healthy", 99, -5.0), near], first_rate=0.7).undecided == (near.name,)
    denied = dataclasses.replace(near, contradicted=ZEROS)
    assert judge([scored("healthy", 99, -5.0), denied], first_rate=0.7).undecided == ()


@pytest.mark.parametrize(("stated", "verdict"), [(True, "fault"), (False, "healthy")])
def test_a_wiring_that_is_known_is_not_the_best_of_many(stated: bool, verdict: str) -> None:
    gain = Gain("wiring.aux-layer-id=1", "wiring.aux-layer-id", "1", 0.3, (0.05, 0.55))
    others = [scored(f"kv.prefix-reuse={size}", 20, -300.0) for size in range(40)]
    found = judge([scored("healthy", 99, -5.0), *others], gains=[gain], first_rate=0.7, stated=stated)
    assert found.verdict == verdict


@pytest.mark.parametrize(("low", "verdict"), [(0.1, "fault"), (-0.01, "healthy")])
def test_a_better_variant_counts_where_its_interval_says_so(low: float, verdict: str) -> None:
    gain = Gain("wiring.aux-layer-id=1", "wiring.aux-layer-id", "1", 0.3, (low, 0.5))
    assert judge([scored("healthy", 99, -5.0)], gains=[gain], first_rate=0.7).verdict == verdict


def test_the_best_of_many_is_no_fault_by_luck() -> None:
    """2.5 standard errors are clear for one variant that was tried, and nothing for the best of two hundred."""
    gain = Gain("attn.window=4", "attn.window", "4", 0.25, (0.054, 0.446))
    healthy = scored("healthy", 99, -5.0)
    many = [scored(f"kv.prefix-reuse={size}", 10, -90.0) for size in range(1, 200)]
    assert judge([healthy], gains=[gain], first_rate=0.7).verdict == "fault"
    assert judge([healthy, *many], gains=[gain], first_rate=0.7).verdict == "healthy"


def test_json_has_no_nan() -> None:
    found = judge([scored("healthy", 99, -5.0)], first_rate=0.7)
    document = to_json(dataclasses.replace(found, expected=math.nan))
    assert json.loads(json.dumps(document, allow_nan=False))["expected"] is None
    assert document["hypotheses"][0] | {"fault": "healthy", "value": ""} == document["hypotheses"][0]


def test_what_would_tell_follows_from_what_was_not_told() -> None:
    alike = [scored("kv.rollback=stale", 99, -5.0), scored("weights.missing=norm", 99, -5.5)]
    found = judge([scored("healthy", 30, -200.0), *alike])
    said = list(separate(found, steps=2))
    assert [sentence.split(":")[0] for sentence in said] == [
        "the server's log from its start", "longer prompts and outputs", "more steps", "more requests",
    ]  # fmt: skip
    assert list(separate(found, steps=3)) == [sentence for sentence in said if "more steps" not in sentence]
    assert list(separate(judge([scored("healthy", 99, -5.0)], first_rate=0.7), steps=2)) == []
    gain = Gain("attn.window=4", "attn.window", "4", 0.3, (0.2, 0.4))
    near = dataclasses.replace(gain, name="attn.window=8", value="8", gain=0.29, tied=True)
    better = judge([scored("healthy", 99, -5.0)], gains=[gain, near], first_rate=0.7)
    assert next(separate(better, steps=2)).startswith("say with --wiring")
