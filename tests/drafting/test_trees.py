"""Trees equal their slow twin's, a chain is a tree of one column, and verify equals a walk over all paths."""

from itertools import product

import numpy as np
import pytest
import torch
from support.random_heads import make_head, requests
from twins.trees import TwinNode, accept_in_tree, draft_one_tree, replay_request_with_trees

from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.rows import DraftInput
from replay.drafting.tree_shape import ORPHAN, ROOT, TreeSize
from replay.drafting.trees import Candidates, Trees, draft_every_tree, grow_in_blocks, keep_best
from replay.head.model import Head
from replay.verify.accept import continuations, count_accepted, count_accepted_in_tree, served_walk

SHAPES = [(2, 1, 3), (2, 3, 5), (3, 2, 13), (3, 4, 8), (4, 3, 8), (5, 5, 32)]  # topk, steps, num_draft_tokens


def grow_trees(
    head: Head, inputs: list[DraftInput], *, topk: int, steps: int, num_draft_tokens: int, kv: str
) -> list[Trees]:
    (trees,) = draft_every_tree(head, inputs, topk=topk, sizes=[TreeSize(steps, num_draft_tokens)], kv=kv)
    return trees


def nodes(trees: Trees) -> list[list[TwinNode]]:
    pairs = zip(trees.drafted_AN.tolist(), trees.parents_AN.tolist(), strict=True)
    return [[TwinNode(*node) for node in zip(*tree, strict=True)] for tree in pairs]


@pytest.mark.parametrize("kv", ["slot", "path"])
@pytest.mark.parametrize(("topk", "steps", "num_draft_tokens"), SHAPES)
def test_every_tree_equals_the_twin(topk: int, steps: int, num_draft_tokens: int, kv: str) -> None:
    head = make_head("plain")
    inputs = requests(head, [(3, 9), (1, 3), (6, 1), (2, 2)])
    shape = {"topk": topk, "steps": steps, "num_draft_tokens": num_draft_tokens, "kv": kv}
    for item, trees in zip(inputs, grow_trees(head, inputs, **shape), strict=True):
        anchors = range(item.prompt_tokens, len(item.tokens_T) - 1)
        expected = [draft_one_tree(head, item.tokens_T, item.features_RKD, anchor, **shape) for anchor in anchors]
        assert nodes(trees) == expected


@pytest.mark.parametrize("kv", ["slot", "path"])
@pytest.mark.parametrize(
    "name", ["two layers", "three layers", "every norm", "whole vocabulary", "no grouping", "latent"]
)
def test_trees_of_other_heads_equal_the_twin(name: str, kv: str) -> None:
    head = make_head(name)
    (item,) = requests(head, [(3, 6)])
    shape = {"topk": 3, "steps": 4, "num_draft_tokens": 10, "kv": kv}
    (trees,) = grow_trees(head, [item], **shape)
    anchors = range(3, len(item.tokens_T) - 1)
    assert nodes(trees) == [
        draft_one_tree(head, item.tokens_T, item.features_RKD, anchor, **shape) for anchor in anchors
    ]


