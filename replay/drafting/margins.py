"""How far the replay is from a server's own drafts: at every anchor it is fed what the server drafted, step by step.

Two runs of a head part at the first token in which they differ, and what follows compares nothing. Fed the server's
tokens the head stays on the server's chain, so that each step says by itself how near the server's choice was. A chain
has one token a step; tree_margins.py follows trees.

Suffixes as in chains.py: A anchors, B of a block, K steps, W draft vocabulary, V target vocabulary, Z noise scales.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from replay.drafting.chains import chain_steps
from replay.drafting.first_pass import FirstPass, first_pass
from replay.drafting.next_tokens import draft_ids, read_logits
from replay.drafting.rows import DraftInput, find_dummies
from replay.errors import UsageError
from replay.head.model import Head
from replay.head.products import ProductSizes

# Logits no further behind the best than this (nats) are summed one by one, and at the scale z those within 24 z: over a
# large vocabulary as well e^-24 each is nothing.
_SUMMED, _COUNTED = 6.0, 24.0


@dataclass(frozen=True, slots=True)
class Margins:
    """A server's drafts against the replay's logits, at each anchor of one request and step [A, K].

    ``logit_AK`` is the logit of the server's token, -inf where the head cannot draft it; ``best_AK`` the largest one
    over the draft vocabulary and ``preferred_AK`` the target id that has it (of equal ones the lowest draft id);
    ``logsumexp_AK`` is over the draft vocabulary too. ``margin_AK`` is best - logit in nats: 0 where both agree or
    tie, inf where the head cannot draft the server's token. ``spread_AKZ`` is, for each noise scale z (nats), the log
    of the sum over the draft vocabulary of exp((logit - best) / z): a softmax at temperature z then gives the server's
    token the probability exp(-margin / z - spread). All but ``preferred_AK`` (int64) are float32.

    From the first step on for which the server drafted nothing, numbers are NaN and ``preferred_AK`` is -1. An anchor
    that drafts token 0 whatever the head says (``Behaviour.dummy_from``) has no logits: they are NaN, its margin is 0
    or inf.
    """

    logit_AK: Tensor
    best_AK: Tensor
    preferred_AK: Tensor
    margin_AK: Tensor
    logsumexp_AK: Tensor
    spread_AKZ: Tensor

    def rows(self, part: slice) -> "Margins":
        """Those of some anchors, on the CPU."""
        return Margins(*(getattr(self, field.name)[part].cpu() for field in fields(self)))


def join_margins(parts: "Sequence[Margins]") -> Margins:
    """One after the other; there must be one."""
    return Margins(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Margins)))


def margins_along(
    head: Head,
    inputs: Sequence[DraftInput],
    served: Sequence[Tensor],
    *,
    scales: Sequence[float] = (),
    first: FirstPass | None = None,
) -> list[Margins]:
    """Margins at every anchor of every request, in the order of ``inputs``.

    ``served`` are the target ids that a server drafted there, [A, K] for each request with one K for all; -1 for none.
    ``scales`` are the noise scales [Z] for which ``spread_AKZ`` is wanted. ``first`` is the first pass over the same
    inputs, where it was made before. Equal to following each anchor by itself (tests/twins/margins.py) up to the
    rounding of products over other numbers of rows; along ``draft_every_anchor``'s own drafts every margin is 0. Raises
    UsageError for behaviour that follows the walk, and for tokens that are none of the head's vocabulary or of another
    shape.
    """
    _check(head, inputs, served)
    counts = [item.anchors for item in inputs]
    served_AK = torch.cat(list(served)).to(head.device)
    if sum(counts) == 0:
        none_AK, none_AKZ = torch.empty(served_AK.shape), torch.empty((*served_AK.shape, len(scales)))
        return [Margins(none_AK, none_AK, none_AK.long(), none_AK, none_AK, none_AKZ) for _ in inputs]
    first = first or first_pass(head, inputs)
    index_AK = served_index(head, served_AK)
    states = chain_steps(head, first, served_AK.shape[1], lambda step: served_AK[:, step - 1].clamp(min=0))
    read = [
        read_margins(head, state.normed_AE, index_A, scales, state.logit_sizes)
        for state, index_A in zip(states, index_AK.T, strict=True)
    ]
    whole = stack_margins(read, served_AK, find_dummies(first.anchor_rows_A, head.behaviour))
    columns = (getattr(whole, field.name).cpu().split(counts) for field in fields(Margins))
    return [Margins(*request) for request in zip(*columns, strict=True)]


def served_index(head: Head, served_AK: Tensor) -> Tensor:
    """The draft ids of a server's tokens [A, K]; -1 for none, or where the head cannot draft it."""
    return torch.where(served_AK < 0, -1, draft_ids(head)[served_AK.clamp(min=0)])


