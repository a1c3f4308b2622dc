"""Runs `replay diagnose` on recordings whose fault is known, and keeps what it said beside what is true."""

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.calibration_cases import HEALTHY, SAME_IN_EFFECT, TABLE, Case
from support.calibration_record import Tell

import replay
from replay.analysis.diagnosis.document import to_json
from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.diagnose import diagnose_server, served_variant
from replay.errors import ReplayError
from replay.traces.rounds import HEALTHY_NAME

LEFT_OUT = "left out"  # the group of a recording of the table, diagnosed without the kind that is true


@dataclass(frozen=True, slots=True)
class Outcome:
    """One diagnosis. ``true`` names the case, ``kind`` its kind (None: the table has none), the rest is what was said.

    ``named`` is KIND=VALUE, or several joined by ``+``; ``kinds`` those of the hypotheses, best first, each once;
    ``first_value`` the first value of the first kind. ``differing`` of ``rounds`` are not as a healthy server's.
    """

    recording: str
    group: str
    true: str
    kind: str | None
    verdict: str
    named: str | None
    certainty: float | None
    kinds: tuple[str, ...]
    first_value: str
    differing: int
    rounds: int
    seconds: float

    @property
    def right(self) -> bool:
        """Whether a fault was named, alone, and it is of the true kind, or the same in effect."""
        return self.named is not None and self._is(self.named)

    @property
    def first(self) -> bool:
        """Whether the true kind leads, by name or as the best hypothesis."""
        return self.right or self._is(f"{self.kinds[0]}={self.first_value}")

    @property
    def third(self) -> bool:
        """Whether the true kind is among the first three kinds, the healthy server counted as one."""
        return self.right or self.first or self.kind in self.kinds[:3]

    @property
    def false_name(self) -> bool:
        """Whether a fault was named that is not there."""
        return self.named is not None and not self.right

    def _is(self, name: str) -> bool:
        if "+" in name:
            return False
        of_kind = self.kind is not None and name.partition("=")[0] == self.kind
        return of_kind or frozenset({name, self.true}) in SAME_IN_EFFECT


def can_leave_out() -> bool:
    """Whether this version's diagnosis can be asked to go without a kind."""
    return "without" in inspect.signature(diagnose_server).parameters


def judge(
    recordings: Sequence[tuple[Case, Path]], checkpoint: Checkpoint, tell: Tell, *, leave_out: bool
) -> Iterator[Outcome]:
    """Diagnose each recording; with ``leave_out`` each of the table once more without the kind that is true."""
    for number, (case, path) in enumerate(recordings, start=1):
        trace = replay.Trace.open(path)
        for without in ((), (case.kind,)) if leave_out and case.group == TABLE else ((),):
            name = f"{number} of {len(recordings)}: {case.name}{' left out' if without else ''}"
            try:
                outcome = _diagnose(case, path, trace, checkpoint, tuple(filter(None, without)))
            except ReplayError as error:
                tell(f"{name}: refused: {error}")
                continue
            tell(f"{name}: {outcome.verdict}, {outcome.named} ({outcome.certainty}), {outcome.seconds:.0f} s")
            yield outcome


def _diagnose(case: Case, path: Path, trace: replay.Trace, checkpoint: Checkpoint, without: tuple[str, ...]) -> Outcome:
    given: dict[str, Any] = {"without": without} if without else {}
    started = time.perf_counter()
    found = diagnose_server(trace, checkpoint, served_variant(trace, checkpoint.name), ladder=False, **given)
    seconds = time.perf_counter() - started
    said = to_json(found)
    tried: list[dict[str, Any]] = said["hypotheses"]
    evidence = next((one for one in tried if one["fault"] == HEALTHY_NAME), said["evidence"])
    return Outcome(
        recording=str(path.parent),
        group=LEFT_OUT if without else case.group,
        true=case.name,
        kind=case.kind,
        verdict=said["verdict"],
        named=said["fault"],
        certainty=_number(said["certainty"]),
        kinds=tuple(dict.fromkeys(one["fault"] for one in tried)),
        first_value=next((one["value"] for one in tried), ""),
        differing=int(evidence["rounds"]) - int(evidence["agreeing"]),
        rounds=int(evidence["rounds"]),
        seconds=seconds,
    )


def _number(value: Any) -> float | None:
    """A number of a document; None where there is none, NaN included."""
    return float(value) if isinstance(value, int | float) and value == value else None


def groups_of(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes by group, each group there."""
    found: dict[str, list[Outcome]] = {group: [] for group in (TABLE, LEFT_OUT, "outside", HEALTHY)}
    for one in outcomes:
        found[one.group].append(one)
    return found
