"""A cost model of a server, and every machine of that kind that the timings leave possible.

Seconds of a round at batch b, with n rows of each request in the verify (1 without speculation), k steps and topk t:

    pass + row b n + kv b c                       the target: weights read once, each row, each token of context c
    + [k > 0] rest + k (draft + draft-row b t)    what drafting adds to a round, and to each of its steps

No term is below 0. A few timings seldom determine all of them. So nothing is fitted to a point: ``Machines`` holds
corners of the set of all cost models that meet every timing within its error, and a prediction is the range over these.
Corners come from linear programs (scipy's HiGHS). Where the timings cannot tell, the range is wide and says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replay.analysis.bootstrap import Floats
from replay.analysis.plan.settings import Load, Setting, read_pairs
from replay.analysis.plan.timings import Timing
from replay.errors import UsageError

TERMS = ("pass", "row", "kv", "rest", "draft", "draft-row")  # as people type them, in milliseconds
NO_TIMING = "no timing of a server was given; type --time batch=1,tok/s=N, or --bench FILE, or --cost"
_RANDOM = 64  # corners in directions of chance, beside those that settings call for
_ROOM = 20.0  # times the longest timing: what one term may be where nothing bounds it
_WORST = 0.5  # share by which a timing may be off before nothing is said
_LOOSE = 1e-6  # of the least misfit: the linear program that found it is exact to about this share


@dataclass(frozen=True, slots=True)
class Machines:
    """Corners [M, 6] of the cost models that are possible, in seconds by term of ``TERMS``.

    ``misfit``: the least share by which some timing is off under every cost model beyond its own error (0: all are
    met). ``typed`` names the terms that were given.
    """

    corners: Floats
    misfit: float
    typed: tuple[str, ...]

    def seconds(self, setting: Setting, load: Load) -> Floats:
        """Seconds of a round under each of the M cost models [M]."""
        found: Floats = self.corners @ columns(setting, load)
        return found


def columns(setting: Setting, load: Load) -> Floats:
    """How often each term of ``TERMS`` counts in a round [6]."""
    rows = setting.num_draft_tokens if setting.speculates else 1
    return round_columns(load, rows=rows, steps=setting.steps, drafting=float(setting.speculates), topk=setting.topk)


def round_columns(load: Load, *, rows: float, steps: float, drafting: float, topk: int = 1) -> Floats:
    """The same for a mean round: ``rows`` of each request in the verify, ``steps`` run for the batch."""
    context = load.batch * (load.context or 0)
    return np.array([1.0, load.batch * rows, context, drafting, steps, steps * load.batch * topk], dtype=float)


def typed_costs(texts: Sequence[str]) -> dict[str, float]:
    """What was typed after --cost, such as ``pass=37.7,rest=35,draft=26``: milliseconds in, seconds by term out.

    Raises UsageError for another term, one that is there twice and a value that is no number.
    """
    found: dict[str, float] = {}
    for text in texts:
        for name, value in read_pairs(text, "--cost", {term: term for term in TERMS}).items():
            if name in found:
                raise UsageError(f"--cost says {name} twice; type it once")
            found[name] = value / 1000
    return found


def possible_machines(
    timings: Sequence[Timing],
    typed: Mapping[str, float],
    asked: Sequence[tuple[Setting, Load]],
    *,
    seed: int = 0,
) -> Machines:
    """Corners of the cost models that meet ``timings`` and have the ``typed`` terms.

    For each setting that is ``asked`` its least and its greatest time are among the corners. Without any timing the
    terms that were not typed are 0. Raises UsageError where there is neither a timing nor a typed term.
    """
    if not timings:
        if not typed:
            raise UsageError(NO_TIMING)
        if not typed.get("pass"):
            raise UsageError("--cost says no time of the target's pass; type pass=MS, as in pass=37.7,rest=35,draft=26")
        return Machines(np.array([[typed.get(term, 0.0) for term in TERMS]]), 0.0, tuple(typed))
    rows = np.stack([columns(timing.setting, timing.load) for timing in timings])
    wanted = np.array([timing.seconds for timing in timings])
    bounds = _bounds(rows, wanted, typed, [columns(*item) for item in asked])
    misfit = _least_misfit(rows, wanted, np.array([timing.error for timing in timings]), bounds)
    errors = np.array([timing.error for timing in timings]) + misfit * (1 + _LOOSE)
    directions = [sign * columns(*item) for item in asked for sign in (1, -1)]
    rng = np.random.default_rng(seed)
    scale = np.maximum(rows.max(axis=0), 1e-12)
    directions += list(rng.normal(size=(_RANDOM, len(TERMS))) * scale)
    corners = [_solve(direction, rows, wanted, errors, bounds) for direction in directions]
    return Machines(np.unique(np.stack(corners), axis=0), misfit, tuple(typed))


def _bounds(
    rows: Floats, wanted: Floats, typed: Mapping[str, float], asked: Sequence[Floats]
) -> list[tuple[float, float]]:
    """What each term may be: as typed; 0 where no timing and no question has it; else with room above."""
    every = np.vstack([rows, *asked]) if asked else rows
    bounds = []
    for index, term in enumerate(TERMS):
        if term in typed:
            bounds.append((typed[term], typed[term]))
        elif not every[:, index].any():
            bounds.append((0.0, 0.0))
        else:
            counted = every[:, index][every[:, index] > 0].min()
            bounds.append((0.0, _ROOM * float(wanted.max()) / float(counted)))
    return bounds


def _least_misfit(rows: Floats, wanted: Floats, errors: Floats, bounds: Sequence[tuple[float, float]]) -> float:
    """The least share by which every error has to grow so that one cost model meets all timings."""
    from scipy.optimize import linprog

    scaled = rows / wanted[:, None]
    one = np.ones((len(rows), 1))
    found = linprog(
        np.append(np.zeros(rows.shape[1]), 1.0),
        A_ub=np.vstack([np.hstack([scaled, -one]), np.hstack([-scaled, -one])]),
        b_ub=np.concatenate([1 + errors, errors - 1]),
        bounds=[*bounds, (0, None)],
        method="highs",
    )
    if not found.success or found.x[-1] > _WORST:
        raise UsageError(
            f"no server has all of these timings and typed costs: some would be off by {100 * _WORST:.0f} % or more; "
            "leave out what was measured elsewhere"
        )
    return float(found.x[-1])


def _solve(
    direction: Floats, rows: Floats, wanted: Floats, errors: Floats, bounds: Sequence[tuple[float, float]]
) -> Floats:
    """The cost model [6] that is least in ``direction`` among those that meet every timing."""
    from scipy.optimize import linprog

    scaled = rows / wanted[:, None]
    found = linprog(
        direction, A_ub=np.vstack([scaled, -scaled]), b_ub=np.concatenate([1 + errors, errors - 1]), bounds=bounds,
        method="highs",
    )  # fmt: skip
    if not found.success:
        raise UsageError(f"the cost model has no solution ({found.message}); leave out the timing that is least sure")
    corner: Floats = np.maximum(found.x, 0.0)
    return corner
