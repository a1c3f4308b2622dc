"""How well a hypothesis explains a server: likelihoods, by hand unless a test says where they come from."""

import math
from math import comb

import numpy as np
import pytest
from support.followed_maker import make_followed

from replay.analysis.diagnosis.counted import histogram_evidence, length_evidence, taken_by_any_cause, taken_likelihood
from replay.analysis.diagnosis.drafted import MEASURED, followed_evidence, noise_scales
from replay.analysis.diagnosis.evidence import (
    OUTLIER_ROUNDS,
    OUTLIER_TOKENS,
    Disturbance,
    Evidence,
    design_effect,
    lead,
    outliers_allowed,
    scale_up,
)
from replay.analysis.diagnosis.gain import RoundDraft, accepted_gain, length_gain
from replay.analysis.followed import Followed, Noise

INF = math.inf
NOISE = Noise((0.05,), 0.02, 100)
SCALES = noise_scales(NOISE.scale)


def followed(margins: list[list[float]], requests: list[int] | None = None, spread: float = 0.0) -> Followed:
    return make_followed(margins, requests=requests, scales=SCALES, spread=spread)


def of(margins: list[list[float]], requests: list[int] | None = None, spread: float = 0.0) -> Evidence:
    return followed_evidence(followed(margins, requests, spread), NOISE, 2.0)


# ---- outliers ----


@pytest.mark.parametrize("rounds", [0, 1, 26, 27, 40, 120, 393, 394])
@pytest.mark.parametrize(("share", "level"), [(OUTLIER_ROUNDS, 0.99), (0.03, 0.99), (0.2, 0.5)])
def test_outliers_that_are_allowed_are_a_quantile_of_the_binomial(rounds: int, share: float, level: float) -> None:
    """Exact sums of binomial terms, from the definition."""
    most = outliers_allowed(rounds, share, level)
    terms = [comb(rounds, count) * share**count * (1 - share) ** (rounds - count) for count in range(most + 1)]
    assert math.fsum(terms) >= level - 1e-12
    assert most == 0 or math.fsum(terms[:-1]) < level


def test_few_rounds_allow_no_outlier() -> None:
    """26 rounds of a healthy server are without one in 99.02 % of all cases, 27 in 98.98 %."""
    assert (outliers_allowed(26), outliers_allowed(27)) == (0, 1)


# ---- scales ----


def test_noise_scales_begin_at_a_quarter_of_what_was_measured_and_end_at_a_nat() -> None:
    assert noise_scales(0.1) == pytest.approx((0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0))
    assert noise_scales(0.0)[:3] == pytest.approx((2.5e-6, 5e-6, 1e-5))  # nothing is smaller than fp32's rounding
    for scale in (0.0, 1e-4, 0.01, 0.2):
        found = noise_scales(scale)
        assert found[MEASURED] == pytest.approx(max(scale, 1e-5)) and found[-1] == 1.0 and list(found) == sorted(found)


# ---- drafted tokens ----


def test_tokens_that_are_the_replays_own_cost_next_to_nothing() -> None:
    """A token drafted for sure has 1 less the share of outliers that are another one of 100."""
    found = of([[0.0, 0.0]] * 10)
    assert (found.rounds, found.alike, found.near_tie, found.unexplained) == (10, 10, 0, 0)
    assert found.fits and found.agreeing == 10
    assert found.log_likelihood == pytest.approx(20 * math.log(1 - 0.99 * OUTLIER_TOKENS))
    # with something unknown besides it is less likely: a part of that belief is in larger shares
    assert found.disturbed < found.log_likelihood
    assert found.disturbance is not None and found.disturbance.share == OUTLIER_TOKENS


def test_a_token_beyond_rounding_is_an_outlier() -> None:
    """However far: one of 100 tokens drawn at random, in so many of all."""
    for margin in (3.0, 50.0, INF):
        found = of([[0.0, margin]])
        assert found.unexplained == 1 and not found.fits
        assert found.log_likelihood == pytest.approx(math.log(OUTLIER_TOKENS / 100), abs=1e-3)


