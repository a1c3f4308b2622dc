"""Acceptance and the served walk: literal cases, laws, and a slow walk written from the server's point of view."""

import numpy as np
import pytest
from numpy.typing import NDArray

from replay.verify.accept import Round, continuations, count_accepted, served_walk

Ints = NDArray[np.int64]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


# ---- what the target chose after each anchor ----


def test_continuations_start_after_the_known_token() -> None:
    tokens_T = ints(10, 11, 12, 13, 14, 15)
    chosen = continuations(tokens_T, ints(), ints(2, 3, 4), 3)
    # Anchor 2: x[0..1] are committed, x[2] is known, the drafts are held against x[3], x[4], x[5].
    assert chosen.tolist() == [[13, 14, 15], [14, 15, -1], [15, -1, -1]]


def test_continuations_go_on_into_the_tail() -> None:
    chosen = continuations(ints(10, 11, 12, 13), ints(77, 88), ints(1, 2, 3), 4)
    assert chosen.tolist() == [[12, 13, 77, 88], [13, 77, 88, -1], [77, 88, -1, -1]]


def test_a_tail_longer_than_the_steps_is_cut() -> None:
    assert continuations(ints(1, 2), ints(3, 4, 5, 6, 7), ints(1), 2).tolist() == [[3, 4]]


def test_no_anchors_have_no_continuations() -> None:
    assert continuations(ints(1, 2), ints(), ints(), 3).shape == (0, 3)


def test_nothing_drafted_equals_what_was_not_recorded() -> None:
    chosen = continuations(ints(5, 6), ints(), ints(1), 2)
    assert chosen.tolist() == [[-1, -1]]
    assert count_accepted(np.array([[0, 0]]), chosen).tolist() == [0]


# ---- how many are taken ----


@pytest.mark.parametrize(
    ("drafted", "chosen", "accepted"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 9], [1, 2, 3], 2),
        ([1, 9, 3], [1, 2, 3], 1),  # what is right behind the first mistake counts for nothing
        ([9, 2, 3], [1, 2, 3], 0),
        ([2, 3, 1], [1, 2, 3], 0),  # right tokens in the wrong places
        ([1, 2, 3], [1, 2, -1], 2),
        ([7], [7], 1),
        ([7], [8], 0),
        ([], [], 0),
        ([0, 0], [0, 0], 2),
    ],
)
def test_the_longest_equal_prefix_is_taken(drafted: list[int], chosen: list[int], accepted: int) -> None:
    rows = np.array([drafted], dtype=np.int64), np.array([chosen], dtype=np.int64)
    assert count_accepted(*rows).tolist() == [accepted]


# ---- the walk ----


def test_walk_by_hand() -> None:
    """Prompt of 3, output of 7: tokens 3..9; token 3 is known before the first round."""
    # Anchors 3..8 accept                1  0  2  0  1  2
    walk = served_walk(ints(1, 0, 2, 0, 1, 2), prompt_tokens=3, tokens=10)
    # 3 takes token 4 and the bonus 5; 5 takes 6, 7 and the bonus 8; 8 takes 9 and would go on to 10 and 11.
    assert walk == [Round(3, 1, False), Round(5, 2, False), Round(8, 2, True)]


@pytest.mark.parametrize(
    ("accepted", "rounds"),
    [
        ([2, 0, 0, 0], [Round(1, 2, False), Round(4, 0, False)]),
        ([3, 0, 0, 0], [Round(1, 3, False)]),  # 4 tokens left, 4 emitted: whole
        ([4, 0, 0, 0], [Round(1, 4, True)]),  # 5 drawn, 4 left to emit: cut
        ([0, 0, 0, 0], [Round(anchor, 0, False) for anchor in (1, 2, 3, 4)]),
    ],
)
def test_the_last_round_is_cut_only_when_it_runs_over(accepted: list[int], rounds: list[Round]) -> None:
    assert served_walk(ints(*accepted), prompt_tokens=1, tokens=6) == rounds


@pytest.mark.parametrize("tokens", [4, 5])
def test_an_output_of_one_token_has_no_round(tokens: int) -> None:
    """The first output token comes from the prompt's own forward."""
    walk = served_walk(ints(3) if tokens == 5 else ints(), prompt_tokens=3, tokens=tokens)
    assert walk == ([Round(3, 3, True)] if tokens == 5 else [])


# ---- laws, on random requests ----


