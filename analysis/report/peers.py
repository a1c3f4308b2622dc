"""Other projects' acceptance metrics, from the same rounds.

Names and definitions as the projects' sources had them in November 2026. Some take theirs over every anchor of a
teacher-forced text; here all are taken over the served walk, so that what differs is the definition alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from rich.console import Group, RenderableType
from rich.text import Text

from replay.analysis import wording
from replay.analysis.counts import ACCEPTED, ROUNDS, per_request, ratio
from replay.analysis.summary import VariantSummary, summarise
from replay.analysis.tables import heading, pairs
from replay.errors import UsageError
from replay.printable import counted
from replay.traces.rounds import Rounds


@dataclass(frozen=True, slots=True)
class PeerMetric:
    """One project's metric from our rounds.

    ``values`` has one number, or one for each draft position (nan without a denominator); ``counts`` says what was
    divided by what, ``definition`` in words.
    """

    project: str
    metric: str
    values: tuple[float, ...]
    counts: str
    definition: str


@dataclass(frozen=True, slots=True)
class Peers:
    """Every project's metric of one variant."""

    variant: str
    metrics: tuple[PeerMetric, ...]


def peer_metrics(rounds: Rounds, variant: str) -> Peers:
    """Every project's metric for one variant. Raises UsageError for a variant that the rounds do not have."""
    names = [info.name for info in rounds.variants]
    if variant not in names:
        raise UsageError(f"there is no variant {variant!r} in these rounds: type one of {', '.join(names)}")
    counts = per_request(rounds)[variant]
    played = [(int(row[ROUNDS]), int(row[ACCEPTED])) for row in counts if row[ROUNDS] > 0]
    tokens = sum(request.output_tokens for request, row in zip(rounds.requests, counts, strict=True) if row[ROUNDS] > 0)
    summary = summarise(rounds, resamples=1)[names.index(variant)]
    return Peers(variant, tuple(_metrics(summary, played, tokens)))


def render_peers(peers: Peers) -> RenderableType:
    """Project and metric, then its value, what was divided by what, and the definition."""
    title = heading(f"Other projects' metrics, from the served walk of {peers.variant}")
    return Group(Text(), title, pairs([(f"{row.project}: {row.metric}", _value(row)) for row in peers.metrics]))


def _value(row: PeerMetric) -> str:
    if len(row.values) == 1:
        equals = " = " if "/" in row.counts else " over "
        return f"{wording.decimal(row.values[0])}{equals}{row.counts}, {row.definition}"
    values = [wording.percent(value).removesuffix(" %") for value in row.values]
    return f"{' '.join(values)} %, {row.counts}, {row.definition}"


def _metrics(row: VariantSummary, played: Sequence[tuple[int, int]], tokens: int) -> list[PeerMetric]:
    """``played``: (rounds, accepted) of each request that has rounds; ``tokens``: the output tokens of these."""
    rounds, accepted, drafted = row.rounds, row.accepted, row.drafted
    nodes = rounds * (row.num_draft_tokens - 1)
    length, joint, conditional = (row.accept_length,), row.position_joint, row.position_conditional
    by_request = math.fsum((some + won) / some for some, won in played) / len(played) if played else math.nan
    products = accumulate((0.0 if math.isnan(rate) else rate for rate in conditional), mul)
    emitted = f"{accepted + rounds:,} / {rounds:,}"
    reached = f"each / {rounds:,}"
    before = "each / those before"
    won, rate = f"{accepted:,} / {rounds:,}", f"{accepted:,} / {drafted:,}"
    return [
        PeerMetric("SGLang log", "accept len", length, emitted, "accepted + 1 a round"),
        PeerMetric(
            "SGLang log",
            "accept rate",
            (ratio(accepted, nodes),),
            f"{accepted:,} / {nodes:,}",
            "accepted of all nodes drafted",
        ),
        PeerMetric(
            "SGLang meta_info",
            "spec_accept_length",
            (ratio(tokens, rounds),),
            f"{tokens:,} / {rounds:,}",
            "completion tokens a round",
        ),
        PeerMetric("vLLM", "mean acceptance length", length, emitted, "1 + accepted a round"),
        PeerMetric("vLLM", "per-position acceptance", joint, reached, "rounds with at least j accepted"),
        PeerMetric("vLLM 2024", "acceptance rate", (ratio(accepted, drafted),), rate, "accepted of all drafted"),
        PeerMetric("EAGLE paper", "tau", length, emitted, "accepted + 1 a round"),
        PeerMetric("EAGLE paper", "n-alpha", conditional, before, "accepted at n, given all before"),
        PeerMetric(
            "SpecForge",
            "simulated_acc_len",
            (math.fsum(products),) if rounds else (math.nan,),
            won,
            "sum of products of rates, no bonus",
        ),
        PeerMetric("Automodel", "tau_sim", (1 + math.fsum(joint),), emitted, "1 + sum of joint rates"),
        PeerMetric("speculators", "full_acc_k", joint, reached, "all up to k right"),
        PeerMetric("speculators", "cond_acc_k", conditional, before, "k right, given all before"),
        PeerMetric("modelopt", "AR", (ratio(accepted, rounds),), won, "accepted a round, no bonus"),
        PeerMetric(
            "specdec_bench",
            "Average_AL",
            (by_request,),
            counted(len(played), "request"),
            "mean of the requests' own lengths",
        ),
        PeerMetric(
            "TensorRT-LLM", "num accepted tokens", (ratio(accepted, rounds),), won, "accepted a round, no bonus"
        ),
    ]
