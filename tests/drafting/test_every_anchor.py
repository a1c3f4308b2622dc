"""Drafts of every anchor, one pass per step, equal the slow twin's: every option of a head, any steps, any packing."""

from dataclasses import replace

import polars as pl
import pytest
import torch
from support.products import products_seen
from support.random_heads import FP64, HEADS, make_head, requests
from twins.rounds import draft_one_round, replay_request
from twins.server_order import replay_in_order

from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.product_sizes import products_of_rows, served_spans
from replay.drafting.rows import DraftInput
from replay.engines.profiles import ENGINES, NUMERICS
from replay.head.products import FP32_ON_CPU, Execution
from replay.verify.accept import continuations, count_accepted, served_walk


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_anchor_of_every_head_equals_the_twin(name: str, engine: str) -> None:
    head = make_head(name, engine=engine, execution=FP32_ON_CPU)
    inputs = requests(head, [(3, 9), (1, 4), (6, 1), (2, 2)])
    for item, drafts in zip(inputs, draft_every_anchor(head, inputs, 4), strict=True):
        anchors = range(item.prompt_tokens, len(item.tokens_T) - 1)
        expected = [draft_one_round(head, item.tokens_T, item.features_RKD, anchor, 4) for anchor in anchors]
        assert drafts.drafted_AK.tolist() == expected
    assert len({tuple(row) for row in expected}) == len(expected)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_equals_the_twin_but_for_near_ties(numerics: str, dtype: torch.dtype) -> None:
    head = make_head("plain", numerics=numerics, execution=Execution(dtype))
    (item,) = requests(head, [(3, 60)])
    (drafts,) = draft_every_anchor(head, [item], 3)
    expected = [draft_one_round(head, item.tokens_T, item.features_RKD, anchor, 3) for anchor in range(3, 62)]
    # Products over other numbers of rows round differently; a flip needs a near tie, and the rest of its chain follows.
    differing = sum(row != other for row, other in zip(drafts.drafted_AK.tolist(), expected, strict=True))
    assert differing <= 3


def test_packing_changes_no_draft() -> None:
    head = make_head("two layers", execution=FP32_ON_CPU)
    inputs = requests(head, [(3, 9), (1, 14), (6, 2)])
    together = draft_every_anchor(head, inputs, 3)
    for item, drafts in zip(inputs, together, strict=True):
        (alone,) = draft_every_anchor(head, [item], 3)
        assert torch.equal(alone.drafted_AK, drafts.drafted_AK)


@pytest.mark.parametrize("name", ["plain", "three layers", "every norm"])
def test_products_as_small_as_a_servers_change_no_draft(name: str) -> None:
    head, small = make_head(name), make_head(name, execution=replace(FP64, product_rows=4))
    inputs = requests(head, [(3, 9), (1, 14), (6, 1), (7, 2)])
    whole = draft_every_anchor(head, inputs, 3)
    for drafts, split in zip(whole, draft_every_anchor(small, inputs, 3), strict=True):
        assert torch.equal(drafts.drafted_AK, split.drafted_AK)


def test_products_are_as_large_as_the_servers() -> None:
    """Rows 0 to 46 are the prompt's. Rounds at 47 and 50, of 5 requests x 8 rows and of 1 x 8, then one not told."""
    rounds = pl.DataFrame(
        [("a", 47, [0] * 7, 2, 5), ("a", 50, [0] * 7, 0, 1), ("a", 51, [0] * 7, 0, None), ("b", 9, [0], 1, 2)],
        schema={"request_id": pl.String, "anchor": pl.Int32, "drafted": pl.List(pl.Int32), "accepted": pl.Int32,
                "batch": pl.Int32}, orient="row",
    )  # fmt: skip
    spans = served_spans(rounds)
    assert spans == {"a": [(47, 3, 40), (50, 1, 8)], "b": [(9, 2, 4)]}
    whole = products_of_rows(52, 47, spans["a"], product_rows=32, prefill_rows=None)
    assert whole.tolist() == [47] * 47 + [40] * 3 + [32] * 2
    chunked = products_of_rows(52, 47, spans["a"], product_rows=8, prefill_rows=20)
    assert chunked.tolist() == [20] * 40 + [8] * 7 + [40] * 3 + [8] * 2
    assert products_of_rows(45, 47, (), product_rows=8, prefill_rows=None).tolist() == [47] * 45
    # cut by a chunk that was shared: 12 rows beside 20 of another prompt, 32 by themselves, 3 beside 25
    told = products_of_rows(52, 47, spans["a"], [(12, 32), (32, 32), (3, 28)], product_rows=8, prefill_rows=32)
    assert told.tolist() == [32] * 44 + [28] * 3 + [40] * 3 + [8] * 2
    # the first 7 rows came from a cache
    cached = products_of_rows(47, 47, (), [(12, 30), (28, 28)], product_rows=1, prefill_rows=5)
    assert cached.tolist() == [5] * 5 + [2] * 2 + [30] * 12 + [28] * 28
    # and it is told what made them: 4 of them a prefill of 60 rows, then 3 a verify of 24 nodes
    told = products_of_rows(47, 47, (), [(12, 30), (28, 28)], [(4, 60), (3, 24)], product_rows=1, prefill_rows=5)
    assert told.tolist() == [60] * 4 + [24] * 3 + [30] * 12 + [28] * 28


