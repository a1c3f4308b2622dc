"""A trace, heads and variants become rounds: what a server would have done, request by request."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.product_sizes import served_spans
from replay.drafting.rows import Span
from replay.errors import UsageError
from replay.simulator.batches import batches_for
from replay.simulator.binding import resolve
from replay.simulator.groups import Group, group_variants
from replay.simulator.held import requests_with_taps
from replay.simulator.inputs import FollowedRounds, followed_rounds, read_packs
from replay.simulator.loops import find_loop
from replay.simulator.play import replay_stems
from replay.simulator.results import (
    RoundsTable,
    Tally,
    describe_head,
    describe_trace,
    describe_wirings,
    request_info,
    variant_info,
)
from replay.simulator.variant import ResolvedVariant, Variant, name_variants
from replay.traces.fields import show
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds
from replay.traces.taps import FINAL
from replay.verify.estimator import Estimator

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """``done`` of ``total`` requests replayed under all variants; ``stage`` says in a few words for what.

    ``part``: what is done of the requests that are under way, as a number of requests.
    """

    done: int
    total: int
    stage: str = "replaying"
    part: float = 0.0


def simulate(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant | ResolvedVariant],
    *,
    device: str = "cpu",
    follow: "pl.DataFrame | None" = None,
    only: Collection[str] | None = None,
    served_products: bool = True,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> Rounds:
    """Replay every request of ``trace`` under every variant; rows are read a pack at a time.

    ``follow`` is a table of rounds (``Trace.served_rounds``): every variant then drafts at the anchors of these rounds
    instead of its own, request by request, so that it can be held against them round for round; requests without
    rounds there are left out. So are requests that lack a tap of some variant (held.py). ``only`` names the requests to
    replay. ``served_products`` false runs matrix products as large as they fit instead of as large as a CPU server's:
    several times as fast, and near ties may fall otherwise.

    ``checkpoints`` maps the variants' ``draft`` to heads. All checks stand before the first tensor is read.
    Raises WiringError, CheckpointError, UsageError or TraceError.

    >>> rounds = replay.simulate(trace, {"head": head}, [replay.Variant("head", steps=3)])
    >>> rounds.variants[0].steps
    3
    """
    if not isinstance(trace, Trace):
        raise UsageError(f"the trace is {show(trace)}; open one by Trace.open")
    _check_heads(variants, checkpoints)
    resolved = [resolve(variant, checkpoints[variant.draft], trace) for variant in variants]
    trace = requests_with_taps(trace, resolved, checkpoints)
    names = name_variants(resolved)
    groups = group_variants(resolved, checkpoints, trace, device, served_products=served_products)
    _check_follow(follow, groups)
    stems = [list(alike) for _, alike in groupby(groups, key=lambda group: group.stem)]
    tallies = [Tally(estimator=_estimator(variant, checkpoints[variant.draft], trace)) for variant in resolved]
    table = RoundsTable(names)
    led = None if follow is None else followed_rounds(follow)
    asked = _asked(led, only)
    total = sum(asked is None or record.request_id in asked for record in trace.records)
    spans, batches = _spans(trace, groups), batches_for(groups, trace)
    loops: dict[str, tuple[int, int]] = {}
    with torch.inference_mode():
        done = 0
        for pack in read_packs(trace, taps_of(groups), asked):
            leads = [FollowedRounds() if led is None else led[rows.request_id] for rows in pack]
            for number, _ in enumerate(
                replay_stems(stems, pack, leads, trace, spans, batches, tallies, table), start=1
            ):
                on_event(ReplayProgress(done, total, part=len(pack) * number / len(groups)))
            loops |= {rows.request_id: find_loop(rows.tokens[rows.prompt_tokens :].tolist()) for rows in pack}
            done += len(pack)
            on_event(ReplayProgress(done, total))
    played_variants = zip(names, resolved, tallies, strict=True)
    return Rounds(
        table=table.frame(),
        variants=tuple(variant_info(name, variant, tally, trace) for name, variant, tally in played_variants),
        requests=tuple(
            request_info(row, loops.get(row["request_id"], (0, 0))) for row in trace.requests.iter_rows(named=True)
        ),
        trace={**describe_trace(trace), "wirings": describe_wirings(resolved, checkpoints, trace)},
        drafts={
            name: describe_head(name, checkpoint, resolved, groups, trace) for name, checkpoint in checkpoints.items()
        },
    )


def _check_heads(variants: Sequence[Variant | ResolvedVariant], checkpoints: Mapping[str, Checkpoint]) -> None:
    if not isinstance(variants, Sequence) or not all(isinstance(one, Variant | ResolvedVariant) for one in variants):
        raise UsageError(f"variants are {show(variants)}, a list of Variant was expected; make them by sweep")
    if not isinstance(checkpoints, Mapping) or not all(isinstance(one, Checkpoint) for one in checkpoints.values()):
        raise UsageError(f"the heads are {show(checkpoints)}, a mapping from names to heads of load_head was expected")
    if not variants:
        raise UsageError("no variant was given; give at least one draft head with --draft")
    unknown = sorted({variant.draft for variant in variants} - set(checkpoints))
    if unknown:
        raise UsageError(f"no head is called {', '.join(unknown)}; there are {', '.join(checkpoints) or 'none'}")


def _check_follow(follow: "pl.DataFrame | None", groups: Sequence[Group]) -> None:
    if follow is not None and any(group.sampled for group in groups):
        raise UsageError("rounds of a sampled draft are drawn, and follow no other run's; type --verify target-only")


def _spans(trace: Trace, groups: Sequence[Group]) -> Mapping[str, Sequence[Span]]:
    """By request, which rows a server ran together; nothing where products run as large as they fit."""
    exact = any(group.head.execution.product_rows is not None for group in groups)
    crosses = any(group.crosses for group in groups)
    return served_spans((trace.whole if crosses else trace).served_rounds()) if exact else {}


def _asked(led: Mapping[str, FollowedRounds] | None, only: Collection[str] | None) -> Collection[str] | None:
    """The requests to replay; None for all."""
    if led is None or only is None:
        return led if only is None else only
    return set(led) & set(only)


def _estimator(variant: ResolvedVariant, checkpoint: Checkpoint, trace: Trace) -> Estimator | None:
    if variant.verify.name == "greedy":
        return None
    return Estimator(variant.verify, trace, variant.steps, draft_vocab_size=checkpoint.config.draft_vocab_size)


def taps_of(groups: Sequence[Group]) -> tuple[str, ...]:
    """Every tap that some variant reads."""
    taps = dict.fromkeys(tap for group in groups for tap in group.wiring.taps)
    if any(group.head.behaviour.chunk is not None for group in groups):
        taps[FINAL] = None
    return tuple(taps)
