"""A simulation held against the rounds of the trace's own server: alike, near a tie, unexplained, and by whom it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from support.heads import invented_checkpoint, write_head
from support.served_maker import HEAD, STEPS, WIRING, make_checkpoint, make_served
from support.trace_maker import changed, make_four, write_trace
from twins.noise import follow_with_noise

import replay
from replay.analysis.followed import agreement
from replay.cli.app import cli
from replay.simulator.agreement import drafts_as_the_server, with_agreement
from replay.simulator.binding import resolve
from replay.simulator.following import follow_server
from replay.simulator.progress import ReplayProgress
from replay.traces.agreement import Agreement
from replay.traces.server_rounds import served_schema

TOPK, NODES = 3, 7
TREE: dict[str, Any] = {"topk": TOPK, "num_draft_tokens": NODES + 1}
WRONG = replay.Wiring(("3", "5", "6"))


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> replay.Trace:
    return make_served(tmp_path_factory.mktemp("chains"), make_checkpoint())


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> replay.Trace:
    return make_served(tmp_path_factory.mktemp("trees"), make_checkpoint(), topk=TOPK, nodes=NODES)


def variant(**changes: Any) -> replay.Variant:
    return replay.Variant("h", **({"wiring": WIRING, "steps": STEPS} | changes))


def agreements(trace: replay.Trace, *variants: replay.Variant) -> list[Agreement | None]:
    heads = {"h": make_checkpoint()}
    rounds = with_agreement(replay.simulate(trace, heads, variants), trace, heads, variants)
    return [one.agreement for one in rounds.variants]


def told(trace: replay.Trace, *variants: replay.Variant) -> list[Agreement]:
    found = [one for one in agreements(trace, *variants) if one is not None]
    assert len(found) == len(variants)
    return found


@pytest.mark.parametrize(("kind", "shape"), [("chains", {}), ("trees", TREE)])
def test_the_servers_own_order_is_alike_another_parts_at_near_ties_and_a_wrong_wiring_further(
    kind: str, shape: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    trace: replay.Trace = request.getfixturevalue(kind)
    same, other, wrong = told(
        trace, variant(**shape), variant(precision="bf16", **shape), variant(wiring=WRONG, **shape)
    )
    total = len(trace.served_rounds())
    assert (same.rounds, same.alike, same.near_tie, same.unexplained, same.flips) == (total, total, 0, 0, 0)
    assert other.unexplained == 0 < other.near_tie < total and other.alike + other.near_tie == total
    assert 0 < other.largest <= 2
    assert wrong.unexplained > total / 2
    assert {one.tokens for one in (same, other, wrong)} == {int(trace.served_rounds()["drafted"].list.len().sum())}


@pytest.mark.parametrize(("kind", "shape"), [("chains", {}), ("trees", TREE)])
def test_together_they_are_counted_as_each_by_itself(
    kind: str, shape: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lots, and with the passes that they share."""
    monkeypatch.setattr("replay.simulator.agreement._AT_ONCE", 2)
    trace: replay.Trace = request.getfixturevalue(kind)
    variants = [variant(**shape, **more) for more in ({}, {"precision": "bf16"}, {"numerics": "hf"}, {"wiring": WRONG})]
    for one, found in zip(variants, told(trace, *variants), strict=True):
        alone = agreement(*follow_with_noise(trace, make_checkpoint(), one, trace.served_rounds()))
        counts = ("rounds", "alike", "near_tie", "unexplained", "tokens", "flips")
        assert [getattr(found, name) for name in counts] == [getattr(alone, name) for name in counts]
        for name in ("noise", "noise_scale", "flips_expected"):
            assert getattr(found, name) == pytest.approx(getattr(alone, name), rel=0.02, abs=1e-4)


def test_only_what_drafts_in_the_servers_shape_is_held_against_it(chains: replay.Trace, trees: replay.Trace) -> None:
    shapes: list[dict[str, Any]] = [{}, {"steps": STEPS + 1}, TREE]
    assert [one is None for one in agreements(chains, *(variant(**more) for more in shapes))] == [False, True, True]
    shapes = [TREE, {}, {**TREE, "topk": TOPK + 1}, {**TREE, "steps": STEPS - 1}, {**TREE, "num_draft_tokens": NODES}]
    found = agreements(trees, *(variant(**more) for more in shapes))
    assert [one is None for one in found] == [False, True, True, True, True]


