"""Ranks along a run's own chains against each anchor by itself, its logits sorted in the open."""

from math import exp, fsum, inf

import pytest
import torch
from support.random_heads import make_head, requests
from twins.path_probability import logits_along

from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.ranks import rank_along

STEPS, TOP = 3, 4


@pytest.mark.parametrize("name", ["plain", "target's lm_head", "latent"])
def test_ranks_equal_one_anchor_at_a_time(name: str) -> None:
    head = make_head(name)
    (item,) = requests(head, [(3, 9)])
    generator = torch.Generator().manual_seed(3)
    drafted_AK, wanted_AK = (
        torch.randint(head.config.vocab_size, (item.anchors, STEPS), generator=generator) for _ in range(2)
    )
    wanted_AK[0, 0] = -1
    found = rank_along(head, item, drafted_AK, wanted_AK, TOP)
    ids, outside = head.target_ids_W.tolist(), 0
    for place, anchor in enumerate(item.anchors_A.tolist()):
        drafted, wanted = drafted_AK[place].tolist(), wanted_AK[place].tolist()
        for step, logits_W in enumerate(logits_along(head, item, anchor, drafted[:-1])):
            by_token = dict(zip(ids, logits_W.tolist(), strict=True))
            order = sorted(ids, key=by_token.__getitem__, reverse=True)
            whole = fsum(map(exp, by_token.values()))
            rank = order.index(wanted[step]) + 1 if wanted[step] in by_token else 0
            outside += rank == 0
            assert int(found.rank_AK[place, step]) == rank
            chance = exp(by_token[wanted[step]]) / whole if rank else 0.0
            assert float(found.chance_AK[place, step]) == pytest.approx(chance, rel=1e-4)
            behind = by_token[order[0]] - by_token.get(drafted[step], -inf)
            assert float(found.behind_AK[place, step]) == pytest.approx(behind, abs=1e-4)
            assert found.top_AKP[place, step].tolist() == order[:TOP]
            told = [exp(by_token[one]) / whole for one in order[:TOP]]
            assert found.chances_AKP[place, step].tolist() == pytest.approx(told, rel=1e-4)
    assert outside >= 1


def test_along_its_own_drafts_every_token_is_the_likeliest() -> None:
    head = make_head("plain")
    (item,) = requests(head, [(3, 9)])
    (drafts,) = draft_every_anchor(head, [item], STEPS)
    found = rank_along(head, item, drafts.drafted_AK, drafts.drafted_AK, 1000)
    assert (found.rank_AK == 1).all() and (found.behind_AK == 0).all()
    assert found.top_AKP.shape[-1] == head.config.draft_vocab_size
    assert torch.equal(found.top_AKP[..., 0], drafts.drafted_AK)