@pytest.mark.parametrize("kv", ["slot", "path"])
def test_blocks_of_anchors_and_of_logits_change_no_tree(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("two layers")
    inputs = requests(head, [(3, 9), (1, 14), (6, 2)])
    shape = {"topk": 3, "steps": 3, "num_draft_tokens": 8, "kv": kv}
    whole = grow_trees(head, inputs, **shape)
    monkeypatch.setattr("replay.drafting.trees._BLOCK_ROWS", 3 * 5 + 1)
    monkeypatch.setattr("replay.drafting.next_tokens._BLOCK_LOGITS", 40 * 7)
    monkeypatch.setattr("replay.drafting.next_tokens._ROWS_AT_LEAST", 1)
    for trees, blocked in zip(whole, grow_trees(head, inputs, **shape), strict=True):
        assert nodes(trees) == nodes(blocked)


@pytest.mark.parametrize("kv", ["slot", "path"])
def test_one_column_is_the_chain(kv: str) -> None:
    head = make_head("plain")
    inputs = requests(head, [(3, 9), (1, 4)])
    trees = grow_trees(head, inputs, topk=1, steps=4, num_draft_tokens=5, kv=kv)
    for tree, chain in zip(trees, draft_every_anchor(head, inputs, 4), strict=True):
        assert torch.equal(tree.drafted_AN, chain.drafted_AK)
        assert tree.parents_AN.tolist() == [[ROOT, 0, 1, 2]] * len(tree.drafted_AN)


def test_fewer_steps_and_tokens_are_cut_from_more() -> None:
    head = make_head("plain")
    (item,) = requests(head, [(4, 12)])
    (grown,) = grow_in_blocks(head, [item], topk=3, steps=5, kv="slot")
    sizes = [TreeSize(*size) for size in product((1, 2, 4, 5), (2, 4))]
    together = draft_every_tree(head, [item], topk=3, sizes=sizes, kv="slot")
    for size, (trees,) in zip(sizes, together, strict=True):
        ((alone,),) = draft_every_tree(head, [item], topk=3, sizes=[size], kv="slot")
        assert nodes(trees) == nodes(keep_best(grown, size)) == nodes(alone)


def crossed(grown: Candidates, steps: int) -> torch.Tensor:
    """Anchors [A] at which some column's node came from another column, before the last forward."""
    topk = grown.topk
    any_A = torch.zeros(len(grown.tokens_AC), dtype=torch.bool)
    for step in range(2, steps):
        parent_AP = grown.parents_AG[:, 1 + (step - 1) * topk : 1 + step * topk]
        column_AP = (parent_AP - topk - (step - 2) * topk * topk) // topk
        any_A |= (column_AP != torch.arange(topk)).any(dim=1)
    return any_A


def test_slot_equals_path_exactly_where_columns_do_not_cross() -> None:
    head = make_head("plain")
    (item,) = requests(head, [(2, 120)])
    (slot,), (path,) = (grow_in_blocks(head, [item], topk=2, steps=3, kv=kv) for kv in ("slot", "path"))
    same_A = torch.isclose(slot.scores_AC, path.scores_AC, rtol=1e-6, atol=0).all(dim=1)
    crossed_A = crossed(slot, 3)
    assert torch.equal(same_A, ~crossed_A)
    assert 10 < int(crossed_A.sum()) < 110


def test_two_steps_have_no_stranger_to_see() -> None:
    head = make_head("plain")
    (item,) = requests(head, [(2, 30)])
    slot, path = (grow_trees(head, [item], topk=4, steps=2, num_draft_tokens=21, kv=kv)[0] for kv in ("slot", "path"))
    assert nodes(slot) == nodes(path)


def planted(item: DraftInput, drafted_AK: torch.Tensor) -> DraftInput:
    """The request with some of its output made of what a head drafts there, so that something is accepted."""
    tokens_T = item.tokens_T.clone()
    for anchor in range(item.prompt_tokens, len(tokens_T) - 5, 4):
        count = anchor % 4 + 1
        tokens_T[anchor + 1 : anchor + 1 + count] = drafted_AK[anchor - item.prompt_tokens, :count]
    return DraftInput(tokens_T, item.features_RKD, item.prompt_tokens)


def test_a_path_tree_that_holds_the_chain_accepts_no_less_at_any_anchor() -> None:
    head = make_head("plain")
    (item,) = requests(head, [(3, 80)])
    (first,) = draft_every_anchor(head, [item], 4)
    item = planted(item, first.drafted_AK)
    (chain,) = draft_every_anchor(head, [item], 4)
    (tree,) = grow_trees(head, [item], topk=3, steps=4, num_draft_tokens=31, kv="path")
    anchors_A = np.arange(3, len(item.tokens_T) - 1)
    chosen_AK = continuations(item.tokens_T.numpy(), np.empty(0, np.int64), anchors_A, 4)
    in_chain_A = count_accepted(chain.drafted_AK.numpy(), chosen_AK)
    in_tree_A = count_accepted_in_tree(tree.drafted_AN.numpy(), tree.parents_AN.numpy(), chosen_AK)
    held_A = count_accepted_in_tree(tree.drafted_AN.numpy(), tree.parents_AN.numpy(), chain.drafted_AK.numpy())
    assert (in_tree_A >= np.minimum(in_chain_A, held_A)).all()
    whole_A = held_A == 4
    assert whole_A.sum() > 10
    assert (in_tree_A[whole_A] >= in_chain_A[whole_A]).all()
    assert in_tree_A.sum() > in_chain_A.sum() > 0


@pytest.mark.parametrize("kv", ["slot", "path"])
def test_served_walk_equals_the_twin_round_for_round(kv: str) -> None:
    head = make_head("plain")
    (item,) = requests(head, [(3, 40)])
    (first,) = draft_every_anchor(head, [item], 4)
    item = planted(item, first.drafted_AK)
    shape = {"topk": 3, "steps": 3, "num_draft_tokens": 8, "kv": kv}
    tail = (1, 2)
    expected = replay_request_with_trees(head, item.tokens_T, item.features_RKD, 3, **shape, tail=tail)
    (trees,) = grow_trees(head, [item], **shape)
    anchors_A = np.arange(3, len(item.tokens_T) - 1)
    chosen_AK = continuations(item.tokens_T.numpy(), np.array(tail), anchors_A, 3)
    accepted_A = count_accepted_in_tree(trees.drafted_AN.numpy(), trees.parents_AN.numpy(), chosen_AK)
    walk = served_walk(accepted_A, prompt_tokens=3, tokens=len(item.tokens_T))
    assert [(played.anchor, played.accepted) for played in walk] == [(r.anchor, r.accepted) for r in expected]
    assert [tuple(trees.drafted_AN[played.anchor - 3].tolist()) for played in walk] == [r.drafted for r in expected]
    assert sum(played.accepted for played in walk) > 3


def longest_path(tree: list[TwinNode], chosen: list[int]) -> int:
    """Brute force: spell out the tokens of every path from the root, take the longest that the target chose."""
    paths = []
    for leaf in range(len(tree)):
        path, node = [], leaf
        while node >= 0:
            path.insert(0, tree[node].token)
            node = tree[node].parent
        if node == ROOT:
            paths.append(path)
    return max((len(path) for path in paths if path == chosen[: len(path)]), default=0)


def test_verify_equals_all_paths_spelled_out() -> None:
    generator = np.random.default_rng(3)
    trees, chosen = [], generator.integers(0, 3, (400, 4))
    for _ in chosen:
        tree: list[TwinNode] = []
        while len(tree) < 9:
            node = TwinNode(int(generator.integers(0, 3)), int(generator.integers(ORPHAN, len(tree))))
            if node not in tree:  # siblings differ in their tokens
                tree.append(node)
        trees.append(tree)
    drafted_AN = np.array([[node.token for node in tree] for tree in trees])
    parents_AN = np.array([[node.parent for node in tree] for tree in trees])
    expected = [longest_path(tree, row) for tree, row in zip(trees, chosen.tolist(), strict=True)]
    assert count_accepted_in_tree(drafted_AN, parents_AN, chosen).tolist() == expected
    assert [accept_in_tree(tree, row) for tree, row in zip(trees, chosen.tolist(), strict=True)] == expected
    assert set(expected) == {0, 1, 2, 3, 4}


def test_a_node_without_its_parent_is_no_part_of_the_tree() -> None:
    """Two steps of topk 2; candidate 2 follows candidate 0 with probability 1, and the cut keeps it alone."""
    scores_AC = torch.tensor([[0.25, 0.5, 0.75, 0.1, 0.1, 0.1]])
    tokens_AC = torch.tensor([[10, 11, 12, 13, 14, 15]])
    grown = Candidates(2, tokens_AC, scores_AC, torch.tensor([[ROOT, 0, 1]]), torch.zeros(1, 6, dtype=torch.bool))
    tree = keep_best(grown, TreeSize(2, 3))
    assert nodes(tree) == [[TwinNode(11, ROOT), TwinNode(12, ORPHAN)]]
    chosen_AK = np.array([[12, 11]])
    assert count_accepted_in_tree(tree.drafted_AN.numpy(), tree.parents_AN.numpy(), chosen_AK).tolist() == [0]


def test_ties_are_candidates_left_out_that_were_as_good() -> None:
    scores_AC = torch.tensor([[0.5, 0.25, 0.25, 0.2, 0.1, 0.1]])
    tied_AC = torch.tensor([[True, False, False, False, False, False]])
    grown = Candidates(2, torch.arange(6)[None], scores_AC, torch.tensor([[ROOT, 0, 1]]), tied_AC)
    assert keep_best(grown, TreeSize(2, 3)).tied_AN.tolist() == [[True, True]]
    assert keep_best(grown, TreeSize(2, 4)).tied_AN.tolist() == [[True, False, False]]
