"""The shape of a tree: how many nodes it may have, and how its nodes name their parents."""

from dataclasses import dataclass


def count_candidates(topk: int, steps: int) -> int:
    """Candidates from which a tree is chosen: ``topk`` after the known token, then ``topk`` after each of ``topk``."""
    return topk + (steps - 1) * topk * topk


ROOT, ORPHAN = -1, -2


@dataclass(frozen=True, slots=True)
class TreeSize:
    """How deep a tree goes, and how many tokens the target verifies, the known one included."""

    steps: int
    num_draft_tokens: int