@pytest.mark.parametrize(("prefill_rows", "prefill"), [(None, [9]), (4, [1, 4, 4]), (3, [3, 3, 3]), (9, [9])])
def test_prompts_are_prefilled_in_the_servers_chunks(
    monkeypatch: pytest.MonkeyPatch, prefill_rows: int | None, prefill: list[int]
) -> None:
    """At every anchor at once and in a server's order: 9 prompt tokens, rounds of a drafted token, 2 rows each."""
    head = make_head("plain", execution=Execution(product_rows=1, prefill_rows=prefill_rows))
    (item,) = requests(head, [(9, 4)])
    seen = products_seen(monkeypatch)
    draft_every_anchor(head, [item], 1)
    # the 2 rows of the output that a draft reads, one at a time
    assert sorted(seen[: len(prefill) + 2]) == sorted([*prefill, 1, 1])
    seen.clear()
    replay_in_order(head, item, 1)
    assert seen[: len(prefill)] == prefill


def test_prompts_run_in_products_of_the_forward_they_were_prefilled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 prompt tokens: 3 of them in a forward of 4 rows, 4 in one of 4, 2 in one of 5."""
    head = make_head("plain", execution=Execution(product_rows=1, prefill_rows=4))
    (item,) = requests(head, [(9, 4)])
    item = replace(item, pieces=[(3, 4), (4, 4), (2, 5)])
    seen = products_seen(monkeypatch)
    draft_every_anchor(head, [item], 1)
    assert sorted(seen[:5]) == [1, 1, 4, 4, 5]
    seen.clear()
    replay_in_order(head, item, 1)
    assert seen[:3] == [4, 4, 5]


def test_rows_of_a_round_run_with_as_many_as_in_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of 3 requests x 2 rows: its rows are made, and its logits read, in products of 6."""
    head = make_head("plain", execution=Execution(product_rows=2))
    (item,) = requests(head, [(9, 4)])
    told = replace(item, spans=[(9, 1, 6)])
    (plain,), (same,) = draft_every_anchor(head, [item], 1), draft_every_anchor(head, [told], 1)
    assert torch.equal(plain.drafted_AK, same.drafted_AK)
    seen = products_seen(monkeypatch)
    draft_every_anchor(head, [told], 1)
    assert seen.count(6) == seen.count(9) + 1  # each matrix once, and lm_head, which a prefill reads one row from
    seen.clear()
    rounds = replay_in_order(head, told, 1)
    assert [one.anchor for one in rounds][:2] == [9, 10] and seen.count(6) == seen.count(9) + 1


def test_fewer_steps_are_a_prefix_of_more() -> None:
    head = make_head("plain", execution=FP32_ON_CPU)
    (item,) = requests(head, [(4, 12)])
    (long,), (short,) = draft_every_anchor(head, [item], 5), draft_every_anchor(head, [item], 2)
    assert torch.equal(long.drafted_AK[:, :2], short.drafted_AK)


def test_long_requests_run_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("two layers", execution=FP32_ON_CPU)
    (item,) = requests(head, [(5, 30)])
    (whole,) = draft_every_anchor(head, [item], 3)
    monkeypatch.setattr("replay.head.attention._BLOCK_SCORES", 4 * 33 * 2)
    (blocked,) = draft_every_anchor(head, [item], 3)
    assert torch.equal(whole.drafted_AK, blocked.drafted_AK)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("name", ["plain", "two layers", "every norm"])
def test_served_walk_equals_the_twin_round_for_round(name: str, steps: int) -> None:
    """Random heads accept next to nothing, so the tokens are made of what the head drafts, with errors strewn in."""
    head = make_head(name, execution=FP32_ON_CPU)
    (item,) = requests(head, [(3, 40)])
    tokens_T = item.tokens_T.clone()
    for anchor in range(3, 42, 7):
        drafted = draft_one_round(head, tokens_T, item.features_RKD, anchor, 6)
        for position, token in enumerate(drafted[: anchor % 5 + 1], start=anchor + 1):
            if position < len(tokens_T):
                tokens_T[position] = token
    tail = (1, 2)
    expected = replay_request(head, tokens_T, item.features_RKD, 3, steps, tail)
    (drafts,) = draft_every_anchor(head, [DraftInput(tokens_T, item.features_RKD, 3)], steps)
    anchors_A = torch.arange(3, len(tokens_T) - 1).numpy()
    chosen_AK = continuations(tokens_T.numpy(), torch.tensor(tail).numpy(), anchors_A, steps)
    walk = served_walk(count_accepted(drafts.drafted_AK.numpy(), chosen_AK), prompt_tokens=3, tokens=len(tokens_T))
    assert [(played.anchor, played.accepted) for played in walk] == [(r.anchor, r.accepted) for r in expected]
    ordered = replay_in_order(head, DraftInput(tokens_T, item.features_RKD, 3), steps, torch.tensor(tail))
    assert ordered == expected
    assert max(played.accepted for played in walk) >= min(steps, 2)
