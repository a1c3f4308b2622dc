"""The rounds of a simulation on their way into a table: a few bytes for each number, and little work for each request.

Suffixes: R rounds, N drafted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from replay.verify.accept import Round

if TYPE_CHECKING:
    import polars as pl

_AT_ONCE = 4096  # rounds that become one frame: to make one costs as much as a hundred rounds


@dataclass(frozen=True, slots=True)
class _Walked:
    """The rounds of one request, of which no frame is made yet."""

    request_id: str
    walk: Sequence[Round]
    drafted_RN: NDArray[np.int32]


class RoundsTable:
    """Collects rounds as compact frames, a variant at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._frames: list[list[pl.DataFrame]] = [[] for _ in names]
        self._walked: list[list[_Walked]] = [[] for _ in names]
        self._waiting = [0] * len(names)  # rounds

    def add(self, member: int, request_id: str, walk: Sequence[Round], drafted_RN: NDArray[np.int64]) -> None:
        """One request's rounds under one variant, with the tokens drafted in each."""
        self._walked[member].append(_Walked(request_id, walk, drafted_RN.astype(np.int32)))
        self._waiting[member] += len(walk)
        if self._waiting[member] >= _AT_ONCE:
            self._make_frames(member)

    def take(self, member: int, table: "pl.DataFrame") -> None:
        """Rounds of further requests under one variant, whatever it was called."""
        import polars as pl

        self._make_frames(member)
        self._frames[member].append(table.with_columns(variant=pl.lit(self._names[member])))

    def of(self, member: int) -> "pl.DataFrame":
        """The rounds of one variant so far."""
        self._make_frames(member)
        return _joined(self._frames[member])

    def frame(self) -> "pl.DataFrame":
        """The table: variants in their order, requests in trace order."""
        return _joined([self.of(member) for member in range(len(self._names))])

    def _make_frames(self, member: int) -> None:
        every, self._walked[member], self._waiting[member] = self._walked[member], [], 0
        rounds = [one for one in every if one.walk]
        for _, alike in groupby(rounds, key=lambda one: one.drafted_RN.shape[1]):
            self._frames[member].append(_frame(self._names[member], list(alike)))


def _frame(name: str, walked: Sequence[_Walked]) -> "pl.DataFrame":
    """Some requests, whose rounds draft as many tokens."""
    import polars as pl

    from replay.traces.rounds import table_schema

    counts = [len(one.walk) for one in walked]
    played = [round_ for one in walked for round_ in one.walk]
    requests = pl.Series([one.request_id for one in walked], dtype=pl.String)
    columns = {
        "variant": pl.repeat(name, len(played), dtype=pl.String, eager=True),
        "request_id": requests.gather(np.repeat(np.arange(len(walked)), counts)),
        "round": np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        "anchor": np.array([round_.anchor for round_ in played], dtype=np.int32),
        "drafted": pl.Series(np.concatenate([one.drafted_RN for one in walked])).cast(pl.List(pl.Int32)),
        "accepted": np.array([round_.accepted for round_ in played], dtype=np.int32),
        "cut": np.array([round_.cut for round_ in played], dtype=np.bool_),
    }
    return pl.DataFrame(columns, schema=table_schema())


def _joined(frames: "Sequence[pl.DataFrame]") -> "pl.DataFrame":
    import polars as pl

    from replay.traces.rounds import table_schema

    return pl.concat(frames, rechunk=True) if frames else pl.DataFrame(schema=table_schema())
