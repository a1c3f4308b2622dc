"""Traces that hold less by choice, replayed: the same rounds where what is left is enough, else a refusal."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.dflash_heads import dflash_checkpoint
from support.less_maker import make_less
from support.served_maker import STEPS, WIRING, make_checkpoint, make_served

import replay
from replay.analysis.followed import Followed, join
from replay.checkpoint.checkpoint import Checkpoint
from replay.cli.replaying import run_simulation
from replay.engines.wiring import Wiring
from replay.errors import UsageError, WiringError
from replay.simulator.agreement import with_agreement
from replay.simulator.binding import resolve
from replay.simulator.cache import open_cache, simulate_cached, simulate_kept
from replay.simulator.confidence import draft_anchors
from replay.simulator.following import follow_server
from replay.simulator.replayer import Job, Replayer, StoredHead
from replay.simulator.tasks import plan_tasks
from replay.simulator.teacher_forced import score_anchors
from replay.simulator.variant import Variant
from replay.traces.copying import captured_request
from replay.traces.header import VERSION
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.writer import TraceWriter

SERVED = Variant("h", WIRING, STEPS)
OTHER = Variant("h", Wiring(("1", "4", "5")), STEPS)  # of which the first requests have a tap of their own


@pytest.fixture(scope="module")
def head() -> Checkpoint:
    return make_checkpoint()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, head: Checkpoint) -> Trace:
    return make_served(tmp_path_factory.mktemp("served"), head)


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory, whole: Trace) -> Trace:
    return make_less(tmp_path_factory.mktemp("less") / "t", whole, taps_for=2, then=WIRING.taps)


# ---- taps of some requests ----


def test_the_taps_of_all_requests_give_all_rounds(whole: Trace, tiered: Trace, head: Checkpoint) -> None:
    ours, theirs = (replay.simulate(trace, {"h": head}, [SERVED]) for trace in (tiered, whole))
    assert ours.table.equals(theirs.table) and len(ours.requests) == 6
    assert ours.trace["doubts"] == [] and "part" not in ours.trace
    ours, theirs = (
        with_agreement(rounds, trace, {"h": head}, [SERVED]) for rounds, trace in ((ours, tiered), (theirs, whole))
    )
    assert ours.variants[0].agreement == theirs.variants[0].agreement is not None


def test_a_tap_of_some_requests_leaves_the_others_out(tiered: Trace, whole: Trace, head: Checkpoint) -> None:
    """Of all variants alike: what is compared is compared on the same requests."""
    variants, first = [SERVED, OTHER], whole.take(Part(limit=2))
    ours, theirs = (replay.simulate(trace, {"h": head}, variants) for trace in (tiered, first))
    assert ours.table.equals(theirs.table) and [one.request_id for one in ours.requests] == ["r0", "r1"]
    assert ours.trace["doubts"][0] == "2 of 6 requests have the taps 1, 2, 4, 5: only these are looked at."
    assert ours.trace["part"] == "with the taps 1, 2, 4, 5 (2 of 6)"
    ours, theirs = (
        with_agreement(rounds, trace, {"h": head}, variants) for rounds, trace in ((ours, tiered), (theirs, first))
    )
    agreements = [variant.agreement for variant in ours.variants]
    assert agreements == [variant.agreement for variant in theirs.variants] and None not in agreements
    followed, alone = (follow_server(one, {"h": head}, [OTHER], whole.served_rounds()) for one in (tiered, first))
    assert (followed[0].margin_N == alone[0].margin_N).all() and followed[0].rounds == alone[0].rounds


def test_a_cache_finds_what_was_replayed_on_the_same_requests(tiered: Trace, head: Checkpoint, tmp_path: Path) -> None:
    heads = {"h": head}

    def cached(variants: list[Variant]) -> replay.Rounds:
        kept = open_cache(tmp_path, tiered, heads, "cpu", agreement=True)
        return simulate_cached(kept, tiered, heads, variants)

    alone = cached([SERVED])
    both = cached([SERVED, OTHER])  # the served one was kept for six requests, and is replayed for two
    assert (len(alone.requests), len(both.requests)) == (6, 2)
    plain = with_agreement(replay.simulate(tiered, heads, [SERVED, OTHER]), tiered, heads, [SERVED, OTHER])
    again = cached([SERVED, OTHER])
    for one in (both, again):
        assert one.table.equals(plain.table) and one.requests == plain.requests and one.trace == plain.trace
        assert [info.agreement for info in one.variants] == [info.agreement for info in plain.variants]
    resolved = [resolve(one, head, tiered) for one in (SERVED, OTHER)]
    kept = open_cache(tmp_path, tiered, heads, "cpu", agreement=False)
    assert simulate_kept(kept, tiered, heads, resolved[:1]).table.equals(alone.table)
    assert simulate_kept(kept, tiered, heads, resolved).table.equals(plain.table)


def test_workers_of_the_command_line_have_what_is_replayed_alone(
    tiered: Trace, head: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a rule is held against these requests, as in one process."""
    given: list[Trace] = []

    def none(_: object, trace: Trace, *__: object) -> nullcontext[None]:
        given.append(trace)
        return nullcontext(None)

    monkeypatch.setattr("replay.simulator.workers.use_workers", none)
    run_simulation(tiered, {"h": head}, [SERVED, OTHER], "cpu", workers=2)
    run_simulation(tiered, {"h": head}, [SERVED], "cpu", workers=2)
    assert [[one.request_id for one in trace.records] for trace in given] == [["r0", "r1"], [f"r{n}" for n in range(6)]]


