"""Which candidates become a tree, held against the functions of the installed SGLang on the same probabilities.

``select_top_k_tokens`` and ``organize_draft_results`` are SGLang's own; the probabilities are those that the engine
took from a random head, so that what is compared is the growing, its ties and the cut, not the head.
"""

import pytest
import torch
from rig.inprocess import sglang_module
from support.heads import target_tables, tiny_checkpoint
from support.random_heads import requests
from torch import Tensor

from replay.drafting import trees as tree
from replay.drafting.tree_shape import ORPHAN, ROOT, TreeSize
from replay.drafting.trees import draft_every_tree
from replay.head.model import Head

Proposal = tuple[Tensor, Tensor, Tensor]


def make_head(sharpness: float) -> Head:
    """A bf16 head; a sharp one is certain of some tokens and gives others no probability at all."""
    checkpoint = tiny_checkpoint()
    checkpoint.tensors["lm_head.weight"].mul_(sharpness)
    embed_VE, lm_head_VE = target_tables(checkpoint)
    return Head(checkpoint, target_embed_VE=embed_VE, target_lm_head_VE=lm_head_VE, dtype=torch.bfloat16)


def grown_by_sglang(proposals: list[Proposal], topk: int, num_draft_tokens: int) -> tuple[Tensor, list[list[int]]]:
    """Tokens [A, N] of each anchor's tree in SGLang's order, and the place of each one's parent."""
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
    for group_parents, places in zip(parent_list.tolist(), kept.tolist(), strict=True):
        wanted = [ROOT if place < topk else group_parents[place // topk] for place in places]
        parents.append([ROOT if it == ROOT else places.index(it) if it in places else ORPHAN for it in wanted])
    return tokens, parents


@pytest.mark.parametrize("sharpness", [1, 40])
@pytest.mark.parametrize(("topk", "steps", "num_draft_tokens"), [(2, 3, 5), (4, 3, 8), (8, 5, 32), (10, 6, 60)])
def test_the_tree_is_sglangs(
    topk: int, steps: int, num_draft_tokens: int, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(sharpness)
    proposals: list[Proposal] = []

    def spy(head: Head, normed_RE: Tensor, topk: int, propose: object = tree.propose) -> Proposal:
        proposals.append(propose(head, normed_RE, topk))  # type: ignore[operator]
        return proposals[-1]

    monkeypatch.setattr(tree, "propose", spy)
    size = TreeSize(steps, num_draft_tokens)
    ((trees,),) = draft_every_tree(head, requests(head, [(3, 60)]), topk=topk, sizes=[size], kv="slot")
    tokens, parents = grown_by_sglang(proposals, topk, num_draft_tokens)
    assert torch.equal(trees.drafted_AN, tokens)
    assert trees.parents_AN.tolist() == parents
    if sharpness > 1 and topk > 4:
        assert ORPHAN in trees.parents_AN  # certain tokens tie with their parents, and the cut takes them apart
