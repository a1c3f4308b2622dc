"""How far the replay is from a server's trees: all anchors at once equal one at a time, and agreement is 0."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from support.heads import target_tables, tiny_checkpoint
from support.random_heads import FP64, HEADS, make_head, requests
from twins.tree_margins import TwinTreeMargins, numbers, tree_margins_at

from replay.checkpoint.checkpoint import Checkpoint, check_checkpoint
from replay.drafting.first_pass import first_pass
from replay.drafting.next_tokens import propose
from replay.drafting.rows import DraftInput
from replay.drafting.tree_margins import ServedTrees, TreeMargins, tree_margins_along
from replay.drafting.tree_shape import ORPHAN, ROOT, TreeSize
from replay.drafting.trees import draft_every_tree
from replay.engines.behaviour import Behaviour
from replay.errors import UsageError
from replay.head.model import Head, TargetTables
from replay.head.products import Execution

REQUESTS = [(3, 9), (1, 4), (6, 1), (2, 2)]
# topk, steps, num_draft_tokens; of the last no candidate is left out
SHAPES = [(1, 3, 4), (2, 1, 2), (2, 3, 5), (3, 2, 10), (3, 4, 8), (4, 3, 8), (5, 5, 32), (3, 3, 22)]
SCALES = (0.05, 0.5, 3.0)


def disturbed(name: str, noise: float, seed: int = 1) -> Head:
    """The head of this name, every weight moved by some of its tensor's spread."""
    checkpoint, generator = tiny_checkpoint(**HEADS[name]), torch.Generator().manual_seed(seed)
    tensors = {
        key: value if key == "d2t" else value + noise * value.std() * torch.randn(value.shape, generator=generator)
        for key, value in checkpoint.tensors.items()
    }
    return of_checkpoint(check_checkpoint("tiny", checkpoint.config, tensors))


def of_checkpoint(checkpoint: Checkpoint) -> Head:
    return Head(checkpoint, TargetTables(*target_tables(checkpoint)), execution=FP64)


def draft(head: Head, inputs: Sequence[DraftInput], shape: tuple[int, int, int], kv: str) -> list[ServedTrees]:
    """What a server with this head drafts."""
    topk, steps, num_draft_tokens = shape
    (trees,) = draft_every_tree(head, inputs, topk=topk, sizes=[TreeSize(steps, num_draft_tokens)], kv=kv)
    return [ServedTrees(one.drafted_AN, one.parents_AN) for one in trees]


def along(
    head: Head, inputs: Sequence[DraftInput], served: Sequence[ServedTrees], shape: tuple[int, int, int], kv: str
) -> list[TreeMargins]:
    return tree_margins_along(head, inputs, served, topk=shape[0], steps=shape[1], kv=kv, scales=SCALES)


def one_by_one(
    head: Head, inputs: Sequence[DraftInput], served: Sequence[ServedTrees], shape: tuple[int, int, int], kv: str
) -> list[list[TwinTreeMargins]]:
    return [
        [
            tree_margins_at(
                head, item, anchor, tokens, parents, topk=shape[0], steps=shape[1], kv=kv, scales=SCALES
            )
            for anchor, tokens, parents in zip(
                item.anchors_A.tolist(), trees.drafted_AN.tolist(), trees.parents_AN.tolist(), strict=True
            )
        ]
        for item, trees in zip(inputs, served, strict=True)
    ]  # fmt: skip


def assert_equal(found: Sequence[TreeMargins], expected: Sequence[Sequence[TwinTreeMargins]]) -> None:
    for margins, twins in zip(found, expected, strict=True):
        got = torch.cat([margins.margin_AN[..., None], margins.score_AN[..., None], margins.spread_ANZ], -1).double()
        for row, twin in zip(got, twins, strict=True):
            # Norms run in fp32 whatever the head's dtype, and a spread divides by its scale.
            torch.testing.assert_close(row, numbers(twin), rtol=1e-4, atol=1e-4, equal_nan=True)
        assert margins.depth_AN.tolist() == [[node.depth for node in twin.nodes] for twin in twins]
        assert margins.alike_A.tolist() == [twin.alike for twin in twins]


