"""A pack of requests along a server's own drafts, under groups of variants: what following.py does, pack by pack.

Suffixes: A rounds of one request, K steps, N nodes of a tree, Z noise scales.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replay.analysis.followed import Floats, Followed, Ints
from replay.drafting.crossed import known_steps
from replay.drafting.first_pass import FirstPass
from replay.drafting.margins import Margins, margins_along
from replay.drafting.round_by_round import walk
from replay.drafting.rows import DraftInput, Span
from replay.drafting.tree_margins import ServedTrees, TreeMargins, tree_margins_along
from replay.simulator.batches import Batches, Together, batches_for, gather
from replay.simulator.groups import Group
from replay.simulator.inputs import FollowedRounds
from replay.simulator.play import shared_first_pass, stem_inputs
from replay.simulator.served_drafts import ServedDrafts, served_drafts
from replay.traces.reader import RequestRows, Trace

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class Served:
    """What a server did, as it is followed: its ``drafts`` by request, and all that packs of them need of the trace."""

    trace: Trace
    drafts: Mapping[str, ServedDrafts]
    spans: Mapping[str, Sequence[Span]]
    batches: Batches | None
    beside: "_Beside | None"
    places: Mapping[str, int]

    @classmethod
    def of(
        cls, trace: Trace, groups: Sequence[Group], rounds: "pl.DataFrame", spans: Mapping[str, Sequence[Span]]
    ) -> "Served":
        """``rounds`` of the trace's server, for these groups. Raises as ``Trace.served_rounds``."""
        batches = batches_for(groups, trace)
        return cls(
            trace=trace,
            drafts=served_drafts(rounds),
            spans=spans,
            batches=batches,
            beside=None if batches is None else _Beside.of(batches, trace, rounds),
            places={record.request_id: place for place, record in enumerate(trace.records)},
        )


def follow_pack(
    groups: Sequence[Group], pack: Sequence[RequestRows], served: Served, scales: tuple[float, ...]
) -> Iterator[tuple[Group, list[Followed]]]:
    """Each group with what it says of each request of the pack, which has the number that it has in the trace."""
    alone = _Along(pack, [served.drafts[rows.request_id].before(len(rows.tokens) - 1) for rows in pack])
    numbers = [served.places[rows.request_id] for rows in pack]
    for _, stem in groupby(groups, key=lambda group: group.stem):
        alike = list(stem)
        along = served.beside.add_to(alone, alike) if served.beside is not None and alike[0].crosses else alone
        inputs = stem_inputs(alike, along.rows, along.leads, served.trace, served.spans, served.batches)
        first = shared_first_pass(alike, inputs)
        for group in alike:
            followed = _follow(group, along, inputs, first, scales)
            yield group, [_of_request(one, number) for one, number in zip(followed, numbers, strict=True)]


@dataclass(frozen=True, slots=True)
class _Along:
    """Requests and the drafts along which they are followed; ``together`` (batches.py) where others are among them."""

    rows: Sequence[RequestRows]
    drafts: Sequence[ServedDrafts]
    together: Together | None = None

    @property
    def leads(self) -> list[FollowedRounds]:
        return [FollowedRounds(one.anchors, one.accepted) for one in self.drafts]


@dataclass(frozen=True, slots=True)
class _Beside:
    """What is followed beside a pack where states cross between requests: all that the server drafted."""

    trace: Trace
    batches: Batches
    drafts: Mapping[str, ServedDrafts]

    @classmethod
    def of(cls, batches: Batches, trace: Trace, rounds: "pl.DataFrame") -> "_Beside":
        """What ``rounds`` say goes before what the trace says of the same round."""
        import polars as pl

        others = trace.whole.served_rounds().join(rounds, on=["request_id", "anchor"], how="anti")
        return cls(trace, batches, served_drafts(pl.concat([rounds.select(others.columns), others])))

    def add_to(self, alone: _Along, stem: Sequence[Group]) -> _Along:
        together = gather(self.batches, self.trace, stem, alone.rows, alone.leads)
        pairs = zip(together.rows, together.leads, strict=True)
        drafts = [
            self.drafts[rows.request_id].at(lead.anchors or ()).before(len(rows.tokens) - 1) for rows, lead in pairs
        ]
        return _Along(together.rows, drafts, together)


def _follow(
    group: Group, along: _Along, inputs: list[DraftInput], first: FirstPass | None, scales: tuple[float, ...]
) -> list[Followed]:
    """Of each request of the pack what one group says, rounds and request counted from 0."""
    head, steps = group.head, max(size.steps for size in group.sizes)
    choices = head.config.draft_vocab_size
    if group.topk > 1:
        trees = [one.trees(max(size.num_draft_tokens for size in group.sizes) - 1) for one in along.drafts]
        read = tree_margins_along(
            head, inputs, trees, topk=group.topk, steps=steps, kv=group.kv, scales=scales, first=first
        )
        known = _known_states(group, inputs, [torch.ones((item.anchors, steps), dtype=torch.bool) for item in inputs])
        return [_from_trees(*one, scales=scales, choices=choices) for one in _own(along, read, trees, known)]
    chains = [one.chains(steps) for one in along.drafts]
    known = _known_states(group, inputs, [chain_AK >= 0 for chain_AK in chains])
    if head.behaviour.follows_walk:
        tails = [rows.tail_ids for rows in along.rows]
        accepted = [one.accepted for one in along.drafts]
        walked = walk(head, inputs, steps, tails, accepted, chains, scales)
        margins = [one.margins for one in walked]
    else:
        margins = [*margins_along(head, inputs, chains, scales=scales, first=first)]
    return [_from_chains(*one, scales=scales, choices=choices) for one in _own(along, margins, chains, known)]