def test_a_near_tie_costs_its_margin_in_scales_of_the_noise() -> None:
    """A margin of 0.04 at a spread of log(2), as of two tokens of one logit: the scales are 0.005, 0.01, 0.02, 0.04,
    ..., of which no more than twice the measured one is rounding: it is exp(-8), exp(-4), exp(-2) and exp(-1) of one
    half, equally likely beforehand."""
    found = of([[0.04]], spread=math.log(2))
    parts = [(1 - OUTLIER_TOKENS) * math.exp(-nats) / 2 + OUTLIER_TOKENS / 100 for nats in (8, 4, 2, 1)]
    assert found.log_likelihood == pytest.approx(math.log(sum(parts) / 4))
    assert (found.near_tie, found.unexplained, found.fits) == (1, 0, True)


def test_as_many_outliers_fit_as_a_healthy_server_has() -> None:
    rounds = [[0.0]] * 399
    assert of([*rounds, [1.0]]).fits
    assert outliers_allowed(400) == 2
    assert of([*rounds[:-1], [1.0], [1.0]]).fits
    assert not of([*rounds[:-2], [1.0], [1.0], [1.0]]).fits


@pytest.mark.parametrize(
    ("place", "share", "tokens"),
    [(4, 0.0, 30000), (5, 0.0, 4000), (6, 0.0, 4000), (7, 0.0, 4000), (5, 0.1, 4000), (4, 0.3, 4000)],
)
def test_the_disturbance_that_is_there_fits_best(place: int, share: float, tokens: int) -> None:
    """Tokens of random logits, drawn at a noise scale, of which a share is drawn from all alike.

    The first scale is but twice the largest that is rounding: it takes more tokens to stand out as far.
    """
    generator = np.random.default_rng(3)
    logits_NW = generator.normal(size=(tokens, 50)) * 2
    noisy_NW = logits_NW / SCALES[place] + generator.gumbel(size=logits_NW.shape)
    alike_N = generator.random(tokens) < share
    served_N = np.where(alike_N, generator.integers(50, size=tokens), noisy_NW.argmax(1))
    best_N = logits_NW.max(1)
    logit_N = logits_NW[np.arange(tokens), served_N]
    spreads = [np.log(np.exp((logits_NW - best_N[:, None]) / scale).sum(1)) for scale in SCALES]
    margin_N = best_N - logit_N
    number_N = np.arange(tokens)
    made = Followed(
        number_N // 100, number_N, np.ones(tokens, dtype=np.int64), margin_N, -1 - margin_N, np.array(spreads).T,
        margin_N == 0, margin_N == 0, SCALES, 50,
    )  # fmt: skip
    found = followed_evidence(made, NOISE, 2.0)
    assert found.disturbance == Disturbance(SCALES[place], share or OUTLIER_TOKENS)
    assert found.disturbed > found.log_likelihood + 1000 and not found.fits


def test_a_replay_whose_logits_are_all_alike_leaves_no_margin_and_explains_nothing() -> None:
    flat, sharp = of([[0.0, 0.0]] * 50, spread=math.log(100)), of([[0.0, 0.0]] * 50)
    assert flat.fits and flat.unexplained == 0
    assert flat.log_likelihood == pytest.approx(-100 * math.log(100))  # as likely as any other of 100 tokens
    assert flat.log_likelihood < sharp.disturbed - 400


def test_scales_are_of_the_hypothesis_and_only_the_first_are_rounding() -> None:
    """A noise of a nat is no rounding: a margin of half a nat costs 6 scales and more, or half a disturbance."""
    found = of([[0.5]] * 20, spread=0.0)
    assert found.log_likelihood < -100 and found.disturbed > -30


# ---- leads ----


