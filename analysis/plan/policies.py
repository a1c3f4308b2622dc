"""Rules that go by the head's own confidence: accept length and tokens a second under a cost model.

A threshold ends what a request brings into the verify. Either drafting stops there too, or it goes on to the fixed
depth, as in an engine that runs all draft steps in one go and chooses afterwards what to verify. In vLLM (pull request
47808) the surest rows of a batch are chosen within a budget; in a large batch that is a threshold. The rounds are the
same under both; the cost of drafting is not.

A request that stops early brings fewer rows into the verify. Draft steps run for the whole batch until its last request
has stopped; rounds of a batch are taken to be independent, so the steps of a batch of b are the largest of b draws from
the rounds' own distribution. An engine whose kernels have a fixed size for every batch does not save the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import DEFAULT_RESAMPLES, Floats, ratios, resampled_sums
from replay.analysis.counts import length_interval
from replay.analysis.plan.costs import Machines, round_columns
from replay.analysis.plan.lengths import Length
from replay.analysis.plan.settings import PLAIN, Load, Setting, make_setting
from replay.errors import UsageError

Counts = npt.NDArray[np.int64]

# Products of chances below which drafting stops: a fine grid changes tokens a second by less than their interval.
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Played:
    """Rounds under one rule: a fixed depth (``threshold`` None), or a threshold with at most ``deepest`` steps.

    ``counts`` [requests, 2]: rounds and accepted tokens. ``drafted`` and ``verified`` [deepest + 1]: rounds with that
    many draft steps, and with that many drafted tokens verified.
    """

    threshold: float | None
    deepest: int
    counts: Counts
    drafted: Counts
    verified: Counts


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule at one load: its accept length, tokens drafted and verified a round, tokens a second by machine and draw.

    ``gain``: tokens a second over those of the best fixed depth, with its range over machines and draws.
    """

    load: Load
    threshold: float
    deepest: int
    accept_length: float
    drafted: float
    verified: float
    tokens_per_second: tuple[float, float, float]
    against: Setting
    gain: tuple[float, float, float]


def with_lengths(played: Sequence[Played], *, seed: int = 0) -> list[tuple[Played, Length]]:
    """Each rule with its accept length; all over the same resampled requests. Raises UsageError without a round."""
    if not all(one.counts[:, 0].any() for one in played):
        raise UsageError("no request of the trace has a round to draft in; capture longer outputs")
    joined = np.hstack([one.counts for one in played])
    sums = resampled_sums(joined, seed=seed, resamples=DEFAULT_RESAMPLES).reshape(DEFAULT_RESAMPLES, len(played), 2)
    found = []
    for place, one in enumerate(played):
        rounds, accepted = (int(total) for total in one.counts.sum(axis=0))
        draws = ratios(sums[:, place, 1] + sums[:, place, 0], sums[:, place, 0])
        draws = draws[np.isfinite(draws)]
        interval = length_interval(draws, one.counts[:, 0] > 0)
        found.append((one, Length((accepted + rounds) / rounds, interval, draws, "rounds")))
    return found


def depth_lengths(played: Sequence[tuple[Played, Length]]) -> dict[Setting, Length]:
    """By setting the accept lengths of fixed depths, and 1 without speculation."""
    plain = {PLAIN: Length(1.0, (1.0, 1.0), np.ones(1), "rounds")}
    return plain | {make_setting(one.deepest): length for one, length in played if one.threshold is None}


def drafted_on(one: Played) -> Played:
    """The same rounds where drafting goes on to the deepest step: fewer rows are verified, none is drafted less."""
    drafted = np.zeros_like(one.drafted)
    drafted[-1] = one.drafted.sum()
    return replace(one, drafted=drafted)


def judge_rules(
    played: Sequence[tuple[Played, Length]], loads: Sequence[Load], machines: Machines, *, drafting_on: bool = False
) -> tuple[Rule, ...]:
    """At each load the threshold with the most tokens a second, held against the best fixed depth there.

    ``drafting_on``: drafting goes on, and it only chooses what is verified. None where ``played`` has no threshold. The
    best of many is chosen and judged on the same requests, which flatters it by less than the interval of its gain.
    """
    fixed = [(one, length) for one, length in played if one.threshold is None]
    stopping = [
        (drafted_on(one) if drafting_on else one, length) for one, length in played if one.threshold is not None
    ]
    rules = []
    if not stopping:
        return ()
    for load in loads:
        speeds = {one.deepest: _speeds(one, length, load, machines) for one, length in fixed}
        best = max(speeds, key=lambda depth: float(speeds[depth].mean()))
        tried = [(one, length, _speeds(one, length, load, machines)) for one, length in stopping]
        one, length, speed_MD = max(tried, key=lambda item: float(item[2].mean()))
        rules.append(_rule(one, length, load, speed_MD, speeds[best], make_setting(best)))
    return tuple(rules)


def _rule(one: Played, length: Length, load: Load, speed_MD: Floats, best_MD: Floats, against: Setting) -> Rule:
    assert one.threshold is not None
    steps = np.arange(one.deepest + 1)
    rounds = one.drafted.sum()
    return Rule(
        load,
        one.threshold,
        one.deepest,
        length.value,
        float((one.drafted * steps).sum() / rounds),
        float((one.verified * steps).sum() / rounds),
        _spread(speed_MD),
        against,
        _spread(speed_MD / best_MD),
    )


def _spread(values_MD: Floats) -> tuple[float, float, float]:
    """The middle of the machines' medians, and the ends of their 95 % intervals."""
    low, middle, high = (np.quantile(values_MD, share, axis=1) for share in (0.025, 0.5, 0.975))
    return (float(middle.min() + middle.max()) / 2, float(low.min()), float(high.max()))


def _speeds(one: Played, length: Length, load: Load, machines: Machines) -> Floats:
    """Tokens a second of the batch by machine and draw [M, D]."""
    seconds_M = machines.corners @ mean_round(one, load)
    found: Floats = load.batch * length.draws[None, :] / seconds_M[:, None]
    return found


def mean_round(one: Played, load: Load) -> Floats:
    """How often each term of the cost model counts in a mean round of a batch under this rule [6]."""
    steps = np.arange(one.deepest + 1)
    verified = float((one.verified * steps).sum() / one.verified.sum())
    share = np.cumsum(one.drafted) / one.drafted.sum()  # of rounds with at most so many steps
    longest = float((1 - share[:-1] ** load.batch).sum())  # mean of the largest of ``batch`` draws
    return round_columns(load, rows=verified + 1, steps=longest, drafting=1.0)
