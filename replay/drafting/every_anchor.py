"""The head's own drafts at every anchor of many requests: greedy chains, one pass over all anchors per step.

The first drafted token of every anchor comes from one causal pass over rows of true target features (first_pass.py),
the j-th from one more pass in which each anchor's row also sees that anchor's own earlier rows (chains.py).

Suffixes as in head/model.py: A anchors, K steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.chains import chain_steps
from replay.drafting.first_pass import FirstPass, first_pass
from replay.drafting.next_tokens import next_tokens
from replay.drafting.rows import DraftInput, find_dummies
from replay.head.model import Head


@dataclass(frozen=True, slots=True)
class Drafts:
    """Target ids drafted at each anchor of one request [A, K], and where the best logit was shared [A, K]."""

    drafted_AK: Tensor
    tied_AK: Tensor


def draft_every_anchor(
    head: Head,
    inputs: Sequence[DraftInput],
    steps: int,
    *,
    first: FirstPass | None = None,
    fed: Sequence[Tensor] | None = None,
) -> list[Drafts]:
    """Drafts of ``steps`` tokens at every anchor of every request, in the order of ``inputs``.

    ``first`` is the first pass over the same inputs, where another variant that agrees up to there has made it. ``fed``
    are target ids [A, >= K-1] for each request: drafted rows then embed these, one a step, whatever was drafted
    (teacher-forced, as training runs a head). Equal to running each anchor by itself (tests/twins/rounds.py) up to the
    rounding of products over other numbers of rows.
    """
    counts = [item.anchors for item in inputs]
    if sum(counts) == 0:
        empty = torch.empty((0, steps), dtype=torch.long)
        return [Drafts(empty, empty.bool()) for _ in inputs]
    first = first or first_pass(head, inputs)
    fed_AK = None if fed is None else torch.cat(list(fed)).to(head.device)
    drafted: list[Tensor] = []
    tied: list[Tensor] = []
    for state in chain_steps(head, first, steps, lambda step: drafted[-1] if fed_AK is None else fed_AK[:, step - 1]):
        ids_A, tied_A = next_tokens(head, state.normed_AE, state.logit_sizes)
        drafted.append(ids_A)
        tied.append(tied_A)
    dummies_A1 = find_dummies(first.anchor_rows_A, head.behaviour)[:, None]
    drafted_AK, tied_AK = torch.stack(drafted, 1).masked_fill(dummies_A1, 0), torch.stack(tied, 1)
    parts = zip(drafted_AK.cpu().split(counts), tied_AK.cpu().split(counts), strict=True)
    return [Drafts(*part) for part in parts]
