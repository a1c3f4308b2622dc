"""One pack of requests under variants that share their first pass: from drafts to rounds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from replay.drafting.every_anchor import Drafts, draft_every_anchor
from replay.drafting.first_pass import FirstPass, first_pass
from replay.drafting.path_probability import force_every_anchor, path_tokens
from replay.drafting.round_by_round import walk
from replay.drafting.rows import DraftInput, Span
from replay.drafting.trees import Trees, draft_every_tree
from replay.simulator.batches import Batches, Together, gather
from replay.simulator.groups import Group
from replay.simulator.inputs import FollowedRounds, draft_input, sampled_after_chunks
from replay.simulator.results import Tally
from replay.simulator.rounds_table import RoundsTable
from replay.traces.reader import RequestRows, Trace
from replay.verify.accept import continuations, count_accepted, count_accepted_in_tree, round_at, served_walk
from replay.verify.expectation import chain_parents

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Pack:
    """Requests replayed at once under all groups of one stem: inputs and first pass (None: not shared) made once.

    Where states cross between requests more of them are ``drafting`` than are asked for, and ``together`` tells which.
    ``tallies`` and ``table`` take what comes of it, by variant.
    """

    rows: Sequence[RequestRows]
    inputs: list[DraftInput]
    leads: Sequence[FollowedRounds]
    drafting: list[DraftInput]
    together: Together | None
    first: FirstPass | None
    tallies: Sequence[Tally]
    table: RoundsTable


def replay_stems(
    stems: Sequence[Sequence[Group]],
    rows: Sequence[RequestRows],
    leads: Sequence[FollowedRounds],
    trace: Trace,
    spans: Mapping[str, Sequence[Span]],
    batches: Batches | None,
    tallies: Sequence[Tally],
    table: RoundsTable,
) -> Iterator[Group]:
    """Replay a pack of requests under all groups; each is given when it is done."""
    for stem in stems:
        yield from _replay_stem(stem, rows, leads, trace, spans, batches, tallies, table)


def _replay_stem(
    stem: Sequence[Group],
    rows: Sequence[RequestRows],
    leads: Sequence[FollowedRounds],
    trace: Trace,
    spans: Mapping[str, Sequence[Span]],
    batches: Batches | None,
    tallies: Sequence[Tally],
    table: RoundsTable,
) -> Iterator[Group]:
    start = perf_counter()
    inputs = drafting = stem_inputs(stem, rows, leads, trace, spans)
    together = gather(batches, trace, stem, rows, leads) if batches is not None and stem[0].crosses else None
    if together is not None:
        drafting = stem_inputs(stem, together.rows, together.leads, trace, spans, batches)
    pack = _Pack(rows, inputs, leads, drafting, together, shared_first_pass(stem, drafting), tallies, table)
    members = sum(len(group.members) for group in stem)
    common = (perf_counter() - start) / members
    for group in stem:
        for member in group.members:
            tallies[member].seconds += common
        if group.head.behaviour.follows_walk:
            _walk_in_order(group, pack)
        elif group.sampled:
            _replay_sampled(group, pack)
        else:
            _replay_anchors(group, pack)
        yield group


def stem_inputs(
    stem: Sequence[Group],
    rows: Sequence[RequestRows],
    leads: Sequence[FollowedRounds],
    trace: Trace,
    spans: Mapping[str, Sequence[Span]],
    batches: Batches | None = None,
) -> list[DraftInput]:
    """A pack of requests as groups of one stem take them: at the anchors of ``leads``, or at all."""
    first_group = stem[0]
    chunk = first_group.head.behaviour.chunk
    inputs = [
        replace(
            draft_input(
                one,
                first_group.wiring,
                None if chunk is None else sampled_after_chunks(one, trace, chunk),
                spans.get(one.request_id, ()),
            ),
            only=lead.anchors_before(len(one.tokens) - 1),
        )
        for one, lead in zip(rows, leads, strict=True)
    ]
    if batches is None:
        return inputs
    return [
        replace(item, batch_rows=batches.rows_at(one.request_id, item.anchors_A.tolist()))
        for one, item in zip(rows, inputs, strict=True)
    ]


def shared_first_pass(stem: Sequence[Group], inputs: Sequence[DraftInput]) -> FirstPass | None:
    """The first pass that all groups of a stem have in common; None where no group takes one."""
    anchors = sum(item.anchors for item in inputs)
    shares = anchors and not all(group.head.behaviour.follows_walk for group in stem)
    return first_pass(stem[0].head, inputs) if shares else None


def _replay_anchors(group: Group, pack: _Pack) -> None:
    start = perf_counter()
    drafts = _draft(group, pack.drafting, pack.first)
    if pack.together is not None:
        drafts = [pack.together.keep(drafted) for drafted in drafts]
    seconds = perf_counter() - start
    for member, size, drafted in zip(group.members, group.sizes, drafts, strict=True):
        pack.tallies[member].seconds += seconds / len(group.members)  # one run serves them all
        for rows, item, draft in zip(pack.rows, pack.inputs, drafted, strict=True):
            _walk(rows, item, draft, size.steps, pack.tallies[member], pack.table, member)


def _replay_sampled(group: Group, pack: _Pack) -> None:
    """Rounds of a head that samples its drafts: one draw of the coins, given the recorded text."""
    start = perf_counter()
    most = max(size.steps for size in group.sizes)
    temperatures = [rows.temperature for rows in pack.rows]
    chances = force_every_anchor(group.head, pack.inputs, temperatures, most, first=pack.first)
    seconds = perf_counter() - start
    for member, size in zip(group.members, group.sizes, strict=True):
        tally, steps = pack.tallies[member], size.steps
        tally.seconds += seconds / len(group.members)
        assert tally.estimator is not None
        for rows, item, q_AK in zip(pack.rows, pack.inputs, chances, strict=True):
            path_AK = path_tokens(item, steps).numpy()
            accepted_A = tally.estimator.add_path(rows.request_id, q_AK[:, :steps].numpy(), path_AK)
            tally.count(rows.request_id, anchors=len(accepted_A), accepted=int(accepted_A.sum()))
            played = served_walk(accepted_A, prompt_tokens=rows.prompt_tokens, tokens=len(rows.tokens))
            visited = [one.anchor - rows.prompt_tokens for one in played]
            # What was refused, and all behind it, is not drawn.
            drafted_AK = np.where(np.arange(steps) < accepted_A[:, None], path_AK, -1)
            pack.table.add(member, rows.request_id, played, drafted_AK[visited])


def _walk_in_order(group: Group, pack: _Pack) -> None:
    """Rounds whose draft KV depends on those before: each number of steps walks by itself, past the other anchors."""
    tails = [rows.tail_ids for rows in pack.rows]
    for member, size in zip(group.members, group.sizes, strict=True):
        start = perf_counter()
        walked = walk(group.head, pack.inputs, size.steps, tails, [lead.accepted or () for lead in pack.leads])
        tally = pack.tallies[member]
        tally.seconds += perf_counter() - start
        for rows, rounds in zip(pack.rows, walked, strict=True):
            pairs = zip(rounds.anchors, rounds.accepted, strict=True)
            played = [round_at(*pair, tokens=len(rows.tokens)) for pair in pairs]
            tally.count(rows.request_id, ties=int(rounds.tied_RK.sum()))
            pack.table.add(member, rows.request_id, played, rounds.drafted_RK.numpy())
            _expect(tally, rows, np.array(rounds.anchors, dtype=np.int64), rounds.drafted_RK.numpy(), None)


def _draft(group: Group, inputs: list[DraftInput], first: FirstPass | None) -> Sequence[Sequence[Drafts | Trees]]:
    """For each member of the group what it drafts, request by request."""
    if group.topk > 1:
        return draft_every_tree(group.head, inputs, topk=group.topk, sizes=group.sizes, kv=group.kv, first=first)
    chains = draft_every_anchor(group.head, inputs, max(size.steps for size in group.sizes), first=first)
    return [
        [Drafts(chain.drafted_AK[:, : size.steps], chain.tied_AK[:, : size.steps]) for chain in chains]
        for size in group.sizes
    ]


def _walk(
    rows: RequestRows,
    item: DraftInput,
    drafts: Drafts | Trees,
    steps: int,
    tally: Tally,
    table: RoundsTable,
    member: int,
) -> None:
    drafted, tied = (
        (drafts.drafted_AN, drafts.tied_AN) if isinstance(drafts, Trees) else (drafts.drafted_AK, drafts.tied_AK)
    )
    anchors_A = item.anchors_A.numpy()
    chosen_AK = continuations(rows.tokens.numpy(), rows.tail_ids.numpy(), anchors_A, steps)
    if isinstance(drafts, Trees):
        accepted_A = count_accepted_in_tree(drafted.numpy(), drafts.parents_AN.numpy(), chosen_AK)
    else:
        accepted_A = count_accepted(drafted.numpy(), chosen_AK)
    if item.only is None:
        played = served_walk(accepted_A, prompt_tokens=rows.prompt_tokens, tokens=len(rows.tokens))
        visited = [one.anchor - rows.prompt_tokens for one in played]
    else:
        pairs = zip(anchors_A.tolist(), accepted_A.tolist(), strict=True)
        played = [round_at(*pair, tokens=len(rows.tokens)) for pair in pairs]
        visited = list(range(len(played)))
    found = {"anchors": len(accepted_A), "accepted": int(accepted_A.sum()), "ties": int(tied[visited].sum())}
    tally.count(rows.request_id, **found)
    table.add(member, rows.request_id, played, drafted.numpy()[visited])
    parents = drafts.parents_AN.numpy()[visited] if isinstance(drafts, Trees) else None
    _expect(tally, rows, anchors_A[visited], drafted.numpy()[visited], parents)


def _expect(tally: Tally, rows: RequestRows, anchors_A: _Ints, drafted_AN: _Ints, parents_AN: _Ints | None) -> None:
    """Adds the expectation at the anchors of a walk; without parents the drafts are chains."""
    if tally.estimator is None:
        return
    if parents_AN is None:
        parents_AN = chain_parents(*drafted_AN.shape)
    chosen_AK = continuations(rows.tokens.numpy(), rows.tail_ids.numpy(), anchors_A, tally.estimator.steps)
    tally.estimator.add_walk(rows.request_id, anchors_A - rows.prompt_tokens, drafted_AN, parents_AN, chosen_AK)
