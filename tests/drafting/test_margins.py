"""How far the replay is from a server's drafts: every anchor at once equals one at a time, and agreement is 0."""

from collections.abc import Sequence
from math import exp, fsum, isinf

import pytest
import torch
from support.random_heads import FP64, HEADS, make_head, requests
from torch import Tensor
from twins.margins import TwinMargin, margins_at

from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.margins import Margins, margins_along
from replay.drafting.rows import DraftInput
from replay.engines.behaviour import Behaviour
from replay.errors import UsageError
from replay.head.model import Head
from replay.head.products import Execution

SHAPES = [(3, 9), (1, 4), (6, 1), (2, 2)]
STEPS = 4
SCALES = (0.05, 0.5, 1.0, 3.0)


def random_drafts(head: Head, inputs: list[DraftInput], seed: int = 3) -> list[Tensor]:
    """Any tokens of the target's vocabulary, some chains shorter than others."""
    generator = torch.Generator().manual_seed(seed)
    drafts = []
    for item in inputs:
        tokens_AK = torch.randint(head.config.vocab_size, (item.anchors, STEPS), generator=generator)
        length_A = torch.randint(STEPS + 1, (item.anchors, 1), generator=generator)
        drafts.append(tokens_AK.masked_fill(torch.arange(STEPS) >= length_A, -1))
    return drafts


def rows_of(margins: Margins) -> list[list[tuple[float, ...]]]:
    """By anchor and step, the numbers in the order of the twin's."""
    columns = [
        margins.logit_AK, margins.best_AK, margins.preferred_AK, margins.margin_AK, margins.logsumexp_AK,
        *margins.spread_AKZ.unbind(-1),
    ]  # fmt: skip
    return torch.stack([column.double() for column in columns], -1).tolist()


def numbers(one: TwinMargin) -> list[float]:
    """In the same order."""
    return [one.logit, one.best, one.preferred, one.margin, one.logsumexp, *one.spread]


