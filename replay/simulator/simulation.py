"""A trace, heads and variants become rounds: what a server would have done, request by request."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from replay.checkpoint.checkpoint import Checkpoint
from replay.errors import UsageError
from replay.simulator.batches import batches_for
from replay.simulator.binding import resolve
from replay.simulator.groups import Group, group_variants, taps_of
from replay.simulator.held import requests_with_taps
from replay.simulator.inputs import followed_rounds, plan_packs, read_packs
from replay.simulator.loops import find_loop
from replay.simulator.packs import check_follow, estimator_of, notes_of, replay_pack, spans_of
from replay.simulator.progress import ReplayProgress
from replay.simulator.results import (
    Played,
    Tally,
    describe_head,
    describe_trace,
    describe_wirings,
    request_info,
    variant_info,
)
from replay.simulator.rounds_table import RoundsTable
from replay.simulator.tasks import Result, Task, Workers, plan_tasks, replay_tasks
from replay.simulator.variant import ResolvedVariant, Variant, name_variants
from replay.simulator.workers import use_workers
from replay.traces.fields import show
from replay.traces.given import check_callable, check_given
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds, tokens_sha256

if TYPE_CHECKING:
    import polars as pl


def simulate(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant | ResolvedVariant],
    *,
    device: str = "cpu",
    follow: "pl.DataFrame | None" = None,
    only: Collection[str] | None = None,
    served_products: bool = True,
    workers: "int | str | Workers | None" = None,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> Rounds:
    """Replay every request of ``trace`` under every variant; rows are read a pack at a time.

    ``follow`` is a table of rounds (``Trace.served_rounds``): every variant then drafts at the anchors of these rounds
    instead of its own, request by request, so that it can be held against them round for round; requests without
    rounds there are left out. So are requests that lack a tap of some variant (held.py). ``only`` names the requests to
    replay. ``served_products`` false runs matrix products as large as they fit instead of as large as a CPU server's:
    several times as fast, and near ties may fall otherwise.

    ``workers`` is a number of processes that replay side by side, with the same rounds to the last bit (workers.py);
    None replays in this one. A text is the address of a Ray cluster whose nodes do it (cluster.py).

    ``checkpoints`` maps the variants' ``draft`` to heads. All checks stand before the first tensor is read.
    Raises WiringError, CheckpointError, UsageError or TraceError, and WorkerError where workers end again and again.

    >>> rounds = replay.simulate(trace, {"head": head}, [replay.Variant("head", steps=3)])
    >>> rounds.variants[0].steps
    3
    """
    return simulate_with_notes(
        trace, checkpoints, variants, device=device, follow=follow, only=only, served_products=served_products,
        workers=workers, on_event=on_event,
    )[0]  # fmt: skip


def simulate_with_notes(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant | ResolvedVariant],
    *,
    device: str = "cpu",
    follow: "pl.DataFrame | None" = None,
    only: Collection[str] | None = None,
    served_products: bool = True,
    workers: "int | str | Workers | None" = None,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> tuple[Rounds, list[Sequence[str]]]:
    """``simulate``, and of each variant what its head said of the passes that it shared. Raises as ``simulate``."""
    if not isinstance(trace, Trace):
        raise UsageError(f"the trace is {show(trace)}; open one by Trace.open")
    _check_heads(variants, checkpoints)
    _check_place(device, follow, only)
    check_given("served_products", served_products, bool, "True or False was expected")
    check_callable("on_event", on_event, "a function that takes an event was expected; leave it out")
    resolved = [resolve(variant, checkpoints[variant.draft], trace) for variant in variants]
    trace = requests_with_taps(trace, resolved, checkpoints)
    names = name_variants(resolved)
    tallies = [Tally(estimator=estimator_of(variant, checkpoints[variant.draft], trace)) for variant in resolved]
    table = RoundsTable(names)
    with use_workers(workers, trace, checkpoints, device) as hands:
        if hands is None:
            groups = group_variants(resolved, checkpoints, trace, device, served_products=served_products)
            check_follow(follow, [group.sampled for group in groups])
            said = _replay_here(trace, groups, follow, only, tallies, table, on_event)
        else:
            planned = plan_tasks(
                trace, checkpoints, resolved, requests_of(follow, only), hands.count,
                rounds=follow, served_products=served_products,
            )  # fmt: skip
            check_follow(follow, planned.sampled)
            notes = _take(replay_tasks(hands, planned, on_event), tallies, table)
            said = [sorted(notes.get(place, ())) for place in range(len(resolved))]
    texts = _texts(trace, requests_of(follow, only))
    played_variants = zip(names, resolved, tallies, strict=True)
    rounds = Rounds(
        table=table.frame(),
        variants=tuple(variant_info(name, variant, tally, trace) for name, variant, tally in played_variants),
        requests=tuple(
            request_info(row, *texts.get(row["request_id"], ())) for row in trace.requests.iter_rows(named=True)
        ),
        trace={**describe_trace(trace), "wirings": describe_wirings(resolved, checkpoints, trace)},
        drafts={
            name: describe_head(name, checkpoint, resolved, said, trace) for name, checkpoint in checkpoints.items()
        },
    )
    return rounds, said


def _check_place(device: object, follow: object, only: object) -> None:
    import polars as pl

    check_given("device", device, str, "the name of a device was expected, cpu or cuda")
    try:
        torch.device(str(device))
    except RuntimeError as error:
        raise UsageError(f"device {show(device)} is none that torch knows; pass cpu or cuda") from error
    check_given("follow", follow, (pl.DataFrame, type(None)), "a table of rounds was expected; leave it out")
    if only is not None and (isinstance(only, str | bytes) or not isinstance(only, Collection)):
        raise UsageError(f"only is {show(only)}, ids of requests were expected; pass a list of them")


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


def _replay_here(
    trace: Trace,
    groups: Sequence[Group],
    follow: "pl.DataFrame | None",
    only: Collection[str] | None,
    tallies: Sequence[Tally],
    table: RoundsTable,
    on_event: Callable[[ReplayProgress], None],
) -> list[Sequence[str]]:
    """In this process; of each variant what its head's notes say is given back."""
    led = None if follow is None else followed_rounds(follow)
    asked = requests_of(follow, only)
    spans, batches = spans_of(groups, trace), batches_for(groups, trace)
    done, total = 0, count_requests(trace, asked)
    with torch.inference_mode():
        for pack in read_packs(trace, taps_of(groups), asked):
            played = replay_pack(groups, pack, led, trace, spans, batches, tallies, table)
            for number, _ in enumerate(played, start=1):
                on_event(ReplayProgress(done, total, part=len(pack) * number / len(groups)))
            done += len(pack)
            on_event(ReplayProgress(done, total))
    notes = {member: notes_of(group) for group in groups for member in group.members}
    return [notes[place] for place in range(len(notes))]


