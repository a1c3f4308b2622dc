"""What a simulation gathers: sums of each variant, its rounds as a table, and the rounds of a run that is followed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replay.verify.accept import Round
from replay.verify.estimator import Estimator

if TYPE_CHECKING:
    import polars as pl


@dataclass(slots=True)
class Tally:
    """Running sums of one variant."""

    seconds: float = 0.0
    anchors: int = 0
    anchors_accepted: int = 0
    ties: int = 0
    estimator: Estimator | None = None


@dataclass(frozen=True, slots=True)
class Lead:
    """The rounds of one request in the run that is followed: their anchors and accepted tokens (None: follow none)."""

    anchors: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None

    def anchors_before(self, last: int) -> torch.Tensor | None:
        """The anchors from which something is left to draft."""
        return None if self.anchors is None else torch.tensor([a for a in self.anchors if a < last], dtype=torch.long)


def leads_of(follow: "pl.DataFrame") -> dict[str, Lead]:
    """By request the rounds of a table such as ``Trace.served_rounds``."""
    grouped = follow.sort("round").group_by("request_id", maintain_order=True).agg("anchor", "accepted")
    return {name: Lead(tuple(anchors), tuple(accepted)) for name, anchors, accepted in grouped.iter_rows()}


class RoundsTable:
    """Collects rounds as compact frames, one per variant and request: a few bytes for each number."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._frames: list[list[pl.DataFrame]] = [[] for _ in names]

    def add(self, member: int, request_id: str, walk: Sequence[Round], drafted_RN: "np.ndarray[Any, Any]") -> None:
        """One request's rounds under one variant, with the tokens drafted in each."""
        import polars as pl

        from replay.traces.rounds import table_schema

        frame = {
            "variant": [self._names[member]] * len(walk),
            "request_id": [request_id] * len(walk),
            "round": range(len(walk)),
            "anchor": [played.anchor for played in walk],
            "drafted": drafted_RN.tolist(),
            "accepted": [played.accepted for played in walk],
            "cut": [played.cut for played in walk],
        }
        self._frames[member].append(pl.DataFrame(frame, schema=table_schema()))

    def frame(self) -> "pl.DataFrame":
        """The table: variants in their order, requests in trace order."""
        import polars as pl

        from replay.traces.rounds import table_schema

        frames = [frame for member in self._frames for frame in member]
        return pl.concat(frames) if frames else pl.DataFrame(schema=table_schema())
