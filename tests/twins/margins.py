"""The slow, obvious twin of drafting/margins.py: one anchor, every row made again at every step, healthy behaviour
only."""

from dataclasses import dataclass
from math import inf

from twins.path_probability import logits_along

from replay.drafting.rows import DraftInput
from replay.head.model import Head


@dataclass(frozen=True, slots=True)
class TwinMargin:
    """One step: logit of the server's token, the best one and its token, best - logit, log-sum-exp of all."""

    logit: float
    best: float
    preferred: int
    margin: float
    logsumexp: float


def margins_at(head: Head, item: DraftInput, anchor: int, served: list[int]) -> list[TwinMargin]:
    """Of each token that a server drafted at ``anchor``, before the first -1."""
    drafted = served[: served.index(-1)] if -1 in served else served
    margins: list[TwinMargin] = []
    if not drafted:
        return margins
    for token, logits_W in zip(drafted, logits_along(head, item, anchor, drafted[:-1]), strict=True):
        by_token = dict(zip(head.target_ids_W.tolist(), logits_W.tolist(), strict=True))
        best, logit = max(by_token.values()), by_token.get(token, -inf)
        preferred = next(other for other, value in by_token.items() if value == best)
        margins.append(TwinMargin(logit, best, preferred, best - logit, float(logits_W.logsumexp(0))))
    return margins
