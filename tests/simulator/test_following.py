"""Variants along a server's own drafts, from a trace: what agrees has margin 0, and how it is read changes nothing."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from support.documents import sampled_trace
from support.followed_maker import assert_same_followed
from support.heads import invented_checkpoint
from support.here import Here
from support.served_maker import STEPS, WIRING, make_checkpoint, make_served
from support.trace_maker import make_four, make_header, make_requests, write_trace
from twins.noise import follow_with_noise
from twins.trees import draft_one_tree

import replay
from replay.analysis.followed import Followed, agreement
from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.tree_shape import ORPHAN
from replay.engines.profiles import NUMERICS
from replay.errors import UsageError
from replay.faults.table import parse_faults
from replay.head.products import take_served_products_in
from replay.simulator.binding import build_head, resolve
from replay.simulator.following import follow_server
from replay.simulator.inputs import draft_input
from replay.simulator.replayer import Job, Replayer, StoredHead
from replay.simulator.rounding import other_orders
from replay.simulator.variant import Variant
from replay.traces.reader import Trace
from replay.traces.server_rounds import served_schema

HEAD = make_checkpoint()
SCALES = (0.2, 1.0)
# Played at every anchor at once, and round after round.
FAULTS = ("none", "position.offset=1", "kv.rollback=stale", "state.hidden-row=first")


def variant(fault: str = "none", **changes: object) -> Variant:
    return Variant("h", **{"wiring": WIRING, "steps": STEPS, "faults": parse_faults(fault), **changes})  # type: ignore[arg-type]


def along(trace: Trace, fault: str = "none", rounds: pl.DataFrame | None = None, head: Checkpoint = HEAD) -> Followed:
    """One variant along the drafts of a trace's server, or some of them."""
    rounds = trace.served_rounds() if rounds is None else rounds
    (found,) = follow_server(trace, {"h": head}, [variant(fault)], rounds, scales=SCALES)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_the_servers_own_variant_is_alike_in_every_round(tmp_path: Path, fault: str) -> None:
    trace = make_served(tmp_path, HEAD, fault)
    found = along(trace, fault)
    rounds = trace.served_rounds().filter(pl.col("drafted").list.len() > 0)
    assert found.rounds == len(rounds) > 30 and found.alike_R.all() and found.same_N.all()
    assert not found.margin_N.any() and len(found.margin_N) == STEPS * found.rounds
    assert np.array_equal(found.depth_N, np.tile(range(1, STEPS + 1), found.rounds))
    assert np.array_equal(found.round_N, np.repeat(range(found.rounds), STEPS))
    assert (found.scales, found.choices, found.by_depth) == (SCALES, HEAD.config.draft_vocab_size, False)
    # a softmax at scale 1 gives a token its log-probability; the greedy one has the spread alone
    np.testing.assert_allclose(found.log_prob_N, -found.spread_NZ[:, 1], rtol=1e-5, atol=1e-5)
    assert (found.spread_NZ[:, 0] <= found.spread_NZ[:, 1] + 1e-6).all()


@pytest.mark.parametrize("fault", FAULTS)
def test_another_variant_is_not(tmp_path: Path, fault: str) -> None:
    """The rounds of another one of these: some part, and a margin is 0 just where the replay prefers the token."""
    trace = make_served(tmp_path, HEAD, "wiring.recycle-norm=other")
    found = along(trace, fault)
    assert found.rounds > 30 and 0 < found.alike_R.sum() < found.rounds
    assert np.array_equal(found.margin_N == 0, found.same_N) and (found.margin_N >= 0).all()
    alike_R = np.array([found.same_N[found.round_N == number].all() for number in range(found.rounds)])
    assert np.array_equal(alike_R, found.alike_R)
    probability_N = np.exp(-found.margin_N - found.spread_NZ[:, 1])
    np.testing.assert_allclose(np.log(probability_N), found.log_prob_N, rtol=1e-4, atol=1e-4)


