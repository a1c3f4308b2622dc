"""What a calibration comes to: counts, the reliability of certainties, Brier score, and these as text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from support.calibration_cases import HEALTHY, OUTSIDE_THE_TABLE, SAME_IN_EFFECT, TABLE
from support.calibration_judge import LEFT_OUT, Outcome, groups_of

BUCKETS = (0.0, 0.5, 0.8, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Names that were said with a certainty from ``low`` up to ``high``, and how many of them were right."""

    low: float
    high: float
    said: int
    right: int
    mean_certainty: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of one calibration. Lists name what was said of which recording.

    ``unseen``: recordings of the table in which every round is as a healthy server's. ``brier`` is the mean square of
    certainty less 1 for a right name, less 0 for a wrong one; None where nothing was said with a certainty.
    """

    table: int
    named_right: int
    ranked_first: int
    among_three: int
    value_right: int
    unseen: tuple[str, ...]
    false_in_table: tuple[str, ...]
    not_named: tuple[str, ...]
    left_out: int
    false_left_out: tuple[str, ...]
    outside: int
    false_outside: tuple[str, ...]
    called_healthy: tuple[str, ...]
    healthy: int
    accused: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    uncertain_said: int
    uncertain_right: int
    brier: float | None
    mean_seconds: float
    most_seconds: float


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """Count. ``outcomes`` may be of any groups; at least one."""
    groups = groups_of(outcomes)
    table, named = groups[TABLE], [one for one in outcomes if one.named is not None]
    certain = [(one.certainty, one.right) for one in named if one.certainty is not None]
    vague = [one for one in named if one.certainty is None]
    seconds = [one.seconds for one in outcomes]
    return Figures(
        table=len(table),
        named_right=sum(one.right for one in table),
        ranked_first=sum(one.first for one in table),
        among_three=sum(one.third for one in table),
        value_right=sum(one.named == one.true for one in table),
        unseen=tuple(one.true for one in table if not one.differing),
        false_in_table=_said([one for one in table if one.false_name]),
        not_named=_said([one for one in table if one.named is None]),
        left_out=len(groups[LEFT_OUT]),
        false_left_out=_said([one for one in groups[LEFT_OUT] if one.false_name]),
        outside=len(groups[OUTSIDE_THE_TABLE]),
        false_outside=_said([one for one in groups[OUTSIDE_THE_TABLE] if one.false_name]),
        called_healthy=_said([one for one in groups[OUTSIDE_THE_TABLE] if one.verdict in ("healthy", "head")]),
        healthy=len(groups[HEALTHY]),
        accused=_said([one for one in groups[HEALTHY] if one.verdict not in ("healthy", "head")]),
        buckets=tuple(_bucket(low, high, certain) for low, high in pairwise(BUCKETS)),
        uncertain_said=len(vague),
        uncertain_right=sum(one.right for one in vague),
        brier=sum((said - right) ** 2 for said, right in certain) / len(certain) if certain else None,
        mean_seconds=sum(seconds) / len(seconds),
        most_seconds=max(seconds),
    )


def _bucket(low: float, high: float, certain: Sequence[tuple[float, bool]]) -> Bucket:
    """Of certainties in [low, high), the last bucket with its end."""
    inside = [(said, right) for said, right in certain if low <= said < high or said == high == BUCKETS[-1]]
    mean = sum(said for said, _ in inside) / len(inside) if inside else 0.0
    return Bucket(low, high, len(inside), sum(right for _, right in inside), mean)


def _said(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return tuple(
        f"{one.true}: {one.verdict}"
        + (f" {one.named}" if one.named else f", best {one.kinds[0]}={one.first_value}")
        + (f" ({one.certainty:.3f})" if one.certainty is not None else "")
        + f", {one.differing} of {one.rounds} rounds differ"
        for one in outcomes
    )


def render(found: Figures) -> str:
    """The figures as text."""
    lines = [
        f"faults of the table: {found.table}; named {found.named_right}, with the value too {found.value_right}; first "
        f"{found.ranked_first}, among the first three {found.among_three}",
        *_listed("not to be seen in its rounds", found.unseen),
        *_listed("false names", found.false_in_table),
        *_listed("not named", found.not_named),
        f"their kind left out: {found.left_out}",
        *_listed("false names", found.false_left_out),
        f"faults outside the table: {found.outside}",
        *_listed("false names", found.false_outside),
        *_listed("called healthy", found.called_healthy),
        f"healthy servers: {found.healthy}",
        *_listed("accused", found.accused),
        "certainty of a name: said, right",
        *map(_row, found.buckets),
        f"  without a number: {found.uncertain_said}, {found.uncertain_right}",
        f"Brier score: {'nothing was said with a certainty' if found.brier is None else f'{found.brier:.4f}'}",
        f"seconds for a diagnosis: {found.mean_seconds:.1f} on average, {found.most_seconds:.1f} at most",
        *_listed("counted as one", [f"{' and '.join(sorted(pair))}: {why}" for pair, why in SAME_IN_EFFECT.items()]),
    ]  # fmt: skip
    return "\n".join(lines)


def _row(one: Bucket) -> str:
    mean = f"mean {one.mean_certainty:.3f}" if one.said else "none"
    return f"  {one.low:.2f} to {one.high:.2f} ({mean}): {one.said}, {one.right}"


def _listed(title: str, names: Sequence[str]) -> list[str]:
    return [f"  {title}: {len(names)}", *(f"    {name}" for name in names)] if names else []


def document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures and outcomes as JSON has them."""
    return {"figures": asdict(figures(outcomes)), "outcomes": [asdict(one) | {"right": one.right} for one in outcomes]}