def _known_states(group: Group, inputs: Sequence[DraftInput], told: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each request whether the states before each of its tokens are known, given where it is known what was drafted.

    They are not where they came from a request that is not in the trace.
    """
    rows_A = [row for item in inputs for row in item.batch_rows or ()]
    known_AK = known_steps(group.head.behaviour, rows_A, torch.cat(list(told)))
    return list(known_AK.split([len(one) for one in told]))


def _own(along: _Along, *parts: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Request by request what was made of the pack's own, at the anchors that were asked for."""
    kept = parts if along.together is None else [along.together.keep(part) for part in parts]
    return zip(*kept, strict=True)


def _from_chains(
    margins: Margins | None,
    drafted_AK: torch.Tensor,
    known_AK: torch.Tensor,
    *,
    scales: tuple[float, ...],
    choices: int,
) -> Followed:
    if margins is None:  # no round of this request was played
        return _nothing(scales, choices)
    told_AK = (drafted_AK >= 0).cummin(dim=1).values
    round_AK = torch.arange(len(drafted_AK))[:, None].expand_as(told_AK)
    depth_AK = torch.arange(1, drafted_AK.shape[1] + 1).expand_as(told_AK)
    same_AK = (margins.preferred_AK == drafted_AK) & known_AK
    log_prob_AK = margins.logit_AK - margins.logsumexp_AK
    found = Followed(
        request_N=np.zeros(int(told_AK.sum()), dtype=np.int64),
        round_N=_numbers(round_AK[told_AK]),
        depth_N=_numbers(depth_AK[told_AK]),
        margin_N=_known(margins.margin_AK[told_AK], math.inf),
        log_prob_N=_known(log_prob_AK[told_AK], -math.inf),
        spread_NZ=_known(margins.spread_AKZ[told_AK], 0.0),
        same_N=same_AK[told_AK].numpy(),
        alike_R=(same_AK | ~told_AK).all(dim=1).numpy(),
        scales=scales,
        choices=choices,
    )
    return _without(found, ~known_AK[told_AK])


def _from_trees(
    read: TreeMargins, served: ServedTrees, known_AK: torch.Tensor, *, scales: tuple[float, ...], choices: int
) -> Followed:
    told_AN = (served.drafted_AN >= 0) & (read.depth_AN > 0)
    round_AN = torch.arange(len(told_AN))[:, None].expand_as(told_AN)
    # Nodes of all depths compete for a place in the tree.
    known_AN = known_AK.all(dim=1, keepdim=True).expand_as(told_AN)
    found = Followed(
        request_N=np.zeros(int(told_AN.sum()), dtype=np.int64),
        round_N=_numbers(round_AN[told_AN]),
        depth_N=_numbers(read.depth_AN[told_AN]),
        margin_N=_known(read.margin_AN[told_AN], math.inf),
        log_prob_N=_known(read.score_AN[told_AN], -math.inf),
        spread_NZ=_known(read.spread_ANZ[told_AN], 0.0),
        same_N=((read.margin_AN == 0) & known_AN)[told_AN].numpy(),
        alike_R=(read.alike_A & (known_AN | ~told_AN).all(dim=1)).numpy(),
        scales=scales,
        choices=choices,
        by_depth=True,
    )
    return _without(found, ~known_AN[told_AN])


def _without(found: Followed, unknown_N: torch.Tensor) -> Followed:
    """Of tokens of which nothing is known each choice is as likely as any other: none is held against the replay."""
    gone_N = unknown_N.numpy()
    if not gone_N.any():
        return found
    return replace(
        found,
        margin_N=np.where(gone_N, 0.0, found.margin_N),
        log_prob_N=np.where(gone_N, -math.inf, found.log_prob_N),  # so that no noise is measured there
        spread_NZ=np.where(gone_N[:, None], math.log(found.choices), found.spread_NZ),
    )


def _nothing(scales: tuple[float, ...], choices: int) -> Followed:
    none_N, flags = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
    spread_NZ = np.zeros((0, len(scales)))
    return Followed(none_N, none_N, none_N, np.zeros(0), np.zeros(0), spread_NZ, flags, flags, scales, choices)


def _known(tensor: torch.Tensor, unknown: float) -> Floats:
    """In float64, with ``unknown`` in the stead of NaN, which a head that overflows gives."""
    found: Floats = tensor.double().nan_to_num(nan=unknown, posinf=math.inf, neginf=-math.inf).numpy()
    return found


def _numbers(tensor: torch.Tensor) -> Ints:
    return tensor.numpy().astype(np.int64)


def _of_request(followed: Followed, number: int) -> Followed:
    """With the number that its request has in the trace."""
    return replace(followed, request_N=np.full_like(followed.request_N, number))
