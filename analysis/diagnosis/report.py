"""A diagnosis as a person reads it: verdict, fix, the ranking, what cannot be told, where to look next."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from replay.analysis import wording
from replay.analysis.diagnosis import feed
from replay.analysis.diagnosis.breakdown import say_profile
from replay.analysis.diagnosis.evidence import DRAFTED, HISTOGRAM, LENGTH
from replay.analysis.diagnosis.gain import Gain
from replay.analysis.diagnosis.scored import Scored
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.analysis.ladder.report import render_ladder
from replay.analysis.tables import bullet

_STYLES = {
    "healthy": "bold green",
    "head": "bold yellow",
    "fault": "bold red",
    "engine": "bold magenta",
    "undetermined": "bold cyan",
}
_SHOWN = 6
_MEASURES = {
    DRAFTED: "rounds in which the server drafted the same tokens, or others at a near tie",
    HISTOGRAM: "rounds that the server's histograms have too, request by request",
    LENGTH: "closeness of the accept length, as a share of rounds",
}


def render_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    """The diagnosis as a renderable that survives 80 columns."""
    parts = [*_answer(diagnosis), *_bullets("Doubts on the trace", diagnosis.doubts)]
    parts += [*_agreement(diagnosis), *_fed(diagnosis)]
    if diagnosis.fix:
        parts += [*_heading("Fix"), Padding(Text(diagnosis.fix), (0, 0, 0, 2))]
    if diagnosis.gains and diagnosis.verdict in ("fault", "undetermined"):
        parts += [*_heading("The head accepts more, at the same anchors, as"), _gains(diagnosis.gains)]
    parts += [*_heading("Hypotheses, best first"), _ranking(diagnosis.ranked[:_SHOWN]), _legend(diagnosis)]
    parts += _bullets("Cannot be told apart", diagnosis.undecided)
    parts += _bullets("What would tell", diagnosis.separate)
    parts += _bullets("What the head lacks", diagnosis.limits)
    if diagnosis.profile is not None:
        parts += _bullets("Where the server parts from the replay", list(say_profile(diagnosis.profile)))
    if diagnosis.ladder is not None:
        parts += [Text(), render_ladder(diagnosis.ladder)]
    return Group(*parts)


def _answer(diagnosis: Diagnosis) -> list[RenderableType]:
    verdict = Text(f"Verdict: {diagnosis.verdict}", style=_STYLES[diagnosis.verdict])
    if diagnosis.named:
        verdict.append(f", {diagnosis.named}")
    return [verdict, Text(f"{diagnosis.why[:1].upper()}{diagnosis.why[1:]}."), Text(_numbers(diagnosis))]


def _agreement(diagnosis: Diagnosis) -> list[RenderableType]:
    found = diagnosis.agreement
    if found is None:
        return []
    line = (
        f"Of {wording.counted(found.rounds, 'round')} the healthy replay drafts {wording.count(found.alike)} alike, "
        f"{wording.count(found.near_tie)} part at a near tie, {wording.count(found.unexplained)} are unexplained "
        f"(rounding moves these drafts by up to {found.noise:.2g} nats)."
    )
    return [Text(line)]


def _fed(diagnosis: Diagnosis) -> list[RenderableType]:
    if diagnosis.feeding is None:
        return []
    requests = wording.counted(diagnosis.feeding.requests, "request")
    heading = _heading(f"What the trace's own server fed its draft, in {requests}")
    return [*heading, *(bullet(line) for line in feed.lines(diagnosis.feeding))]


def _legend(diagnosis: Diagnosis) -> Text:
    evidence = diagnosis.healthy.evidence
    return Text(
        f"same: {_MEASURES[evidence.kind]}, of {wording.count(evidence.rounds)}, or of some of these where a "
        f"hypothesis was soon left behind; {len(diagnosis.ranked)} hypotheses were tried",
        style="dim",
    )


def _heading(text: str) -> list[RenderableType]:
    return [Text(), Text(text, style="bold")]


def _bullets(heading: str, lines: Sequence[str]) -> list[RenderableType]:
    return [*_heading(heading), *(bullet(line) for line in _some(lines))] if lines else []


def _some(lines: Sequence[str]) -> Sequence[str]:
    """As many as a screen holds, and how many are left."""
    if len(lines) <= _SHOWN + 1:
        return lines
    return [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more, which --json lists"]


def _numbers(diagnosis: Diagnosis) -> str:
    """What was served, and what a healthy server would have: at the same anchors, and left to itself."""
    healthy = diagnosis.healthy
    if math.isnan(diagnosis.replayed_at_served_anchors):
        gives = wording.decimal(healthy.evidence.accept_length)
    else:
        gives = f"{wording.decimal(diagnosis.replayed_at_served_anchors)} at the server's own anchors"
        if math.isfinite(healthy.accept_length):
            gives += f" and {wording.decimal(healthy.accept_length)} on its own walk"
    said = f"Served accept length {wording.decimal(diagnosis.served)}; a healthy replay of the same gives {gives}"
    if diagnosis.verdict == "fault" and math.isfinite(diagnosis.expected):
        said += f"; expected once it is mended {wording.decimal(diagnosis.expected)}"
    return f"{said}.{_mending(diagnosis)}"


def _mending(diagnosis: Diagnosis) -> str:
    """What mending gains at the server's own anchors, where that was compared."""
    gain, low, high = diagnosis.mending
    if math.isnan(gain):
        return ""
    interval = "" if math.isnan(low) else f", 95 % interval {low:+.2f} to {high:+.2f}"
    shows = gain > 0 if math.isnan(low) else low > 0
    costs = "Mending it gains" if shows else "That it costs anything does not show: mending it gains"
    return f" {costs} {gain:+.2f} tokens a round at the same anchors{interval}."


def _ranking(ranked: Sequence[Scored]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("hypothesis", overflow="fold")
    for heading in ("probability", "same", "accept length\non own walk"):
        table.add_column(heading, justify="right")
    for item in ranked:
        evidence = item.evidence
        same = wording.percent(evidence.agreeing / evidence.rounds if evidence.rounds else math.nan)
        table.add_row(
            item.name,
            "< 0.1 %" if item.probability < 0.001 else wording.percent(item.probability),
            same,
            wording.decimal(item.accept_length),
        )
    return table


def _gains(gains: Sequence[Gain]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("variant", overflow="fold")
    for heading in ("accepted\nmore a round", "95 %\ninterval", "accept length\non own walk"):
        table.add_column(heading, justify="right")
    for gain in gains[:_SHOWN]:
        interval = wording.interval(gain.ci95)
        table.add_row(gain.label, f"{gain.gain:+.2f}", interval, wording.decimal(gain.accept_length))
    return table
