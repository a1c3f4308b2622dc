"""How far the replay is from a server's own drafts: at every anchor it is fed what the server drafted, step by step.

Two runs of a head part at the first token in which they differ, and what follows compares nothing. Fed the server's
tokens the head stays on the server's chain, so that each step says by itself how near the server's choice was. A chain
has one token a step; tree_margins.py follows trees.

Suffixes as in chains.py: A anchors, B of a block, K steps, W draft vocabulary, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from replay.drafting.chains import ChainStep, chain_steps
from replay.drafting.first_pass import FirstPass, first_pass
from replay.drafting.next_tokens import draft_ids, read_logits
from replay.drafting.rows import DraftInput, find_dummies
from replay.errors import UsageError
from replay.head.model import Head


@dataclass(frozen=True, slots=True)
class Margins:
    """A server's drafts against the replay's logits, at each anchor of one request and step [A, K].

    ``logit_AK`` is the logit of the server's token, -inf where the head cannot draft it; ``best_AK`` the largest one
    over the draft vocabulary and ``preferred_AK`` the target id that has it (of equal ones the lowest draft id);
    ``logsumexp_AK`` is over the draft vocabulary too. ``margin_AK`` is best - logit in nats: 0 where both agree or
    tie, inf where the head cannot draft the server's token. All but ``preferred_AK`` (int64) are float32.

    From the first step on for which the server drafted nothing, numbers are NaN and ``preferred_AK`` is -1. An anchor
    that drafts token 0 whatever the head says (``Behaviour.dummy_from``) has no logits: they are NaN, its margin is 0
    or inf.
    """

    logit_AK: Tensor
    best_AK: Tensor
    preferred_AK: Tensor
    margin_AK: Tensor
    logsumexp_AK: Tensor


def margins_along(
    head: Head, inputs: Sequence[DraftInput], served: Sequence[Tensor], *, first: FirstPass | None = None
) -> list[Margins]:
    """Margins at every anchor of every request, in the order of ``inputs``.

    ``served`` are the target ids that a server drafted there, [A, K] for each request with one K for all; -1 for none.
    ``first`` is the first pass over the same inputs, where it was made before. Equal to following each anchor by itself
    (tests/twins/margins.py) up to the rounding of products over other numbers of rows; along ``draft_every_anchor``'s
    own drafts every margin is 0. Raises UsageError for behaviour that follows the walk, and for tokens that are none of
    the head's vocabulary or of another shape.
    """
    _check(head, inputs, served)
    counts = [item.anchors for item in inputs]
    served_AK = torch.cat(list(served)).to(head.device)
    if sum(counts) == 0:
        none_AK = torch.empty(served_AK.shape)
        return [Margins(none_AK, none_AK, none_AK.long(), none_AK, none_AK) for _ in inputs]
    first = first or first_pass(head, inputs)
    index_AK = torch.where(served_AK < 0, -1, draft_ids(head)[served_AK.clamp(min=0)])
    states = chain_steps(head, first, served_AK.shape[1], lambda step: served_AK[:, step - 1].clamp(min=0))
    read = [_read(head, state, index_A) for state, index_A in zip(states, index_AK.T, strict=True)]
    whole = _blank_out(
        Margins(*(torch.stack(column, 1) for column in zip(*read, strict=True))),
        served_AK,
        find_dummies(first.anchor_rows_A, head.behaviour),
    )
    columns = (getattr(whole, field.name).cpu().split(counts) for field in fields(Margins))
    return [Margins(*request) for request in zip(*columns, strict=True)]


def _check(head: Head, inputs: Sequence[DraftInput], served: Sequence[Tensor]) -> None:
    if head.behaviour.follows_walk:
        raise UsageError("margins are read over committed rows; ask for them without faults that follow the walk")
    shapes = [tuple(tokens_AK.shape) for tokens_AK in served]
    steps = {shape[1] for shape in shapes if len(shape) == 2}
    if len(steps) != 1 or 0 in steps or shapes != [(item.anchors, *steps) for item in inputs]:
        raise UsageError(
            f"drafted tokens came as {', '.join(map(str, shapes)) or 'nothing'}, the requests have "
            f"{', '.join(str(item.anchors) for item in inputs) or 'no'} anchors; give each [anchors, steps], with as "
            "many steps for all"
        )
    strange = {int(token) for tokens_AK in served for token in tokens_AK[tokens_AK >= head.config.vocab_size]}
    if strange:
        raise UsageError(
            f"the server drafted token {min(strange)}, the vocabulary of draft head {head.name} has "
            f"{head.config.vocab_size}; give the head that drafted, or -1 where nothing was drafted"
        )


def _read(head: Head, state: ChainStep, index_A: Tensor) -> tuple[Tensor, ...]:
    """The numbers of one step [A], in the order of ``Margins``; ``index_A`` are draft ids, -1 for none."""

    def read(logits_BW: Tensor, block: slice) -> tuple[Tensor, ...]:
        index_B = index_A[block]
        best_B, preferred_B = logits_BW.max(dim=-1)  # of equals the first, as ``choose`` takes it
        logit_B = logits_BW.gather(1, index_B[:, None].clamp(min=0))[:, 0].masked_fill(index_B < 0, float("-inf"))
        margin_B = best_B.double() - logit_B.double()
        return logit_B.float(), best_B.float(), preferred_B, margin_B.float(), logits_BW.float().logsumexp(-1)

    logit_A, best_A, preferred_A, margin_A, logsumexp_A = read_logits(head, state.normed_AE, read, state.logit_sizes)
    return logit_A, best_A, head.target_ids_W[preferred_A], margin_A, logsumexp_A


def _blank_out(found: Margins, served_AK: Tensor, dummy_A: Tensor) -> Margins:
    """NaN and -1 from where the server drafted nothing, and what holds of anchors that draft token 0 unasked."""
    nothing_AK = (served_AK < 0).cummax(dim=1).values
    unread_AK = nothing_AK | dummy_A[:, None]
    of_dummies_AK = torch.zeros_like(found.margin_AK).masked_fill(served_AK != 0, float("inf"))
    return Margins(
        logit_AK=found.logit_AK.masked_fill(unread_AK, float("nan")),
        best_AK=found.best_AK.masked_fill(unread_AK, float("nan")),
        preferred_AK=found.preferred_AK.masked_fill(dummy_A[:, None], 0).masked_fill(nothing_AK, -1),
        margin_AK=torch.where(dummy_A[:, None], of_dummies_AK, found.margin_AK).masked_fill(nothing_AK, float("nan")),
        logsumexp_AK=found.logsumexp_AK.masked_fill(unread_AK, float("nan")),
    )
