"""From what training reported down to what was served: one rung for each cause, and what each costs.

Every rung is an accept length on one scale, 1 + the sum of position rates, so that changes from rung to rung add up to
the whole gap. All rungs are resampled with the same requests, so that each change has a paired interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replay.analysis import wording
from replay.analysis.bootstrap import DEFAULT_RESAMPLES, Floats, percentile_interval
from replay.analysis.gaps import Gap
from replay.analysis.json_document import JsonObject, object_json
from replay.analysis.ladder.levels import NOTHING_SERVED, Level, Levels, Reached, Reported
from replay.analysis.ladder.shapley import shapley, subsets
from replay.traces.rounds import Rounds

if TYPE_CHECKING:
    import polars as pl

Interval = tuple[float, float]
NO_INTERVAL: Interval = (math.nan, math.nan)

TRAINING, VOCABULARY, JOINT, OWN = "training metric", "out-of-vocabulary", "joint", "own tokens"
WALK, OBSERVED, UNEXPLAINED = "served walk", "observed", "unexplained"


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing in which the server may differ from what training assumed; ``what`` says how, in a sentence."""

    name: str
    what: str
    differs: bool


@dataclass(frozen=True, slots=True)
class Replays:
    """Served walks with each choice of ``factors`` as the server has them and the others as training assumed.

    ``factors`` stand in the order of the ladder. ``variants`` names, for a choice of the names of those that differ,
    the variant in ``rounds`` that plays it; where some choices cannot be played, ``unplayable`` says why, and those
    along the ladder are there all the same. ``verify`` is the server's acceptance rule; the walks are greedy ones.
    """

    rounds: Rounds
    factors: tuple[Factor, ...]
    variants: Mapping[frozenset[str], str]
    unplayable: str = ""
    verify: str = "greedy"

    @property
    def differing(self) -> tuple[str, ...]:
        """The names of the factors that differ, in the ladder's order."""
        return tuple(factor.name for factor in self.factors if factor.differs)


@dataclass(frozen=True, slots=True)
class Rung:
    """One level and its change from the level before. nan, with no counts, stands where something was not measured.

    ``observed`` has a level only and ``unexplained`` a change only, which is what is left of the gap.
    """

    name: str
    what: str
    accept_length: float
    ci95: Interval
    change: float
    change_ci95: Interval
    counts: Reached | None

    @property
    def verdict(self) -> str | None:
        """Of the change: ``better``, ``worse``, ``equal`` or ``cannot tell``; None where there is no change."""
        return None if math.isnan(self.change) else Gap(self.name, self.change, self.change_ci95).verdict


@dataclass(frozen=True, slots=True)
class Share:
    """What one factor costs: averaged over all orders, and where it stands in the ladder.

    ``interacts``: each of the two lies outside the other's interval, so the cost depends on what else is wrong.
    """

    factor: str
    change: float
    ci95: Interval
    in_order: float
    in_order_ci95: Interval
    interacts: bool