def test_requests_are_numbered_as_in_the_trace(tmp_path: Path) -> None:
    trace = make_served(tmp_path, HEAD)
    found = along(trace)
    counts = dict(trace.served_rounds().group_by("request_id").len().iter_rows())
    expected = [number for number, one in enumerate(trace.records) for _ in range(counts.get(one.request_id, 0))]
    first = found.round_N[found.depth_N == 1]
    assert np.array_equal(first, range(found.rounds))
    assert found.request_N[found.depth_N == 1].tolist() == expected


@pytest.mark.parametrize("fault", FAULTS)
def test_packs_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    trace = make_served(tmp_path, HEAD, "wiring.recycle-norm=other")
    whole = along(trace, fault)
    monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", 50)  # two requests of 22 to 25 tokens
    assert_same_followed(along(trace, fault), whole)
    monkeypatch.setattr("replay.simulator.inputs.PACK_ROWS", 1)
    assert_same_followed(along(trace, fault), whole)


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_without_rounds_are_left_out(tmp_path: Path, fault: str) -> None:
    trace = make_served(tmp_path, HEAD, "wiring.recycle-norm=other")
    whole, rounds = along(trace, fault), trace.served_rounds()
    some = along(trace, fault, rounds.filter(pl.col("request_id").is_in(["r1", "r4"])))
    kept_N = np.isin(whole.request_N, [1, 4])
    assert set(some.request_N.tolist()) == {1, 4}
    np.testing.assert_allclose(some.margin_N, whole.margin_N[kept_N], rtol=1e-4, atol=1e-4)
    assert np.array_equal(some.alike_R, whole.alike_R[np.unique(whole.round_N[kept_N])])


@pytest.mark.parametrize("fault", ["none", "position.offset=1", "state.hidden-row=first"])
def test_chains_may_be_of_unequal_length(tmp_path: Path, fault: str) -> None:
    """Cut to 0 to 3 tokens by turns: what is left has the numbers that it had, the rest none, every round counts."""
    trace = make_served(tmp_path, HEAD, "wiring.recycle-norm=other")
    rounds = trace.served_rounds()
    lengths = [number % (STEPS + 1) for number in range(len(rounds))]
    cut = [row[:length] for row, length in zip(rounds["drafted"].to_list(), lengths, strict=True)]
    short = rounds.with_columns(pl.Series("drafted", cut, dtype=rounds.schema["drafted"]))
    whole, found = along(trace, fault), along(trace, fault, short)
    limit_N = np.array(lengths)[whole.round_N]
    kept_N = whole.depth_N <= limit_N
    assert found.rounds == whole.rounds and 0 < len(found.margin_N) == kept_N.sum() < len(whole.margin_N)
    for name in ("round_N", "depth_N", "request_N", "same_N"):
        assert np.array_equal(getattr(found, name), getattr(whole, name)[kept_N])
    np.testing.assert_allclose(found.margin_N, whole.margin_N[kept_N], rtol=1e-4, atol=1e-4)
    assert found.alike_R[np.array(lengths) == 0].all()  # nothing was drafted, and nothing parts


def test_what_cannot_follow_is_refused(tmp_path: Path) -> None:
    trace = make_served(tmp_path, HEAD, requests=2)
    rounds = trace.served_rounds()
    for changes, said in (
        ({"steps": 2}, r"drafted chains of 3 tokens, the variant drafts chains of 2; type the server's --steps"),
        ({"topk": 2, "num_draft_tokens": 4}, r"drafted chains of 3 tokens, the variant drafts trees of 3"),
    ):
        with pytest.raises(UsageError, match=said):
            follow_server(trace, {"h": HEAD}, [variant(**changes)], rounds)
    with pytest.raises(UsageError, match="no round of a server is left to follow"):
        follow_server(trace, {"h": HEAD}, [variant()], rounds.clear())


def test_a_head_that_samples_its_drafts_follows_none(tmp_path: Path) -> None:
    trace = Trace.open(sampled_trace(tmp_path / "trace"))
    served = make_served(tmp_path / "served", HEAD, requests=1).served_rounds()
    sampling = Variant("h", steps=STEPS, verify="rejection")
    with pytest.raises(UsageError, match="samples its drafts follows no other run's; type --verify target-only"):
        follow_server(trace, {"h": invented_checkpoint()}, [sampling], served)


