"""What `replay check` shows: one block a finding, or one line that nothing was found."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from replay.check.facts import Facts
from replay.check.finding import ERROR, WARNING, Finding
from replay.check.inspection import DraftFacts, TraceFacts
from replay.check.run import Outcome
from replay.printable import one_line
from replay.traces.taps import FINAL

if TYPE_CHECKING:
    from rich.console import RenderableType

    from replay.traces.check import TraceFinding


_MOST_VALUE = 2000  # characters of a value: categories and layer ids are lists
_STYLES = {ERROR: "bold red", WARNING: "bold yellow"}


def render_outcome(outcome: Outcome, facts: Facts) -> "RenderableType":
    """Findings, what each engine would feed, what was looked at."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for finding in outcome.findings:
        parts += [_block(finding), Text()]
    parts.append(_summary(outcome, facts))
    if outcome.fed:
        parts.append(Text("taps: " + _fed(outcome.fed)))
    parts.append(Text(f"checked: {', '.join(outcome.checked)}"))
    for option, whats in outcome.unchecked.items():
        parts.append(Text(f"not checked without {option}: {', '.join(whats)}"))
    return Group(*parts)


def _block(finding: Finding) -> "RenderableType":
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble((finding.severity, _STYLES.get(finding.severity, "bold")), " ", (finding.fault, "bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in (
        ("what", finding.what),
        ("where", f"{finding.file}, {finding.field}"),
        ("seen", finding.seen),
        ("expected", finding.expected),
        ("fix", finding.fix),
    ):
        grid.add_row(name, Text(value))
    return Group(head, Padding(grid, (0, 0, 0, 2)))


def _summary(outcome: Outcome, facts: Facts) -> "RenderableType":
    from rich.text import Text

    pair = f"{facts.draft.name} on {facts.target.name}, {facts.server.engine}"
    if not outcome.findings:
        return Text(f"nothing found: {pair}", style="bold")
    counts = [(severity, len(list(group))) for severity, group in groupby(outcome.findings, lambda one: one.severity)]
    spelled = ", ".join(f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts)
    return Text(f"{spelled}: {pair}", style="bold")


def _fed(fed: dict[str, str]) -> str:
    """Engines that feed alike, together."""
    alike: dict[str, list[str]] = {}
    for engine, taps in fed.items():
        alike.setdefault(taps if taps.startswith("R[") or taps == FINAL else "none", []).append(engine)
    return "; ".join(f"{taps} by {', '.join(engines)}" for taps, engines in alike.items())


def render_facts(facts: TraceFacts | DraftFacts) -> "RenderableType":
    """Two columns: what, and how much."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in asdict(facts).items():
        table.add_row(name.replace("_", " "), Text(_spell(name, value)))  # Text: names may hold square brackets
    return table


def render_findings(findings: "Sequence[TraceFinding]") -> "RenderableType":
    """What a self-check found: how severe, and a paragraph each."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        request = "" if finding.request_id is None else f"{finding.request_id}: "
        table.add_row(f"{finding.severity}:", Text(request + finding.what))
    return table


def _spell(name: str, value: Any) -> str:
    return one_line(_spell_whole(name, value), _MOST_VALUE)


def _spell_whole(name: str, value: Any) -> str:
    if value is None:
        return "not stated"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items()) or "none"
    if isinstance(value, tuple | list):
        return ", ".join(str(item) for item in value) or "none"
    if name == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,}" if isinstance(value, int) else str(value)