def test_a_worker_may_have_all_requests_open(whole: Trace, head: Checkpoint, tmp_path: Path) -> None:
    """It numbers requests as they stand in the part that is replayed, wherever these stand in the trace."""
    with TraceWriter.create(tmp_path / "odd", replace(whole.header, weights=None, version=VERSION)) as writer:
        writer.write_target_weights(whole.embed_weight(), None)
        writer.add_rounds(whole.served_rounds())
        for index in range(len(whole)):
            one = captured_request(whole, index)
            kept = one.taps if index % 2 else {tap: one.taps[tap] for tap in (*WIRING.taps, "final")}
            writer.add([replace(one, taps=kept)])
        writer.finish()
    trace, heads = Trace.open(tmp_path / "odd"), {"h": head}
    part = trace.having(["1", "4", "5"])
    assert [record.request_id for record in part.records] == ["r1", "r3", "r5"]
    rounds, variants = trace.served_rounds(), [resolve(OTHER, head, trace)]
    (expected,) = follow_server(part, heads, variants, rounds)
    planned = plan_tasks(part, heads, variants, None, 1, rounds=rounds, scales=())
    worker = Replayer(Job(trace, {"h": StoredHead.carry(head)}, "cpu", torch.get_num_threads()))
    found = join([one for task in planned.tasks for one in worker.replay(task) if isinstance(one, Followed)])
    assert found.request_N.tolist() == expected.request_N.tolist() and set(found.request_N.tolist()) == {0, 1, 2}
    assert (found.margin_N == expected.margin_N).all()


def test_training_and_plans_look_at_the_same_requests(tiered: Trace, whole: Trace, head: Checkpoint) -> None:
    first = whole.take(Part(limit=2))
    assert score_anchors(tiered, head, OTHER).equals(score_anchors(first, head, OTHER))
    names = [one.request_id for one in draft_anchors(tiered, head, OTHER)]
    assert names == ["r0", "r1"]


def test_no_request_with_the_taps(tiered: Trace, head: Checkpoint) -> None:
    rest = tiered.take(Part(requests=("r3", "r4")))
    with pytest.raises(WiringError, match="wiring 1,4,5 asks for tap 1, the trace has embed, 2, 4, 5, final; capture"):
        replay.simulate(rest, {"h": head}, [OTHER])


# ---- fp8 ----


def test_rows_in_fp8_are_not_said_to_be_exact(tmp_path: Path, whole: Trace, head: Checkpoint) -> None:
    less = make_less(tmp_path / "fp8", whole, rows="fp8")
    rounds = with_agreement(replay.simulate(less, {"h": head}, [SERVED]), less, {"h": head}, [SERVED])
    assert rounds.variants[0].agreement is None
    assert "stored in fp8, a byte a value" in rounds.trace["doubts"][0]
    exact = make_less(tmp_path / "exact", whole)
    rounds = with_agreement(replay.simulate(exact, {"h": head}, [SERVED]), exact, {"h": head}, [SERVED])
    assert rounds.variants[0].agreement is not None and rounds.trace["doubts"] == []


# ---- prompts from some row on ----


@pytest.mark.parametrize(
    ("fault", "layers", "needed", "wider"),
    [
        ("attn.window=1", 1, 1, "attn.window=2"),
        ("attn.window=4", 1, 4, "attn.window=5"),
        ("attn.window=2", 2, 4, "attn.window=3"),
        ("attn.window=3+shift.alignment=features", 1, 4, "attn.window=4+shift.alignment=features"),
    ],
)
def test_a_window_that_fits_gives_the_same_rounds(
    tmp_path: Path, whole: Trace, fault: str, layers: int, needed: int, wider: str
) -> None:
    head = make_checkpoint(num_hidden_layers=layers)
    less = make_less(tmp_path / "less", whole, prompt_rows=needed)
    variant = replace(SERVED, faults=replay.parse_faults(fault))
    ours, theirs = (replay.simulate(trace, {"h": head}, [variant]) for trace in (less, whole))
    assert ours.table.equals(theirs.table)
    more = replace(SERVED, faults=replay.parse_faults(wider))
    with pytest.raises(UsageError, match=rf"sees the last \d rows of a prompt, .* has the last {needed} of some"):
        replay.simulate(less, {"h": head}, [more])
    with pytest.raises(UsageError, match=r"sees all rows of a prompt, .*; capture again without --prompt-rows"):
        replay.simulate(less, {"h": head}, [SERVED])


def test_blocks_see_the_widest_window_of_a_layer(tmp_path: Path, whole: Trace) -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 4}
    small = {
        "hidden_size": 16, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 24, "dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 2, 3]},
    }  # fmt: skip
    variant = Variant("h", Wiring(("1", "3", "4")), steps=4)
    less = make_less(tmp_path / "less", whole, prompt_rows=4)
    head = dflash_checkpoint(**small, **sliding)
    ours, theirs = (replay.simulate(trace, {"h": head}, [variant]) for trace in (less, whole))
    assert ours.table.equals(theirs.table)
    three = make_less(tmp_path / "three", whole, prompt_rows=3)
    with pytest.raises(
        UsageError, match=r"sees the last 4 rows of a prompt, .*; capture again with --prompt-rows last:4"
    ):
        replay.simulate(three, {"h": head}, [variant])
    full = dflash_checkpoint(**small, **{**sliding, "layer_types": ["sliding_attention", "full_attention"]})
    with pytest.raises(UsageError, match="sees all rows of a prompt"):
        replay.simulate(less, {"h": full}, [variant])
