"""The slow, obvious twin of drafting/margins.py: one anchor, every row made again at every step, healthy behaviour
only."""

from dataclasses import dataclass
from math import exp, fsum, inf, log

from twins.path_probability import logits_along

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


def margins_at(
    head: Head, item: DraftInput, anchor: int, served: list[int], scales: tuple[float, ...] = ()
) -> list[TwinMargin]:
    """Of each token that a server drafted at ``anchor``, before the first -1."""
    drafted = served[: served.index(-1)] if -1 in served else served
    margins: list[TwinMargin] = []
    if not drafted:
        return margins
    for token, logits_W in zip(drafted, logits_along(head, item, anchor, drafted[:-1]), strict=True):
        by_token = dict(zip(head.target_ids_W.tolist(), logits_W.tolist(), strict=True))
        best, logit = max(by_token.values()), by_token.get(token, -inf)
        preferred = next(other for other, value in by_token.items() if value == best)
        spread = tuple(log(fsum(exp((value - best) / scale) for value in by_token.values())) for scale in scales)
        margins.append(TwinMargin(logit, best, preferred, best - logit, float(logits_W.logsumexp(0)), spread))
    return margins