def slow_rounds(drafts: dict[int, list[int]], prompt: list[int], output: list[int], tail: list[int]) -> list[Round]:
    """A server, token by token: emit the first output token, then draft, compare, emit, until the output is full."""
    emitted = output[:1]
    rounds = []
    while len(emitted) < len(output):
        anchor = len(prompt) + len(emitted) - 1
        would_say = (output + tail)[len(emitted) :]
        taken = 0
        for guess in drafts[anchor]:
            if taken == len(would_say) or guess != would_say[taken]:
                break
            taken += 1
        room = len(output) - len(emitted)
        emitted += would_say[: min(taken + 1, room)]
        rounds.append(Round(anchor, taken, cut=taken + 1 > room))
    assert emitted == output
    return rounds


def random_request(seed: int) -> tuple[dict[int, list[int]], list[int], list[int], list[int]]:
    """Drafts of 6 tokens at every anchor, over an alphabet of 2, so that long chains are often right."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, size=rng.integers(1, 5)).tolist()
    output = rng.integers(2, size=rng.integers(1, 30)).tolist()
    tail = rng.integers(2, size=rng.integers(0, 8)).tolist()
    anchors = range(len(prompt), len(prompt) + len(output) - 1)
    return {anchor: rng.integers(2, size=6).tolist() for anchor in anchors}, prompt, output, tail


def fast_rounds(
    drafts: dict[int, list[int]], prompt: list[int], output: list[int], tail: list[int], steps: int
) -> tuple[list[Round], Ints]:
    anchors_A = np.array(list(drafts), dtype=np.int64)
    drafted_AK = np.array(list(drafts.values()), dtype=np.int64).reshape(-1, 6)[:, :steps]
    chosen_AK = continuations(ints(*prompt, *output), ints(*tail), anchors_A, steps)
    accepted_A = count_accepted(drafted_AK, chosen_AK)
    return served_walk(accepted_A, prompt_tokens=len(prompt), tokens=len(prompt) + len(output)), accepted_A


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_the_walk_equals_a_server_that_goes_token_by_token(steps: int) -> None:
    cut = 0
    for seed in range(200):
        drafts, prompt, output, tail = random_request(seed)
        shorter = {anchor: chain[:steps] for anchor, chain in drafts.items()}
        walk, _ = fast_rounds(drafts, prompt, output, tail, steps)
        assert walk == slow_rounds(shorter, prompt, output, tail)
        cut += sum(played.cut for played in walk)
    assert cut > 10


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_rounds_emit_the_output_and_nothing_else(steps: int) -> None:
    """The sum of accepted + 1, less what a cut round runs over, is the output less its first token; no gaps."""
    for seed in range(200):
        drafts, prompt, output, tail = random_request(seed)
        walk, _ = fast_rounds(drafts, prompt, output, tail, steps)
        end = len(prompt) + len(output) - 1
        over = sum(played.anchor + played.accepted + 1 - end for played in walk if played.cut)
        assert sum(played.accepted + 1 for played in walk) - over == len(output) - 1
        assert [played.cut for played in walk[:-1]] == [False] * len(walk[:-1])
        assert (over > 0) == any(played.cut for played in walk)
        anchors = [len(prompt), *(played.anchor + played.accepted + 1 for played in walk)]
        assert anchors[:-1] == [played.anchor for played in walk]
        assert all(0 <= played.accepted <= steps for played in walk)


def test_at_each_anchor_fewer_steps_take_the_minimum() -> None:
    """Whole walks need not shorten with more steps, as they land elsewhere; every single anchor does."""
    for seed in range(200):
        request = random_request(seed)
        _, most_A = fast_rounds(*request, 6)
        for steps in (5, 3, 2, 1, 0):
            walk, accepted_A = fast_rounds(*request, steps)
            assert np.array_equal(accepted_A, np.minimum(most_A, steps))
        assert len(walk) == len(request[2]) - 1  # without drafts, one round a token


def test_a_longer_output_only_adds_rounds_behind() -> None:
    """What a server did up to a place does not depend on what came later."""
    for seed in range(100):
        drafts, prompt, output, _ = random_request(seed)
        whole, _ = fast_rounds(drafts, prompt, output, [], 4)
        for kept in range(1, len(output)):
            rest = output[kept:]
            some = {anchor: drafts[anchor] for anchor in list(drafts)[: kept - 1]}
            part, _ = fast_rounds(some, prompt, output[:kept], rest, 4)
            assert [(each.anchor, each.accepted) for each in part] == [
                (each.anchor, each.accepted) for each in whole[: len(part)]
            ]
