"""A simulation held against the rounds of the trace's own server: how many are alike, near a tie or unexplained.

Every variant that drafts in the server's shape follows the server's drafts once to find how far rounding moves them,
and once more to count with that noise (analysis/followed.py, rounding.py). Variants share these passes; those that
differ in their acceptance rule only draft the same and are followed as one. Equal to each variant by itself
(tests/twins/noise.py) up to the rounding of fp32, which stands for exact arithmetic and runs in products as large as
fit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from replay.analysis.followed import LEAST_SCALE, Followed, agreement
from replay.checkpoint.checkpoint import Checkpoint
from replay.simulator.binding import resolve, target_precision
from replay.simulator.fit import samples_drafts
from replay.simulator.following import follow_server
from replay.simulator.progress import ReplayProgress
from replay.simulator.rounding import EXACT, noise_between, other_orders
from replay.simulator.served_drafts import served_shape
from replay.simulator.tasks import Workers
from replay.simulator.variant import ResolvedVariant, Variant
from replay.traces.agreement import Agreement
from replay.traces.fields import count_of
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds
from replay.verify.rules import Rule

if TYPE_CHECKING:
    import polars as pl

# Variants followed at once: every token is held against the noise scale of each, and eight cost hardly more than one.
_AT_ONCE = 8
_PASSES = 3  # over the trace, for each lot of variants
_STAGE = "against the server"


def with_agreement(
    rounds: Rounds,
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant | ResolvedVariant],
    *,
    device: str = "cpu",
    workers: Workers | None = None,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> Rounds:
    """What ``simulate`` made of ``variants``, with the ``agreement`` of each that drafts as the trace's server did.

    It stays None of all where the trace holds no rounds of a server, and of variants of another shape, whose drafts are
    sampled, or whose head knows fewer tokens than the server drafted. The other arguments are those of ``simulate``,
    and so is what is raised.
    """
    trace = trace.only([request.request_id for request in rounds.requests])
    served = trace.served_rounds()
    resolved = [resolve(variant, checkpoints[variant.draft], trace) for variant in variants]
    drafting = {
        variant: replace(variant, verify=Rule())
        for variant in resolved
        if drafts_as_the_server(variant, checkpoints[variant.draft], trace, served)
    }
    distinct = list(dict.fromkeys(drafting.values()))
    lots = [distinct[start : start + _AT_ONCE] for start in range(0, len(distinct), _AT_ONCE)]
    follow = _Following(trace, checkpoints, served, device, workers, on_event, len(lots) * _PASSES)
    found = {variant: one for lot in lots for variant, one in follow.agree(lot)}
    agreed = [found[drafting[variant]] if variant in drafting else None for variant in resolved]
    infos = zip(rounds.variants, agreed, strict=True)
    return replace(rounds, variants=tuple(replace(info, agreement=one) for info, one in infos))


def drafts_as_the_server(
    variant: ResolvedVariant, checkpoint: Checkpoint, trace: Trace, served: "pl.DataFrame"
) -> bool:
    """Whether the rounds of ``served`` can be held against what the variant drafts.

    Chains have to be as long as the server's; trees have to have its topk, steps and number of draft tokens. Rows in
    fp8 draft other tokens than those that the server had.
    """
    if not len(served) or samples_drafts(variant.verify, trace) or not set(variant.wiring.taps) <= set(_exact(trace)):
        return False
    trees, most = served_shape(served["drafted"].to_list(), served["parents"].to_list())
    if trees != (variant.topk > 1) or variant.num_draft_tokens != most + 1:
        return False
    if trees and (variant.steps, variant.topk) != _told_shape(trace):
        return False
    return max(map(max, filter(None, served["drafted"].to_list())), default=0) < checkpoint.config.vocab_size


def _exact(trace: Trace) -> list[str]:
    return [tap for tap in trace.taps if tap not in trace.rounded_taps]


def _told_shape(trace: Trace) -> tuple[int | None, ...]:
    """Steps and topk as the server's arguments give them; None where they do not."""
    told = (trace.header.engine.details.get(f"speculative_{name}", "") for name in ("num_steps", "eagle_topk"))
    return tuple(map(count_of, told))


@dataclass(slots=True)
class _Following:
    """Passes over one trace along its server's drafts, ``passes`` of them in all."""

    trace: Trace
    checkpoints: Mapping[str, Checkpoint]
    served: "pl.DataFrame"
    device: str
    workers: Workers | None
    on_event: Callable[[ReplayProgress], None]
    passes: int
    passed: int = 0

    def agree(self, variants: list[ResolvedVariant]) -> Iterator[tuple[ResolvedVariant, Agreement]]:
        """Each variant with the rounds that it explains."""
        orders = {variant: other_orders(variant, self.trace) for variant in variants}
        every = dict.fromkeys([*variants, *(one for others in orders.values() for one in others)])
        exact = [one for one in every if _stands_for_exact(one, self.trace)]
        followed = self._follow([one for one in every if one not in exact])
        followed |= self._follow(exact, served_products=False)
        noises = [noise_between(followed[one], *(followed[other] for other in orders[one])) for one in variants]
        counted = self._follow(variants, [max(noise.scale, LEAST_SCALE) for noise in noises])
        for place, (variant, noise) in enumerate(zip(variants, noises, strict=True)):
            yield variant, agreement(counted[variant], noise, place)

    def _follow(
        self, variants: list[ResolvedVariant], scales: Sequence[float] = (), *, served_products: bool = True
    ) -> dict[ResolvedVariant, Followed]:
        """Each variant along the server's drafts: one pass for all of them."""
        before, total = self.passed * len(self.trace.requests), self.passes * len(self.trace.requests)
        self.passed += 1
        if not variants:
            return {}
        found = follow_server(
            self.trace, self.checkpoints, variants, self.served, scales=scales, device=self.device,
            served_products=served_products, workers=self.workers,
            on_event=lambda event: self.on_event(ReplayProgress(before + event.done, total, _STAGE, event.part)),
        )  # fmt: skip
        return dict(zip(variants, found, strict=True))


def _stands_for_exact(variant: ResolvedVariant, trace: Trace) -> bool:
    """Whether it is in fp32, and so fine that the sizes of its products do not matter."""
    return variant.precision.base == EXACT != target_precision(trace)
