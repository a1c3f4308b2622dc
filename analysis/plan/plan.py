"""The plan: for every load and setting tokens a second with its range, and what to do at each load.

A setting's range joins two uncertainties: of the accept length (resampled requests) and of the time (all cost models
that the timings leave possible, costs.py). Settings are compared draw by draw and model by model, so that what both
have in common cancels. Percentages follow from counting these pairs' extremes, not from a distribution of cost models,
which nobody knows: "better" means better under every cost model that is possible, in 95 % of the draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan

import numpy as np

from replay.analysis.bootstrap import Floats
from replay.analysis.plan.costs import TERMS, Machines, possible_machines
from replay.analysis.plan.lengths import Length
from replay.analysis.plan.policies import Played, Rule, judge_rules
from replay.analysis.plan.settings import PLAIN, Load, Setting
from replay.analysis.plan.timings import Timing, plain_timing

# A time whose ends are further apart than this is not determined by the timings.
DETERMINED = 1.25
# Timings that no cost model of this kind meets within this share are in doubt.
MISFIT = 0.10


@dataclass(frozen=True, slots=True)
class Range:
    """A value between two ends."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether the ends are finite and near enough for the value to mean something."""
        return self.low > 0 and self.high / self.low <= DETERMINED


@dataclass(frozen=True, slots=True)
class Row:
    """One setting at one load.

    ``round_ms``: of one round. ``tokens_per_second`` of the whole batch and ``token_ms`` between two tokens of a
    request follow from it and ``accept_length``. ``break_even`` is the accept length at which it is as fast as without
    speculation, ``speedup`` its tokens a second over those without; both None where the time without is not known.
    ``timed``: this setting was timed at this load.
    """

    load: Load
    setting: Setting
    accept_length: Range
    length_source: str
    round_ms: Range
    tokens_per_second: Range
    token_ms: Range
    break_even: Range | None
    speedup: Range | None
    timed: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do at one load.

    ``advice`` is ``speculate``, ``do not speculate`` or ``cannot tell``. ``best`` has the most tokens a second;
    ``alike`` are the settings that cannot be told from it, best first. ``measure`` is the setting whose timing would
    tell most, where the timings do not determine the answer.
    """

    load: Load
    advice: str
    best: Row
    alike: tuple[Setting, ...]
    measure: Setting | None


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the cost model in milliseconds, as often as it counts, with its range."""

    name: str
    ms: Range
    typed: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows by load and setting, a choice for each load, and the cost model behind them.

    ``rules``: at each load the best rule that stops drafting by the head's confidence; ``verify_rules``: the best of
    those that only choose what is verified. None without a trace.
    """

    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]
    costs: tuple[Term, ...]
    timings: tuple[Timing, ...]
    misfit: float
    rules: tuple[Rule, ...] = ()
    verify_rules: tuple[Rule, ...] = ()


def make_plan(
    timings: Sequence[Timing],
    typed: Mapping[str, float],
    lengths: Mapping[Setting, Length],
    loads: Sequence[Load],
    *,
    played: Sequence[tuple[Played, Length]] = (),
    seed: int = 0,
) -> Plan:
    """Every setting of ``lengths`` at every load, and of rules that were ``played`` the best.

    Raises UsageError where the costs are not given (costs.py).
    """
    settings = sorted({PLAIN, *lengths})
    asked = [(setting, load) for load in loads for setting in settings]
    machines = possible_machines(timings, typed, asked, seed=seed)
    rows, choices = [], []
    for load in loads:
        times = {setting: _seconds(machines, timings, setting, load) for setting in settings}
        timed = [setting for setting in settings if times[setting].min() > 0]  # nothing may be told of a plain step
        speeds = {setting: _speeds(load, times[setting], lengths.get(setting)) for setting in timed}
        here = [_row(load, setting, times, lengths.get(setting), timings) for setting in timed]
        rows += here
        choices.append(_choose(load, here, speeds))
    rules, verify_rules = (judge_rules(played, loads, machines, drafting_on=on) for on in (False, True))
    return Plan(tuple(rows), tuple(choices), _terms(machines), tuple(timings), machines.misfit, rules, verify_rules)


def _seconds(machines: Machines, timings: Sequence[Timing], setting: Setting, load: Load) -> Floats:
    """Seconds of a round under each possible machine [M]; of a machine that leaves a timing unmet, the timing's own.

    Where the timings contradict a cost model of this kind, the setting's own timing is nearer to the truth than it.
    """
    modelled = machines.seconds(setting, load)
    own = next((timing for timing in timings if (timing.setting, timing.load) == (setting, load)), None)
    if own is None or machines.misfit <= own.error:
        return modelled
    return modelled.clip(own.seconds * (1 - own.error), own.seconds * (1 + own.error))


def _speeds(load: Load, seconds_M: Floats, length: Length | None) -> Floats:
    """Tokens a second of the batch by machine and draw [M, D]; nan where the accept length is not known."""
    draws_D = np.array([nan]) if length is None else length.draws
    found: Floats = load.batch * draws_D[None, :] / seconds_M[:, None]
    return found


def _row(
    load: Load,
    setting: Setting,
    times: Mapping[Setting, Floats],
    length: Length | None,
    timings: Sequence[Timing],
) -> Row:
    seconds_M = times[setting]
    accept = Range(nan, nan, nan) if length is None else Range(length.value, *length.ci95)
    took = _range(seconds_M)
    even = gain = None
    if (plain := _range(times[PLAIN])).known:
        paid_M = seconds_M / times[PLAIN]  # machine by machine, so that what both have in common cancels
        even = Range(took.value / plain.value, float(paid_M.min()), float(paid_M.max()))
        gain = Range(1 / even.value, 1 / even.high, 1 / even.low)
    return Row(
        load=load,
        setting=setting,
        accept_length=accept,
        length_source="" if length is None else length.source,
        round_ms=_scaled(took, 1000),
        tokens_per_second=_quotient(_scaled(accept, load.batch), took),
        token_ms=_scaled(_quotient(took, accept), 1000),
        break_even=even,
        speedup=None if gain is None else _product(accept, gain),
        timed=any((timing.setting, timing.load) == (setting, load) for timing in timings),
    )


def _range(values: Floats) -> Range:
    low, high = float(values.min()), float(values.max())
    return Range((low + high) / 2, low, high)


def _scaled(found: Range, factor: float) -> Range:
    return Range(found.value * factor, found.low * factor, found.high * factor)


def _product(a: Range, b: Range) -> Range:
    return Range(a.value * b.value, a.low * b.low, a.high * b.high)


def _quotient(a: Range, b: Range) -> Range:
    return Range(a.value / b.value, a.low / b.high, a.high / b.low)


def _choose(load: Load, rows: Sequence[Row], speeds: Mapping[Setting, Floats]) -> Choice:
    known = [row for row in rows if row.tokens_per_second.value == row.tokens_per_second.value]
    best = max(known, key=lambda row: row.tokens_per_second.value)
    alike = [row for row in known if row is not best and (_untold(row, best) or not _slower(speeds, row, best))]
    alike.sort(key=lambda row: -row.tokens_per_second.value)
    drafting = [row.setting.speculates for row in (best, *alike)]
    advice = "cannot tell" if len(set(drafting)) > 1 else "speculate" if drafting[0] else "do not speculate"
    if all(row.setting.speculates for row in rows):
        return Choice(load, "cannot tell", best, tuple(row.setting for row in alike), PLAIN)
    loose = [row for row in (best, *alike) if not row.round_ms.known]
    measure = max(loose, key=lambda row: _spread(row.round_ms)).setting if alike and loose else None
    return Choice(load, advice, best, tuple(row.setting for row in alike), measure)


def _untold(one: Row, other: Row) -> bool:
    """Whether an accept length has no interval, as that of a single request."""
    return isnan(one.accept_length.low) or isnan(other.accept_length.low)


def _slower(speeds: Mapping[Setting, Floats], one: Row, best: Row) -> bool:
    """Whether ``one`` is slower than ``best`` under every machine, in 97.5 % of the draws.

    Of draws that do not belong together the best of one is held against the worst of the other.
    """
    one_MD, best_MD = speeds[one.setting], speeds[best.setting]
    behind_MD = one_MD / best_MD if _paired(one, best) else _upper(one_MD)[:, None] / _lower(best_MD)[:, None]
    return bool((np.quantile(behind_MD, 0.975, axis=1) < 1).all())


def _paired(one: Row, other: Row) -> bool:
    """Whether draws of both belong together: of the same requests, or exactly known."""
    return all(row.length_source == "rounds" or row.accept_length.low == row.accept_length.high for row in (one, other))


def _upper(speeds_MD: Floats) -> Floats:
    found: Floats = np.quantile(speeds_MD, 0.975, axis=1)
    return found


def _lower(speeds_MD: Floats) -> Floats:
    found: Floats = np.quantile(speeds_MD, 0.025, axis=1)
    return found


def _spread(found: Range) -> float:
    return found.high / found.low if found.low > 0 else inf


def _terms(machines: Machines) -> tuple[Term, ...]:
    ranges = [_range(machines.corners[:, index] * 1000) for index in range(len(TERMS))]
    return tuple(
        Term(name, found, name in machines.typed)
        for name, found in zip(TERMS, ranges, strict=True)
        if found.high > 0 or name in machines.typed
    )


def untimed_plain(plan: Plan) -> list[Load]:
    """Loads at which nobody timed the server without speculation."""
    return [choice.load for choice in plan.choices if plain_timing(plan.timings, choice.load) is None]
