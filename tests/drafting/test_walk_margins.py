"""A walk that is fed a server's drafts: its margins are those of the twin that goes round by round, for every behaviour
under which the draft KV or the next draft depends on the rounds before."""

import pytest
import torch
from support.random_heads import make_head, requests
from torch import Tensor
from twins.margins import TwinMargin, margins_of_rounds

from replay.drafting.margins import Margins, margins_along
from replay.drafting.round_by_round import WalkedRounds, walk
from replay.drafting.rows import DraftInput
from replay.engines.behaviour import Behaviour
from replay.head.model import Head

SHAPES = [(3, 14), (1, 6), (6, 1), (4, 9)]
STEPS = 3
SCALES = (0.05, 1.0, 2.0)
# Every value of every field that follows the walk, alone and together with another one.
BEHAVIOURS = {
    "stale": Behaviour(rewrite="stale"),
    "accumulate": Behaviour(rewrite="accumulate"),
    "hole": Behaviour(hole="accepted"),
    "full hole": Behaviour(hole="full"),
    "next row first": Behaviour(next_row="first"),
    "next row previous": Behaviour(next_row="previous"),
    "next row drafted": Behaviour(next_row="drafted"),
    "next row hidden-only": Behaviour(next_row="hidden-only"),
    "stale rows anchor": Behaviour(stale_rows="anchor"),
    "stale rows previous": Behaviour(stale_rows="previous"),
    "stale rows first": Behaviour(stale_rows="first"),
    "stale rows last": Behaviour(stale_rows="last"),
    "stale and full hole": Behaviour(rewrite="stale", hole="full"),
    "stale and a window": Behaviour(rewrite="stale", window=4),
    "accumulate and next row first": Behaviour(rewrite="accumulate", next_row="first"),
}
# Those under which a round leaves something in the draft KV, or to the next round, that its drafted tokens are in.
KEEPS_DRAFTED = ("stale", "accumulate", "next row drafted", "stale and full hole", "stale and a window")
KEEPS_NONE = ("hole", "next row first", "next row previous", "next row hidden-only", "stale rows last")


def other_rounds(head: Head, inputs: list[DraftInput], seed: int = 3) -> tuple[list[list[int]], list[Tensor]]:
    """Any tokens of the target's vocabulary, and rounds that took 0 to all of them, until each output ends."""
    generator = torch.Generator().manual_seed(seed)
    accepted: list[list[int]] = []
    for item in inputs:
        anchor, taken = item.prompt_tokens, list[int]()
        while anchor < len(item.tokens_T) - 1:
            taken.append(int(torch.randint(STEPS + 1, (), generator=generator)))
            anchor += taken[-1] + 1
        accepted.append(taken)
    drafts = [torch.randint(head.config.vocab_size, (len(taken), STEPS), generator=generator) for taken in accepted]
    return accepted, drafts


def numbers(one: TwinMargin) -> list[float]:
    return [one.logit, one.best, one.preferred, one.margin, one.logsumexp, *one.spread]


def rows_of(margins: Margins) -> Tensor:
    """The same of every round and step [r, K, 5 + Z]."""
    columns = [margins.logit_AK, margins.best_AK, margins.preferred_AK, margins.margin_AK, margins.logsumexp_AK]
    return torch.stack([column.double() for column in (*columns, *margins.spread_AKZ.unbind(-1))], -1)


def assert_close(found: Tensor, told: Tensor) -> None:
    """Norms run in fp32 whatever the head's dtype, and a spread divides by its scale."""
    torch.testing.assert_close(found[..., :5], told[..., :5], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found[..., 5:], told[..., 5:], rtol=1e-4, atol=1e-4)


