"""States that cross between requests, from a trace: in the batches of its server, whatever shares a pass with what."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from support.documents import sampled_trace
from support.followed_maker import assert_same_followed
from support.heads import invented_checkpoint
from support.served_maker import STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.analysis.followed import Followed, measure_noise
from replay.drafting.crossed import BatchRow
from replay.errors import UsageError
from replay.faults.table import parse_faults
from replay.simulator.batches import Batches
from replay.simulator.following import follow_server
from replay.simulator.variant import Variant
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.server_rounds import served_schema

HEAD = make_checkpoint()
FAULTS = ("state.crossed=previous", "state.crossed=reversed:once", "state.crossed=first")
TREE = {"topk": 3, "num_draft_tokens": 9}
every_fault = pytest.mark.parametrize("fault", FAULTS)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """By fault the trace of a server that verifies three requests together."""
    names = ("none", *FAULTS)
    return {name: make_served(tmp_path_factory.mktemp("served"), HEAD, name, together=3) for name in names}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Of one that drafts trees."""
    return make_served(tmp_path_factory.mktemp("trees"), HEAD, FAULTS[0], together=3, topk=3)


def variant(fault: str, **changes: object) -> Variant:
    return Variant("h", **{"wiring": WIRING, "steps": STEPS, "faults": parse_faults(fault), **changes})  # type: ignore[arg-type]


def along(trace: Trace, fault: str, rounds: pl.DataFrame | None = None, **changes: object) -> Followed:
    rounds = trace.served_rounds() if rounds is None else rounds
    (found,) = follow_server(trace, {"h": HEAD}, [variant(fault, **changes)], rounds, scales=(0.2, 1.0))
    return found