def test_tokens_of_one_request_count_by_their_design_effect() -> None:
    """Kish, Survey Sampling, section 5.4: of clusters that are each of one kind, every one counts once."""
    nats = np.array([1.0, 1.0, -1.0, -1.0])
    assert design_effect(nats, np.array([0, 0, 1, 1])) == 2.0  # (2^2 + 2^2) / 4
    assert design_effect(nats, np.array([0, 1, 0, 1])) == 1.0  # each request has both: not fewer than the tokens
    assert design_effect(nats, np.array([0, 1, 2, 3])) == 1.0
    assert design_effect(nats, np.array([7, 7, 7, 7])) == 1.0  # of one request nothing is known
    assert design_effect(np.ones(4), np.array([0, 0, 1, 1])) == 1.0
    # a tenth of ten requests of 4 tokens has all of it: 9 off the mean in one, 1 in each other
    alone = np.array([10.0] * 4 + [0.0] * 36)
    assert design_effect(alone, np.repeat(np.arange(10), 4)) == pytest.approx((36**2 + 9 * 4**2) / (4 * 81 + 36))


def test_a_lead_is_the_difference_less_what_tokens_have_in_common() -> None:
    """20 tokens in four requests; the other hypothesis fails on all tokens of one, or on one token of each."""
    requests = [number // 5 for number in range(20)]
    right = of([[0.0]] * 20, requests)
    clustered = of([[INF]] * 5 + [[0.0]] * 15, requests)
    scattered = of([[INF] if number % 5 == 2 else [0.0] for number in range(20)], requests)
    whole = right.log_likelihood - clustered.log_likelihood
    # off the mean by 3/4 and 1/4 of it: (15/4)^2 + 3 (5/4)^2 over 5 (3/4)^2 + 15 (1/4)^2 is 5
    assert lead(right, clustered) == pytest.approx(whole / 5)
    assert lead(clustered, right) == pytest.approx(-whole / 5)
    assert lead(right, scattered) == pytest.approx(right.log_likelihood - scattered.log_likelihood)


def test_a_lead_over_something_unknown_is_over_the_disturbed_likelihood() -> None:
    right, wrong = of([[0.0]] * 20), of([[INF]] * 5 + [[0.0]] * 15)
    assert lead(right, wrong, disturbed=True) == pytest.approx(right.log_likelihood - wrong.disturbed)
    alone = lead(right, right, disturbed=True)
    assert alone == pytest.approx(right.log_likelihood - right.disturbed) and alone > 0


def test_likelihoods_of_fewer_rounds_are_drawn_out() -> None:
    some = of([[0.0], [INF]])
    more = scale_up(some, 3.0)
    assert (more.log_likelihood, more.disturbed) == (3 * some.log_likelihood, 3 * some.disturbed)
    assert (more.rounds, more.unexplained) == (2, 1)
    right = of([[0.0]] * 6)
    assert lead(right, more) == pytest.approx(
        right.log_likelihood - more.log_likelihood
    )  # of other tokens: no clusters


# ---- histograms ----


def test_histograms_agree_as_far_as_they_can_be_matched() -> None:
    """Of a: 3 + 1 + 2 of 7 rounds, of b: 1 of 3. One round with two tokens and two with none or one are left."""
    ours, theirs = {"a": [3, 2, 2], "b": [1, 0, 2]}, {"a": [4, 1, 2], "b": [1, 2, 0], "c": [9]}
    found = histogram_evidence(ours, theirs, 2)
    assert (found.rounds, found.agreeing, found.near_tie, found.unexplained) == (10, 7, 0, 3)
    # of a one round with none is left, of b two with one; smoothed by one round each the replay has 5, 3 and 5 of 13
    pooled = math.log(5 / 13) + 2 * math.log(3 / 13)
    expected = 7 * math.log1p(-OUTLIER_ROUNDS) + 3 * math.log(OUTLIER_ROUNDS) + pooled
    assert found.log_likelihood == pytest.approx(expected)
    assert found.accept_length == pytest.approx(1 + (2 + 4 + 4) / 10) and found.served == pytest.approx(1 + 7 / 10)
    assert found.disturbance == Disturbance(0.0, 0.3) and found.disturbed > found.log_likelihood
    assert not found.fits
    same = histogram_evidence(theirs, theirs, 2)
    assert same.fits and same.unexplained == 0 and same.log_likelihood > same.disturbed


def test_rounds_that_took_more_than_the_steps_are_of_the_last_count() -> None:
    assert histogram_evidence({"a": [0, 0, 0, 2]}, {"a": [0, 0, 2]}, 2).fits


# ---- one accept length ----


def counts(*requests: tuple[int, int]) -> np.ndarray:
    """By request its rounds and accepted tokens, with columns that nothing here reads."""
    return np.array([[rounds, accepted, 0, 0] for rounds, accepted in requests], dtype=np.int64)


def test_an_accept_length_fits_within_two_errors() -> None:
    """Requests that are all alike have no spread: what is left is 2 % of the length, 0.04 of 2."""
    alike = counts(*[(50, 50)] * 10)
    for served, fits in ((2.0, True), (2.07, True), (2.1, False), (1.9, False)):
        found = length_evidence(alike, served, None, 3)
        error = 0.02 * served
        assert found.log_likelihood == pytest.approx(
            -0.5 * ((2 - served) / error) ** 2 - math.log(error * math.sqrt(2 * math.pi))
        )
        assert (found.fits, found.disturbed, found.accept_length) == (fits, pytest.approx(-math.log(3)), 2.0)


def test_requests_that_differ_leave_an_accept_length_open() -> None:
    mixed = counts(*[(50, 20), (50, 80)] * 5)
    assert (
        length_evidence(mixed, 2.2, None, 3).fits and not length_evidence(counts(*[(50, 50)] * 10), 2.2, None, 3).fits
    )
    # the server's own sampling error is that of as many rounds as it had
    few, many = (length_evidence(mixed, 3.0, rounds, 3).log_likelihood for rounds in (50, 50_000))
    assert few > many


# ---- how many are taken ----


def test_taken_tokens_are_judged_at_the_rates_of_the_replay() -> None:
    """Two steps; the replay takes none in 2 of 3 rounds: smoothed by one of each it has 3, 2 and 1 of 6."""
    assert taken_likelihood([0, 0, 1], [0, 2], 2) == pytest.approx(math.log(3 / 6) + math.log(1 / 6))


def test_any_cause_takes_as_the_server_does_and_pays_for_its_rates() -> None:
    """Schwarz, 1978: half the logarithm of the rounds for each of two rates."""
    accepted = [0, 0, 1, 2]
    own = 2 * math.log(3 / 7) + 2 * math.log(2 / 7)
    assert taken_by_any_cause(accepted, 2) == pytest.approx(own - math.log(4))


# ---- gains ----


def test_gains_are_over_the_same_anchors_or_requests() -> None:
    base = {("a", 3): RoundDraft((1, 2), 1), ("a", 5): RoundDraft((1, 2), 0), ("b", 3): RoundDraft((4, 5), 0)}
    more = {("a", 3): RoundDraft((1, 3), 2), ("a", 5): RoundDraft((1, 3), 1), ("b", 3): RoundDraft((4, 6), 1)}
    assert accepted_gain(more, base) == (1.0, 1.0, 1.0)
    assert accepted_gain(more, {**base, ("c", 1): RoundDraft((1,), 0)})[0] == 1.0  # only where both drafted
    gain, *interval = accepted_gain(more, {key: base[key] for key in list(base)[:2]})
    assert gain == 1.0 and all(map(math.isnan, interval))  # of one request no interval
    assert math.isnan(accepted_gain({}, base)[0])
    gain, low, high = length_gain(counts((10, 8), (10, 12), (0, 0)), counts((10, 3), (10, 7), (10, 7)))
    assert (gain, low, high) == pytest.approx((0.5, 0.5, 0.5))
