"""Trees as variants: which can be, how a sweep names them, the rounds that a simulation writes, what a report says."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.heads import INVENTED, invented_checkpoint, write_head
from support.rounds_maker import make_rounds, make_variant
from support.trace_maker import make_four, write_trace
from twins.rounds import replay_request
from twins.trees import replay_request_with_trees

import replay
from replay.analysis.report.report import assess
from replay.checkpoint.checkpoint import Checkpoint
from replay.cli.app import cli
from replay.errors import UsageError
from replay.simulator.binding import build_head, resolve
from replay.simulator.inputs import draft_input
from replay.simulator.simulation import simulate
from replay.simulator.variant import Variant, name_variants, sweep
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds, VariantInfo


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace.open(write_trace(tmp_path / "trace", [make_four()]))


@pytest.fixture
def checkpoint() -> Checkpoint:
    return invented_checkpoint()


# ---- which trees can be ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topk": 0}, "topk 0 was asked for, possible are 1 .* to 64"),
        ({"topk": 65, "num_draft_tokens": 8}, "topk 65 was asked for"),
        ({"topk": 4}, "was not given, possible are 2 to 37 with 3 steps.*--num-draft-tokens"),
        ({"topk": 4, "num_draft_tokens": 1}, "1 draft tokens were asked for.* has 2 to 37"),
        ({"topk": 4, "num_draft_tokens": 38}, "38 draft tokens were asked for"),
        ({"topk": 4, "steps": 1, "num_draft_tokens": 6}, "has 2 to 5"),
        ({"topk": 4, "num_draft_tokens": 8, "kv": "column"}, "kv 'column' .* refresh, .*slot, path"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Variant("h", **({"steps": 3} | changes))


def test_the_largest_tree_holds_every_candidate(trace: Trace, checkpoint: Checkpoint) -> None:
    (variant,) = sweep(draft=["h"], steps=[2], topk=[3], num_draft_tokens=[1 + 3 + 9], precision=["fp32"])
    table = simulate(trace, {"h": checkpoint}, [variant]).table
    assert set(table["drafted"].list.len()) == {12}


def test_the_layout_is_the_engines_unless_it_is_said(trace: Trace, checkpoint: Checkpoint) -> None:
    def layout(**options: Any) -> str:
        return resolve(Variant("h", topk=2, num_draft_tokens=4, **options), checkpoint, trace).kv

    assert [layout(engine=engine) for engine in ("sglang", "eagle")] == ["slot", "path"]
    assert layout(kv="refresh") == "slot"
    assert layout(kv="path") == "path"


def test_a_chain_has_one_layout_and_one_number_of_tokens(trace: Trace, checkpoint: Checkpoint) -> None:
    asked = Variant("h", steps=3)
    plain = resolve(asked, checkpoint, trace)
    assert (plain.num_draft_tokens, plain.kv) == (4, "refresh")
    assert resolve(Variant("h", steps=3, num_draft_tokens=16, kv="path"), checkpoint, trace) == plain
    assert resolve(dataclasses.replace(asked, steps=5), checkpoint, trace).num_draft_tokens == 6


def test_what_is_resolved_stays_as_it_is(trace: Trace, checkpoint: Checkpoint) -> None:
    plain = resolve(Variant("h", steps=3), checkpoint, trace)
    assert resolve(plain, checkpoint, trace) is plain


def test_a_sweep_holds_each_variant_once_and_names_what_differs(trace: Trace, checkpoint: Checkpoint) -> None:
    def names(**choices: list[Any]) -> list[str]:
        return name_variants([resolve(one, checkpoint, trace) for one in sweep(draft=["h"], **choices)])

    assert names(steps=[3], topk=[1, 4], num_draft_tokens=[8], kv=["slot", "path"]) == [
        "topk=1",
        "topk=4 num_draft_tokens=8 kv=slot",
        "topk=4 num_draft_tokens=8 kv=path",
    ]
    assert names(steps=[1, 3]) == ["steps=1", "steps=3"]


def test_more_columns_than_tokens_to_draft_are_refused(trace: Trace, checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="topk 49 was asked for, draft head tiny has 48 tokens"):
        simulate(trace, {"h": checkpoint}, [Variant("h", topk=49, num_draft_tokens=8)])


@pytest.mark.parametrize("fault", ["position.offset=1", "attn.window=2", "kv.rollback=stale"])
def test_a_fault_of_chains_is_refused_in_trees(fault: str, trace: Trace, checkpoint: Checkpoint) -> None:
    tree = Variant("h", topk=2, steps=2, num_draft_tokens=4, faults=replay.parse_faults(fault))
    with pytest.raises(UsageError, match=f"fault {fault} is played on chains, topk 2 drafts trees; type --topk 1"):
        simulate(trace, {"h": checkpoint}, [tree])


def test_a_fault_of_trees_says_nothing_of_chains(trace: Trace, checkpoint: Checkpoint) -> None:
    faults = replay.parse_faults("tree.parent-kv=path")
    with pytest.raises(UsageError, match=r"tree.parent-kv is played in trees, topk 1 drafts chains; type --topk N"):
        simulate(trace, {"h": checkpoint}, [Variant("h", faults=faults)])
    tree = Variant("h", topk=2, steps=2, num_draft_tokens=4, kv="slot", faults=faults)
    (info,) = simulate(trace, {"h": checkpoint}, [tree]).variants
    (path,) = simulate(trace, {"h": checkpoint}, [dataclasses.replace(tree, kv="path", faults=())]).variants
    assert info.anchors_accepted == path.anchors_accepted


# ---- the rounds ----


def test_every_round_of_a_sweep_of_trees_and_chains_equals_the_twins(trace: Trace, checkpoint: Checkpoint) -> None:
    trees = sweep(draft=["h"], steps=[3], topk=[6], num_draft_tokens=[4, 24], kv=["slot", "path"], precision=["fp32"])
    variants = [*trees, Variant("h", steps=3, precision="fp32")]
    rounds = simulate(trace, {"h": checkpoint}, variants)
    for variant, info in zip(variants, rounds.variants, strict=True):
        resolved = resolve(variant, checkpoint, trace)
        head = build_head(checkpoint, resolved, trace)
        for index, request in enumerate(rounds.requests):
            item = draft_input(trace.read(index, resolved.wiring.taps), resolved.wiring)
            sized = (item.tokens_T, item.features_RKD, item.prompt_tokens)
            with torch.inference_mode():
                if variant.topk == 1:
                    expected = replay_request(head, *sized, variant.steps)
                else:
                    expected = replay_request_with_trees(
                        head, *sized, topk=6, steps=variant.steps, num_draft_tokens=info.num_draft_tokens, kv=info.kv
                    )
            played = rounds.table.filter(variant=info.name, request_id=request.request_id).sort("round")
            assert played["anchor"].to_list() == [one.anchor for one in expected]
            assert played["drafted"].to_list() == [list(one.drafted) for one in expected]
            assert played["accepted"].to_list() == [one.accepted for one in expected]
    accepted = {info.name: info.anchors_accepted for info in rounds.variants}
    assert max(accepted.values()) > 0


def test_what_is_replayed_together_equals_what_is_replayed_alone(trace: Trace, checkpoint: Checkpoint) -> None:
    variants = sweep(draft=["h"], steps=[2, 3], topk=[1, 2], num_draft_tokens=[4], kv=["slot", "path"])
    together = simulate(trace, {"h": checkpoint}, variants)
    for variant, info in zip(variants, together.variants, strict=True):
        (alone,) = simulate(trace, {"h": checkpoint}, [variant]).variants
        assert (info.anchors_accepted, info.ties) == (alone.anchors_accepted, alone.ties)


def test_the_command_line_sweeps_trees(trace: Trace, tmp_path: Path) -> None:
    draft = write_head(tmp_path / "draft", INVENTED)
    command = ["simulate", str(trace.path), "--draft", str(draft), "--steps", "3", "--json"]
    trees = ["--topk", "1", "--topk", "2", "--num-draft-tokens", "6", "--kv", "slot", "--kv", "path"]
    done = CliRunner().invoke(cli, [*command, *trees], catch_exceptions=False)
    shapes = [
        (row["topk"], row["num_draft_tokens"], row["kv"], row["drafted"] / row["rounds"], len(row["histogram"]))
        for row in json.loads(done.stdout)["variants"]
    ]
    assert shapes == [(1, 4, "refresh", 3, 4), (2, 6, "slot", 5, 4), (2, 6, "path", 5, 4)]
    assert "topk 1 with 3 steps verifies 4 tokens a round, not 6" in done.stderr


# ---- the report ----


def tree_rounds(slot: list[list[int]], path: list[list[int]], **changes: object) -> Rounds:
    sized = {"topk": 4, "num_draft_tokens": 8} | changes
    return make_rounds({make_variant("s", kv="slot", **sized): slot, make_variant("p", kv="path", **sized): path})


def layouts(rounds: Rounds) -> tuple[str, ...]:
    return assess(rounds, replay.summarise(rounds, resamples=200), resamples=200).layouts


def test_the_report_says_what_slot_costs_against_path() -> None:
    cost = layouts(tree_rounds([[1, 1]] * 30, [[1, 2]] * 30))
    assert cost == ("The tree's KV layout slot costs 0.500 against path, 95 % interval 0.50 to 0.50.",)
    gain = layouts(tree_rounds([[1, 2]] * 30, [[1, 1]] * 30))
    assert gain == ("The tree's KV layout slot gains 0.500 against path, 95 % interval 0.50 to 0.50.",)
    assert layouts(tree_rounds([[1]] * 3, [[1]] * 3)) == ("The tree's KV layout slot accepts the same as path.",)
    unsure = layouts(tree_rounds([[1], [2]], [[2], [1]]))
    assert unsure[0].endswith("cannot be told from noise.")


def test_only_pairs_that_differ_in_nothing_else_are_compared() -> None:
    def variant(name: str, kv: str, topk: int) -> VariantInfo:
        return make_variant(name, kv=kv, topk=topk, num_draft_tokens=8)

    played = [variant("a", "slot", 4), variant("b", "path", 4), variant("c", "slot", 8), variant("d", "path", 8)]
    assert len(layouts(make_rounds({one: [[1]] for one in played}))) == 2
    assert layouts(make_rounds({one: [[1]] for one in played[1:3]})) == ()
    named = layouts(make_rounds({played[0]: [[1]] * 9, played[1]: [[2]] * 9, played[2]: [[1]], played[3]: [[1]]}))
    assert "(topk 4)" in named[0]
    silent = make_rounds({one: [[]] for one in played[:2]})
    assert layouts(silent) == ()