@dataclass(frozen=True, slots=True)
class Attribution:
    """Shapley shares of the change from the served walk as training assumed it to the one as served; they add up."""

    shares: tuple[Share, ...]
    total: float
    total_ci95: Interval
    replays: int


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs from the training metric down, shares that no order decides, and what to bear in mind."""

    rungs: tuple[Rung, ...]
    attribution: Attribution | None
    notes: tuple[str, ...]

    def rung(self, name: str) -> Rung:
        """The rung called ``name``."""
        return next(rung for rung in self.rungs if rung.name == name)


def build_ladder(
    anchors: "pl.DataFrame",
    replays: Replays,
    *,
    observed: float | Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    resamples: int = DEFAULT_RESAMPLES,
) -> Ladder:
    """The ladder of the counts that simulator/teacher_forced.py made (``anchors``) and of ``replays``.

    ``observed``: an accept length, or by request id the server's rounds by accepted tokens; None takes what the server
    reported in the trace. Raises UsageError for an accept length that cannot be or histograms of other requests.
    """
    reported = Reported.of(observed, replays.rounds.requests)
    levels = Levels(anchors, replays.rounds, reported, seed=seed, resamples=resamples)
    climbing = _Climb()
    _training_rungs(climbing, levels)
    _served_rungs(climbing, levels, replays)
    climbing.end(levels.observed(), reported)
    attribution = None if replays.unplayable else _attribution(climbing.rungs, levels, replays)
    return Ladder(tuple(climbing.rungs), attribution, tuple(_notes(replays, levels, reported)))


class _Climb:
    """Rungs so far and the last level that was measured."""

    def __init__(self) -> None:
        self.rungs: list[Rung] = []
        self.at: Level | None = None

    def step(self, name: str, what: str, level: Level | None) -> None:
        """One rung further; without a level, one that was not measured."""
        if level is None:
            self.rungs.append(Rung(name, what, math.nan, NO_INTERVAL, math.nan, NO_INTERVAL, None))
            return
        change, interval = (math.nan, NO_INTERVAL) if self.at is None else _change(self.at, level)
        self.rungs.append(Rung(name, what, level.value, level.ci95, change, interval, level.reached))
        self.at = level

    def end(self, observed: Level | None, reported: Reported) -> None:
        """What was observed, and what of it the rungs before leave unexplained."""
        before = self.at
        self.step(OBSERVED, reported.what, observed)
        change, interval = self.rungs[-1].change, self.rungs[-1].change_ci95
        self.rungs[-1] = replace(self.rungs[-1], change=math.nan, change_ci95=NO_INTERVAL)
        self.at = before
        left = "What was observed beyond the replay of the server as described: engine state, or a cause not named."
        what = left if observed is not None else f"Not measured: {NOTHING_SERVED}"
        self.rungs.append(Rung(UNEXPLAINED, what, math.nan, NO_INTERVAL, change, interval, None))


def _training_rungs(climbing: _Climb, levels: Levels) -> None:
    text = "given text" if levels.taught_differ else "the target's own text"
    climbing.step(
        TRAINING,
        f"Every anchor of {text}, fed its own tokens: right / targets that the head can draft, multiplied up over the "
        "steps (SpecForge's simulated_acc_len, which leaves out the 1, where its accuracies mask such targets).",
        levels.products("in_vocabulary"),
    )
    climbing.step(
        VOCABULARY,
        "Targets outside the draft vocabulary count as misses (as in EAGLE's trainer and SpecForge of 2025, "
        "core/eagle3.py; speculators asks for the likeliest token inside the vocabulary instead).",
        levels.products("recorded"),
    )
    climbing.step(
        JOINT,
        "A step counts where all steps before it were right too, at the same anchor, instead of a product of averages "
        "(Automodel's tau_sim, speculators' full_acc).",
        levels.joint_as_taught(),
    )
    own = {
        "both": "The same over the target's own outputs, which is what a server drafts for.",
        "generated": "Not measured: every output here is the target's own, so the rungs above stand on it already; for "
        "the training text as well, capture prompt rows that hold `response`.",
        "forced": "Not measured: every output here was given; capture the same prompts without `response`.",
    }[levels.texts]
    climbing.step(OWN, own, levels.joint_of_own() if levels.texts == "both" else None)


def _served_rungs(climbing: _Climb, levels: Levels, replays: Replays) -> None:
    on: frozenset[str] = frozenset()
    climbing.step(
        WALK,
        "Rounds as a server runs them, each going on after accepted + 1 tokens until the output ends, in fp32 with the "
        "wiring, steps and draft KV that training assumed: easy stretches make many anchors and few rounds.",
        levels.walk(replays.variants[on]),
    )
    for factor in replays.factors:
        on |= {factor.name} if factor.differs else set()
        climbing.step(factor.name, factor.what, levels.walk(replays.variants[on]))


def _attribution(rungs: Sequence[Rung], levels: Levels, replays: Replays) -> Attribution:
    names = replays.differing
    values = {chosen: levels.walk(replays.variants[chosen]).values for chosen in subsets(names)}
    in_order = {rung.name: rung for rung in rungs}
    shares = []
    for name, share in shapley(values, names).items():
        interval = levels.interval(share)
        rung = in_order[name]
        apart = _outside(rung.change, interval) and _outside(float(share[0]), rung.change_ci95)
        shares.append(Share(name, float(share[0]), interval, rung.change, rung.change_ci95, apart))
    total = values[frozenset(names)] - values[frozenset()]
    distinct = len({replays.variants[chosen] for chosen in values})
    return Attribution(tuple(shares), float(total[0]), levels.interval(total), distinct)


def _outside(value: float, interval: Interval) -> bool:
    """Whether it lies out of the interval by more than rounding; never where there is none."""
    low, high = interval
    return bool(value < low - 1e-9 or value > high + 1e-9)


def _change(before: Level, after: Level) -> tuple[float, Interval]:
    values: Floats = after.values - before.values
    # A number that came alone has no counts; against it the other side's resamples are all there is.
    alone = after.reached is None
    interval = percentile_interval(values[1:]) if before.drawn and (after.drawn or alone) else NO_INTERVAL
    return float(values[0]), interval


def _notes(replays: Replays, levels: Levels, reported: Reported) -> list[str]:
    notes = []
    if replays.unplayable:
        notes.append(f"No order-free shares: not every choice of causes can be replayed ({replays.unplayable}).")
    if replays.verify != "greedy":
        notes.append(
            f"The server verifies by the rule {replays.verify}; every rung holds drafts against the recorded tokens, "
            "so what the rule itself adds or takes is among the unexplained."
        )
    if levels.texts == "forced":
        notes.append("Served rungs follow text that was given, which no server would have served.")
    warm = sorted({request.temperature for request in replays.rounds.requests if request.temperature > 0})
    if warm:
        notes.append(
            f"Outputs were sampled (temperature {', '.join(f'{value:g}' for value in warm)}): what was drawn counts as "
            "right on every rung, where a trainer counts the likeliest token."
        )
    if reported.accept_length is not None:
        notes.append("The observed accept length came as one number: its own noise is in no interval.")
    if levels.left_out:
        seen = wording.counted(levels.left_out, "request")
        notes.append(f"No rounds were reported for {seen}; they are left out of every rung over the target's own text.")
    return notes


def ladder_json(ladder: Ladder | None) -> JsonObject:
    """``ladder`` (the rungs), ``attribution`` and ``notes`` of ``replay diagnose --json``; empty without a ladder."""
    if ladder is None:
        return {"ladder": [], "attribution": None, "notes": []}
    rungs = [{**object_json(rung), "verdict": rung.verdict} for rung in ladder.rungs]
    return object_json({"ladder": rungs, "attribution": ladder.attribution, "notes": ladder.notes})
