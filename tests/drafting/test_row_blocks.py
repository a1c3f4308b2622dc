"""A long request goes in blocks of rows: equal to all rows at once, and nothing but keys and values is held of all."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.dflash_heads import dflash_checkpoint
from support.heads import target_tables
from support.random_heads import FP64, HEADS, make_head, requests
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twins.rounds import draft_one_round

from replay.drafting.chains import chain_steps
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.features import JoinedTaps
from replay.drafting.first_pass import FirstPass, first_pass
from replay.drafting.row_blocks import BLOCK_ROWS, overlaps, row_blocks
from replay.drafting.rows import DraftInput
from replay.drafting.trees import TreeSize, draft_every_tree
from replay.head.attention import KeyValues, Sight, attend_committed_and_chain
from replay.head.model import Head, TargetTables
from replay.head.products import FP32_ON_CPU, WHOLE_PROMPTS, Execution

SHAPES = [(19, 9), (1, 4), (26, 3), (2, 14)]
STEPS = 3


def in_blocks(monkeypatch: pytest.MonkeyPatch, rows: int = 8) -> None:
    """From here on; what went before had all rows at once."""
    monkeypatch.setattr("replay.drafting.row_blocks.BLOCK_ROWS", rows)


def tensors(first: FirstPass, layers: int) -> list[Tensor]:
    """All that a first pass leaves behind."""
    kv = [part for layer in range(layers) for pair in first.attention.committed_kv(layer) for part in pair]
    return [first.output.normed_RE, first.output.feedback_RE, first.anchor_rows_A, *kv]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Up to the last digits of fp32, in which norms and softmax are: products over fewer rows sum in another order."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        assert (mine - other).abs().max() <= 5e-6 * other.abs().max()


def test_blocks_cover_all_rows_and_none_is_tiny() -> None:
    for rows in (1, BLOCK_ROWS, *range(BLOCK_ROWS + 1, 5 * BLOCK_ROWS, 61), 50 * BLOCK_ROWS + 1):
        blocks = row_blocks(rows)
        assert [row for block in blocks for row in block] == list(range(rows))
        sizes = [len(block) for block in blocks]
        assert max(sizes) <= BLOCK_ROWS and (rows <= BLOCK_ROWS) == (len(sizes) == 1)
        assert len(sizes) == 1 or min(sizes) >= BLOCK_ROWS // 2 - 128
        assert len(set(sizes[:-2])) <= 1


def test_overlaps_are_those_of_one_row_after_the_other() -> None:
    counts = [3, 0, 5, 1, 4]
    every = [(part, row) for part, count in enumerate(counts) for row in range(count)]
    for start in range(len(every)):
        for stop in range(start + 1, len(every) + 1):
            found = [(part, row) for part, rows in overlaps(counts, range(start, stop)) for row in rows]
            assert found == every[start:stop]


@pytest.mark.parametrize("name", HEADS)
def test_blocks_equal_all_rows_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(name)
    inputs = requests(head, SHAPES)
    layers, sizes = head.config.num_layers, [TreeSize(STEPS, 5)]
    whole, drafts = first_pass(head, inputs), draft_every_anchor(head, inputs, STEPS)
    trees = None if name == "P-EAGLE" else draft_every_tree(head, inputs, topk=2, sizes=sizes, kv="slot")
    in_blocks(monkeypatch)
    assert_close(tensors(first_pass(head, inputs), layers), tensors(whole, layers))
    for mine, other in zip(draft_every_anchor(head, inputs, STEPS), drafts, strict=True):
        assert torch.equal(mine.drafted_AK, other.drafted_AK) and torch.equal(mine.tied_AK, other.tied_AK)
    if trees is not None:
        for mine, other in zip(
            *draft_every_tree(head, inputs, topk=2, sizes=sizes, kv="slot"), *trees, strict=True
        ):  # fmt: skip
            assert torch.equal(mine.drafted_AN, other.drafted_AN)


@pytest.mark.parametrize("name", ["plain", "two layers", "latent"])
def test_blocks_equal_the_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin runs each anchor by itself, without a cache."""
    in_blocks(monkeypatch, 5)
    head = make_head(name, execution=FP32_ON_CPU)
    for item, drafts in zip(
        inputs := requests(head, [(12, 3), (2, 7)]), draft_every_anchor(head, inputs, 3), strict=True
    ):
        anchors = item.anchors_A.tolist()
        expected = [draft_one_round(head, item.tokens_T, item.features_RKD, anchor, 3) for anchor in anchors]
        assert drafts.drafted_AK.tolist() == expected


