"""A server's tokens against a replay that follows them: what is alike, what rounding explains, what it does not.

Numbers are worked by hand unless a test says where they come from.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from support.followed_maker import make_followed as make

from replay.analysis.followed import (
    Agreement,
    Floats,
    Followed,
    Noise,
    agreement,
    expected_flips,
    join,
    judge_rounds,
    measure_noise,
)

INF = math.inf


# ---- noise ----


def logs(*chances: float) -> list[float]:
    """Log-probabilities. A chance of 1/3 has the odds 1 to 2, one of 1/5 has 1 to 4: moves are ratios of odds."""
    return [math.log(chance) for chance in chances]


def test_the_noise_is_the_largest_move_and_the_scale_that_flips_as_much() -> None:
    """The odds go from 1:2 to 1:4, from 1:4 to 1:8, and from 1:8 to 1:2, in units of log(2) by 1, 1 and 2. Their mean
    square is 2, a difference of two such errors has the deviation sqrt(4), and a logistic variable of scale s has
    s * pi / sqrt(3)."""
    rounded = make([[0.0, 0.3], [0.0]], log_probs=[logs(1 / 3, 1 / 5), logs(1 / 9)])
    exact = make([[0.0, 0.3], [0.0]], log_probs=[logs(1 / 5, 1 / 9), logs(1 / 3)])
    noise = measure_noise(rounded, exact)
    assert noise.largest == pytest.approx((2 * math.log(2),)) and noise.tokens == 3
    assert noise.scale == pytest.approx(2 * math.log(2) * math.sqrt(3) / math.pi)
    assert noise.limit(np.array([1, 2, 7])) == pytest.approx([4 * math.log(2)] * 3)


def test_a_token_moves_by_its_gap_in_a_tie_of_two_and_by_its_own_log_probability_where_it_is_unlikely() -> None:
    """Of two tokens with a gap of g nats the lesser has 1 / (1 + e^g): its log-odds are -g. One in a billion
    that doubles moves by log(2), as all others together stay at one."""
    gaps = [[-math.log1p(math.exp(gap))] for gap in (0.2, 0.5)]
    assert measure_noise(*(make([[0.0]], log_probs=[gap]) for gap in gaps)).largest == pytest.approx((0.3,))
    rare = (make([[0.0]], log_probs=[logs(chance)]) for chance in (1e-9, 2e-9))
    assert measure_noise(*rare).largest == pytest.approx((math.log(2),))


def test_a_token_that_either_thinks_likelier_than_one_half_is_left_out() -> None:
    """The third is left: from 1:2 to 1:3. The others would have moved by more."""
    rounded = make([[0.0, 0.0, 0.0]], log_probs=[logs(0.6, 0.2, 1 / 3)])
    exact = make([[0.0, 0.0, 0.0]], log_probs=[logs(0.2, 0.6, 1 / 4)])
    noise = measure_noise(rounded, exact)
    assert (noise.tokens, noise.largest) == (1, pytest.approx((math.log(3 / 2),)))


def test_noise_of_other_orders_counts_where_it_is_larger() -> None:
    """From 1:2 both go to 1:4 in the first order; in the other one to 1:16, and nowhere."""
    rounded, exact, other = (
        make([[0.0, 0.0]], log_probs=[logs(*chances)]) for chances in ((1 / 5, 1 / 5), (1 / 3, 1 / 3), (1 / 17, 1 / 3))
    )
    assert measure_noise(rounded, exact).largest == pytest.approx((math.log(2),))
    noise = measure_noise(rounded, exact, other)  # 3 and 1 times log(2) off the exact numbers: a mean square of 5
    assert noise.largest == pytest.approx((3 * math.log(2),))
    assert noise.scale == pytest.approx(math.sqrt(2 * 5) * math.log(2) * math.sqrt(3) / math.pi)


def test_the_noise_of_trees_is_that_of_each_depth() -> None:
    """The odds go to 1:3 from 1:2 and to 1:8 from 1:4, the larger is twofold; a depth further to 1:8 from 1:2 and to
    1:6 from 1:4, the larger is fourfold. Deeper than it was measured, the deepest counts; where nothing that counts
    moved, it is 0."""
    margins = [[0.0, 0.0], [0.0, 0.0, 0.0]]
    rounded = make(margins, log_probs=[logs(1 / 3, 1 / 3), logs(1 / 5, 1 / 5, 0.9)], by_depth=True)
    exact = make(margins, log_probs=[logs(1 / 4, 1 / 9), logs(1 / 9, 1 / 7, 0.7)], by_depth=True)
    noise = measure_noise(rounded, exact)
    assert noise.largest == pytest.approx((math.log(2), math.log(4), 0.0))
    assert noise.limit(np.array([1, 2, 3, 4])) == pytest.approx([math.log(4), math.log(16), 0.0, 0.0])


def test_tokens_that_no_draft_can_be_move_nothing() -> None:
    """Neither by what both say of them nor by what one does, which overflowed; the third goes from 1:2 to 1:4."""
    rounded = make([[INF, 0.0, 0.0]], log_probs=[[-INF, -INF, math.log(1 / 3)]])
    exact = make([[INF, 0.0, 0.0]], log_probs=[[-INF, -1.0, math.log(1 / 5)]])
    noise = measure_noise(rounded, exact)
    assert (noise.largest, noise.tokens) == (pytest.approx((math.log(2),)), 1)
    nothing = measure_noise(make([]), make([]))
    assert (nothing.largest, nothing.scale, nothing.tokens) == ((0.0,), 0.0, 0)


# ---- rounds ----

NOISE = Noise((0.05,), 0.02, 100)


def test_a_round_is_alike_a_near_tie_or_unexplained() -> None:
    """Twice the noise is 0.1: a round with one larger margin is unexplained, whatever else is in it."""
    found = make([[0.0, 0.0], [0.0, 0.1], [0.04, 0.11], [INF], [0.0]])
    near_R, unexplained_R = judge_rounds(found, NOISE)
    assert near_R.tolist() == [False, True, False, False, False]
    assert unexplained_R.tolist() == [False, False, True, True, False]


def test_a_tie_that_fell_otherwise_is_a_near_tie_and_not_alike() -> None:
    """Two tokens with the very same logit: the margin is 0, and the round is not the server's."""
    tied = replace(make([[0.0], [0.0]]), same_N=np.array([True, False]), alike_R=np.array([True, False]))
    counted = agreement(tied, NOISE)
    assert (counted.alike, counted.near_tie, counted.unexplained, counted.flips, counted.largest) == (1, 1, 0, 1, 0.0)


