"""Which candidates become a tree, held against the functions of the installed SGLang on the same probabilities.

``select_top_k_tokens`` and ``organize_draft_results`` are SGLang's own; the probabilities are those that
``draft_every_tree`` took from a random head: what is compared is the growing, its ties and the cut, not the head.
"""

import pytest
import torch
from rig.inprocess import sglang_module
from support.heads import target_tables, tiny_checkpoint
from support.random_heads import requests
from torch import Tensor

from replay.drafting import trees
from replay.drafting.tree_shape import ORPHAN, ROOT, TreeSize
from replay.drafting.trees import draft_every_tree
from replay.head.model import Head, TargetTables
from replay.head.products import Execution

Proposal = tuple[Tensor, Tensor, Tensor]


def make_head(sharpness: float) -> Head:
    """A bf16 head; a sharp one is certain of some tokens and gives others no probability at all."""
    checkpoint = tiny_checkpoint()
    checkpoint.tensors["lm_head.weight"].mul_(sharpness)
    return Head(checkpoint, TargetTables(*target_tables(checkpoint)), execution=Execution(torch.bfloat16))


def grown_by_sglang(proposals: list[Proposal], topk: int, num_draft_tokens: int) -> tuple[Tensor, list[list[int]]]:
    """Tokens [A, N] of each anchor's tree in SGLang's order, and the index of each one's parent among them."""
    select = sglang_module("srt.speculative.spec_utils").select_top_k_tokens
    organize = sglang_module("srt.speculative.eagle_utils").organize_draft_results
    scores, grown = None, []
    with torch.compiler.set_stance("force_eager"):
        for step, (probs, ids, _) in enumerate(proposals):
            hidden = torch.zeros(len(probs), 1)
            _, _, scores, info = select(step, probs, ids, hidden, scores, topk)
            grown.append(info)
    parent_list, kept, tokens = organize(*(list(parts) for parts in zip(*grown, strict=True)), num_draft_tokens)
    parents = []
    for group_parents, nodes in zip(parent_list.tolist(), kept.tolist(), strict=True):
        wanted = [ROOT if node < topk else group_parents[node // topk] for node in nodes]
        parents.append([ROOT if it == ROOT else nodes.index(it) if it in nodes else ORPHAN for it in wanted])
    return tokens, parents


@pytest.mark.parametrize("sharpness", [1, 40])
@pytest.mark.parametrize(("topk", "steps", "num_draft_tokens"), [(2, 3, 5), (4, 3, 8), (8, 5, 32), (10, 6, 60)])
def test_the_tree_is_sglangs(
    topk: int, steps: int, num_draft_tokens: int, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(sharpness)
    proposals: list[Proposal] = []

    def spy(head: Head, normed_RE: Tensor, topk: int, propose: object = trees.propose) -> Proposal:
        proposals.append(propose(head, normed_RE, topk))  # type: ignore[operator]
        return proposals[-1]

    monkeypatch.setattr(trees, "propose", spy)
    size = TreeSize(steps, num_draft_tokens)
    ((grown,),) = draft_every_tree(head, requests(head, [(3, 60)]), topk=topk, sizes=[size], kv="slot")
    tokens, parents = grown_by_sglang(proposals, topk, num_draft_tokens)
    assert torch.equal(grown.drafted_AN, tokens)
    assert grown.parents_AN.tolist() == parents
    if sharpness > 1 and topk > 4:
        assert ORPHAN in grown.parents_AN  # certain tokens tie with their parents, and the cut takes them apart
