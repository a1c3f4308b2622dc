"""P values of differences: against scipy, and by simulation how often 64 variants are told apart, rightly or not."""

import math
import random

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats
from support.rounds_maker import make_rounds, make_variant

from replay.analysis.compare.compare import compare_variants
from replay.analysis.compare.doubts import doubts
from replay.analysis.compare.pairing import pair_rounds
from replay.analysis.compare.report import answer
from replay.analysis.counts import ACCEPTED, ROUNDS, WIDTH, Counts
from replay.analysis.p_values import LEVEL, holm, least_p_value, paired_p_value, two_sided

Shares = npt.NDArray[np.float64]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 7, 10, 79, 80, 2001])
def test_students_t_is_that_of_scipy(freedom: int) -> None:
    for t in (0.0, 0.1, 1.0, -2.0, 3.3, 5.0, 8.0, 40.0, math.inf):
        assert two_sided(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-13)


def test_of_equal_rounds_a_request_it_is_the_paired_t_test() -> None:
    """With as many rounds in every request a ratio of sums is a mean of ratios."""
    rng = np.random.default_rng(3)
    one, other = (np.zeros((9, WIDTH), dtype=np.int64) for _ in range(2))
    one[:, ROUNDS] = other[:, ROUNDS] = 10
    one[:, ACCEPTED], other[:, ACCEPTED] = rng.integers(0, 30, 9), rng.integers(0, 30, 9)
    peer = stats.ttest_rel(one[:, ACCEPTED] / 10, other[:, ACCEPTED] / 10)
    assert paired_p_value(one, other) == pytest.approx(peer.pvalue)


def test_few_requests_have_no_small_p_value() -> None:
    """Three requests that differ alike: no spread, an infinite t, and yet no more than three coins can say."""
    one, other = (np.array([[10, accepted, 0, 0]] * 3) for accepted in (20, 10))
    assert paired_p_value(one, other) == least_p_value(3) == 0.25
    assert paired_p_value(one, one) == 1.0
    assert math.isnan(paired_p_value(one[:1], other[:1]))


def _counts(rng: np.random.Generator, rates: Shares) -> Counts:
    """Requests of very unequal length whose drafts of 5 tokens are right with ``rates``, one for each request."""
    counts = np.zeros((len(rates), WIDTH), dtype=np.int64)
    counts[:, ROUNDS] = left = np.exp(rng.normal(3, 0.8, len(rates))).astype(int) + 1
    for _ in range(5):
        left = rng.binomial(left, rates)
        counts[:, ACCEPTED] += left
    return counts


def _against_the_first(rng: np.random.Generator, requests: int, better: int, by: float) -> list[float]:
    """P values of 63 variants, the first ``better`` of which draft each token right more often by ``by``."""
    shared = rng.beta(4, 4, requests)
    first = _counts(rng, shared)
    own = [shared + rng.normal(0, 0.05, requests) + by * (place < better) for place in range(63)]
    return [paired_p_value(_counts(rng, np.clip(rates, 0.01, 0.99)), first) for rates in own]


def test_64_variants_that_do_not_differ_are_not_told_apart() -> None:
    """5 in 100 such sweeps may name one; the tail that Holm reads is checked too, far beyond 1 in 2,000."""
    rng = np.random.default_rng(1)
    sweeps = [_against_the_first(rng, 40, 0, 0.0) for _ in range(120)]
    wrong = sum(min(holm({str(place): p for place, p in enumerate(found)}).values()) <= LEVEL for found in sweeps)
    assert wrong <= stats.binom.ppf(0.99, len(sweeps), LEVEL)
    every = np.array(sweeps)
    assert 0.03 < (every <= 0.05).mean() < 0.06
    assert (every <= 0.01).mean() < 0.013
    assert (every <= LEVEL / 63).mean() < 2 * LEVEL / 63


def test_64_variants_that_differ_are_told_apart() -> None:
    rng = np.random.default_rng(2)
    told = []
    for _ in range(40):
        p_values = _against_the_first(rng, 80, 8, 0.15)
        adjusted = list(holm({str(place): p for place, p in enumerate(p_values)}).values())
        told.append(np.mean([p <= LEVEL for p in adjusted[:8]]))
    assert np.mean(told) > 0.8


def _sweep(requests: int) -> list[str]:
    """The report's sentences on 63 variants that each accept much less than the first."""
    rng = random.Random(4)
    played = {}
    for place in range(64):
        rates = [0.6 - 0.2 * (place > 0) + rng.uniform(-0.05, 0.05) for _ in range(requests)]
        rounds = [[sum(np.cumprod([rng.random() < rate for _ in range(3)])) for _ in range(12)] for rate in rates]
        played[make_variant(f"v{place}", kv=str(place))] = rounds
    found = compare_variants(pair_rounds(make_rounds(played)), resamples=200)
    return [answer(found), *doubts(found)]


def test_a_command_with_63_comparisons_calls_them_worse() -> None:
    """Once "63 cannot tell": 2,000 resamples gave no p value that Holm's adjustment left below 0.05."""
    said = _sweep(30)
    assert said[0] == "63 variants against v0: 63 worse."
    assert not any("comparisons" in doubt for doubt in said[1:])


def test_where_the_requests_are_the_limit_a_doubt_says_so() -> None:
    said = _sweep(8)
    assert said[0] == "63 variants against v0: 63 cannot tell."
    (doubt,) = [one for one in said[1:] if "comparisons" in one]
    assert doubt.startswith("8 requests cannot call any difference better or worse among 63 comparisons")
    assert doubt.endswith("capture at least 12.") and 63 * least_p_value(12) <= LEVEL < 63 * least_p_value(11)
