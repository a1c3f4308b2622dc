"""Checkpoints of a training run as a curve: the accept length by step, of each run and under each setting.

A checkpoint's step is the number that its folder's name ends with (``checkpoint-500``); those beside each other in one
folder are of one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.summary import VariantSummary
from replay.analysis.tables import Fitted, column
from replay.printable import one_line
from replay.traces.rounds import Rounds

_BAR = 20  # cells of the longest bar
_MOST_NAME = 60  # characters of a run's name


@dataclass(frozen=True, slots=True)
class Point:
    """One checkpoint: its step and what was counted."""

    step: int
    summary: VariantSummary


@dataclass(frozen=True, slots=True)
class Curve:
    """The checkpoints of one ``run`` under one ``setting`` (empty: all have the same), by step."""

    run: str
    setting: str
    points: tuple[Point, ...]


def curves(rounds: Rounds, summaries: Sequence[VariantSummary]) -> tuple[Curve, ...]:
    """A curve wherever a run has two steps or more."""
    facts = [name for name in wording.varying(summaries) if name not in ("draft", "name")]
    found: dict[tuple[str, str], list[Point]] = {}
    for row in summaries:
        head = rounds.drafts.get(row.draft) or {}
        if (step := head.get("step")) is None:
            continue
        run = str(PurePath(str(head.get("path") or "")).parent)
        setting = " · ".join(wording.phrase(row, name) for name in facts)
        found.setdefault((run, setting), []).append(Point(step, row))
    runs = dict.fromkeys(run for run, _ in found)
    names = _short([*runs])
    return tuple(
        Curve(names[run], setting, tuple(sorted(points, key=lambda point: point.step)))
        for (run, setting), points in found.items()
        if len({point.step for point in points}) > 1
    )


def _short(runs: Sequence[str]) -> dict[str, str]:
    """The end of each path that tells it from the others."""
    for parts in range(1, max((len(PurePath(run).parts) for run in runs), default=0) + 1):
        names = ["/".join(PurePath(run).parts[-parts:]) for run in runs]
        if len(set(names)) == len(names):
            return dict(zip(runs, names, strict=True))
    return {run: run for run in runs}


def render_curves(found: Sequence[Curve], together: Sequence[VariantSummary]) -> RenderableType:
    """A table for each, with a bar from an accept length of 1, where nothing is accepted, to the longest.

    ``together`` are the best variant and those that are not told apart from it.
    """
    longest = max((point.summary.accept_length for curve in found for point in curve.points), default=1.0)
    parts: list[RenderableType] = []
    for curve in found:
        if parts:
            parts.append(Text())
        said = [one_line(curve.run, _MOST_NAME) if len({one.run for one in found}) > 1 else "", curve.setting]
        if title := " · ".join(filter(None, said)):
            parts.append(Text(title, style="bold"))
        parts.append(_table(curve, longest, together))
    return Group(*parts)


def _table(curve: Curve, longest: float, together: Sequence[VariantSummary]) -> RenderableType:
    rows = [point.summary for point in curve.points]
    lengths = column("accept\nlength", [wording.decimal(row.accept_length) for row in rows])
    intervals = column("95 %\ninterval", [wording.interval(row.accept_length_ci95) for row in rows])
    marks = ["best" if row in together[:1] else "≈ best" if row in together else "" for row in rows]
    drawn = column("from 1", [_bar(row.accept_length, longest) for row in rows], left=True)
    steps = column("step", [f"{point.step:,}" for point in curve.points])
    return Fitted((steps,), ((lengths, intervals, column("", marks, left=True), drawn),), ())


def _bar(length: float, longest: float) -> str:
    """Half cells count, so that a small step up is seen."""
    if not longest > 1 or not length > 1:
        return "·"
    halves = round(2 * _BAR * (length - 1) / (longest - 1))
    return "█" * (halves // 2) + "▌" * (halves % 2) or "·"
