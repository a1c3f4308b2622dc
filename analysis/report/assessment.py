"""Everything that a report says, before it is laid out."""

from collections.abc import Mapping
from dataclasses import dataclass

from replay.analysis.gaps import Gap
from replay.analysis.report.curve import Curve
from replay.analysis.summary import VariantSummary


@dataclass(frozen=True, slots=True)
class Report:
    """``best`` has the largest accept length (the first of equals; None without rounds), ``nearest`` lies closest to
    what the server reported (None where it reported nothing). ``gaps`` are paired against ``best``, ``observed_gaps``
    against the server.

    ``together`` are ``best`` and those that are not told apart from it (``gaps.verdicts``), the largest accept length
    first; empty without rounds. ``layouts`` say what a tree's KV layout costs, ``facts`` name what differs between the
    variants. ``curves`` are those of training runs of which several checkpoints were replayed.
    """

    summaries: tuple[VariantSummary, ...]
    best: VariantSummary | None
    together: tuple[VariantSummary, ...]
    nearest: VariantSummary | None
    gaps: Mapping[str, Gap]
    observed_gaps: Mapping[str, Gap]
    layouts: tuple[str, ...]
    facts: tuple[str, ...]
    doubts: tuple[str, ...]
    provenance: tuple[tuple[str, str], ...]
    curves: tuple[Curve, ...] = ()