def _take(results: Iterable[tuple[Task, Result]], tallies: Sequence[Tally], table: RoundsTable) -> dict[int, set[str]]:
    """Put together what workers did; by variant what its head's notes say in any of its tasks."""
    notes: dict[int, set[str]] = {}
    for task, result in results:
        for member, one in zip(task.members, result, strict=True):
            assert isinstance(one, Played)
            tallies[member].take(one)
            table.take(member, one.table)
            notes.setdefault(member, set()).update(one.notes)
    return notes


def requests_of(follow: "pl.DataFrame | None", only: Collection[str] | None) -> Collection[str] | None:
    """The requests to replay; None for all."""
    led = None if follow is None else set(follow["request_id"])
    if led is None or only is None:
        return led if only is None else only
    return led & set(only)


def count_requests(trace: Trace, asked: Collection[str] | None) -> int:
    """How many requests of the trace are replayed."""
    return sum(asked is None or record.request_id in asked for record in trace.records)


def _texts(trace: Trace, asked: Collection[str] | None) -> dict[str, tuple[tuple[int, int], str]]:
    """By request the loop of its output, and the checksum of its token ids."""
    rows = (trace.read(index, ()) for pack in plan_packs(trace, asked) for index in pack)
    return {
        one.request_id: (find_loop(one.tokens[one.prompt_tokens :].tolist()), tokens_sha256(one.tokens.tolist()))
        for one in rows
    }
