"""The promise for trees: what replay predicts from a server's trace is what that very server did, node for node.

Kernels differ from machine to machine, and with them the order of sums: every tree is the server's, or it parts from
it at a near tie, whose margin is measured (support/near_ties.py).
"""

from pathlib import Path
from typing import Any

import pytest
from support.near_ties import Anchor, Grown, grow_trees, judge_trees, report_judged
from support.served_traces import served_trace

import replay
from replay.traces.sample_files import sample_head

PROMPTS = 4
NEW_TOKENS = 32
TOPK, STEPS, NUM_DRAFT_TOKENS = 8, 5, 32  # of (4, 3, 8) test_sglang_plugin.py has a trace


@pytest.fixture(scope="module")
def trace(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> replay.Trace:
    """Of a server that drafts trees, one request at a time."""
    return served_trace(
        target_dir, tmp_path_factory.mktemp("served"), taps="embed,3,16", topk=TOPK, steps=STEPS,
        num_draft_tokens=NUM_DRAFT_TOKENS, prompts=PROMPTS, new_tokens=NEW_TOKENS,
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


def test_trees_in_sglangs_layout_are_the_servers(
    trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]], record_property: Any
) -> None:
    judged = judge_trees("trees of 32", trace, grown["served"], grown["fp32"], grown["hf"])
    report_judged(record_property, [judged])
    assert judged.unexplained == 0, judged
    assert judged.rounds > PROMPTS * NEW_TOKENS / (STEPS + 1)


@pytest.mark.parametrize("order", ["fp32", "hf"])
def test_trees_rounded_in_another_order_part_at_near_ties(
    trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]], record_property: Any, order: str
) -> None:
    """As where a server with other kernels is replayed here."""
    judged = judge_trees(f"trees of 32, replayed in the order {order}", trace, grown[order], grown["served"])
    report_judged(record_property, [judged])
    assert judged.unexplained == 0, judged
    assert judged.parted  # rounding does show in trees of this size, so the test above says something


def test_another_layout_is_told_from_rounding(trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]]) -> None:
    """Where a node sees its true ancestors, trees part, and further than rounding parts them."""
    slot = judge_trees("slot", trace, grown["served"], grown["fp32"], grown["hf"])
    path = judge_trees("path", trace, grown["path"], grown["path in fp32"])
    assert slot.alike > path.alike
    assert path.unexplained > 0


def test_the_simulation_plays_these_trees(trace: replay.Trace, grown: dict[str, dict[Anchor, Grown]]) -> None:
    """What `replay simulate` writes at the server's anchors are the trees judged above, and its counts are theirs."""
    rounds = replay.simulate(
        trace, {"demo": replay.load_head(sample_head())}, [variant()], follow=trace.served_rounds()
    )
    served = {(row["request_id"], row["anchor"]): row for row in trace.served_rounds().iter_rows(named=True)}
    for row in rounds.table.iter_rows(named=True):
        anchor = row["request_id"], row["anchor"]
        kept = grown["served"][anchor].kept
        assert {path[-1] for path in kept} <= set(row["drafted"])
        if row["drafted"] == served[anchor]["drafted"]:
            assert row["accepted"] == served[anchor]["accepted"]
    assert len(rounds.table) == len(served)