@pytest.mark.parametrize("name", HEADS)
def test_every_anchor_at_once_equals_one_by_one(name: str) -> None:
    head = make_head(name)
    inputs = requests(head, SHAPES)
    served = random_drafts(head, inputs)
    compared, outside = 0, 0
    for item, tokens_AK, found in zip(inputs, served, margins_along(head, inputs, served, scales=SCALES), strict=True):
        for row, tokens, anchor in zip(rows_of(found), tokens_AK.tolist(), item.anchors_A.tolist(), strict=True):
            expected = [numbers(one) for one in margins_at(head, item, anchor, tokens, SCALES)]
            told_K, twin_K = torch.tensor(row[: len(expected)]), torch.tensor(expected)
            # Norms run in fp32 whatever the head's dtype; a layer grows their rounding to some 1e-6, and a spread
            # divides it by its scale.
            torch.testing.assert_close(told_K[..., :5], twin_K[..., :5], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(told_K[..., 5:], twin_K[..., 5:], rtol=1e-4, atol=1e-4)
            for logit, best, preferred, *others in row[len(expected) :]:
                assert all(number != number for number in (logit, best, *others)) and preferred == -1
            compared += len(expected)
            outside += sum(isinf(one[3]) for one in expected)
    assert compared > 20 and (outside > 5) == (head.config.draft_vocab_size < head.config.vocab_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("behaviour", [Behaviour(), Behaviour(advance=0), Behaviour(window=3), Behaviour(dummy_from=5)])
def test_along_the_replays_own_drafts_every_margin_is_0(behaviour: Behaviour, dtype: torch.dtype) -> None:
    head = make_head("two layers", execution=Execution(dtype, product_rows=4), behaviour=behaviour)
    inputs = requests(head, SHAPES)
    served = [drafts.drafted_AK for drafts in draft_every_anchor(head, inputs, STEPS)]
    for tokens_AK, found in zip(served, margins_along(head, inputs, served), strict=True):
        assert torch.equal(found.preferred_AK, tokens_AK)
        assert torch.equal(found.margin_AK, torch.zeros(tokens_AK.shape))
        read_AK = ~found.best_AK.isnan()
        assert torch.equal(found.logit_AK[read_AK], found.best_AK[read_AK])
        assert (found.logsumexp_AK[read_AK] >= found.best_AK[read_AK]).all()


def test_another_choice_costs_its_margin_there_and_is_followed() -> None:
    """The second likeliest token at the first step: its distance is the gap, and later steps go on from it."""
    head = make_head("whole vocabulary")
    (item,) = requests(head, [(3, 9)])
    logits_AW = head.logits(first_pass(head, [item]).output.normed_RE)
    best_A2 = logits_AW.topk(2, dim=-1)
    served_AK = best_A2.indices[:, 1:].repeat(1, 2)
    (found,) = margins_along(head, [item], [served_AK])
    assert torch.equal(found.preferred_AK[:, 0], best_A2.indices[:, 0])
    gap_A = best_A2.values[:, 0] - best_A2.values[:, 1]
    torch.testing.assert_close(found.margin_AK[:, 0], gap_A.float())
    assert (found.margin_AK[:, 0] > 0).all()
    (fed,) = draft_every_anchor(head, [item], 2, fed=[served_AK])
    assert torch.equal(found.preferred_AK, fed.drafted_AK)


def test_an_anchor_that_drafts_dummies_prefers_token_0() -> None:
    head = make_head("plain", behaviour=Behaviour(dummy_from=4))
    (item,) = requests(head, [(3, 5)])  # anchors 3 to 6 draft from rows 2 to 5
    served_AK = torch.tensor([[0, 0], [0, 7], [0, 7], [0, -1]])
    (found,) = margins_along(head, [item], [served_AK])
    assert found.preferred_AK[2:].tolist() == [[0, 0], [0, -1]]
    assert found.margin_AK[2:, 0].tolist() == [0, 0]
    assert found.margin_AK[2, 1] == torch.inf and found.margin_AK[3, 1].isnan()
    assert found.best_AK[2:].isnan().all() and not found.best_AK[:2].isnan().any()
    (scaled,) = margins_along(head, [item], [served_AK], scales=[0.1])
    assert torch.equal(scaled.spread_AKZ[2], torch.zeros(2, 1)) and scaled.spread_AKZ[3, 1].isnan().all()


def test_a_token_that_several_draft_ids_stand_for_has_the_best_of_them() -> None:
    """Pairs of draft ids for one token, as a map that was read wrongly makes them."""
    head = make_head("plain")
    head.target_ids_W = head.target_ids_W.div(4, rounding_mode="floor")
    assert len(head.target_ids_W.unique()) < len(head.target_ids_W)
    inputs = requests(head, SHAPES)
    own = [drafts.drafted_AK for drafts in draft_every_anchor(head, inputs, STEPS)]
    for found in margins_along(head, inputs, own):
        assert torch.equal(found.margin_AK, torch.zeros(found.margin_AK.shape))
    served = [tokens_AK.div(4, rounding_mode="floor") for tokens_AK in random_drafts(head, inputs)]
    for item, tokens_AK, found in zip(inputs, served, margins_along(head, inputs, served, scales=SCALES), strict=True):
        for row, tokens, anchor in zip(rows_of(found), tokens_AK.tolist(), item.anchors_A.tolist(), strict=True):
            expected = torch.tensor([numbers(one) for one in margins_at(head, item, anchor, tokens, SCALES)])
            torch.testing.assert_close(
                torch.tensor(row[: len(expected)])[..., :5], expected[..., :5], rtol=1e-5, atol=1e-5
            )


# ---- spreads ----


def spreads(head: Head, inputs: list[DraftInput], served: list[Tensor], scales: Sequence[float]) -> Tensor:
    """Of all anchors at which something was drafted [M, Z]."""
    found = margins_along(head, inputs, served, scales=scales)
    spread_MZ = torch.cat([one.spread_AKZ.flatten(0, 1) for one in found]).double()
    return spread_MZ[~spread_MZ[:, 0].isnan()]


@pytest.mark.parametrize(
    ("summed", "exact"),
    [(0.3, (1.0, 1.5)), (1, (0.02, 1.0, 1.5)), (2, (0.02, 0.1, 1.0, 1.5)), (6, (0.02, 0.1, 1.0, 1.5))],
)
def test_logits_that_are_not_summed_one_by_one_are_bounded(
    monkeypatch: pytest.MonkeyPatch, summed: float, exact: tuple[float, ...]
) -> None:
    """At every scale the sum is never too small; it is exact from 1 on, and where what is left out is far behind."""
    head = make_head("whole vocabulary")
    inputs = requests(head, SHAPES)
    served, scales = random_drafts(head, inputs), (0.02, 0.1, 0.4, 0.8, 1.0, 1.5)
    monkeypatch.setattr("replay.drafting.margins._SUMMED", 1e9)
    whole_MZ = spreads(head, inputs, served, scales)
    monkeypatch.setattr("replay.drafting.margins._SUMMED", summed)
    bounded_MZ = spreads(head, inputs, served, scales)
    assert len(whole_MZ) > 20 and (bounded_MZ >= whole_MZ - 1e-6).all()
    same = [scales.index(scale) for scale in exact]
    torch.testing.assert_close(bounded_MZ[:, same], whole_MZ[:, same], rtol=1e-6, atol=1e-6)
    assert (bounded_MZ > whole_MZ + 1e-4).any()  # elsewhere it is a bound


def test_a_spread_gives_every_token_its_probability() -> None:
    """All tokens of the vocabulary along one anchor: at each scale their probabilities add up to 1."""
    head = make_head("whole vocabulary")
    (item,) = requests(head, [(3, 2)])
    every = [
        margins_along(head, [item], [torch.full((1, 1), token)], scales=SCALES)[0]
        for token in range(head.config.vocab_size)
    ]
    for place, scale in enumerate(SCALES):
        nats = [-float(one.margin_AK[0, 0]) / scale - float(one.spread_AKZ[0, 0, place]) for one in every]
        assert fsum(map(exp, nats)) == pytest.approx(1, abs=1e-5)


def test_blocks_of_logits_and_a_first_pass_made_before_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head("two layers")
    inputs = requests(head, SHAPES)
    served = random_drafts(head, inputs)
    whole = margins_along(head, inputs, served, scales=SCALES)
    monkeypatch.setattr("replay.drafting.next_tokens._BLOCK_LOGITS", 40 * 3)
    monkeypatch.setattr("replay.drafting.next_tokens._ROWS_AT_LEAST", 1)
    blocked = margins_along(head, inputs, served, scales=SCALES, first=first_pass(head, inputs))
    for one, other in zip(whole, blocked, strict=True):
        torch.testing.assert_close(torch.tensor(rows_of(one)), torch.tensor(rows_of(other)), equal_nan=True)


def test_requests_without_an_anchor_have_no_margins() -> None:
    head = make_head("plain")
    inputs = requests(head, [(6, 1), (4, 1)])
    for found in margins_along(head, inputs, [torch.empty(0, 3, dtype=torch.long)] * 2):
        assert found.margin_AK.shape == found.preferred_AK.shape == (0, 3)
        assert found.preferred_AK.dtype == torch.long and found.spread_AKZ.shape == (0, 3, 0)


def test_what_cannot_be_followed_is_refused() -> None:
    head = make_head("plain")
    (item,) = requests(head, [(3, 9)])
    good = random_drafts(head, [item])[0]
    for served in ([], [good[:-1]], [good[0]], [good, good], [good[:, :0]]):
        with pytest.raises(UsageError, match=r"drafted tokens came as .*, the requests have 8 anchors; give each"):
            margins_along(head, [item], served)
    with pytest.raises(UsageError, match="the server drafted token 96, the vocabulary of draft head tiny has 96"):
        margins_along(head, [item], [good.masked_fill(good == good[0, 0], 96)])
    walking = make_head("plain", behaviour=Behaviour(rewrite="stale"), execution=FP64)
    with pytest.raises(UsageError, match="without faults that follow the walk"):
        margins_along(walking, [item], [good])
