"""Variants that follow a server's own drafts: fed what the server drafted, each says how near it was to every token.

Two replays part at their first differing token, and what follows compares nothing; a replay that follows the server
stays on the server's drafts, so that each of its tokens is evidence (analysis/followed.py).

Suffixes: A rounds of one request, K steps, N nodes of a tree, Z noise scales.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from replay.analysis.followed import Floats, Followed, Ints, join
from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.first_pass import FirstPass
from replay.drafting.margins import Margins, margins_along
from replay.drafting.product_sizes import served_spans
from replay.drafting.round_by_round import walk
from replay.drafting.rows import DraftInput
from replay.drafting.tree_margins import ServedTrees, TreeMargins, tree_margins_along
from replay.drafting.tree_shape import ORPHAN, ROOT
from replay.errors import UsageError
from replay.simulator.binding import resolve
from replay.simulator.groups import Group, group_variants
from replay.simulator.inputs import FollowedRounds, read_packs
from replay.simulator.play import shared_first_pass, stem_inputs
from replay.simulator.simulation import ReplayProgress, taps_of
from replay.simulator.variant import ResolvedVariant, Variant
from replay.traces.reader import RequestRows, Trace

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class ServedDrafts:
    """What a server drafted in the rounds of one request, as lists: anchors [A], accepted [A], drafted and parents."""

    anchors: tuple[int, ...]
    accepted: tuple[int, ...]
    drafted: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...] | None, ...]

    def before(self, last: int) -> "ServedDrafts":
        """The rounds whose anchors lie before token ``last``: from there on nothing is left to draft."""
        kept = [place for place, anchor in enumerate(self.anchors) if anchor < last]
        return ServedDrafts(
            tuple(self.anchors[place] for place in kept),
            tuple(self.accepted[place] for place in kept),
            tuple(self.drafted[place] for place in kept),
            tuple(self.parents[place] for place in kept),
        )


def follow_server(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant | ResolvedVariant],
    rounds: "pl.DataFrame",
    *,
    scales: Sequence[float] = (),
    device: str = "cpu",
    served_products: bool = True,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> list[Followed]:
    """Every variant against the drafts of ``rounds`` (``Trace.served_rounds`` or some of them), token by token.

    Requests without a round there are left out; ``scales`` are the noise scales of ``Followed``. A variant drafts
    chains or trees as the rounds do; its steps and topk are the server's. ``served_products`` as in ``simulate``.
    Raises UsageError for a variant of another shape, or whose drafts are sampled, and what ``simulate`` raises.
    """
    resolved = [resolve(variant, checkpoints[variant.draft], trace) for variant in variants]
    groups = group_variants(resolved, checkpoints, trace, device, served_products=served_products)
    served = served_drafts(rounds)
    _check_shapes(resolved, groups, served)
    spans = served_spans(trace.served_rounds()) if served_products else {}
    stems = [list(alike) for _, alike in groupby(groups, key=lambda group: group.stem)]
    found: list[list[Followed]] = [[] for _ in resolved]
    done, total = 0, len(served)
    places = {record.request_id: place for place, record in enumerate(trace.records)}
    with torch.inference_mode():
        for pack in read_packs(trace, taps_of(groups), served):
            drafts = [served[rows.request_id].before(len(rows.tokens) - 1) for rows in pack]
            leads = [FollowedRounds(one.anchors, one.accepted) for one in drafts]
            for stem in stems:
                inputs = stem_inputs(stem, pack, leads, trace, spans)
                first = shared_first_pass(stem, inputs)
                for group in stem:
                    numbers = [places[rows.request_id] for rows in pack]
                    followed = _follow(group, pack, inputs, drafts, first, tuple(scales))
                    for member in group.members:
                        found[member] += [
                            _of_request(one, number) for one, number in zip(followed, numbers, strict=True)
                        ]
            done += len(pack)
            on_event(ReplayProgress(done, total))
    return [join(parts) for parts in found]


def served_drafts(rounds: "pl.DataFrame") -> dict[str, ServedDrafts]:
    """By request, what a table such as ``Trace.served_rounds`` says was drafted."""
    columns = ["anchor", "accepted", "drafted", "parents"]
    grouped = rounds.sort("round").group_by("request_id", maintain_order=True).agg(columns)
    return {
        name: ServedDrafts(
            tuple(anchors),
            tuple(accepted),
            tuple(map(tuple, drafted)),
            tuple(None if one is None else tuple(one) for one in parents),
        )
        for name, anchors, accepted, drafted, parents in grouped.iter_rows()
    }


def served_shape(drafted: Sequence[Sequence[int]], parents: Sequence[Sequence[int] | None]) -> tuple[bool, int]:
    """Of a server's rounds whether they drafted trees, and the most tokens that one of them drafted."""
    return any(one is not None for one in parents), max(map(len, drafted), default=0)