def test_trees_need_a_server_that_told_its_steps(tmp_path: Path) -> None:
    trace = make_served(tmp_path, make_checkpoint(), topk=TOPK, nodes=NODES, speculative_num_steps="", requests=1)
    assert agreements(trace, variant(**TREE)) == [None]


def test_a_head_that_knows_fewer_tokens_than_the_server_drafted_is_not_held_against_it(chains: replay.Trace) -> None:
    checkpoint, served = make_checkpoint(), chains.served_rounds()
    resolved = resolve(variant(), checkpoint, chains)
    most = max(max(drafted) for drafted in served["drafted"].to_list())
    for known, expected in ((most + 1, True), (most, False)):
        few = replace(checkpoint, config=replace(checkpoint.config, vocab_size=known))
        assert drafts_as_the_server(resolved, few, chains, served) is expected


def test_a_head_that_samples_its_drafts_is_not_held_against_it(tmp_path: Path) -> None:
    drawn = [changed(request, temperature=0.5) for request in make_four()]
    trace, checkpoint = replay.Trace.open(write_trace(tmp_path / "trace", [drawn])), invented_checkpoint()
    served = pl.DataFrame([("r0", 0, 3, [1, 2], 0, *[None] * 4)], schema=served_schema(), orient="row")
    for rule, expected in (("target-only", True), ("rejection", False)):
        resolved = resolve(replay.Variant("h", steps=2, verify=rule), checkpoint, trace)
        assert drafts_as_the_server(resolved, checkpoint, trace, served) is expected
        assert not drafts_as_the_server(resolved, checkpoint, trace, served.clear())


def test_rules_that_draft_alike_are_followed_once(chains: replay.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 every rule is played as greedy."""
    followed: list[int] = []

    def count(*arguments: Any, **more: Any) -> Any:
        followed.append(len(arguments[2]))
        return follow_server(*arguments, **more)

    monkeypatch.setattr("replay.simulator.agreement.follow_server", count)
    first, second = told(chains, variant(), variant(verify="target-only"))
    assert first == second
    assert sum(followed) == 3  # in the server's order, in Transformers', and once more to count


def test_a_trace_without_a_servers_rounds_changes_nothing(tmp_path: Path) -> None:
    trace = replay.Trace.open(write_trace(tmp_path / "trace", [make_four()]))
    heads, variants = {"h": invented_checkpoint()}, [replay.Variant("h", steps=2)]
    rounds = replay.simulate(trace, heads, variants)
    assert with_agreement(rounds, trace, heads, variants) == rounds


def test_progress_goes_on_under_a_name_of_its_own(chains: replay.Trace) -> None:
    events: list[ReplayProgress] = []
    heads, variants = {"h": make_checkpoint()}, [variant()]
    with_agreement(replay.simulate(chains, heads, variants), chains, heads, variants, on_event=events.append)
    assert {event.stage for event in events} == {"against the server"}
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert events[-1].done == events[-1].total


# ---- the command ----


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_head(tmp_path / "head", HEAD)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_says_it_keeps_it_and_shows_it_again(chains: replay.Trace, draft: Path, tmp_path: Path) -> None:
    typed = ("simulate", chains.path, "--draft", draft, "--wiring", WIRING, "--steps", STEPS)
    out = tmp_path / "rounds.parquet"
    (row,) = json.loads(run(*typed, "--json", "-o", out))["variants"]
    (again,) = json.loads(run("report", out, "--json"))["variants"]
    assert row["agreement"] == again["agreement"]
    total = len(chains.served_rounds())
    assert (row["agreement"]["rounds"], row["agreement"]["alike"]) == (total, total)
    said = f"Against the server's {total} rounds: {total} alike, 0 at a near tie, 0 unexplained"
    assert said in run(*typed)
    assert said in run("report", out)


def test_the_command_leaves_it_out_where_asked(chains: replay.Trace, draft: Path) -> None:
    typed = ("simulate", chains.path, "--draft", draft, "--wiring", WIRING, "--steps", STEPS)
    (row,) = json.loads(run(*typed, "--no-agreement", "--json"))["variants"]
    assert row["agreement"] is None
    assert "Against the server's" not in run(*typed, "--no-agreement")
    ranked = json.loads(run(*typed, "--rank-precision", "w8a8", "--json"))
    assert {row["agreement"] for row in ranked["variants"]} == {None}
