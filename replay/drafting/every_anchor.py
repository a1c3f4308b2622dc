"""The engine: drafts of every anchor of many requests, one pass over all rows per step.

The first drafted token of every anchor comes from one causal pass over rows of true target features, the j-th from
one more pass in which each anchor's row also sees that anchor's own earlier rows: K passes replace K x rounds.
The rows that true features made are the committed draft KV, as a server holds it after each verify
(SGLang 0.5.23 speculative/eagle_worker_v2.py, draft extend).

Suffixes as in head/model.py and head/attention.py: R rows of all packed requests, A anchors of all, K steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.first_pass import FirstPass, PackedAttention, first_pass
from replay.drafting.next_tokens import next_tokens
from replay.drafting.rows import DraftInput, drafted_positions
from replay.engines.behaviour import Behaviour
from replay.head.model import Head


@dataclass(frozen=True, slots=True)
class Drafts:
    """Target ids drafted at each anchor of one request [A, K], and where the best logit was shared [A, K]."""

    drafted_AK: Tensor
    tied_AK: Tensor


class ChainAttention:
    """Attention of drafted rows: the committed rows that ``base`` holds, and the anchor's own drafted rows before."""

    def __init__(self, head: Head, base: PackedAttention) -> None:
        self._base, self._behaviour = base, head.behaviour
        self._chain: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.config.num_layers)]

    def __call__(self, layer: int, q: Tensor, k_AMH: Tensor, v_AMH: Tensor) -> Tensor:
        """One more drafted row per anchor."""
        chain = self._chain[layer]
        chain.append((k_AMH, v_AMH))
        seen = chain[seen_from(self._behaviour, len(chain)) :]
        if seen:
            k_JAMH, v_JAMH = (torch.stack(part) for part in zip(*seen, strict=True))
        else:
            k_JAMH, v_JAMH = (part.new_empty((0, *part.shape)) for part in (k_AMH, v_AMH))
        return self._base.answer(layer, q, k_JAMH, v_JAMH, len(chain))


def seen_from(behaviour: Behaviour, step: int) -> int:
    """How many of the first drafted rows the drafted row of ``step`` (1, 2, ...) does not see."""
    hidden = {"grow": 0, "overwrite": step - 1, "unseen": step}[behaviour.chain]
    return hidden if behaviour.window is None else max(hidden, step - behaviour.window)


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
    rounding of products over other numbers of rows. Behaviour that follows the walk is not played here but in
    round_by_round.py.
    """
    inputs = list(inputs)
    if sum(item.anchors for item in inputs) == 0:
        empty = torch.empty((0, steps), dtype=torch.long)
        return [Drafts(empty, empty.bool()) for _ in inputs]
    first = first or first_pass(head, inputs)
    output, chain = first.output, ChainAttention(head, first.attention)
    drafted: list[Tensor] = []
    tied: list[Tensor] = []
    fed_AK = None if fed is None else torch.cat(list(fed)).to(head.device)
    for step in range(steps):
        if step:
            embeds_AE = head.embed(drafted[-1] if fed_AK is None else fed_AK[:, step - 1])
            positions_A = drafted_positions(first.positions_A, step, head.behaviour)
            output = head.forward(embeds_AE, output.feedback_RE, positions_A, chain)
        ids_A, tied_A = next_tokens(head, output.normed_RE, None if step else first.sizes_A)
        drafted.append(ids_A)
        tied.append(tied_A)
    counts = [item.anchors for item in inputs]
    drafted_AK, tied_AK = torch.stack(drafted, 1).cpu(), torch.stack(tied, 1).cpu()
    if head.behaviour.dummy_from is not None:
        drafted_AK[first.positions_A.cpu() >= head.behaviour.dummy_from] = 0
    return [Drafts(*parts) for parts in zip(drafted_AK.split(counts), tied_AK.split(counts), strict=True)]
