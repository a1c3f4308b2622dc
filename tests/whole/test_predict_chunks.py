"""The promise under load: several prompts share a server's chunks, and the replay of its trace drafts what it drafted.

Kernels differ from machine to machine, and with them the order of sums: every round is the server's, or it parts from
it at a near tie, whose margin is measured (support/near_ties.py).
"""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.near_ties import Judged, chain_noise, follow_chains, judge_chains, report_judged
from support.served_traces import served_trace
from support.this_cpu import prompts_for

import replay
from replay.traces.sample_files import sample_head

NEW_TOKENS, STEPS = 24, 3
CHUNK, TOGETHER = 32, 4
PROMPTS = prompts_for(12, TOGETHER)


def serve(target_dir: Path, folder: Path, **env: str) -> replay.Trace:
    """A trace of a server that prefills 32 tokens at a time and has four requests in flight."""
    return served_trace(
        target_dir, folder, taps="embed,3,16", steps=STEPS, num_draft_tokens=STEPS + 1, prompts=PROMPTS,
        new_tokens=NEW_TOKENS, concurrency=TOGETHER, extra_args=["--chunked-prefill-size", str(CHUNK)], env=env,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trace(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> replay.Trace:
    """Of a healthy server."""
    return serve(target_dir, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def broken(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> replay.Trace:
    """Of a server without the fix of the tails of chunks, which SGLang 0.5.23 takes back when it is asked to
    (debug_utils/pr_fix_toggle.py): the last row of each piece embeds what the target would say there."""
    return serve(target_dir, tmp_path_factory.mktemp("broken"), SGLANG_DEBUG_REVERT_PR="26329")


def variant(**changes: Any) -> replay.Variant:
    return replay.Variant("demo", steps=STEPS, **changes)


def test_prompts_are_cut_where_the_server_cut_them(trace: replay.Trace) -> None:
    """Whole, within the server's chunk, and some of them where no prompt by itself would be cut."""
    odd = 0
    for record in trace.records:
        rows = [own for own, _ in record.pieces]
        assert sum(rows) == record.prompt_tokens
        assert all(own <= whole <= CHUNK for own, whole in record.pieces)
        odd += any(own % CHUNK for own in rows[:-1])
    assert odd > 0
    assert max(len(record.pieces) for record in trace.records) > 1
    shared = [whole - own for record in trace.records for own, whole in record.pieces]
    assert any(shared), "some piece ran together with another prompt's"


def test_the_draft_is_fed_the_prompts_own_token_at_the_end_of_a_piece(trace: replay.Trace) -> None:
    """As the replay has it: the feed of a prompt in pieces is of the first one, its last row among them."""
    seen = 0
    for index, record in enumerate(trace.records):
        feed = trace.feed(index)
        assert feed is not None
        end = record.pieces[0][0] - 1
        assert int(feed.row_F[-1]) == end
        assert int(feed.token_F[-1]) == int(trace.read(index, ()).tokens[end + 1])
        seen += len(record.pieces) > 1
    assert seen > 0


def test_rounds_that_ran_together_have_one_number(trace: replay.Trace) -> None:
    """As many rounds to a number as its batch, each in a row of its own, and the numbers rise in a request."""
    rounds = trace.served_rounds()
    together = rounds.group_by("verify_pass").agg(pl.col("batch").first(), pl.col("batch_row").sort())
    for batch, rows in together.select("batch", "batch_row").iter_rows():
        assert set(rows) <= set(range(batch))
    assert together["batch"].max() == TOGETHER
    assert (together["batch_row"].list.len() == together["batch"]).mean() > 0.5  # but for verifies of ended requests
    for name in rounds["request_id"].unique():
        numbers = rounds.filter(request_id=name).sort("round")["verify_pass"]
        assert bool((numbers.diff().drop_nulls() > 0).all())


def judge(what: str, trace: replay.Trace, fault: str) -> Judged:
    """The server's rounds against a replay under ``fault``."""
    followed, other = (
        follow_chains(trace, sample_head(), variant(faults=replay.parse_faults(fault), precision=precision))
        for precision in (None, "fp32")
    )
    return judge_chains(what, followed, chain_noise(followed, other))


def test_every_round_is_the_servers(trace: replay.Trace, record_property: Any) -> None:
    judged = judge(f"chains of {STEPS}, {TOGETHER} prompts in chunks of {CHUNK}", trace, "none")
    report_judged(record_property, [judged])
    assert judged.unexplained == 0, str(judged)
    assert judged.rounds == len(trace.served_rounds()) > PROMPTS * NEW_TOKENS / (STEPS + 1)


def test_a_server_that_embeds_predicted_tokens_did_so_where_its_trace_says(
    broken: replay.Trace, record_property: Any
) -> None:
    """Every round is met by the fault at the recorded pieces, fewer by a healthy replay or by chunks of one size."""
    faults = ("kv.chunk-boundary=recorded", f"kv.chunk-boundary={CHUNK}", "none")
    recorded, by_size, healthy = (judge(f"a broken server, {fault}", broken, fault) for fault in faults)
    report_judged(record_property, [recorded, by_size, healthy])
    assert recorded.unexplained == 0, str(recorded)
    assert recorded.rounds == len(broken.served_rounds())
    assert recorded.alike > max(by_size.alike, healthy.alike)
