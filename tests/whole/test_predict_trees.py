"""The promise for trees: what replay predicts from a server's trace is what that very server did, node for node.

Kernels differ from machine to machine, and with them the order of sums: every tree is the server's, or it parts from
it at a near tie, whose margin is measured (support/near_ties.py).
"""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.near_ties import (
    Anchor,
    Grown,
    Judged,
    count_in_production,
    follow_trees,
    grow_trees,
    judge_trees,
    report_judged,
    served_paths,
    tree_noise,
)
from support.served_traces import served_trace
from support.this_cpu import prompts_for

import replay
from replay.analysis.diagnosis.evidence import outliers_allowed
from replay.traces.sample_files import sample_head

PROMPTS = prompts_for(4)
NEW_TOKENS = 32
TOPK, STEPS, NUM_DRAFT_TOKENS = 8, 5, 32  # of (4, 3, 8) test_sglang_plugin.py has a trace


@pytest.fixture(scope="module")
def trace(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> replay.Trace:
    """Of a server that drafts trees, one request at a time; REPLAY_RECORD alone lets it record."""
    return served_trace(
        target_dir, tmp_path_factory.mktemp("served"), taps="embed,3,16", topk=TOPK, steps=STEPS,
        num_draft_tokens=NUM_DRAFT_TOKENS, prompts=PROMPTS, new_tokens=NEW_TOKENS, by_variables=True,
    )  # fmt: skip


def variant(**changes: Any) -> replay.Variant:
    return replay.Variant("demo", steps=STEPS, topk=TOPK, num_draft_tokens=NUM_DRAFT_TOKENS, **changes)


@pytest.fixture(scope="module")
def grown(trace: replay.Trace) -> dict[str, dict[Anchor, Grown]]:
    """The replay's own trees: as the server rounds, in two other orders, and in a layout that SGLang has not."""
    changes: dict[str, dict[str, Any]] = {
        "served": {}, "fp32": {"precision": "fp32"}, "hf": {"numerics": "hf"},
        "path": {"kv": "path"}, "path in fp32": {"kv": "path", "precision": "fp32"},
    }  # fmt: skip
    return {name: grow_trees(trace, sample_head(), variant(**changes[name])) for name in changes}


def judge(trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]], order: str) -> Judged:
    """Trees in one order; one that is not the server's by noise that is not its own."""
    rest = [name for name in ("hf", "fp32", "served") if name != order]
    noise = tree_noise(grown["served"], grown["hf" if order == "fp32" else "fp32"])
    return judge_trees(f"trees of 32, order {order}", trace, grown[order], noise, *(grown[name] for name in rest))


def test_trees_in_sglangs_layout_are_the_servers(
    trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]], record_property: Any
) -> None:
    """In another rounding order fewer are, as where a server with other kernels is replayed here."""
    judged = {order: judge(trace, grown, order) for order in ("served", "fp32", "hf")}
    report_judged(record_property, list(judged.values()))
    assert [str(one) for one in judged.values() if one.unexplained] == []
    assert judged["served"].rounds > PROMPTS * NEW_TOKENS / (STEPS + 1)
    assert judged["served"].alike > max(judged["fp32"].alike, judged["hf"].alike)


def test_the_simulation_says_so_itself(trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]]) -> None:
    """What `replay simulate` counts: as many alike as here, in the server's order none unexplained, in another order no
    more than a diagnosis allows for (of four prompts on an AVX2 CPU one of 53 in fp32), in another layout many."""
    orders: dict[str, dict[str, Any]] = {"served": {}, "fp32": {"precision": "fp32"}, "hf": {"numerics": "hf"}}
    variants = [variant(**changes) for changes in (*orders.values(), {"kv": "path"})]
    allowed = outliers_allowed(len(trace.served_rounds()))
    *found, path = count_in_production(trace, sample_head(), variants)
    for order, one in zip(orders, found, strict=True):
        judged = judge(trace, grown, order)
        assert (one.rounds, one.alike) == (judged.rounds, judged.alike)
        assert one.near_tie + one.unexplained == len(judged.parted)
        assert one.unexplained <= (0 if order == "served" else allowed)
    assert path.unexplained > 2 * allowed


def test_branches_are_the_servers(trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]]) -> None:
    """Where the same tokens are drafted, each continues the same one, as the server linked them for its verify."""
    compared = 0
    for row in trace.served_rounds().iter_rows(named=True):
        mine = grown["served"][row["request_id"], row["anchor"]]
        if mine.drafted == row["drafted"]:
            assert mine.parents == row["parents"]
            compared += 1
    assert compared > len(trace.served_rounds()) / 2


def test_another_layout_is_told_from_rounding(trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]]) -> None:
    """Where a node sees its true ancestors, trees part, and further than rounding parts them."""
    noise = tree_noise(grown["path"], grown["path in fp32"])
    path = judge_trees("path", trace, grown["path"], noise, grown["path in fp32"])
    assert judge(trace, grown, "served").alike > path.alike
    assert path.unexplained > 0


def test_along_the_servers_trees_only_rounding_is_left(
    trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]]
) -> None:
    """Grown along what the server drafted every margin is 0 or near, whatever the order; wired wrongly few are."""
    orders: dict[str, dict[str, Any]] = {"served": {}, "fp32": {"precision": "fp32"}, "hf": {"numerics": "hf"}}
    near = 2 * max(tree_noise(grown["served"], grown["fp32"]).values())
    for order, changes in orders.items():
        followed = follow_trees(trace, sample_head(), variant(**changes))
        for row in trace.served_rounds().iter_rows(named=True):
            anchor = row["request_id"], row["anchor"]
            margin, alike = followed[anchor]
            assert alike == (grown[order][anchor].kept == served_paths(row))
            assert margin == 0 if alike else margin <= near
    wrong = follow_trees(trace, sample_head(), variant(wiring=replay.parse_wiring("embed,16,3")))
    assert median(margin for margin, _ in wrong.values()) > 2 * near


def test_the_simulation_plays_these_trees(trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]]) -> None:
    """What `replay simulate` writes at the server's anchors are the trees judged above, and its counts are theirs."""
    rounds = replay.simulate(
        trace, {"demo": replay.load_head(sample_head())}, [variant()], follow=trace.served_rounds()
    )
    served = {(row["request_id"], row["anchor"]): row for row in trace.served_rounds().iter_rows(named=True)}
    assert len(rounds.table) == len(served)
    for row in rounds.table.iter_rows(named=True):
        anchor = row["request_id"], row["anchor"]
        assert row["drafted"] == grown["served"][anchor].drafted
        if grown["served"][anchor].kept == served_paths(served[anchor]):
            assert row["accepted"] == served[anchor]["accepted"]
