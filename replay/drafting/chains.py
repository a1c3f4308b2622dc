"""Chains of every anchor: after the first pass one drafted row per anchor and step, whatever token each is fed.

What the tokens are is the caller's: the head's own drafts (every_anchor.py), the recorded text (path_probability.py) or
what a server drafted (margins.py). K passes then replace K x rounds. Behaviour that follows the walk is not played here
but in round_by_round.py.

Suffixes as in head/model.py and head/attention.py: A anchors of all packed requests, J drafted rows so far.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from replay.drafting.blocks import block_states
from replay.drafting.crossed import handover
from replay.drafting.first_pass import FirstPass, join_outputs
from replay.drafting.packed_attention import PackedAttention
from replay.drafting.row_blocks import row_blocks
from replay.drafting.rows import drafted_positions
from replay.engines.behaviour import Behaviour
from replay.head.attention import KeyValues
from replay.head.model import Head
from replay.head.products import ProductSizes


@dataclass(frozen=True, slots=True)
class ChainStep:
    """The state [A, E] that gives each anchor's next logits, and the sizes of the products that a server reads them in.

    ``logit_sizes`` is None where these do not matter.
    """

    normed_AE: Tensor
    logit_sizes: ProductSizes | None


def chain_steps(head: Head, first: FirstPass, steps: int, feed: Callable[[int], Tensor]) -> Iterator[ChainStep]:
    """The states of ``steps`` steps, one after the other.

    ``feed(step)`` gives the target ids [A] that the rows of ``step`` (1, 2, ...) embed. It is asked for them when the
    step before has been dealt with, and so may answer with what was drafted there. Raises UsageError where states
    cross between requests (crossed.py) and ``first`` does not know their batches. A head that drafts blocks is fed
    mask tokens instead (blocks.py), whatever ``feed`` would say, and so is a P-EAGLE head: there a server makes all
    drafted rows in one pass, in which each sees only those before it, so that step after step gives the same.
    """
    if head.config.block is not None:
        yield from (ChainStep(normed_AE, None) for normed_AE in block_states(head, first, steps))
        return
    handed = handover(head.behaviour, first.batch_rows, head.device)
    yield ChainStep(first.output.normed_RE, first.logit_sizes)
    state_AE = first.output.feedback_RE
    attentions = [ChainAttention(head, first.attention, block) for block in _anchor_blocks(head, first)]
    for step in range(1, steps):
        positions_A = drafted_positions(first.anchor_rows_A, step, head.behaviour)
        embeds_AE, fed_AE = head.masks(len(positions_A)) or (head.embed(feed(step)), handed(state_AE, step))
        parts = [(attend, slice(attend.block.start, attend.block.stop)) for attend in attentions]
        output = join_outputs(
            [head.forward(embeds_AE[part], fed_AE[part], positions_A[part], attend) for attend, part in parts]
        )
        state_AE = output.feedback_RE
        yield ChainStep(output.normed_RE, None)


def _anchor_blocks(head: Head, first: FirstPass) -> list[range]:
    """Anchors whose drafted rows run at once; all where products are as large as a server's, for the sake of bits."""
    anchors = len(first.anchor_rows_A)
    return row_blocks(anchors) if head.execution.product_rows is None else [range(anchors)]


class ChainAttention:
    """Attention of the drafted rows of a block of anchors: the committed rows that ``base`` holds, and the anchor's own
    drafted rows before."""

    def __init__(self, head: Head, base: PackedAttention, block: range) -> None:
        self.block = block
        self._base, self._behaviour = base, head.behaviour
        self._chain: list[list[KeyValues]] = [[] for _ in range(head.config.num_layers)]

    def __call__(self, layer: int, q: Tensor, k_AMH: Tensor, v_AMH: Tensor) -> Tensor:
        """One more drafted row per anchor."""
        chain = self._chain[layer]
        chain.append(KeyValues(k_AMH, v_AMH))
        seen = chain[seen_from(self._behaviour, len(chain)) :]
        if seen:
            k_JAMH, v_JAMH = (torch.stack(part) for part in zip(*seen, strict=True))
        else:
            k_JAMH, v_JAMH = (part.new_empty((0, *part.shape)) for part in (k_AMH, v_AMH))
        return self._base.answer(layer, q, KeyValues(k_JAMH, v_JAMH), len(chain), self.block)


def seen_from(behaviour: Behaviour, step: int) -> int:
    """How many of the first drafted rows the drafted row of ``step`` (1, 2, ...) does not see."""
    hidden = {"grow": 0, "overwrite": step - 1, "unseen": step}[behaviour.chain]
    return hidden if behaviour.window is None else max(hidden, step - behaviour.window)