@pytest.mark.parametrize("kv", ["slot", "path"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_along_the_replays_own_trees_every_margin_is_0(
    dtype: torch.dtype, shape: tuple[int, int, int], kv: str
) -> None:
    head = make_head("two layers", execution=Execution(dtype, product_rows=4))
    inputs = requests(head, REQUESTS)
    for margins in along(head, inputs, draft(head, inputs, shape, kv), shape, kv):
        assert margins.alike_A.all()
        assert torch.equal(margins.margin_AN, torch.zeros(margins.margin_AN.shape))
        assert (margins.spread_ANZ >= 0).all() and (margins.score_AN <= 0).all() and (margins.depth_AN >= 1).all()


@pytest.mark.parametrize("kv", ["slot", "path"])
@pytest.mark.parametrize(("noise", "least_alike"), [(0.02, 40), (0.1, 10), (0.3, 0)])
def test_all_anchors_at_once_equal_one_by_one(noise: float, least_alike: int, kv: str) -> None:
    """Along trees of another head: of a little other weights, and of quite other ones."""
    head, server = make_head("plain"), disturbed("plain", noise)
    inputs = requests(head, REQUESTS)
    forced: Counter[tuple[str, int]] = Counter()
    alike = 0
    for shape in SHAPES:
        served = draft(server, inputs, shape, kv)
        expected = one_by_one(head, inputs, served, shape, kv)
        assert_equal(along(head, inputs, served, shape, kv), expected)
        twins = [twin for of_request in expected for twin in of_request]
        forced.update(place for twin in twins for place in twin.forced)
        alike += sum(twin.alike for twin in twins)
    assert {("proposed", 1), ("proposed", 2), ("proposed", 3), ("continued", 2), ("continued", 3)} <= forced.keys()
    assert least_alike <= alike < 8 * 12 - 30  # of 12 anchors in each shape


@pytest.mark.parametrize("name", ["three layers", "every norm", "whole vocabulary", "no grouping"])
def test_other_heads_equal_the_twin(name: str) -> None:
    head, inputs, shape = make_head(name), requests(make_head(name), [(3, 5)]), (4, 4, 12)
    served = draft(disturbed(name, 0.05), inputs, shape, "slot")
    assert_equal(along(head, inputs, served, shape, "slot"), one_by_one(head, inputs, served, shape, "slot"))


def test_a_node_that_was_not_best_costs_what_the_best_had_more() -> None:
    """One step, one node kept of three: at noise 1 the softmax of log-probabilities is the probabilities' shares."""
    head = make_head("plain")
    (item,) = requests(head, [(3, 9)])
    probs_AP, tokens_AP, _ = propose(head, first_pass(head, [item]).output.normed_RE, 3)
    served = ServedTrees(tokens_AP[:, 1:2], torch.full_like(tokens_AP[:, 1:2], ROOT))
    (found,) = tree_margins_along(head, [item], [served], topk=3, steps=1, kv="slot", scales=[1.0])
    torch.testing.assert_close(found.margin_AN[:, 0], (probs_AP[:, 0] / probs_AP[:, 1]).log())
    torch.testing.assert_close(
        (-found.margin_AN - found.spread_ANZ[..., 0]).exp()[:, 0], probs_AP[:, 1] / probs_AP.sum(-1)
    )
    torch.testing.assert_close(found.score_AN[:, 0].exp(), probs_AP[:, 1])
    assert not found.alike_A.any()


def edited(trees: ServedTrees, head: Head) -> ServedTrees:
    """With a token in each tree that the head cannot draft: at the root and, where that has any, with children."""
    outside = min(set(range(head.config.vocab_size)) - set(head.target_ids_W.tolist()))
    drafted_AN = trees.drafted_AN.clone()
    drafted_AN[:, 0] = outside
    return ServedTrees(drafted_AN, trees.parents_AN)


@pytest.mark.parametrize("kv", ["slot", "path"])
def test_a_token_that_the_head_cannot_draft_is_infinitely_far(kv: str) -> None:
    head, shape = make_head("plain"), (3, 4, 10)
    inputs = requests(head, REQUESTS)
    served = [edited(trees, head) for trees in draft(disturbed("plain", 0.05), inputs, shape, kv)]
    found = along(head, inputs, served, shape, kv)
    assert_equal(found, one_by_one(head, inputs, served, shape, kv))
    for margins, trees in zip(found, served, strict=True):
        below_AN = trees.parents_AN == 0
        below_AN[:, 0] = True
        assert (margins.margin_AN[below_AN] == torch.inf).all() and (margins.score_AN[below_AN] == -torch.inf).all()
        assert not margins.alike_A.any()
    assert sum(int((trees.parents_AN == 0).sum()) for trees in served) > 10


def test_where_no_path_leads_there_is_no_margin() -> None:
    """An orphan, a node below it, and padding; the others keep theirs."""
    head, shape = make_head("plain"), (3, 3, 11)
    inputs = requests(head, REQUESTS)
    served = draft(head, inputs, shape, "slot")
    for trees in served:
        trees.parents_AN[:, 3] = ORPHAN  # of the second step at least: it has no grandchildren
        trees.drafted_AN[:, 9], trees.parents_AN[:, 9] = -1, 99  # of nothing the parent is not read
    found = along(head, inputs, served, shape, "slot")
    assert_equal(found, one_by_one(head, inputs, served, shape, "slot"))
    below = 0
    for margins, trees in zip(found, served, strict=True):
        gone_AN = (trees.parents_AN == 3) | torch.isin(torch.arange(10), torch.tensor([3, 9]))
        below += int((trees.parents_AN == 3).sum())
        for numbers_AN in (margins.margin_AN, margins.score_AN, margins.spread_ANZ[..., 0]):
            assert torch.equal(numbers_AN.isnan(), gone_AN)
        assert torch.equal(margins.depth_AN == 0, gone_AN)
        assert not margins.alike_A.any()
    assert below > 0


def with_shared_tokens() -> Head:
    """Two draft ids stand for each target id, as under a wrong map."""
    checkpoint = tiny_checkpoint()
    own_W = torch.arange(checkpoint.config.draft_vocab_size)
    return of_checkpoint(
        check_checkpoint("tiny", checkpoint.config, dict(checkpoint.tensors) | {"d2t": own_W // 2 - own_W})
    )


@pytest.mark.parametrize("kv", ["slot", "path"])
def test_siblings_with_one_token_are_each_a_draft_id_of_its_own(kv: str) -> None:
    head, shape = with_shared_tokens(), (5, 4, 24)
    inputs = requests(head, REQUESTS)
    served = draft(head, inputs, shape, kv)
    twice = [
        len(set(pairs)) < len(pairs)
        for trees in served
        for row in zip(trees.drafted_AN.tolist(), trees.parents_AN.tolist(), strict=True)
        for pairs in [list(zip(*row, strict=True))]
    ]
    assert 3 < sum(twice) < len(twice)
    for margins in along(head, inputs, served, shape, kv):
        assert margins.alike_A.all() and (margins.margin_AN == 0).all()
    only_one = along(make_head("whole vocabulary"), inputs, served, shape, kv)
    assert [bool(row.isinf().any()) for margins in only_one for row in margins.margin_AN] == twice


def test_blocks_and_a_first_pass_made_before_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head, shape = make_head("two layers"), (3, 3, 8)
    inputs = requests(head, REQUESTS)
    served = draft(disturbed("two layers", 0.1), inputs, shape, "slot")
    whole = along(head, inputs, served, shape, "slot")
    monkeypatch.setattr("replay.drafting.trees._BLOCK_ROWS", 3 * 5 + 1)
    monkeypatch.setattr("replay.drafting.next_tokens._BLOCK_LOGITS", 40 * 7)
    monkeypatch.setattr("replay.drafting.next_tokens._ROWS_AT_LEAST", 1)
    monkeypatch.setattr("replay.drafting.tree_margins._BLOCK_RIVALS", 7 * 21 * 2)
    blocked = tree_margins_along(
        head, inputs, served, topk=3, steps=3, kv="slot", scales=SCALES, first=first_pass(head, inputs)
    )
    for one, other in zip(whole, blocked, strict=True):
        torch.testing.assert_close(one.margin_AN, other.margin_AN, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.spread_ANZ, other.spread_ANZ, rtol=1e-4, atol=1e-4)
        assert torch.equal(one.depth_AN, other.depth_AN) and torch.equal(one.alike_A, other.alike_A)


def test_requests_without_an_anchor_have_no_margins() -> None:
    head = make_head("plain")
    none_AN = torch.empty(0, 3, dtype=torch.long)
    inputs = requests(head, [(6, 1), (4, 1)])
    for margins in along(head, inputs, [ServedTrees(none_AN, none_AN)] * 2, (2, 2, 4), "slot"):
        assert margins.margin_AN.shape == margins.depth_AN.shape == (0, 3)
        assert margins.spread_ANZ.shape == (0, 3, 3) and margins.alike_A.shape == (0,)
        assert margins.depth_AN.dtype == torch.long and margins.alike_A.dtype == torch.bool


def tree_of(item: DraftInput, parents: list[int], tokens: list[int] | None = None) -> ServedTrees:
    """One tree at all anchors; every node another token."""
    drafted_N = torch.tensor(tokens or list(range(len(parents))))
    return ServedTrees(*(row_N.repeat(item.anchors, 1) for row_N in (drafted_N, torch.tensor(parents))))


def test_what_cannot_be_followed_is_refused() -> None:
    head = make_head("plain")
    (item,) = requests(head, [(3, 9)])
    good = tree_of(item, [ROOT, 0, 1])

    def ask(served: Sequence[ServedTrees], scales: Sequence[float] = SCALES, head: Head = head) -> list[TreeMargins]:
        return tree_margins_along(head, [item], served, topk=2, steps=3, kv="slot", scales=scales)

    assert len(ask([good])) == 1
    fewer = ServedTrees(good.drafted_AN, good.parents_AN[:, :2])
    flat = ServedTrees(good.drafted_AN[0], good.parents_AN[0])
    short = ServedTrees(good.drafted_AN[1:], good.parents_AN[1:])
    none = ServedTrees(good.drafted_AN[:, :0], good.parents_AN[:, :0])
    for served in ([], [good, good], [fewer], [flat], [short], [none]):
        with pytest.raises(UsageError, match=r"drafted trees came as .*, the requests have 8 anchors; give tokens and"):
            ask(served)
    for tree, said in {
        (ROOT, ROOT, ROOT): "up to 3 tokens after one node, with topk 2 there are at most 2",
        (ROOT, 0, 1, 2): "up to 4 tokens on one path, with steps 3 there are at most 3",
        (ROOT, ROOT, 0, 0, 1, 2, 3, 4): "up to 3 continued nodes in one step, with topk 2 there are at most 2",
        (ROOT,) * 11: "11 drafted tokens, this topk and steps have 10 candidates",
        (ROOT, 1): "node 1 of a tree has the parent 1, possible are the nodes before it",
        (ROOT, -3): "node 1 of a tree has the parent -3, possible are the nodes before it",
    }.items():
        with pytest.raises(UsageError, match=said):
            ask([tree_of(item, list(tree))])
    with pytest.raises(UsageError, match="the server drafted token 96, the vocabulary of draft head tiny has 96"):
        ask([tree_of(item, [ROOT, 0], [5, 96])])
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=f"a noise scale of {scale} nats was given"):
            ask([good], [1.0, scale])
    for behaviour in (Behaviour(rewrite="stale"), Behaviour(window=3)):
        with pytest.raises(UsageError, match="ask for them without faults of drafted rows"):
            ask([good], head=make_head("plain", behaviour=behaviour))