def test_the_first_row_of_a_whole_prompt_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("latent", execution=replace(FP64, prefill_rows=WHOLE_PROMPTS))
    absorbed = make_head("latent")
    # Of the first request some other rows are asked for, and not the first behind the prompt.
    inputs = requests(head, SHAPES)
    inputs[0] = replace(inputs[0], only=torch.tensor([22, 25]))
    whole = first_pass(head, inputs)
    in_blocks(monkeypatch)
    assert_close(tensors(first_pass(head, inputs), 1), tensors(whole, 1))
    assert not torch.equal(whole.output.normed_RE, first_pass(absorbed, inputs).output.normed_RE)


def test_a_context_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head that drafts blocks of its own: no row of a context sees another."""
    checkpoint = dflash_checkpoint()
    head = Head(checkpoint, TargetTables(*target_tables(checkpoint)), execution=FP64)
    inputs = requests(head, SHAPES)

    def states() -> list[Tensor]:
        steps = chain_steps(head, first_pass(head, inputs), 3, lambda _: torch.zeros(1))
        return [step.normed_AE for step in steps]

    whole = states()
    in_blocks(monkeypatch)
    assert_close(states(), whole)


@pytest.mark.parametrize("name", ["plain", "two layers", "latent"])
def test_a_request_that_fits_keeps_every_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the head's forward over all rows, each of which sees those before it."""
    head = make_head(name, execution=Execution(torch.bfloat16))
    (item,) = requests(head, SHAPES[:1])
    in_blocks(monkeypatch, item.rows)
    found = first_pass(head, [item])
    made: list[Tensor] = []

    def attend(layer: int, q_RNH: Tensor, k_RMH: Tensor, v_RMH: Tensor) -> Tensor:
        """The last layer is asked for the anchors' rows alone."""
        made.extend((k_RMH, v_RMH))
        reach_A = torch.arange(1, item.rows + 1) if len(q_RNH) == item.rows else item.anchors_A
        drafted = KeyValues(*(part.new_empty((0, len(q_RNH), *part.shape[1:])) for part in (k_RMH, v_RMH)))
        sight = Sight(None, None, reach_A - 1)
        return attend_committed_and_chain(q_RNH, KeyValues(k_RMH, v_RMH), reach_A, drafted, head.numerics, sight)

    rows_R, anchors_A, layers = torch.arange(item.rows), item.anchors_A - 1, head.config.num_layers
    state_RE = head.fuse(item.features_RKD[: item.rows])
    whole = head.forward(head.embed(item.tokens_T[1 : item.rows + 1]), state_RE, rows_R, attend, anchors_A)
    expected = [whole.normed_RE, whole.feedback_RE, anchors_A, *made]
    assert len(made) == 2 * layers and len(whole.normed_RE) == item.anchors
    assert all(map(torch.equal, tensors(found, layers), expected))


def test_products_as_large_as_a_servers_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("two layers", execution=Execution(torch.bfloat16, product_rows=4))
    inputs = requests(head, SHAPES)
    whole, drafts = tensors(first_pass(head, inputs), 2), draft_every_anchor(head, inputs, STEPS)
    in_blocks(monkeypatch)
    assert all(map(torch.equal, tensors(first_pass(head, inputs), 2), whole))
    for mine, other in zip(draft_every_anchor(head, inputs, STEPS), drafts, strict=True):
        assert torch.equal(mine.drafted_AK, other.drafted_AK)


def test_taps_are_joined_as_rows_are_asked_for() -> None:
    head = make_head("plain", execution=FP32_ON_CPU)
    (item,) = requests(head, [(5, 9)])
    joined = JoinedTaps(item.features_RKD.split(32, dim=-1))
    assert joined.width == 96 and torch.equal(joined[2:7], item.features_RKD[2:7])
    lazy = DraftInput(item.tokens_T, joined, item.prompt_tokens)
    (mine,), (other,) = (draft_every_anchor(head, [one], STEPS) for one in (lazy, item))
    assert torch.equal(mine.drafted_AK, other.drafted_AK)


class Largest(TorchDispatchMode):
    """Of the tensors that operations make, the most elements of one."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize("name", ["two layers", "three layers"])
def test_nothing_but_keys_and_values_grows_with_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of a block of queries do too, up to a bound of their own (head/attention.py)."""
    head = make_head(name, execution=FP32_ON_CPU)
    prompt, block, config = 300, 8, head.config
    (item,) = requests(head, [(prompt, 4)])
    (joined,) = (JoinedTaps(item.features_RKD.split(32, dim=-1)),)
    item = replace(item, features_RKD=joined)

    def largest() -> int:
        with Largest() as seen:
            draft_every_anchor(head, [item], STEPS)
        return seen.most

    whole = largest()
    in_blocks(monkeypatch, block)
    kept = item.rows * config.num_kv_heads * config.head_dim
    scores = block * config.num_heads * item.rows
    assert whole >= item.rows * config.features_width > max(kept, scores) >= largest()
