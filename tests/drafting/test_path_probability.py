"""The head's probabilities along a recorded path: every anchor at once equals one anchor at a time."""

import pytest
import torch
from support.random_heads import make_head
from twins.path_probability import force_one_anchor

from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.first_pass import first_pass
from replay.drafting.path_probability import force_every_anchor, path_tokens
from replay.drafting.rows import DraftInput
from replay.engines.behaviour import Behaviour
from replay.head.model import Head

HEADS = ["plain", "two layers", "every norm", "whole vocabulary", "target's lm_head"]


def requests(head: Head, shapes: list[tuple[int, int]]) -> list[DraftInput]:
    generator = torch.Generator().manual_seed(7)
    return [
        DraftInput(
            torch.randint(head.config.vocab_size, (prompt + output,), generator=generator),
            torch.randn(prompt + output - 1, head.config.fc_inputs, generator=generator).double(),
            prompt,
        )
        for prompt, output in shapes
    ]


@pytest.mark.parametrize("name", HEADS)
def test_every_anchor_at_once_equals_one_by_one(name: str) -> None:
    head = make_head(name)
    inputs = requests(head, [(4, 7), (1, 3), (5, 1), (3, 2)])
    temperatures = [0.7, 1.0, 1.0, 1.6]
    steps = 4
    found = force_every_anchor(head, inputs, temperatures, steps)
    drafted = 0
    for item, temperature, q_AK in zip(inputs, temperatures, found, strict=True):
        anchors = range(item.prompt_tokens, len(item.tokens_T) - 1)
        by_hand = [force_one_anchor(head, item, anchor, temperature, steps) for anchor in anchors]
        assert q_AK.shape == (len(anchors), steps)
        # Logits near 50 rounded to fp32 before the softmax: half an ulp is 2e-6 of a probability.
        torch.testing.assert_close(q_AK, torch.tensor(by_hand).double().view(-1, steps), rtol=1e-5, atol=1e-12)
        drafted += int((q_AK > 0).sum())
    assert drafted > 3


def test_fed_its_own_draft_the_head_gives_it_its_largest_probability() -> None:
    """On a text that is the head's own chain, forcing is drafting: the same states, no token likelier than the next."""
    head, steps = make_head("whole vocabulary"), 4
    (item,) = requests(head, [(5, steps + 1)])
    tokens_T = item.tokens_T.clone()
    drafts = draft_every_anchor(head, [DraftInput(tokens_T, item.features_RKD, 5)], steps)[0]
    tokens_T[6:] = drafts.drafted_AK[0, : len(tokens_T) - 6]
    forced = DraftInput(tokens_T, item.features_RKD, 5)
    q_AK = force_every_anchor(head, [forced], [1e-3], steps)[0]
    torch.testing.assert_close(q_AK[0, : steps - 1], torch.ones(steps - 1).double(), rtol=0, atol=1e-6)


def test_beyond_the_end_and_outside_the_draft_vocabulary_nothing_is_drafted() -> None:
    head = make_head("plain")
    (item,) = requests(head, [(2, 6)])
    known = set(head.target_ids_W.tolist())
    path_AK, (q_AK,) = path_tokens(item, 5), force_every_anchor(head, [item], [1.0], 5)
    for row, chances in zip(path_AK.tolist(), q_AK.tolist(), strict=True):
        assert [chance > 0 for chance in chances] == [token in known for token in row]
    assert path_AK[-1].tolist() == [int(item.tokens_T[-1]), -1, -1, -1, -1]


def test_probabilities_add_up_over_the_vocabulary() -> None:
    head = make_head("whole vocabulary")
    (item,) = requests(head, [(3, 3)])
    total = 0.0
    for token in range(96):
        tokens_T = item.tokens_T.clone()
        tokens_T[4] = token
        total += float(force_every_anchor(head, [DraftInput(tokens_T, item.features_RKD, 3)], [1.3], 1)[0][0, 0])
    assert total == pytest.approx(1, rel=1e-6)


def test_a_first_pass_made_before_serves_as_well() -> None:
    head = make_head("plain")
    inputs = requests(head, [(4, 6), (2, 5)])
    alone = force_every_anchor(head, inputs, [1.0, 1.0], 3)
    shared = force_every_anchor(head, inputs, [1.0, 1.0], 3, first=first_pass(head, inputs))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(alone, shared, strict=True))


def test_behaviour_of_drafted_rows_is_played() -> None:
    """Positions that do not advance change what follows the first step and nothing before; dummies draft token 0."""
    inputs = requests(make_head("plain"), [(4, 6)])
    healthy = force_every_anchor(make_head("plain"), inputs, [1.0], 3)[0]
    still = force_every_anchor(make_head("plain", behaviour=Behaviour(advance=0)), inputs, [1.0], 3)[0]
    assert torch.equal(healthy[:, 0], still[:, 0])
    assert not torch.equal(healthy[:, 1:], still[:, 1:])
    dummy = force_every_anchor(make_head("plain", behaviour=Behaviour(dummy_from=0)), inputs, [1.0], 3)[0]
    assert torch.equal(dummy, (path_tokens(inputs[0], 3) == 0).double())