def test_depths_of_trees_have_their_own_limit() -> None:
    found = make([[0.0, 0.3], [0.3, 0.0]], by_depth=True)
    near_R, unexplained_R = judge_rounds(found, Noise((0.05, 0.2), 0.02, 100))
    assert (near_R.tolist(), unexplained_R.tolist()) == ([True, False], [False, True])


def test_agreement_counts_and_says_how_large_near_ties_are() -> None:
    """Near ties of 0.05 and 0.08, the larger of which is 1.6 times the noise; 4 of 7 tokens differ. At a spread of
    log(2) half of all tokens are drawn otherwise."""
    found = make([[0.0, 0.0], [0.05, 0.08], [0.0, 0.2], [INF]], spread=math.log(2))
    assert agreement(found, NOISE) == Agreement(
        rounds=4, alike=1, near_tie=1, unexplained=2, noise=0.05, noise_scale=0.02, largest=pytest.approx(1.6),
        tokens=7, flips=4, flips_expected=pytest.approx(3.5),
    )  # fmt: skip


def test_what_overflowed_is_not_alike_though_it_prefers_the_token() -> None:
    """Logits that are no numbers have an infinite margin; the largest of them is any."""
    broken = replace(make([[INF]]), same_N=np.array([True]), alike_R=np.array([True]))
    counted = agreement(broken, NOISE)
    assert (counted.alike, counted.near_tie, counted.unexplained) == (0, 0, 1)


def test_no_rounds_and_no_scales_are_counted_as_none() -> None:
    counted = agreement(make([]), NOISE)
    assert (counted.rounds, counted.tokens, counted.flips, counted.largest, counted.flips_expected) == (0, 0, 0, 0, 0)
    assert math.isnan(expected_flips(replace(make([[0.0]]), scales=(), spread_NZ=np.zeros((1, 0))), 0))


