"""The slow, obvious twins of margins along a server's drafts: one anchor, or one round after the other, every row made
again at every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, inf, log

from torch import Tensor
from twins.path_probability import logits_along
from twins.rounds import Twin

from replay.drafting.rows import DraftInput
from replay.head.model import Head


@dataclass(frozen=True, slots=True)
class TwinMargin:
    """One step: logit of the server's token, the best one and its token, best - logit, log-sum-exp of all, and
    for each noise scale that of (logit - best) / scale."""

    logit: float
    best: float
    preferred: int
    margin: float
    logsumexp: float
    spread: tuple[float, ...]


def margin_of(head: Head, logits_W: Tensor, token: int, scales: tuple[float, ...] = ()) -> TwinMargin:
    """Of one token against the logits of its step."""
    pairs = list(zip(head.target_ids_W.tolist(), logits_W.tolist(), strict=True))
    best, logit = (
        max(value for _, value in pairs),
        max((value for other, value in pairs if other == token), default=-inf),
    )
    preferred = next(other for other, value in pairs if value == best)
    spread = tuple(log(fsum(exp((value - best) / scale) for _, value in pairs)) for scale in scales)
    return TwinMargin(logit, best, preferred, best - logit, float(logits_W.logsumexp(0)), spread)


def margins_at(
    head: Head, item: DraftInput, anchor: int, served: list[int], scales: tuple[float, ...] = ()
) -> list[TwinMargin]:
    """Of each token that a server drafted at ``anchor``, before the first -1; healthy behaviour only."""
    drafted = served[: served.index(-1)] if -1 in served else served
    if not drafted:
        return []
    along = logits_along(head, item, anchor, drafted[:-1])
    return [margin_of(head, logits_W, token, scales) for token, logits_W in zip(drafted, along, strict=True)]


def margins_of_rounds(
    head: Head,
    item: DraftInput,
    accepted: Sequence[int],
    served: Sequence[Sequence[int]],
    scales: tuple[float, ...] = (),
) -> list[list[TwinMargin]]:
    """Of each token of each round of a request, in order, whatever the behaviour: the twin of ``walk`` along drafts.

    Each round goes on behind the ``accepted`` tokens of the one before, and what it leaves is made of what was served.
    """
    twin = Twin(head, item.tokens_T, item.features_RKD, item.prompt_tokens)
    found = []
    for taken, drafted in zip(accepted, served, strict=True):
        twin.draft(len(drafted), drafted)
        found.append([margin_of(head, *pair, scales) for pair in zip(twin.logits, drafted, strict=True)])
        if twin.anchor + taken + 1 < len(item.tokens_T) - 1:
            twin.commit(len(drafted), taken)
    return found
