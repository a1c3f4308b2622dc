"""The estimators of expected acceptance, each against the process itself: all texts of small targets, no sampling."""

import numpy as np
import pytest
from support.rule_cases import RULES, TREE_RULES
from support.toy_target import Toy, greedy_draft_rounds, rejection_rounds, shares_by_coin

from replay.verify.accept import count_accepted, served_walk
from replay.verify.expectation import (
    Offers,
    chain_parents,
    draw_accepted,
    effective_samples,
    expect_taken,
    expected_walk,
    follow_path,
    keep_probabilities,
)
from replay.verify.rules import Rule, parse_rule

SEEDS = range(6)


def entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def chances_to_take(rule: Rule, p: np.ndarray, tokens: list[int]) -> list[float]:
    """Of each of some siblings, tried in order, the chance that it is the one taken: the definitions of the rules.

    A rule that trees do not take is asked for one token only, that of a chain.
    """
    match rule.name:
        case "typical":
            (token,) = tokens
            return [float(p[token] > min(rule.epsilon, rule.delta * np.exp(-entropy(p))))]
        case "target-only":
            return shares_by_coin(p, tokens, rule.single, rule.acc)
        case name:
            raise AssertionError(f"write the definition of {name} here, from its source")


@pytest.mark.parametrize("spelled", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_round_of_a_chain_is_unbiased(spelled: str, seed: int) -> None:
    """The mean over all texts is the product of the rule's own chances along the drafted chain."""
    rule, toy, steps, start = parse_rule(spelled), Toy(3, seed), 3, (0, 1)
    drafted = toy.chain(start, steps)
    exact = np.cumprod([chances_to_take(rule, toy.p(start + drafted[:i]), [drafted[i]])[0] for i in range(steps)])
    mean = np.zeros(steps)
    for path, chance in toy.paths(start, steps):
        offers = follow_path(np.array([drafted]), chain_parents(1, steps), np.array([path]))
        p = np.array([[toy.p(start + path[:i])[drafted[i]] for i in range(steps)]])
        entropies = np.array([[entropy(toy.p(start + path[:i])) for i in range(steps)]])
        mean += chance * expect_taken(rule, offers, p, entropies).joint_AK[0]
    np.testing.assert_allclose(mean, exact, rtol=0, atol=1e-13)


# Nodes of a tree as (token, parent), siblings in the order in which they are tried.
TREE = [(0, -1), (2, -1), (1, 0), (2, 0), (0, 1), (1, 1), (1, 2), (0, 4), (2, 4)]


@pytest.mark.parametrize("spelled", TREE_RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_round_of_a_tree_is_unbiased(spelled: str, seed: int) -> None:
    rule, toy, steps, start = parse_rule(spelled), Toy(3, seed), 3, (1, 2)
    tokens, parents = (np.array([column]) for column in zip(*TREE, strict=True))

    def reach(node: int, text: tuple[int, ...], depth: int, chance: float, exact: np.ndarray) -> None:
        children = [place for place, (_, parent) in enumerate(TREE) if parent == node]
        shares = chances_to_take(rule, toy.p(text), [TREE[place][0] for place in children]) if children else []
        for place, share in zip(children, shares, strict=True):
            exact[depth] += chance * share
            reach(place, (*text, TREE[place][0]), depth + 1, chance * share, exact)

    exact, mean = np.zeros(steps), np.zeros(steps)
    reach(-1, start, 0, 1.0, exact)
    for path, chance in toy.paths(start, steps):
        offers = follow_path(tokens, parents, np.array([path]))
        p = np.array(
            [
                [toy.p(start + path[: depth - 1])[token] if depth else 0.0
                 for depth, token in zip(offers.depth_AN[0], tokens[0], strict=True)]
            ]
        )  # fmt: skip
        entropies = np.array([[entropy(toy.p(start + path[:i])) for i in range(steps)]])
        mean += chance * expect_taken(rule, offers, p, entropies).joint_AK[0]
    np.testing.assert_allclose(mean, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_and_tokens_of_target_only_are_those_of_the_process(seed: int) -> None:
    """Over the served walk of every text: the expected rounds and accepted tokens of the whole process, exactly."""
    toy, steps, prompt, end = Toy(3, seed), 2, (0, 1, 2), 7
    rounds = accepted = 0.0
    for path, chance in toy.paths(prompt, end - len(prompt)):
        text = np.array(prompt + path)
        # The known token of the first anchor is the last one of this prompt.
        anchors = np.arange(len(prompt) - 1, end - 1)
        drafted = np.array([toy.chain(tuple(text[: a + 1].tolist()), steps) for a in anchors])
        padded = np.append(text, [-1] * steps)
        chosen = np.array([padded[a + 1 : a + 1 + steps] for a in anchors])
        walk = served_walk(count_accepted(drafted, chosen), prompt_tokens=len(prompt) - 1, tokens=end)
        visited = np.array([played.anchor for played in walk]) - (len(prompt) - 1)
        offers = follow_path(drafted[visited], chain_parents(len(visited), steps), chosen[visited])
        p = np.zeros(offers.depth_AN.shape)
        for place in zip(*np.nonzero(offers.depth_AN), strict=True):
            before = tuple(text[: anchors[visited[place[0]]] + offers.depth_AN[place]].tolist())
            p[place] = toy.p(before)[drafted[visited][place]]
        rounds += chance * len(visited)
        accepted += chance * expect_taken(Rule("target-only"), offers, p, np.zeros(p.shape)).joint_AK.sum()
    np.testing.assert_allclose((rounds, accepted), greedy_draft_rounds(toy, prompt, end, steps), rtol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_rounds_and_tokens_of_rejection_are_those_of_the_process(seed: int, steps: int) -> None:
    """Averaged over all texts, the walk given a text is the process that makes them: drafts, coins and residuals."""
    toy, prompt, end = Toy(3, seed), (2, 0), 6
    mean = np.zeros(2)
    for path, chance in toy.paths(prompt, end - len(prompt)):
        text = prompt + path
        anchors = range(len(prompt) - 1, end - 1)
        p, q = np.ones((len(anchors), steps)), np.zeros((len(anchors), steps))
        for row, anchor in enumerate(anchors):
            for step in range(min(steps, end - 1 - anchor)):
                here = text[: anchor + 1 + step]
                p[row, step], q[row, step] = toy.p(here)[text[len(here)]], toy.q(here, step)[text[len(here)]]
        mean += chance * np.array(expected_walk(keep_probabilities(q, p)))
    np.testing.assert_allclose(mean, rejection_rounds(toy, prompt, end, steps), rtol=1e-12)


def walk_by_hand(kept: np.ndarray, anchor: int = 0) -> tuple[float, float]:
    """Expected rounds and tokens from ``anchor`` on, by following every outcome of every round."""
    if anchor >= len(kept):
        return 0.0, 0.0
    atleast = [1.0, *kept[anchor], 0.0]
    rounds, accepted = 1.0, 0.0
    for count in range(len(atleast) - 1):
        chance = atleast[count] - atleast[count + 1]
        more = walk_by_hand(kept, anchor + count + 1)
        rounds, accepted = rounds + chance * more[0], accepted + chance * (count + more[1])
    return rounds, accepted


@pytest.mark.parametrize("seed", SEEDS)
def test_the_walk_adds_up_every_sequence_of_rounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = np.cumprod(rng.random((7, 3)), axis=1)
    kept[np.arange(7)[:, None] + np.arange(3) >= 7] = 0.0
    np.testing.assert_allclose(expected_walk(kept), walk_by_hand(kept), rtol=1e-13)


def test_drawn_coins_agree_with_the_expected_walk() -> None:
    """20,000 draws: six standard errors, a false alarm in 5e8; a walk that ignores the coins is 100 of them away."""
    rng = np.random.default_rng(1)
    kept = np.cumprod(rng.random((12, 4)) ** 0.3, axis=1)
    kept[np.arange(12)[:, None] + np.arange(4) >= 12] = 0.0
    samples = []
    for _ in range(20_000):
        accepted = draw_accepted(kept, rng.random(kept.shape))
        walk = served_walk(accepted, prompt_tokens=0, tokens=13)
        samples.append((len(walk), sum(played.accepted for played in walk)))
    errors = np.std(samples, axis=0) / len(samples) ** 0.5
    assert (np.abs(np.mean(samples, axis=0) - expected_walk(kept)) < 6 * errors).all()


def test_sure_coins_give_the_sure_walk() -> None:
    kept = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    accepted = draw_accepted(kept, np.full(kept.shape, 0.999))
    assert accepted.tolist() == [2, 1, 0, 1, 0]
    assert expected_walk(kept) == (2.0, 3.0)
    assert expected_walk(np.zeros((0, 3))) == (0.0, 0.0)


def test_a_head_that_cannot_draft_a_token_never_keeps_it() -> None:
    p, q = np.array([[0.5, 0.2, 0.1], [0.0, 0.5, 0.5]]), np.array([[0.25, 0.4, 0.0], [0.1, 0.0, 1.0]])
    assert keep_probabilities(q, p).tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]


def test_offers_end_with_the_path() -> None:
    """Nodes off the path, behind a refused token and behind the end of the output are not offered."""
    drafted, parents = np.array([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]), chain_parents(3, 4)
    offers = follow_path(drafted, parents, np.array([[5, 6, 7, 8], [5, 9, 7, 8], [5, 6, -1, -1]]))
    assert offers.depth_AN.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0], [1, 2, 0, 0]]
    assert offers.taken_AN.tolist() == [[True] * 4, [True, False, False, False], [True, True, False, False]]


def test_effective_samples() -> None:
    """Equal weights count whole, one large weight counts as one (Kish, Survey Sampling, 1965)."""
    weights = np.array([[2.0, 2.0, 2.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert effective_samples(weights.sum(1), (weights**2).sum(1)).tolist() == [3.0, 1.0, 0.0]


def test_weights_of_a_lossless_rule_are_one() -> None:
    offers = Offers(np.array([[1, 2]]), np.array([[True, False]]))
    found = expect_taken(Rule("target-only"), offers, np.array([[0.0, 0.25]]), np.zeros((1, 2)))
    assert found.joint_AK.tolist() == [[0.0, 0.25]]
    assert found.weights_AK.tolist() == [[1.0, 1.0]]
