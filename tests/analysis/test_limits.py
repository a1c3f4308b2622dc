"""What holds a head back: tables made by hand, of which it is plain what is worse and what is chance."""

from dataclasses import replace

import pytest
from support.rounds_maker import make_rounds, make_variant

from replay.analysis.diagnosis.limits import limits
from replay.traces.rounds import Rounds

VARIANT = make_variant("v")


def of(requests: list[list[int]], categories: str = "") -> Rounds:
    """One letter of ``categories`` for each request."""
    rounds = make_rounds({VARIANT: requests})
    named = zip(rounds.requests, categories or " " * len(requests), strict=True)
    return replace(rounds, requests=tuple(replace(one, category=name.strip() or None) for one, name in named))


def said(rounds: Rounds, unknown_share: float = 0.0) -> list[str]:
    first, *others = limits(rounds, "v", unknown_share=unknown_share)
    assert first.startswith("data or training: ")
    return [one.partition(":")[0] for one in others]


def test_a_head_that_is_alike_everywhere_lacks_nothing_but_data() -> None:
    assert said(of([[3, 0, 0, 3]] * 12, "abc" * 4)) == []


def test_tokens_that_it_cannot_draft_are_said() -> None:
    assert said(of([[3, 0, 0, 3]] * 3), unknown_share=0.001) == ["vocabulary"]


def test_a_third_token_that_is_taken_less_often_is_depth() -> None:
    assert said(of([[2, 0, 0, 2]] * 8)) == ["depth"]  # half of the first tokens, and no third one


def test_a_category_that_accepts_less_is_named_with_its_numbers() -> None:
    found = list(limits(of([[3, 0, 0, 3]] * 6 + [[1, 0, 0, 1]] * 6, "a" * 6 + "b" * 6), "v", unknown_share=0))
    assert "category b: accept length 1.50 over 24 rounds, 2.50 elsewhere" in found
    assert not any(one.startswith("category a") for one in found)


@pytest.mark.parametrize("requests", [[[3, 0], [0, 3], [3, 3], [0, 0]] * 3])
def test_chance_names_no_category(requests: list[list[int]]) -> None:
    assert said(of(requests, "aabbabababba")) == []


def test_later_positions_that_accept_less_are_context_length() -> None:
    found = list(limits(of([[3, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0]] * 8), "v", unknown_share=0))
    assert "context length: accept length 2.50 in the first half of the positions, 1.00 in the second" in found


def test_a_table_without_a_second_half_says_nothing_of_context() -> None:
    assert said(of([[3]] * 4)) == []