def stack_margins(read: Sequence[tuple[Tensor, ...]], served_AK: Tensor, dummy_A: Tensor) -> Margins:
    """Margins of K steps from those of each (``read_margins``).

    ``dummy_A`` are anchors that draft token 0 unasked.
    """
    return _blank_out(Margins(*(torch.stack(column, 1) for column in zip(*read, strict=True))), served_AK, dummy_A)


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


def read_margins(
    head: Head, normed_AE: Tensor, index_A: Tensor, scales: Sequence[float], sizes: ProductSizes | None = None
) -> tuple[Tensor, ...]:
    """The numbers of one step [A], in the order of ``Margins``; ``index_A`` are draft ids, -1 for none.

    ``sizes`` as in ``read_logits``. Where several draft ids stand for one token, its logit is their largest: a wrong
    map of the vocabulary (``vocab.d2t``) does that.
    """
    target_ids_W = head.target_ids_W
    shared = len(target_ids_W.unique()) < len(target_ids_W)

    def read(logits_BW: Tensor, block: slice) -> tuple[Tensor, ...]:
        index_B = index_A[block]
        best_B, preferred_B = logits_BW.max(dim=-1)  # of equals the first, as ``choose`` takes it
        logit_B = logits_BW.gather(1, index_B[:, None].clamp(min=0))[:, 0]
        if shared:
            other_BW = target_ids_W != target_ids_W[index_B.clamp(min=0)][:, None]
            logit_B = logits_BW.masked_fill(other_BW, float("-inf")).amax(-1)
        logit_B = logit_B.masked_fill(index_B < 0, float("-inf"))
        margin_B = best_B.double() - logit_B.double()
        logsumexp_B = logits_BW.float().logsumexp(-1)
        spread_BZ = _spread(logits_BW, best_B, logsumexp_B, scales)
        return logit_B.float(), best_B.float(), preferred_B, margin_B.float(), logsumexp_B, spread_BZ

    logit_A, best_A, preferred_A, margin_A, logsumexp_A, spread_AZ = read_logits(
        head,
        normed_AE,
        read,
        sizes,
        widening=2,  # logits in fp32 beside them
    )
    return logit_A, best_A, target_ids_W[preferred_A], margin_A, logsumexp_A, spread_AZ


def _spread(logits_BW: Tensor, best_B: Tensor, logsumexp_B: Tensor, scales: Sequence[float]) -> Tensor:
    """The log of the sum of exp((logit - best) / z) over the draft vocabulary for each scale z [B, Z].

    Up to a scale of 1 only logits within ``_SUMMED`` of the best are summed one by one. The others lie further behind
    than that: of what they sum to at scale 1 no more than exp(-_SUMMED (1 / z - 1)) is left, and that is taken.
    """
    behind_BW = logits_BW.float() - best_B.float()[:, None]
    row_F, column_F = (behind_BW > -_SUMMED).nonzero(as_tuple=True)
    behind_F = behind_BW[row_F, column_F]
    none_B = torch.zeros_like(logsumexp_B)
    at_one_B = (logsumexp_B - best_B.float()).exp()
    rest_B = (at_one_B - none_B.index_add(0, row_F, behind_F.exp())).clamp_min(0)
    spread_BZ = none_B.new_empty((len(best_B), len(scales)))
    for place, scale in sorted(enumerate(scales), key=lambda pair: -pair[1]):
        if scale > 1:
            spread_BZ[:, place] = (behind_BW / scale).logsumexp(-1)
            continue
        if _COUNTED * scale < _SUMMED:
            counted_F = behind_F > -_COUNTED * scale
            row_F, behind_F = row_F[counted_F], behind_F[counted_F]
        summed_B = none_B.index_add(0, row_F, (behind_F / scale).exp())
        spread_BZ[:, place] = (summed_B + rest_B * math.exp(-_SUMMED * (1 / scale - 1))).log()
    return spread_BZ


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
        spread_AKZ=found.spread_AKZ.masked_fill(dummy_A[:, None, None], 0.0).masked_fill(
            nothing_AK[..., None], float("nan")
        ),
    )
