"""States that cross between requests of a batch: whose state each draft step is handed (``Behaviour.crossed``).

A server drafts for all requests of a batch at once and verifies them together: a row each, in trees ``topk`` of them,
one request after the other. What a step makes is handed on by that order (SGLang 0.5.23 speculative/eagle_worker_v2.py
``draft_forward``, spec_utils.py ``select_top_k_tokens``). A server that takes it from another row feeds a request with
the state of another one; tokens, positions and draft KV stay its own.

Suffixes as in chains.py: A anchors of all packed requests, K steps, X whatever follows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.engines.behaviour import Behaviour
from replay.errors import UsageError


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Where one round ran: row ``row``, from 0, of the ``batch`` requests of a server's ``verify_pass``."""

    verify_pass: int
    row: int
    batch: int


BatchRows = Sequence[BatchRow | None]  # of each anchor; None where nobody knows


def row_handed(crossed: str, row: int, batch: int) -> int:
    """The row of a batch whose state ``row`` is handed."""
    if crossed == "pairs":  # the last of an odd number keeps its own
        return row ^ 1 if row ^ 1 < batch else row
    return {"previous": (row - 1) % batch, "next": (row + 1) % batch, "reversed": batch - 1 - row, "first": 0}[crossed]


def handed_from(crossed: str, rows_A: BatchRows) -> list[int]:
    """Whose state each anchor is handed, as an index among the anchors; -1 where that one is not among them.

    Anchors rise within a request. Several may have one batch row, those behind the start of its round; other requests
    are handed the state of the first one.
    """
    first: dict[tuple[int, int], int] = {}
    for anchor, here in enumerate(rows_A):
        if here is not None:
            first.setdefault((here.verify_pass, here.row), anchor)
    return [-1 if here is None else _source(crossed, anchor, here, first) for anchor, here in enumerate(rows_A)]


def _source(crossed: str, anchor: int, here: BatchRow, first: Mapping[tuple[int, int], int]) -> int:
    row = row_handed(crossed, here.row, here.batch)
    return anchor if row == here.row else first.get((here.verify_pass, row), -1)


def handover(behaviour: Behaviour, rows_A: BatchRows | None, device: torch.device) -> Callable[[Tensor, int], Tensor]:
    """From the states [A, X] that a step made, in the order of its rows, those that ``step`` (1, 2, ...) is fed.

    An anchor that would be handed a state of a request that is not there keeps its own. Raises UsageError where states
    cross and nobody says in which batches.
    """
    if not behaviour.crosses:
        return lambda state_AX, _: state_AX
    if rows_A is None:
        raise UsageError("states cross between requests of a batch, and batches were not told; give a server's rounds")
    sources = handed_from(behaviour.crossed, rows_A)
    source_A = torch.tensor([own if source < 0 else source for own, source in enumerate(sources)], device=device)
    once = behaviour.crossed_once
    return lambda state_AX, step: state_AX if once and step > 1 else state_AX[source_A]


def known_steps(behaviour: Behaviour, rows_A: BatchRows, told_AK: Tensor) -> Tensor:
    """Of each step of each anchor [A, K], whether all states that led to it are known.

    ``told_AK``: whether it is known what was drafted there, and so what the next row embedded.
    """
    known_AK = torch.ones_like(told_AK)
    if not behaviour.crosses:
        return known_AK
    source_A = torch.tensor(handed_from(behaviour.crossed, rows_A), dtype=torch.long)
    there_A, source_A = source_A >= 0, source_A.clamp(min=0)
    for step in range(1, told_AK.shape[1]):
        known_A = known_AK[:, step - 1] & told_AK[:, step - 1]
        if step == 1 or not behaviour.crossed_once:
            known_A = known_A & there_A & known_AK[source_A, step - 1]
        known_AK[:, step] = known_A
    return known_AK