def with_rounds(trace: Trace, rounds: pl.DataFrame, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """The trace as if its server had told other rounds."""
    monkeypatch.setattr(trace, "served_rounds", lambda: rounds)
    monkeypatch.delitem(vars(trace), "largest_batch", raising=False)
    return trace


@every_fault
def test_the_servers_own_fault_is_alike_in_every_round(traces: dict[str, Trace], fault: str) -> None:
    trace = traces[fault]
    found = along(trace, fault)
    assert found.rounds == len(trace.served_rounds()) > 30 and found.alike_R.all() and not found.margin_N.any()
    for other in ("none", *FAULTS):
        assert other == fault or not along(trace, other).alike_R.all()


def test_trees_follow_a_server_whose_states_cross(trees: Trace) -> None:
    found = along(trees, FAULTS[0], **TREE)
    assert found.alike_R.all() and not found.margin_N.any()
    assert along(trees, "none", **TREE).alike_R.mean() < 0.5
    rounds = trees.served_rounds().filter(pl.col("request_id").is_in(["r1", "r4"]) & (pl.col("round") < 3))
    some = along(trees, FAULTS[0], rounds, **TREE)
    assert some.alike_R.all() and some.rounds == 6


@every_fault
def test_packs_and_what_else_is_followed_change_nothing(
    traces: dict[str, Trace], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Requests of one batch in several packs, others under the same head, and along the drafts of another server."""
    trace = traces["none"]
    whole = along(trace, fault)
    several = [variant(one) for one in ("none", fault, "kv.rollback=stale", "position.offset=1", FAULTS[0])]
    found = follow_server(trace, {"h": HEAD}, several, trace.served_rounds(), scales=(0.2, 1.0))
    assert_same_followed(found[1], whole)
    assert_same_followed(found[0], along(trace, "none"))
    for rows in (50, 1):
        monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", rows)
        assert_same_followed(along(trace, fault), whole)


@every_fault
def test_some_rounds_have_the_batches_of_all(traces: dict[str, Trace], fault: str) -> None:
    """Two rounds of two requests, whose neighbours are not asked for."""
    trace = traces["none"]
    whole, rounds = along(trace, fault), trace.served_rounds()
    some = along(trace, fault, rounds.filter(pl.col("request_id").is_in(["r1", "r4"]) & pl.col("round").is_in([1, 2])))
    numbers = np.cumsum([0, *rounds.group_by("request_id", maintain_order=True).len()["len"]])
    kept_N = np.isin(whole.round_N, [numbers[request] + number for request in (1, 4) for number in (1, 2)])
    assert some.rounds == 4 and set(some.request_N.tolist()) == {1, 4}
    np.testing.assert_allclose(some.margin_N, whole.margin_N[kept_N], rtol=1e-4, atol=1e-4)
    assert np.array_equal(some.alike_R, whole.alike_R[np.unique(whole.round_N[kept_N])])


@every_fault
def test_a_walk_of_its_own_meets_the_servers_rounds(
    traces: dict[str, Trace], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Under the server's own fault it comes by the server's anchors, in the server's batches: the rounds are the same,
    at their anchors too, and however requests are packed."""
    trace, columns = traces[fault], ["request_id", "round", "anchor", "drafted", "accepted"]
    told = trace.served_rounds().select(columns).sort("request_id", "round")
    for rows in (2048, 40):
        monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", rows)
        for follow in (None, trace.served_rounds(), trace.served_rounds().filter(pl.col("request_id") == "r3")):
            played = replay.simulate(trace, {"h": HEAD}, [variant(fault)], follow=follow).table
            expected = told if follow is None else told.filter(pl.col("request_id").is_in(follow["request_id"]))
            assert played.select(columns).sort("request_id", "round").equals(expected)
        some = replay.simulate(trace, {"h": HEAD}, [variant("none"), variant(fault)], only={"r2"})
        mine = some.table.filter(variant=some.variants[1].name).select(columns)
        assert mine.equals(told.filter(request_id="r2"))


@every_fault
@pytest.mark.parametrize("part", [Part(limit=2), Part(requests=("r3",))], ids=str)
def test_a_part_has_the_batches_of_the_whole(traces: dict[str, Trace], fault: str, part: Part) -> None:
    """Neighbours that are in the folder and not asked for are drafted for all the same."""
    trace, columns = traces[fault], ["request_id", "round", "anchor", "drafted", "accepted"]
    taken = trace.take(part)
    assert taken.largest_batch == trace.largest_batch == 3 and len(taken) < len(taken.whole) == len(trace)
    played = replay.simulate(taken, {"h": HEAD}, [variant(fault)]).table.select(columns)
    told = taken.served_rounds().select(columns)
    assert played.sort("request_id", "round").equals(told.sort("request_id", "round"))
    found = along(taken, fault)
    assert found.rounds == len(told) and found.alike_R.all() and not found.margin_N.any()


def test_trees_walk_in_the_servers_batches(trees: Trace) -> None:
    columns = ["request_id", "anchor", "drafted", "accepted"]
    played = replay.simulate(trees, {"h": HEAD}, [variant(FAULTS[0], **TREE)]).table
    told = trees.served_rounds()
    assert played.select(columns).sort("request_id", "anchor").equals(told.select(columns).sort("request_id", "anchor"))


@every_fault
def test_where_it_is_not_known_who_else_was_there_no_token_counts(
    traces: dict[str, Trace], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A request that is not in the trace: what led from it to others is as likely as anything, and no margin."""
    trace = traces[fault]
    rounds = trace.served_rounds()
    left = rounds.filter(pl.col("request_id") != "r2")
    whole = along(trace, fault, left)
    with monkeypatch.context() as patched:
        found = along(with_rounds(trace, left, patched), fault)
    unknown_N = ~found.same_N
    assert 0 < unknown_N.sum() < len(unknown_N) / 2 and whole.alike_R.all()
    assert not found.margin_N.any() and (found.depth_N[unknown_N] > 1).all()
    np.testing.assert_allclose(found.spread_NZ[unknown_N], np.log(HEAD.config.draft_vocab_size))
    np.testing.assert_allclose(found.spread_NZ[~unknown_N], whole.spread_NZ[~unknown_N], rtol=1e-4, atol=1e-4)
    assert set(found.round_N[unknown_N].tolist()) == set(np.flatnonzero(~found.alike_R).tolist())
    noisy = replace(whole, log_prob_N=whole.log_prob_N - 0.1)
    assert measure_noise(found, noisy).tokens == measure_noise(whole, noisy).tokens - _half(whole, noisy, unknown_N)


def test_a_tree_of_which_some_state_is_not_known_counts_in_no_node(
    trees: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes compete with each other. Trees of batches without the missing request are as they were."""
    rounds = trees.served_rounds()
    left = rounds.filter(pl.col("request_id") != "r2")
    whole = along(trees, FAULTS[0], left, **TREE)
    with monkeypatch.context() as patched:
        found = along(with_rounds(trees, left, patched), FAULTS[0], **TREE)
    passes = set(rounds.filter(request_id="r2")["verify_pass"])
    order = left.sort(pl.col("request_id").replace_strict({f"r{n}": n for n in range(6)}), "round")
    touched_R = np.array([number in passes for number in order["verify_pass"]])
    assert 0 < touched_R.sum() < len(touched_R) and np.array_equal(found.alike_R, ~touched_R)
    assert np.array_equal(found.same_N, ~touched_R[found.round_N]) and not found.margin_N.any()
    np.testing.assert_allclose(found.log_prob_N[found.same_N], whole.log_prob_N[found.same_N], rtol=1e-4, atol=1e-4)


def _half(whole: Followed, noisy: Followed, chosen_N: np.ndarray) -> int:
    """How many of the chosen tokens noise would have been measured on."""
    likely_N = np.maximum(whole.log_prob_N, noisy.log_prob_N) > np.log(0.5)
    return int((chosen_N & ~likely_N).sum())


def test_a_batch_is_that_of_the_round_in_which_an_anchor_lies() -> None:
    rows = [
        ("a", 0, 5, [1], 1, None, 2, 7, 1), ("a", 1, 7, [1], 0, None, 1, 9, 0),
        ("a", 2, 8, [1], 0, None, None, None, None),
        ("b", 0, 4, [1], 0, None, 2, 7, 0),
    ]  # fmt: skip
    batches = Batches(pl.DataFrame(rows, schema=served_schema(), orient="row"))
    at = BatchRow(7, 1, 2)
    assert batches.rows_at("a", [4, 5, 6, 7, 8, 30]) == [None, at, at, BatchRow(9, 0, 1), None, None]
    assert batches.rows_at("c", [4]) == [None]
    assert batches.beside({"a": [6]}) == {"a": {5}, "b": {4}}
    assert batches.beside({"a": [7, 8]}) == {"a": {7}} and batches.beside({"a": None}) == {"a": {5, 7}, "b": {4}}


# ---- refusals ----


def test_without_two_requests_together_there_is_nothing_to_cross(tmp_path: Path) -> None:
    for together in (0, 1):
        trace = make_served(tmp_path / str(together), HEAD, requests=2, together=together)
        assert trace.largest_batch == 0
        with pytest.raises(UsageError, match=r"state.crossed=next hands .* tells of no two .* verified together"):
            replay.simulate(trace, {"h": HEAD}, [variant("state.crossed=next")])


def test_a_request_that_always_ran_alone_has_nothing_to_cross(tmp_path: Path) -> None:
    """The last of three, which begins when the two that the server verified together have ended."""
    trace = make_served(tmp_path / "t", HEAD, requests=3, together=2)
    taken = trace.take(Part(requests=("r2",)))
    assert set(taken.served_rounds()["batch"]) == {1} and (taken.largest_batch, trace.largest_batch) == (0, 2)
    with pytest.raises(UsageError, match="tells of no other request that a server verified together with one of those"):
        replay.simulate(taken, {"h": HEAD}, [variant("state.crossed=next")])


def test_what_follows_the_walk_is_not_played_beside_it(traces: dict[str, Trace]) -> None:
    faults = "state.crossed=next+kv.rollback=stale"
    with pytest.raises(UsageError, match="and one that follows the walk, which is not; type one of them"):
        replay.simulate(traces["none"], {"h": HEAD}, [variant(faults)])
    joined = along(traces["none"], "state.crossed=next+position.offset=1")
    assert not np.array_equal(joined.margin_N, along(traces["none"], "state.crossed=next").margin_N)


def test_two_of_them_at_once_are_refused(traces: dict[str, Trace]) -> None:
    with pytest.raises(UsageError, match="both set the row of a batch whose state is handed on"):
        along(traces["none"], "state.crossed=next+state.crossed=pairs")


def test_drafts_that_are_drawn_are_not_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace.open(sampled_trace(tmp_path / "trace"))
    monkeypatch.setattr(Trace, "largest_batch", 4)
    drawn = replace(variant(FAULTS[0]), wiring=None, verify="rejection")
    with pytest.raises(UsageError, match="hands on what other requests drafted, and under rule rejection"):
        replay.simulate(trace, {"h": invented_checkpoint()}, [drawn])