def along(head: Head, inputs: list[DraftInput], accepted: list[list[int]], served: list[Tensor]) -> list[WalkedRounds]:
    return walk(head, inputs, STEPS, None, accepted, served, SCALES)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_along_other_drafts_a_walk_equals_the_twin(name: str) -> None:
    head = make_head("two layers", behaviour=BEHAVIOURS[name])
    inputs = requests(head, SHAPES)
    accepted, served = other_rounds(head, inputs)
    compared = 0
    for item, taken, tokens_RK, found in zip(
        inputs, accepted, served, along(head, inputs, accepted, served), strict=True
    ):
        expected = margins_of_rounds(head, item, taken, tokens_RK.tolist(), SCALES)
        if found.margins is None:
            assert not expected
            continue
        told = torch.tensor([[numbers(step) for step in steps] for steps in expected], dtype=torch.float64)
        assert_close(rows_of(found.margins), told)
        assert torch.equal(found.drafted_RK, tokens_RK)
        compared += len(expected)
    assert compared > 10


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_along_its_own_drafts_every_margin_is_0(name: str) -> None:
    head = make_head("two layers", behaviour=BEHAVIOURS[name])
    inputs = requests(head, SHAPES)
    own = walk(head, inputs, STEPS)
    again = along(head, inputs, [list(one.accepted) for one in own], [one.drafted_RK for one in own])
    for mine, found in zip(own, again, strict=True):
        assert found.anchors == mine.anchors and (found.margins is None) == (not mine.anchors)
        if found.margins is not None:
            assert torch.equal(found.margins.preferred_AK, mine.drafted_RK)
            assert torch.equal(found.margins.margin_AK, torch.zeros(mine.drafted_RK.shape))


@pytest.mark.parametrize(("name", "kept"), [(name, True) for name in KEEPS_DRAFTED] + [(n, False) for n in KEEPS_NONE])
def test_what_a_round_leaves_is_made_of_what_was_served(name: str, kept: bool) -> None:
    """Other tokens in the first round, taken as many: the second one sees them where something of them stays."""
    head = make_head("plain", behaviour=BEHAVIOURS[name])
    (item,) = requests(head, [(3, 9)])
    served_RK = torch.tensor([[5, 6, 7], [8, 9, 10]])
    other_RK = torch.tensor([[35, 36, 37], [8, 9, 10]])
    (one,), (other,) = (along(head, [item], [[2, 1]], [tokens_RK]) for tokens_RK in (served_RK, other_RK))
    assert one.margins is not None and other.margins is not None
    same = torch.allclose(one.margins.best_AK[1], other.margins.best_AK[1], atol=1e-6)
    assert same == (not kept)
    assert torch.equal(one.margins.best_AK[0, 0], other.margins.best_AK[0, 0])


def test_a_healthy_walk_has_the_margins_of_its_anchors() -> None:
    """Both ways of following a server agree where the rounds before leave nothing."""
    head = make_head("two layers")
    inputs = requests(head, SHAPES)
    accepted, served = other_rounds(head, inputs)
    walked = along(head, inputs, accepted, served)
    for item, tokens_RK, found in zip(inputs, served, walked, strict=True):
        if found.margins is None:
            continue
        chain_AK = torch.full((item.anchors, STEPS), -1)
        here = torch.tensor(found.anchors) - item.prompt_tokens
        chain_AK[here] = tokens_RK
        (every,) = margins_along(head, [item], [chain_AK], scales=SCALES)
        assert_close(rows_of(found.margins), rows_of(every)[here])


def test_anchors_that_draft_dummies_prefer_token_0() -> None:
    head = make_head("plain", behaviour=Behaviour(rewrite="stale", dummy_from=5))
    (item,) = requests(head, [(3, 9)])
    (found,) = along(head, [item], [[2, 1]], [torch.tensor([[5, 6, 7], [0, 9, 0]])])  # the second at anchor 6, row 5
    assert found.margins is not None
    assert found.margins.preferred_AK[1].tolist() == [0, 0, 0]
    assert found.margins.margin_AK[1].tolist() == [0, torch.inf, 0]
    assert not found.margins.best_AK[0].isnan().any() and found.margins.best_AK[1].isnan().all()
