"""A diagnosis as a person reads it: verdict, fix, the ranking, what cannot be told, where to look next."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from replay.analysis import wording
from replay.analysis.diagnosis import feed as slots
from replay.analysis.diagnosis.evidence import DRAFTED, HISTOGRAM, LENGTH
from replay.analysis.diagnosis.verdict import Diagnosis, Gain, Scored, Stratum
from replay.analysis.ladder.report import render_ladder
from replay.analysis.tables import bullet

_STYLES = {"healthy": "bold green", "head": "bold yellow", "fault": "bold red", "engine": "bold magenta"}
_SHOWN = 8
_MEASURES = {
    DRAFTED: "rounds in which the server drafted the same tokens",
    HISTOGRAM: "rounds that the server's histograms have too, request by request",
    LENGTH: "closeness of the accept length, as a share of rounds",
}


def render_diagnosis(diagnosis: Diagnosis) -> RenderableType:
    """The diagnosis as a renderable that survives 80 columns."""
    verdict = Text(f"Verdict: {diagnosis.verdict}", style=_STYLES[diagnosis.verdict])
    if diagnosis.named:
        verdict.append(f", {diagnosis.named}")
    parts: list[RenderableType] = [verdict, Text(f"{diagnosis.why[:1].upper()}{diagnosis.why[1:]}.")]
    parts.append(Text(_numbers(diagnosis)))
    if diagnosis.feeding is not None:
        heading = (
            f"What the trace's own server fed its draft, in {wording.counted(diagnosis.feeding.requests, 'request')}"
        )
        parts += [Text(), Text(heading, style="bold"), *(bullet(line) for line in slots.lines(diagnosis.feeding))]
    if diagnosis.fix:
        parts += [Text(), Text("Fix", style="bold"), Padding(Text(diagnosis.fix), (0, 0, 0, 2))]
    if diagnosis.gains and diagnosis.verdict == "fault":
        parts += [Text(), Text("The head accepts more, at the same anchors, as", style="bold"), _gains(diagnosis.gains)]
    parts += [Text(), Text("Hypotheses, best first", style="bold"), _ranking(diagnosis.ranked[:_SHOWN])]
    evidence = diagnosis.healthy.evidence
    parts.append(
        Text(
            f"same: {_MEASURES[evidence.kind]}, of {wording.count(evidence.rounds)}, or of the first of these where a "
            "hypothesis was soon left behind; "
            f"{len(diagnosis.ranked)} hypotheses were tried",
            style="dim",
        )
    )
    for heading, lines in (
        ("Cannot be told apart", diagnosis.undecided),
        ("What would tell", diagnosis.separate),
        ("What the head lacks", diagnosis.limits),
    ):
        if lines:
            parts += [Text(), Text(heading, style="bold"), *(bullet(line) for line in _some(lines))]
    if diagnosis.strata:
        parts += [Text(), Text("Where the server parts from the replay", style="bold"), _strata(diagnosis.strata)]
    if diagnosis.ladder is not None:
        parts += [Text(), render_ladder(diagnosis.ladder)]
    return Group(*parts)


def _some(lines: Sequence[str]) -> Sequence[str]:
    """As many as a screen holds, and how many are left."""
    if len(lines) <= _SHOWN + 1:
        return lines
    return [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more, which --json lists"]


def _numbers(diagnosis: Diagnosis) -> str:
    said = (
        f"Served accept length {wording.decimal(diagnosis.served)}; a healthy replay of the same gives "
        f"{wording.decimal(diagnosis.healthy.evidence.accept_length)}"
    )
    if diagnosis.verdict == "fault" and math.isfinite(diagnosis.expected):
        said += f"; expected once it is mended {wording.decimal(diagnosis.expected)}"
    return f"{said}."


def _ranking(ranked: Sequence[Scored]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("hypothesis", overflow="fold")
    for heading in ("probability", "same", "accept\nlength"):
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
    for heading in ("accepted\nmore a round", "95 %\ninterval", "accept\nlength"):
        table.add_column(heading, justify="right")
    for gain in gains[:_SHOWN]:
        interval = wording.interval(gain.ci95)
        table.add_row(gain.label, f"{gain.gain:+.2f}", interval, wording.decimal(gain.accept_length))
    return table


def _strata(strata: Sequence[Stratum]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("by", "value"):
        table.add_column(heading, overflow="fold")
    for heading in ("rounds", "same"):
        table.add_column(heading, justify="right")
    for part in strata:
        table.add_row(part.by, part.value, wording.count(part.rounds), wording.percent(part.agreeing / part.rounds))
    return table
