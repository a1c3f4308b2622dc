"""A ladder → what a person reads: a waterfall of accept lengths, what each rung is, shares, what to bear in mind."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from replay.analysis import wording
from replay.analysis.ladder.ladder import OBSERVED, UNEXPLAINED, Attribution, Ladder, Rung, Share
from replay.analysis.ladder.levels import Reached
from replay.analysis.tables import Column, Fitted

_BAR = 24
_LEFT, _LOST, _GAINED = "█", "░", "▓"
_LEGEND = "Bars from 1: █ what is left, ░ lost and ▓ gained on this rung; ≈ cannot be told from no change."


def render_ladder(ladder: Ladder) -> RenderableType:
    """The ladder as a renderable that adapts to the console's width."""
    parts: list[RenderableType] = [Text(answer(ladder), style="bold"), Text(), _waterfall(ladder.rungs)]
    parts += [Text(), Text(_LEGEND, style="dim"), Text(), _bold("What the rungs are")]
    parts.append(_pairs([(rung.name, _explained(rung)) for rung in ladder.rungs]))
    if ladder.attribution is not None:
        parts += [Text(), _bold("The same without an order"), *_shares(ladder.attribution)]
    if ladder.notes:
        parts += [Text(), _bold("To bear in mind"), _pairs([("•", note) for note in ladder.notes])]
    return Group(*parts)


def answer(ladder: Ladder) -> str:
    """Where it starts, where it ends, and on which rung most is lost."""
    measured = [rung for rung in ladder.rungs if not math.isnan(rung.accept_length)]
    first, last = measured[0], measured[-1]
    if math.isnan(first.accept_length) or first is last:
        return "Nothing was measured."
    end = OBSERVED if last.name == OBSERVED else "the replay as served"
    ends = f"{first.name} {wording.decimal(first.accept_length)} to {end} {wording.decimal(last.accept_length)}"
    lost = min((rung for rung in ladder.rungs if rung.verdict == "worse"), key=lambda rung: rung.change, default=None)
    if lost is None:
        return f"From {ends}: no rung loses anything that can be told from noise."
    low, high = sorted(-bound for bound in lost.change_ci95)
    return (
        f"From {ends}: most is lost at {lost.name}, {wording.decimal(-lost.change)} "
        f"(95 % interval {wording.interval((low, high))})."
    )


def _waterfall(rungs: Sequence[Rung]) -> RenderableType:
    top = max((rung.accept_length for rung in rungs if not math.isnan(rung.accept_length)), default=1.0)
    bars, before = [], math.nan
    for rung in rungs:
        bars.append(Text(_bar(rung, before, top)))
        if not math.isnan(rung.accept_length):
            before = rung.accept_length
    names = Column("rung", tuple(Text(rung.name) for rung in rungs), "left")
    numbers = (
        Column("accept\nlength", tuple(Text(wording.decimal(rung.accept_length)) for rung in rungs)),
        Column("change", tuple(Text(_change(rung.change, rung.verdict)) for rung in rungs)),
        Column("its 95 %\ninterval", tuple(Text(_within(rung)) for rung in rungs)),
    )
    return Fitted((names,), (numbers, (Column("", tuple(bars), "left"),)), ())


def _bar(rung: Rung, before: float, top: float) -> str:
    """Up to this level, and from the level before down or up to it."""
    level = rung.accept_length
    if math.isnan(level):
        return "" if rung.name == UNEXPLAINED else "not measured"
    here = _cells(level, top)
    there = here if math.isnan(before) else _cells(before, top)
    return _LEFT * min(here, there) + (_LOST if there > here else _GAINED) * abs(there - here)


def _cells(level: float, top: float) -> int:
    return round(_BAR * (level - 1) / (top - 1)) if top > 1 else 0


def _change(change: float, verdict: str | None) -> str:
    if math.isnan(change):
        return ""
    return "=" if verdict == "equal" else ("≈ " if verdict == "cannot tell" else "") + f"{change:+z.3f}"


def _within(rung: Rung) -> str:
    return "" if math.isnan(rung.change) or rung.verdict == "equal" else wording.interval(rung.change_ci95, 3)


def _explained(rung: Rung) -> str:
    return rung.what if rung.counts is None else f"{rung.what} {_counted(rung.counts)}"


def _counted(counts: Reached) -> str:
    if not counts.right:
        return ""
    shares = zip(counts.right, counts.of, strict=True)
    rates = " ".join(f"{100 * right / of:.1f}" if of else wording.NOTHING for right, of in shares)
    least, most = min(counts.of), max(counts.of)
    of = wording.count(most) if least == most else f"{wording.count(most)} to {wording.count(least)}"
    return f"[{rates} % of {of} {counts.unit}]"


def _shares(attribution: Attribution) -> list[RenderableType]:
    if not attribution.shares:
        return [Text("  The server differs in nothing from what training assumed.")]
    rows = attribution.shares
    names = Column("cause", tuple(Text(text) for text in [*(share.factor for share in rows), "together"]), "left")
    columns = (
        Column("share", tuple(Text(f"{value:+z.3f}") for value in [*(row.change for row in rows), attribution.total])),
        Column(
            "its 95 %\ninterval",
            tuple(Text(wording.interval(value, 3)) for value in [*(row.ci95 for row in rows), attribution.total_ci95]),
        ),
        Column("as ordered\nabove", tuple(Text(text) for text in [*(f"{row.in_order:+z.3f}" for row in rows), ""])),
    )
    said: list[RenderableType] = [
        Text(
            f"Each cause's change averaged over all orders in which the causes can be switched on (Shapley), from "
            f"{attribution.replays} replays.",
            style="dim",
        ),
        Fitted((names,), (columns,), ()),
    ]
    return said + [Text(sentence) for sentence in interactions(rows)]


def interactions(shares: Sequence[Share]) -> list[str]:
    """Where the two views part by more than their intervals."""
    apart = [share.factor for share in shares if share.interacts]
    if not apart:
        return []
    it, costs = ("it", "costs") if len(apart) == 1 else ("they", "cost")
    return [
        f"Both views part on {wording.listed(apart)} by more than their intervals: what {it} {costs} depends on what "
        "else is wrong."
    ]


def _bold(text: str) -> Text:
    return Text(text, style="bold")


def _pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for left, right in rows:
        grid.add_row(Text(left), Text(right))
    return Padding(grid, (0, 0, 0, 2))
