"""What a trace's server drafted, request by request, as a replay follows it.

Suffixes: A rounds of one request, K steps.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from replay.drafting.tree_margins import ServedTrees
from replay.drafting.tree_shape import ORPHAN, ROOT

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class ServedDrafts:
    """What a server drafted in the rounds of one request, as lists: anchors [A], accepted [A], drafted and parents."""

    anchors: tuple[int, ...]
    accepted: tuple[int, ...]
    drafted: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...] | None, ...]

    def before(self, last: int) -> "ServedDrafts":
        """The rounds whose anchors lie before token ``last``: from there on nothing is left to draft."""
        return self._some([place for place, anchor in enumerate(self.anchors) if anchor < last])

    def at(self, anchors: Container[int]) -> "ServedDrafts":
        """The rounds that start at these anchors."""
        return self._some([place for place, anchor in enumerate(self.anchors) if anchor in anchors])

    def _some(self, kept: Sequence[int]) -> "ServedDrafts":
        return ServedDrafts(
            tuple(self.anchors[place] for place in kept),
            tuple(self.accepted[place] for place in kept),
            tuple(self.drafted[place] for place in kept),
            tuple(self.parents[place] for place in kept),
        )

    def chains(self, steps: int) -> torch.Tensor:
        """Target ids drafted in each round [A, K], -1 behind the last one."""
        return _padded(self.drafted, steps)

    def trees(self, nodes: int) -> ServedTrees:
        """The trees of each round, of so many nodes."""
        # The trace counts the known token as 0 and the drafted ones from 1; an orphan is -1 there.
        parents = [[ORPHAN if parent < 0 else parent - 1 for parent in one or ()] for one in self.parents]
        assert ROOT == -1
        return ServedTrees(_padded(self.drafted, nodes), _padded(parents, nodes, ORPHAN))


def served_drafts(rounds: "pl.DataFrame") -> dict[str, ServedDrafts]:
    """By request, what a table such as ``Trace.served_rounds`` says was drafted."""
    columns = ["anchor", "accepted", "drafted", "parents"]
    grouped = rounds.sort("round").group_by("request_id", maintain_order=True).agg(columns)
    return {
        name: ServedDrafts(
            tuple(anchors),
            tuple(accepted),
            tuple(map(tuple, drafted)),
            tuple(None if one is None else tuple(one) for one in parents),
        )
        for name, anchors, accepted, drafted, parents in grouped.iter_rows()
    }


def served_shape(drafted: Sequence[Sequence[int]], parents: Sequence[Sequence[int] | None]) -> tuple[bool, int]:
    """Of a server's rounds whether they drafted trees, and the most tokens that one of them drafted."""
    return any(one is not None for one in parents), max(map(len, drafted), default=0)


def _padded(lists: Sequence[Sequence[int]], longest: int, filler: int = -1) -> torch.Tensor:
    """Lists as rows of one length."""
    rows = [[*one, *[filler] * (longest - len(one))] for one in lists]
    return torch.tensor(rows, dtype=torch.long).reshape(len(rows), longest)
