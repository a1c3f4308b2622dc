"""Timings that were measured on a server → a document, and what a person reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.json_document import JsonObject, object_json
from replay.analysis.plan.settings import Load, Setting
from replay.analysis.tables import Fitted, column, heading, pairs
from replay.traces.timings import Measured


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of the repeats in milliseconds, and their quartiles; all three alike of a single repeat."""

    value: float
    low: float
    high: float


def spread(measured: Measured) -> Spread:
    """Of the milliseconds of a round."""
    times = measured.round_ms
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return Spread(median(times), low, high)


def measured_json(path: str, measured: Sequence[Measured]) -> JsonObject:
    """The body of `replay time --json`: lines of the file, each with its spread."""
    lines = [
        object_json(one) | {"repeats": len(one.round_ms), "spread_ms": object_json(spread(one))} for one in measured
    ]
    return {"path": path, "timings": lines}


def render_measured(path: str, measured: Sequence[Measured]) -> RenderableType:
    """A line that says where they are, a table, and what was timed."""
    first = measured[0]
    setting = Setting(first.steps, first.topk, first.num_draft_tokens)
    plan = f"replay plan ROUNDS --bench {path}"
    return Group(
        Text(f"{path}: {wording.counted(len(measured), 'timing')} of {setting.spelled}. Give it to {plan}.", "bold"),
        Text(),
        _table(measured),
        Text(),
        heading("Provenance"),
        pairs(_provenance(first)),
    )


def _table(measured: Sequence[Measured]) -> Fitted:
    labels = [Load(one.batch, one.context).spelled for one in measured]
    found = [spread(one) for one in measured]
    columns = (
        column("ms a\nround", [wording.decimal(one.value, 2) for one in found]),
        column("half of the\nrepeats", [wording.interval((one.low, one.high), 2) for one in found]),
        column("repeats", [str(len(one.round_ms)) for one in measured]),
        column("rounds", [str(one.rounds) for one in measured]),
        column(
            "accept\nlength",
            ["" if one.accept_length is None else wording.decimal(one.accept_length, 2) for one in measured],
        ),
    )
    return Fitted((column("at", labels, left=True),), (columns,), tuple(labels))


def _provenance(first: Measured) -> list[tuple[str, str]]:
    asked = "random token ids, so no accept length" if first.prompts is None else f"prompts {first.prompts[:12]}"
    drafts = [] if first.algorithm is None else [("drafts", f"{first.algorithm}, {first.draft}")]
    return [
        ("server", f"{first.server}, {first.engine}" + (", recording" if first.recording else "")),
        ("model", first.model),
        *drafts,
        ("asked", asked),
        ("time", first.time),
    ]