def test_packs_are_joined_with_their_rounds_numbered_through() -> None:
    parts = [make([[0.0, 0.2], [0.0]]), make([]), make([[0.3], [0.0, 0.0], [0.4]], requests=[4, 4, 4])]
    whole = join(parts)
    assert whole.round_N.tolist() == [0, 0, 1, 2, 3, 3, 4] and whole.rounds == 5
    assert whole.request_N.tolist() == [0] * 3 + [4] * 4
    assert whole.margin_N.tolist() == [0, 0.2, 0, 0.3, 0, 0, 0.4]
    assert whole.alike_R.tolist() == [False, True, False, True, False] and whole.spread_NZ.shape == (7, 1)


# ---- what rounding flips ----

TOKENS, CHOICES = 40000, 30


class Machines:
    """Logits of random tokens; a server and a replay each add Gaussian noise of their own, and prefer what is best."""

    def __init__(self, spread: float, deviation: float) -> None:
        generator = np.random.default_rng(7)
        self.exact_NW = generator.normal(size=(TOKENS, CHOICES)) * spread
        noises = (generator.normal(size=self.exact_NW.shape) for _ in range(2))
        self.replayed_NW, served_NW = (self.exact_NW + deviation * noise_NW for noise_NW in noises)
        self.served_N = served_NW.argmax(1)

    def followed(self, logits_NW: Floats, scales: tuple[float, ...] = ()) -> Followed:
        """One of them along what the server preferred, a token a round."""
        best_N = logits_NW.max(1)
        logit_N = np.take_along_axis(logits_NW, self.served_N[:, None], 1)[:, 0]
        margin_N = best_N - logit_N
        spreads = [np.log(np.exp((logits_NW - best_N[:, None]) / scale).sum(1)) for scale in scales]
        return Followed(
            np.zeros(TOKENS, dtype=np.int64), np.arange(TOKENS), np.ones(TOKENS, dtype=np.int64), margin_N,
            logit_N - np.log(np.exp(logits_NW).sum(1)), np.array(spreads).T.reshape(TOKENS, len(scales)),
            margin_N == 0, margin_N == 0, scales, CHOICES,
        )  # fmt: skip


def assert_as_many(counted: Agreement) -> None:
    """Within three Poisson errors, and the twentieth by which a logistic curve and a Gaussian one part: by hand, over
    all gaps of one density, log(2) * sqrt(3) / pi against 1 / sqrt(2 * pi), 0.382 against 0.399."""
    assert counted.flips > 200
    off = abs(counted.flips - counted.flips_expected)
    assert off < 3 * math.sqrt(counted.flips) + 0.05 * counted.flips


@pytest.mark.parametrize("deviation", [0.03, 0.1])
@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_flips_are_as_many_as_the_scale_of_the_gaps_expects(deviation: float, spread: float) -> None:
    """The gap between two tokens is off by four errors: of two tokens, on two machines."""
    machines = Machines(spread, deviation)
    noise = Noise((4 * deviation,), 2 * deviation * math.sqrt(3) / math.pi, TOKENS)
    counted = agreement(machines.followed(machines.replayed_NW, (noise.scale,)), noise)
    assert_as_many(counted)
    assert counted.unexplained <= 1e-3 * counted.rounds  # hardly a gap is off by four deviations of its own


@pytest.mark.parametrize("deviation", [0.03, 0.1])
@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_a_rounded_machine_flips_what_the_measured_scale_expects(deviation: float, spread: float) -> None:
    """Between a rounded machine and exact numbers, whatever the logits are; two machines flip sqrt(2) times as many.

    Log-odds are the gap of a tie of two, and a token's own error in a flat distribution: the scale lies between.
    """
    machines = Machines(spread, deviation)
    exact = machines.followed(machines.exact_NW)
    noise = measure_noise(machines.followed(machines.replayed_NW), exact)
    one = agreement(machines.followed(machines.exact_NW, (noise.scale,)), noise)
    two = agreement(machines.followed(machines.replayed_NW, (noise.scale,)), noise)
    assert one.flips > 100 and 0.85 < one.flips_expected / one.flips < 1.35
    assert two.flips / one.flips == pytest.approx(math.sqrt(2), rel=0.1)


def test_other_noise_than_rounding_flips_more_than_is_expected() -> None:
    """Margins that rounding explains one by one, and ten times as many of them."""
    found = make([[0.0]] * 900 + [[0.08]] * 100, spread=math.log1p(0.01))
    counted = agreement(found, NOISE)
    assert counted.unexplained == 0 and counted.flips_expected == pytest.approx(1000 * 0.01 / 1.01)
    assert counted.flips == 100
