"""The shape of a tree: how deep and how large it is, and how its nodes name their parents."""

from dataclasses import dataclass

# In the stead of a parent's index: the known token, from which a tree grows; a parent that was left out.
ROOT, ORPHAN = -1, -2


@dataclass(frozen=True, slots=True)
class TreeSize:
    """How deep a tree goes, and how many tokens the target verifies, the known one included."""

    steps: int
    num_draft_tokens: int


def count_candidates(topk: int, steps: int) -> int:
    """Candidates from which a tree is chosen: ``topk`` after the known token, then ``topk`` after each of ``topk``."""
    return topk + (steps - 1) * topk * topk