@pytest.mark.parametrize("fault", ["", "+kv.rollback=stale"])
def test_logits_that_are_no_numbers_make_margins_infinite(tmp_path: Path, fault: str) -> None:
    """What enters layer 0 is 4e5 times as large, which its norm divides away, and fp16 cannot hold."""
    large = replace(HEAD, tensors={**HEAD.tensors, "fc.weight": HEAD.tensors["fc.weight"] * 4e5})
    trace = make_served(tmp_path, large, requests=3)
    assert along(trace, head=large).alike_R.all()
    found = along(trace, f"precision.dtype-cast=fp16{fault}", head=large)
    assert np.isinf(found.margin_N).all() and (found.log_prob_N == -math.inf).all()
    assert not np.isnan(found.spread_NZ).any()
    followed, noise = follow_with_noise(trace, large, variant(), trace.served_rounds())
    assert followed.rounds == found.rounds
    assert agreement(found, noise).unexplained == found.rounds and agreement(found, noise).alike == 0


# ---- trees ----


def tree_server(trace: Trace, head: Checkpoint, tree: Variant) -> pl.DataFrame:
    """The rounds of a server whose trees are the twin's, as they are recorded; they take a token or none by turns."""
    resolved = resolve(tree, head, trace)
    built, rows = build_head(head, resolved, trace), list[tuple[object, ...]]()
    for index, record in enumerate(trace.records):
        item = draft_input(trace.read(index, resolved.wiring.taps), resolved.wiring)
        anchor, number = item.prompt_tokens, 0
        while anchor < len(item.tokens_T) - 1:
            nodes = draft_one_tree(
                built, item.tokens_T, item.features_RKD, anchor,
                topk=tree.topk, steps=tree.steps, num_draft_tokens=resolved.num_draft_tokens, kv=tree.kv,
            )  # fmt: skip
            parents = [-1 if node.parent == ORPHAN else node.parent + 1 for node in nodes]
            tokens = [node.token for node in nodes]
            rows.append((record.request_id, number, anchor, tokens, number % 2, parents, None, None, None))
            anchor, number = anchor + number % 2 + 1, number + 1
    return pl.DataFrame(rows, schema=served_schema(), orient="row")


@pytest.fixture
def trees_of(tmp_path: Path) -> Trace:
    return Trace.open(write_trace(tmp_path / "trace", [make_four("float32")], header=make_header("float32")))


@pytest.mark.parametrize(("kv", "other"), [("path", "slot"), ("slot", "path")])
def test_trees_along_their_own_are_alike(trees_of: Trace, kv: str, other: str) -> None:
    trace, head = trees_of, invented_checkpoint()
    tree = Variant("h", steps=5, topk=3, num_draft_tokens=16, kv=kv)
    rounds = tree_server(trace, head, tree)
    own, wrong, turned = follow_server(
        trace, {"h": head}, [tree, replace(tree, kv=other), replace(tree, faults=parse_faults("vocab.d2t=offset:1"))],
        rounds, scales=SCALES,
    )  # fmt: skip
    assert own.by_depth and own.rounds == len(rounds) > 10 and own.alike_R.all() and not own.margin_N.any()
    assert len(own.margin_N) == 15 * own.rounds and set(own.depth_N.tolist()) == {1, 2, 3, 4, 5}
    assert not turned.alike_R.any() and turned.margin_N.max() > 1
    assert 0 < wrong.alike_R.sum() < wrong.rounds
    # up to the second depth both layouts show a node the same rows
    assert not wrong.margin_N[wrong.depth_N == 1].any() and wrong.margin_N.max() > 0


