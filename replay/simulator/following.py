"""Variants that follow a server's own drafts: fed what the server drafted, each says how near it was to every token.

Two replays part at their first differing token, and what follows compares nothing; a replay that follows the server
stays on the server's drafts, so that each of its tokens is evidence (analysis/followed.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from replay.analysis.followed import Followed, join
from replay.checkpoint.checkpoint import Checkpoint
from replay.errors import UsageError
from replay.simulator.along import Served, follow_pack
from replay.simulator.binding import resolve
from replay.simulator.fit import samples_drafts
from replay.simulator.groups import Group, group_variants, taps_of
from replay.simulator.held import requests_with_taps
from replay.simulator.inputs import read_packs
from replay.simulator.packs import spans_of
from replay.simulator.progress import ReplayProgress
from replay.simulator.served_drafts import ServedDrafts, served_drafts, served_shape
from replay.simulator.tasks import Result, Task, Workers, plan_tasks, replay_tasks
from replay.simulator.variant import ResolvedVariant, Variant
from replay.simulator.workers import use_workers
from replay.traces.reader import Trace

if TYPE_CHECKING:
    import polars as pl


def follow_server(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant | ResolvedVariant],
    rounds: "pl.DataFrame",
    *,
    scales: Sequence[float] = (),
    device: str = "cpu",
    served_products: bool = True,
    workers: Workers | None = None,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> list[Followed]:
    """Every variant against the drafts of ``rounds`` (``Trace.served_rounds`` or some of them), token by token.

    Requests without a round there are left out; ``scales`` are the noise scales of ``Followed``. A variant drafts
    chains or trees as the rounds do; its steps and topk are the server's. ``served_products`` and ``workers`` as in
    ``simulate``.
    Raises UsageError for a variant of another shape, or whose drafts are sampled, and what ``simulate`` raises.
    """
    resolved = [resolve(variant, checkpoints[variant.draft], trace) for variant in variants]
    trace = requests_with_taps(trace, resolved, checkpoints)
    served = served_drafts(rounds)
    with use_workers(workers, trace, checkpoints, device) as hands:
        if hands is not None:
            _check_shapes(resolved, [samples_drafts(one.verify, trace) for one in resolved], served)
            planned = plan_tasks(
                trace, checkpoints, resolved, set(served), hands.count,
                rounds=rounds, scales=tuple(scales), served_products=served_products,
            )  # fmt: skip
            return [join(parts) for parts in _by_variant(len(resolved), replay_tasks(hands, planned, on_event))]
    groups = group_variants(resolved, checkpoints, trace, device, served_products=served_products)
    _check_shapes(resolved, [group.sampled for group in groups], served)
    return [join(parts) for parts in _follow_here(groups, trace, rounds, tuple(scales), on_event)]


def _by_variant(variants: int, results: Sequence[tuple[Task, Result]]) -> list[list[Followed]]:
    found: list[list[Followed]] = [[] for _ in range(variants)]
    for task, result in results:
        for member, one in zip(task.members, result, strict=True):
            assert isinstance(one, Followed)
            found[member].append(one)
    return found


def _follow_here(
    groups: Sequence[Group],
    trace: Trace,
    rounds: "pl.DataFrame",
    scales: tuple[float, ...],
    on_event: Callable[[ReplayProgress], None],
) -> list[list[Followed]]:
    """In this process: of each variant what it says of each request."""
    found: list[list[Followed]] = [[] for group in groups for _ in group.members]
    served = Served.of(trace, groups, rounds, spans_of(groups, trace))
    done, total = 0, len(served.drafts)
    with torch.inference_mode():
        for pack in read_packs(trace, taps_of(groups), served.drafts):
            for told, (group, followed) in enumerate(follow_pack(groups, pack, served, scales), start=1):
                for member in group.members:
                    found[member] += followed
                on_event(ReplayProgress(done, total, part=len(pack) * told / len(groups)))
            done += len(pack)
            on_event(ReplayProgress(done, total))
    return found


def _check_shapes(
    variants: Sequence[ResolvedVariant], sampled: Sequence[bool], served: Mapping[str, ServedDrafts]
) -> None:
    if not served:
        raise UsageError("no round of a server is left to follow; give a trace whose server drafted")
    if any(sampled):
        raise UsageError("a head that samples its drafts follows no other run's; type --verify target-only")
    rounds = served.values()
    trees, most = served_shape([d for one in rounds for d in one.drafted], [p for one in rounds for p in one.parents])
    for variant in variants:
        here = variant.num_draft_tokens - 1
        # Chains may be shorter than the most that a server drafts; a tree has one size.
        if trees != (variant.topk > 1) or (here != most if trees else here < most):
            raise UsageError(
                f"the server drafted {'trees' if trees else 'chains'} of {most} tokens, the variant drafts "
                f"{'trees' if variant.topk > 1 else 'chains'} of {here}; type the server's --steps, --topk and "
                "--num-draft-tokens"
            )
