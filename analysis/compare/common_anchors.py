"""Rounds of two variants that start at the same anchor of the same request: the same tokens, another draft.

In two recordings of a prompt only those anchors count up to whose known token both texts are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import DEFAULT_RESAMPLES
from replay.analysis.counts import ACCEPTED, ROUNDS, WIDTH, Counts, position_rates, ratio, reached_positions
from replay.analysis.gaps import Gap, paired_gaps
from replay.traces.rounds import Rounds, VariantInfo

if TYPE_CHECKING:
    import polars as pl

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CommonPosition:
    """One draft position: rounds that got there, those that accepted it, and their ratio, under both."""

    reached_a: int
    accepted_a: int
    conditional_a: float
    reached_b: int
    accepted_b: int
    conditional_b: float


@dataclass(frozen=True, slots=True)
class CommonDrafts:
    """Chains held against each other up to the shorter one's steps.

    ``parted[j]``: rounds whose drafts first differ at position j + 1; ``alike``: those that differ nowhere.
    ``tokens_equal`` and ``tokens_different`` count drafted tokens position by position.
    """

    parted: tuple[int, ...]
    alike: int
    tokens_equal: int
    tokens_different: int


@dataclass(frozen=True, slots=True)
class CommonAnchors:
    """The ``rounds`` of both variants that start at the same (request, anchor).

    ``joint[i][j]`` counts those in which A accepted i and B accepted j tokens. ``difference`` is accepted by B minus by
    A a round, its interval and p value by bootstrap over requests. ``drafts`` is None where one of them drafts trees.
    """

    rounds: int
    share_a: float
    share_b: float
    accepted_a: int
    accepted_b: int
    a_more: int
    equal: int
    b_more: int
    difference: float
    ci95: tuple[float, float]
    p_value: float
    joint: tuple[tuple[int, ...], ...]
    positions: tuple[CommonPosition, ...]
    drafts: CommonDrafts | None


def common_anchors(
    rounds: Rounds,
    a: VariantInfo,
    b: VariantInfo,
    *,
    shared: Mapping[str, int] | None = None,
    seed: int = 0,
    resamples: int = DEFAULT_RESAMPLES,
) -> CommonAnchors:
    """Compare the common rounds of variants ``a`` and ``b`` of ``rounds``.

    ``shared``: tokens that both texts of a request begin with; None where both have the same text.
    """
    common = _common(rounds, a, b, shared)
    accepted_a, accepted_b = (common[name].cast(int).to_numpy() for name in ("accepted", "accepted_b"))
    joint = np.zeros((a.steps + 1, b.steps + 1), dtype=np.int64)
    np.add.at(joint, (accepted_a, accepted_b), 1)
    gap = _gap(rounds, common, accepted_a, accepted_b, seed=seed, resamples=resamples)
    own_a, own_b = (int((rounds.table["variant"] == variant.name).sum()) for variant in (a, b))
    return CommonAnchors(
        rounds=common.height,
        share_a=ratio(common.height, own_a),
        share_b=ratio(common.height, own_b),
        accepted_a=int(accepted_a.sum()),
        accepted_b=int(accepted_b.sum()),
        a_more=int((accepted_a > accepted_b).sum()),
        equal=int((accepted_a == accepted_b).sum()),
        b_more=int((accepted_a < accepted_b).sum()),
        difference=gap.difference,
        ci95=gap.ci95,
        p_value=gap.p_value,
        joint=tuple(tuple(int(count) for count in row) for row in joint),
        positions=_positions(joint),
        drafts=_drafts(common) if a.topk == b.topk == 1 else None,
    )


def _common(rounds: Rounds, a: VariantInfo, b: VariantInfo, shared: Mapping[str, int] | None) -> "pl.DataFrame":
    """One row for each common round: request_id, anchor, drafted and accepted of A, drafted_b and accepted_b."""
    import polars as pl

    own = ["request_id", "anchor", "drafted", "accepted"]
    parts = [rounds.table.filter(rounds.table["variant"] == variant.name).select(own) for variant in (a, b)]
    common = parts[0].join(parts[1], on=["request_id", "anchor"], suffix="_b", maintain_order="left")
    if shared is None:
        return common
    # A round at anchor S knows the tokens 0..S.
    return common.filter(common["anchor"] < common["request_id"].replace_strict(shared, return_dtype=pl.Int64))


def _gap(
    rounds: Rounds, common: "pl.DataFrame", accepted_a: Ints, accepted_b: Ints, *, seed: int, resamples: int
) -> Gap:
    row_of = {request.request_id: row for row, request in enumerate(rounds.requests)}
    rows = np.array([row_of[request_id] for request_id in common["request_id"]], dtype=np.int64)

    def counts(accepted: Ints) -> Counts:
        found = np.zeros((len(row_of), WIDTH), dtype=np.int64)
        np.add.at(found[:, ROUNDS], rows, 1)
        np.add.at(found[:, ACCEPTED], rows, accepted)
        return found

    return paired_gaps({"b": counts(accepted_b)}, counts(accepted_a), seed=seed, resamples=resamples)["b"]


def _positions(joint: Counts) -> tuple[CommonPosition, ...]:
    """As many positions as the shallower variant has."""
    histograms = (joint.sum(axis=1), joint.sum(axis=0))
    steps = [list(pairwise(reached_positions(histogram))) for histogram in histograms]
    rates = [position_rates(histogram)[1] for histogram in histograms]
    return tuple(
        CommonPosition(*one, one_rate, *other, other_rate)
        for one, one_rate, other, other_rate in zip(steps[0], rates[0], steps[1], rates[1], strict=False)
    )


def _drafts(common: "pl.DataFrame") -> CommonDrafts:
    if common.is_empty():
        return CommonDrafts((), 0, 0, 0)
    depth = min(int(common[name].list.len().min()) for name in ("drafted", "drafted_b"))  # type: ignore[arg-type]
    one_RK, other_RK = (
        common[name].list.head(depth).list.to_array(depth).to_numpy() for name in ("drafted", "drafted_b")
    )
    equal_RK = one_RK == other_RK
    same_R = np.cumprod(equal_RK, axis=1).sum(axis=1)  # how far the two go together
    parted = np.bincount(same_R, minlength=depth + 1)
    return CommonDrafts(
        parted=tuple(int(count) for count in parted[:depth]),
        alike=int(parted[depth]),
        tokens_equal=int(equal_RK.sum()),
        tokens_different=int(equal_RK.size - equal_RK.sum()),
    )
