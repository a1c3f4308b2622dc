"""A report as one flat table, a row for each variant. The columns are in docs/simulate.md."""

from collections.abc import Sequence

from replay.analysis.flat import Cell, FlatRow, flat_row
from replay.analysis.report.assessment import Report
from replay.analysis.summary import VariantSummary
from replay.analysis.wording import FACTS


def variant_rows(report: Report, shown: Sequence[VariantSummary]) -> list[FlatRow]:
    """The variants ``shown`` of a report, with what each lost to the best."""
    return [flat_row(_variant_row(report, row)) for row in shown]


def _variant_row(report: Report, row: VariantSummary) -> dict[str, Cell]:
    gap = report.gaps.get(row.name)
    joined = {name: _joined(getattr(row, name)) for name in FACTS}
    return {
        "variant": row.name,
        **joined,
        "requests": row.requests,
        "rounds": row.rounds,
        "drafted": row.drafted,
        "accepted": row.accepted,
        "accept_length": row.accept_length,
        "ci95_low": row.accept_length_ci95[0],
        "ci95_high": row.accept_length_ci95[1],
        "accept_rate": row.accept_rate,
        "best": row in report.together,
        "lost": 0.0 if row is report.best else 0.0 - gap.difference if gap else None,
        "lost_ci95_low": 0.0 - gap.ci95[1] if gap else None,
        "lost_ci95_high": 0.0 - gap.ci95[0] if gap else None,
        "observed_accept_length": row.observed.accept_length if row.observed else None,
        "expected_accept_length": row.expected.accept_length if row.expected else None,
    }


def _joined(value: object) -> Cell:
    """Wirings and faults as the command line spells them."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    assert isinstance(value, str | int | float)
    return value
