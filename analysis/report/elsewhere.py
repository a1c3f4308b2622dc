"""An accept length that was observed elsewhere, beside the variants of a report."""

import math
from collections.abc import Sequence

from replay.analysis import wording
from replay.analysis.json_document import JsonObject
from replay.analysis.summary import VariantSummary
from replay.printable import one_line

_MOST = 300  # characters of where it was observed


def elsewhere_sentence(
    summaries: Sequence[VariantSummary], accept_length: float, source: str, steps: int | None = None
) -> str:
    """What was observed, which variant lies nearest, and whether its interval holds it.

    Where the server's ``steps`` are known, variants of other steps are none of its.
    """
    said = f"Observed elsewhere: {wording.decimal(accept_length)} ({one_line(source, _MOST)})"
    nearest = nearest_to(summaries, accept_length, steps)
    if nearest is None and any(row.rounds for row in summaries):
        return f"{said}; the server drafted {wording.counted(steps or 0, 'step')}, and no variant does."
    if nearest is None:
        return f"{said}; no variant has rounds."
    name = wording.label(nearest, wording.varying(summaries))
    who = f"nearest is {name}, which" if len(summaries) > 1 else "the replay"
    low, high = nearest.accept_length_ci95
    held = "" if math.isnan(low) else " holds it" if low <= accept_length <= high else " lacks it"
    held = held and f", and its 95 % interval{held}"
    return f"{said}; {who} gives {wording.decimal(nearest.accept_length)}{held}."


def nearest_to(
    summaries: Sequence[VariantSummary], accept_length: float, steps: int | None = None
) -> VariantSummary | None:
    """The variant, of ``steps`` if given, whose accept length is nearest, the first of equals; None where none has
    rounds."""
    played = [row for row in summaries if row.rounds and steps in (None, row.steps)]
    return min(played, key=lambda row: abs(row.accept_length - accept_length), default=None)


def elsewhere_json(
    summaries: Sequence[VariantSummary],
    accept_length: float,
    source: str,
    rounds: int | None,
    steps: int | None = None,
) -> JsonObject:
    """The same as an object."""
    nearest = nearest_to(summaries, accept_length, steps)
    name = None if nearest is None else nearest.name
    return {"accept_length": accept_length, "source": source, "rounds": rounds, "steps": steps, "nearest": name}
