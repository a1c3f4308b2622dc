"""How a trace's requests are spread, as a table or as JSON."""

from typing import TYPE_CHECKING

from replay.analysis import wording
from replay.analysis.json_document import JsonObject, object_json
from replay.analysis.tables import Fitted, column
from replay.printable import one_line
from replay.traces.stats import CategoryStats, Spread, TraceStats

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_NAME = 60  # characters of a category


def stats_json(stats: TraceStats) -> JsonObject:
    """Its fields, and the accept length of each row."""
    body = object_json(stats)
    for row, counted in zip((body["all"], *body["categories"]), (stats.all, *stats.categories), strict=True):
        row["observed_accept_length"] = counted.observed_accept_length
    return body


def render_stats(stats: TraceStats) -> "RenderableType":
    """A row for each category, and one for all where there are several."""
    from rich.console import Group
    from rich.text import Text

    rows = [*stats.categories, *([stats.all] if len(stats.categories) != 1 else [])]
    state = "" if stats.state == "complete" else ", not finished: those that are whole"
    names = [one_line(row.name, _MOST_NAME) for row in rows]
    numbers = (
        column("requests", [wording.count(row.requests) for row in rows]),
        column("prompt tokens\n(median, most)", [_spread(row.prompt_tokens) for row in rows]),
        column("output tokens\n(median, most)", [_spread(row.output_tokens) for row in rows]),
        column("server's\naccept length", [_observed(row) for row in rows]),
    )
    title = f"{stats.path}: {wording.counted(stats.all.requests, 'request')}{state}"
    return Group(Text(title, style="bold"), Fitted((column("category", names, left=True),), (numbers,), tuple(names)))


def _spread(spread: Spread) -> str:
    return f"{wording.count(spread.total)} ({spread.median:g}, {wording.count(spread.most)})"


def _observed(row: CategoryStats) -> str:
    length = row.observed_accept_length
    return (
        wording.NOTHING
        if length is None
        else f"{wording.decimal(length)} ({wording.count(row.observed_rounds)} rounds)"
    )