def _check_shapes(
    variants: Sequence[ResolvedVariant], groups: Sequence[Group], served: Mapping[str, ServedDrafts]
) -> None:
    if not served:
        raise UsageError("no round of a server is left to follow; give a trace whose server drafted")
    if any(group.sampled for group in groups):
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


def _follow(
    group: Group,
    pack: Sequence[RequestRows],
    inputs: list[DraftInput],
    drafts: Sequence[ServedDrafts],
    first: FirstPass | None,
    scales: tuple[float, ...],
) -> list[Followed]:
    """Of each request of the pack what one group says, rounds and request counted from 0."""
    head, steps = group.head, max(size.steps for size in group.sizes)
    choices = head.config.draft_vocab_size
    if group.topk > 1:
        trees = [_trees(one, max(size.num_draft_tokens for size in group.sizes) - 1) for one in drafts]
        read = tree_margins_along(
            head, inputs, trees, topk=group.topk, steps=steps, kv=group.kv, scales=scales, first=first
        )
        return [_from_trees(*pair, scales, choices) for pair in zip(read, trees, strict=True)]
    chains = [_padded(one.drafted, steps) for one in drafts]
    if head.behaviour.follows_walk:
        tails = [rows.tail_ids for rows in pack]
        accepted = [one.accepted for one in drafts]
        walked = walk(head, inputs, steps, tails, accepted, chains, scales)
        return [
            _from_chains(one.margins, chain_AK, scales, choices) for one, chain_AK in zip(walked, chains, strict=True)
        ]
    margins = margins_along(head, inputs, chains, scales=scales, first=first)
    return [_from_chains(one, chain_AK, scales, choices) for one, chain_AK in zip(margins, chains, strict=True)]


# ---- shapes ----


def _padded(lists: Sequence[Sequence[int]], longest: int, filler: int = -1) -> torch.Tensor:
    """Lists as rows of one length."""
    rows = [[*one, *[filler] * (longest - len(one))] for one in lists]
    return torch.tensor(rows, dtype=torch.long).reshape(len(rows), longest)


def _trees(drafts: ServedDrafts, nodes: int) -> ServedTrees:
    # The trace counts the known token as 0 and the drafted ones from 1; an orphan is -1 there.
    parents = [[ORPHAN if parent < 0 else parent - 1 for parent in one or ()] for one in drafts.parents]
    assert ROOT == -1
    return ServedTrees(_padded(drafts.drafted, nodes), _padded(parents, nodes, ORPHAN))


def _from_chains(
    margins: Margins | None, drafted_AK: torch.Tensor, scales: tuple[float, ...], choices: int
) -> Followed:
    if margins is None:  # no round of this request was played
        return _nothing(scales, choices)
    told_AK = (drafted_AK >= 0).cummin(dim=1).values
    round_AK = torch.arange(len(drafted_AK))[:, None].expand_as(told_AK)
    depth_AK = torch.arange(1, drafted_AK.shape[1] + 1).expand_as(told_AK)
    same_AK = margins.preferred_AK == drafted_AK
    log_prob_AK = margins.logit_AK - margins.logsumexp_AK
    return Followed(
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


def _from_trees(read: TreeMargins, served: ServedTrees, scales: tuple[float, ...], choices: int) -> Followed:
    told_AN = (served.drafted_AN >= 0) & (read.depth_AN > 0)
    round_AN = torch.arange(len(told_AN))[:, None].expand_as(told_AN)
    return Followed(
        request_N=np.zeros(int(told_AN.sum()), dtype=np.int64),
        round_N=_numbers(round_AN[told_AN]),
        depth_N=_numbers(read.depth_AN[told_AN]),
        margin_N=_known(read.margin_AN[told_AN], math.inf),
        log_prob_N=_known(read.score_AN[told_AN], -math.inf),
        spread_NZ=_known(read.spread_ANZ[told_AN], 0.0),
        same_N=(read.margin_AN[told_AN] == 0).numpy(),
        alike_R=read.alike_A.numpy(),
        scales=scales,
        choices=choices,
        by_depth=True,
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
