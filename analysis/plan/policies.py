"""Rules that go by the head's own confidence: accept length and tokens a second under a cost model.

A threshold ends what a request brings into the verify. Either drafting stops there too, or it goes on to the fixed
depth, as in an engine that runs all draft steps in one go and chooses afterwards what to verify. In vLLM (pull request
47808) the surest rows of a batch are chosen within a budget; in a large batch that is a threshold. The rounds are the
same under both; the cost of drafting is not.

A request that stops early brings fewer rows into the verify. Draft steps run for the whole batch until its last request
has stopped; rounds of a batch are taken to be independent, so the steps of a batch of b are the largest of b draws from
the rounds' own distribution. An engine whose kernels have a fixed size for every batch does not save the rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import DEFAULT_RESAMPLES, Floats, ratios, resampled_sums
from replay.analysis.counts import length_interval
from replay.analysis.plan.costs import TERMS, Machines, round_columns
from replay.analysis.plan.lengths import Length
from replay.analysis.plan.settings import PLAIN, Load, Setting, make_setting
from replay.errors import UsageError

Counts = npt.NDArray[np.int64]

# Products of chances below which drafting stops: a fine grid changes tokens a second by less than their interval.
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_FOLDS = 5  # parts of the requests; each is judged by what the other parts choose
_HEAD = 3  # of ``_by_request``: columns before the drafted ones


@dataclass(frozen=True, slots=True)
class Played:
    """Rounds under one rule: a fixed depth (``threshold`` None), or a threshold with at most ``deepest`` steps.

    ``counts`` [requests, 2]: rounds and accepted tokens. ``drafted`` and ``verified`` [requests, deepest + 1]: rounds
    of each request with that many draft steps, and with that many drafted tokens verified.
    """

    threshold: float | None
    deepest: int
    counts: Counts
    drafted: Counts
    verified: Counts


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule at one load: its accept length, tokens drafted and verified a round, tokens a second by machine and draw.

    ``gain``: tokens a second over those of the best fixed depth, with its range over machines and draws; of requests
    that were judged by a rule which others chose. Its range is (nan, nan) for a single request, which no other judges.
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
    drafted[:, -1] = one.drafted.sum(axis=1)
    return replace(one, drafted=drafted)


def judge_rules(
    played: Sequence[tuple[Played, Length]],
    loads: Sequence[Load],
    machines: Machines,
    *,
    drafting_on: bool = False,
    seed: int = 0,
) -> tuple[Rule, ...]:
    """At each load the threshold with the most tokens a second, held against the best fixed depth there.

    ``drafting_on``: drafting goes on, and it only chooses what is verified. Empty where ``played`` has no threshold.
    The best of many looks better than it is on the requests that chose it. So requests fall into five parts (as many
    as there are, if fewer); each part is played under the rule that the others choose (cross-validation: Stone,
    Journal of the Royal Statistical Society B 36, 1974), and ``gain`` is of all parts together. The fixed depth is
    the best on all requests, which flatters it, so a gain is rather too small.
    """
    fixed = [one for one, _ in played if one.threshold is None]
    stopping = [drafted_on(one) if drafting_on else one for one, _ in played if one.threshold is not None]
    if not stopping:
        return ()
    return tuple(_judged(stopping, fixed, load, machines, seed) for load in loads)


def _judged(stopping: Sequence[Played], fixed: Sequence[Played], load: Load, machines: Machines, seed: int) -> Rule:
    parts = _parts(len(stopping[0].counts))
    every = np.ones((1, parts.shape[1]), dtype=np.int64)
    choosing = np.vstack([every, 1 - parts])  # all requests, then those outside each part
    (best, *others), (against, *_) = (_fastest(ones, choosing, load, machines) for ones in (stopping, fixed))
    speeds_MD, against_MD, held_MD = _drawn(
        [[(best, None)], [(against, None)], list(zip(others, parts, strict=True)) or [(best, None)]],
        load,
        machines,
        seed,
    )
    gain = _spread(held_MD / against_MD) if len(parts) else (_spread(speeds_MD / against_MD)[0], np.nan, np.nan)
    return _rule(best, load, _spread(speeds_MD), make_setting(against.deepest), gain)


def _parts(requests: int) -> Counts:
    """[parts, requests]: 1 where a request is in that part; no part of a single request."""
    parts = min(_FOLDS, requests) if requests > 1 else 0
    found: Counts = (np.arange(requests)[None, :] % max(parts, 1) == np.arange(parts)[:, None]).astype(np.int64)
    return found


def _fastest(ones: Sequence[Played], choosing: Counts, load: Load, machines: Machines) -> Iterator[Played]:
    """For each row of ``choosing`` [rows, requests] the one with the most tokens a second on its requests."""
    speeds = [_speeds([choosing @ _by_request(one)], load, machines).mean(axis=0) for one in ones]
    for row in np.nan_to_num(np.stack(speeds, axis=1)):
        yield ones[int(row.argmax())]


def _drawn(
    wanted: Sequence[Sequence[tuple[Played, Counts | None]]], load: Load, machines: Machines, seed: int
) -> Iterator[Floats]:
    """Tokens a second [M, D] of each of ``wanted``, rules with the requests of each; all see the same draws."""
    for pieces in wanted:
        sums = []
        for one, chosen in pieces:
            counts = _by_request(one) if chosen is None else _by_request(one) * chosen[:, None]
            sums.append(resampled_sums(counts, seed=seed, resamples=DEFAULT_RESAMPLES))
        yield _speeds(sums, load, machines)


def _by_request(one: Played) -> Counts:
    """[requests, 3 + deepest + 1]: rounds, accepted tokens and verified tokens, and rounds by draft steps."""
    verified = one.verified @ np.arange(one.deepest + 1)
    found: Counts = np.hstack([one.counts, verified[:, None], one.drafted])
    return found


def _speeds(pieces: Sequence[npt.NDArray[np.generic]], load: Load, machines: Machines) -> Floats:
    """Tokens a second of the batch by machine and draw [M, D]; nan where no round was drawn.

    ``pieces`` are sums of ``_by_request`` [D, 3 + deepest + 1], each of its own requests under its own rule. Each takes
    its own time; tokens and times are added.
    """
    tokens_D: Floats = np.zeros(len(pieces[0]))
    seconds_MD: Floats = np.zeros((len(machines.corners), len(pieces[0])))
    for sums in (np.asarray(piece, dtype=np.float64) for piece in pieces):
        tokens_D = tokens_D + sums[:, 0] + sums[:, 1]
        seconds_MD = seconds_MD + machines.corners @ (mean_rounds(sums, load) * sums[:, :1]).T
    return ratios(np.broadcast_to(load.batch * tokens_D, seconds_MD.shape), seconds_MD)


def mean_rounds(sums: Floats, load: Load) -> Floats:
    """How often each term of the cost model counts in a mean round of a batch [D, 6]; 0 where no round is.

    ``sums`` [D, 3 + deepest + 1]: rounds, accepted tokens, verified tokens, and rounds by draft steps.
    """
    rounds = np.maximum(sums[:, :1], 1)
    share = np.cumsum(sums[:, _HEAD:], axis=1) / rounds  # of rounds with at most so many steps
    longest = (1 - share[:, :-1] ** load.batch).sum(axis=1)  # mean of the largest of ``batch`` draws
    rows = sums[:, 2] / rounds[:, 0] + 1
    terms = [round_columns(load, rows=row, steps=steps, drafting=1.0) for row, steps in zip(rows, longest, strict=True)]
    return np.array(terms).reshape(-1, len(TERMS)) * (sums[:, :1] > 0)


def _rule(
    one: Played, load: Load, speed: tuple[float, float, float], against: Setting, gain: tuple[float, float, float]
) -> Rule:
    assert one.threshold is not None
    steps = np.arange(one.deepest + 1)
    rounds, accepted = one.counts.sum(axis=0)
    return Rule(
        load,
        one.threshold,
        one.deepest,
        float((rounds + accepted) / rounds),
        float((one.drafted @ steps).sum() / rounds),
        float((one.verified @ steps).sum() / rounds),
        speed,
        against,
        gain,
    )


def _spread(values_MD: Floats) -> tuple[float, float, float]:
    """The middle of the machines' medians, and the ends of their 95 % intervals."""
    kept_MD = values_MD[:, np.isfinite(values_MD).all(axis=0)]
    low, middle, high = (np.quantile(kept_MD, share, axis=1) for share in (0.025, 0.5, 0.975))
    return (float(middle.min() + middle.max()) / 2, float(low.min()), float(high.max()))
