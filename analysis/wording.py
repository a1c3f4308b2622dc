"""Numbers and variants as words, the same everywhere in a report."""

import math
from collections.abc import Sequence
from pathlib import PurePath

from replay.analysis.summary import VariantSummary
from replay.printable import counted as counted
from replay.printable import one_line
from replay.traces.rounds import HEALTHY_NAME
from replay.traces.rounds_join import BETWEEN

NOTHING = "-"
_MOST_NAME = 200  # characters of what a file calls a variant or a head

# The facts of a variant that can differ in a sweep, in the order in which a report says them.
FACTS = (
    "draft",
    "wiring",
    "steps",
    "topk",
    "num_draft_tokens",
    "precision",
    "numerics",
    "kv",
    "verify",
    "temperature",
    "engine",
    "faults",
)

# What a variant's name says without "FACT=" in front of it.
_BARE = ("draft", "wiring", "precision", "numerics", "faults")

# Where the column's name alone would be misread beside the engine that recorded the trace.
_NOUNS = {"engine": "engine profile"}


def count(number: int) -> str:
    """``1450`` as ``1,450``."""
    return f"{number:,}"


def decimal(number: float, digits: int = 3) -> str:
    """A fixed number of digits; NOTHING for nan."""
    return NOTHING if math.isnan(number) else f"{number:z.{digits}f}"


def percent(number: float, digits: int = 1) -> str:
    """``0.257`` as ``25.7 %``; a dash for nan."""
    return NOTHING if math.isnan(number) else f"{100 * number:.{digits}f} %"


def interval(bounds: tuple[float, float], digits: int = 2) -> str:
    """``2.11 to 2.46``; a dash when there is none."""
    low, high = bounds
    return NOTHING if math.isnan(low) else f"{low:z.{digits}f} to {high:z.{digits}f}"


def bars(histogram: Sequence[int]) -> str:
    """One block character for each count, as high as its share of the largest; a dot for 0."""
    top = max(histogram, default=0)
    return "".join("·" if value == 0 else "▁▂▃▄▅▆▇█"[math.ceil(8 * value / top) - 1] for value in histogram)


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def fact(summary: VariantSummary, name: str) -> str:
    """The value of one fact of ``FACTS`` as a table cell says it."""
    value = getattr(summary, name)
    if isinstance(value, str):
        value = one_line(value, _MOST_NAME)
    if name == "wiring":
        return ",".join(value)
    if name == "faults":
        return ", ".join(value) or "none"
    if name == "draft":
        return PurePath(value).name or value
    return f"{value:g}" if isinstance(value, float) else str(value)


def phrase(summary: VariantSummary, name: str) -> str:
    """The same fact as a sentence says it, with its noun."""
    value = fact(summary, name)
    if name == "steps":
        return counted(summary.steps, "step")
    if name == "num_draft_tokens":
        return counted(summary.num_draft_tokens, "draft token")
    if name == "faults":
        return f"fault {value}" if summary.faults else "no fault"
    return f"{_NOUNS.get(name, name)} {value}"


def varying(summaries: Sequence[VariantSummary]) -> tuple[str, ...]:
    """The facts in which the variants differ, and ``name`` too where these do not tell all of them apart.

    The number of draft tokens is left out where it follows from the steps (a chain drafts steps + 1).
    """
    facts = [name for name in FACTS if len({fact(summary, name) for summary in summaries}) > 1]
    if "num_draft_tokens" in facts and all(row.num_draft_tokens == row.steps + 1 for row in summaries):
        facts.remove("num_draft_tokens")
    told = {tuple(fact(summary, name) for name in facts) for summary in summaries}
    return tuple(facts) if len(told) == len(summaries) else ("name", *facts)


def joined(summaries: Sequence[VariantSummary]) -> tuple[str, ...]:
    """``varying`` of rounds from several files: the name, which says the file, and what no name says already.

    A name says a fact that is a word of it as a rounds file spells it: ``embed,3,16`` or ``steps=3``.
    """
    facts = [name for name in varying(summaries) if name != "name"]
    return ("name", *(name for name in facts if not all(_spelled(row, name) for row in summaries)))


def _spelled(row: VariantSummary, name: str) -> bool:
    said = "+".join(row.faults) or HEALTHY_NAME if name == "faults" else fact(row, name)
    words = row.name.rpartition(BETWEEN)[2].split()
    return said in words if name in _BARE else f"{name}={said}" in words


def label(summary: VariantSummary, facts: Sequence[str]) -> str:
    """A variant said by the ``facts`` in which it differs from the others."""
    said = [name for name in facts if name != "name"]
    words = [fact(summary, name) if name in ("draft", "wiring") else phrase(summary, name) for name in said]
    return " · ".join([summary.name, *words] if "name" in facts else words)