def test_a_variant_of_chains_follows_no_trees(trees_of: Trace) -> None:
    trace, head = trees_of, invented_checkpoint()
    rounds = tree_server(trace, head, Variant("h", steps=3, topk=2, num_draft_tokens=6))
    with pytest.raises(UsageError, match="drafted trees of 5 tokens, the variant drafts chains of 5"):
        follow_server(trace, {"h": head}, [Variant("h", steps=5)], rounds)


# ---- rounding ----


@pytest.mark.parametrize(
    ("dtype", "precision", "numerics", "expected"),
    [
        ("bfloat16", "bf16", "sglang", [("fp32", "sglang")]),
        ("bfloat16", "bf16", "hf", [("fp32", "hf"), ("bf16", "sglang")]),
        ("bfloat16", "fp32", "sglang", [("bf16", "sglang")]),
        ("bfloat16", "fp32", "hf", [("fp32", "sglang"), ("bf16", "sglang")]),
        ("bfloat16", "fp16", "sglang", [("fp32", "sglang"), ("bf16", "sglang")]),
        ("float32", "fp32", "sglang", [("fp32", "hf")]),
    ],
)
def test_noise_is_measured_against_exact_arithmetic_and_the_servers_order(
    tmp_path: Path, dtype: str, precision: str, numerics: str, expected: list[tuple[str, str]]
) -> None:
    path = write_trace(tmp_path / "trace", [make_requests(2, dtype)], header=make_header(dtype))
    trace = Trace.open(path)
    resolved = resolve(Variant("h", steps=2, precision=precision, numerics=numerics), invented_checkpoint(), trace)
    found = [(one.precision.base, one.numerics) for one in other_orders(resolved, trace)]
    assert found == [(base, NUMERICS[order]) for base, order in expected]


def test_the_noise_of_a_replay_in_low_precision_is_that_of_its_logits(tmp_path: Path) -> None:
    """bf16 has 8 bits: logits of some nats move by some hundredths, and rounding flips few drafts."""
    trace = Trace.open(write_trace(tmp_path / "trace", [make_four()]))
    head = invented_checkpoint()
    chain = Variant("h", steps=3)
    rounds = replay.simulate(trace, {"h": head}, [chain]).table.with_columns(parents=None)
    followed, noise = follow_with_noise(trace, head, chain, rounds)
    exact = follow_server(trace, {"h": head}, [replace(chain, precision="fp32")], rounds)[0]
    odds_N, exact_N = (one.log_prob_N - np.log(1 - np.exp(one.log_prob_N)) for one in (followed, exact))
    moved_N = np.abs(odds_N - exact_N)
    told_N = np.maximum(followed.log_prob_N, exact.log_prob_N) <= math.log(0.5)
    assert noise.largest == pytest.approx((moved_N[told_N].max(),)) and noise.tokens == told_N.sum() > 5
    assert 1e-3 < noise.largest[0] < 0.5
    counted = agreement(followed, noise)
    assert (counted.alike, counted.unexplained, counted.flips) == (followed.rounds, 0, 0)
    assert followed.scales == (noise.scale,) and 0 < counted.flips_expected < 0.2 * counted.tokens


def test_workers_with_fewer_threads_have_the_bits_of_this_process(tmp_path: Path) -> None:
    """Products of a server's size: on a CPU with AVX2 those of 5 to 11 rows of fp32 depend on the threads."""
    head, own = make_checkpoint(), torch.get_num_threads()
    trace = make_served(tmp_path / "served", head, device="cpu")
    variants = [replay.Variant("h", WIRING, STEPS, kv="stale"), replay.Variant("h", WIRING, STEPS)]
    try:
        torch.set_num_threads(2)
        alone = follow_server(trace, {"h": head}, variants, trace.served_rounds())
        job = Job(trace, {"h": StoredHead.carry(head)}, "cpu", threads=1)
        hands = Here(trace, {"h": head})
        hands.replayer = Replayer(job)
        found = follow_server(trace, {"h": head}, variants, trace.served_rounds(), workers=hands)
    finally:
        torch.set_num_threads(own)
        take_served_products_in(None)
    for one, other in zip(alone, found, strict=True):
        assert one.log_prob_N.tolist() == other.log_prob_N.tolist()
