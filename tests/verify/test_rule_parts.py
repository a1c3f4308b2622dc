"""Every acceptance rule has all its parts. A failing test names the rule and the part; CONTRIBUTING.md lists them."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.rule_cases import RULES, TREE_RULES

from replay.cli.app import cli
from replay.verify.rules import GRAMMAR, PARAMETERS, Rule, parse_rule, share_ratios, taken_shares

PAGE = Path(__file__).resolve().parents[2] / "docs" / "acceptance-rules.md"
every_rule = pytest.mark.parametrize("name", PARAMETERS)
# Of greedy the draft is taken or not, of rejection it depends on q: neither has shares of p alone.
NO_SHARES = ("greedy", "rejection")
shared_rule = pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in NO_SHARES])


def chain_shares(rule: Rule, p: np.ndarray) -> np.ndarray:
    """Probability with which a token is taken that is the only one to try, by its p, where p and the rest split."""
    rest = np.maximum(1 - p, 0)
    entropy = -sum(np.where(part > 0, part * np.log(np.where(part > 0, part, 1)), 0) for part in (p, rest))
    return taken_shares(rule, p[:, None], entropy)[:, 0]


@every_rule
def test_a_rule_is_in_the_grammar(name: str) -> None:
    said = next((part for part in GRAMMAR.split(", ") if part.split("[")[0] == name), "")
    assert said, f"add {name} to GRAMMAR, which refusals quote"
    assert all(f"{parameter}=" in said for parameter in PARAMETERS[name])


@every_rule
def test_a_threshold_of_a_rule_is_a_field(name: str) -> None:
    defaults = {field.name: field.default for field in fields(Rule)}
    for parameter in PARAMETERS[name]:
        assert parameter in defaults and 0 < defaults[parameter] <= 1
        assert getattr(parse_rule(f"{name}:{parameter}=0.25"), parameter) == 0.25


@every_rule
def test_a_rule_is_on_its_page_and_in_the_help(name: str) -> None:
    assert f"| `{name}" in PAGE.read_text(encoding="utf-8")
    assert name in " ".join(CliRunner().invoke(cli, ["simulate", "--help"]).stdout.split())


@shared_rule
def test_a_rule_says_whether_it_is_lossless(name: str) -> None:
    """Lossless with an argmax draft: a token is taken exactly as often as the target would sample it."""
    p = np.linspace(0.01, 1, 100)
    same = bool(np.allclose(chain_shares(Rule(name), p), p, atol=1e-12))
    assert Rule(name).lossless == same, f"say so in Rule.lossless: {same}"


@shared_rule
def test_a_rule_that_reads_the_entropy_is_given_it(name: str) -> None:
    """Shares at the same p move with the entropy, or they do not."""
    p = np.linspace(0, 1, 101)[:, None]
    low, high = (taken_shares(Rule(name), p, np.full(len(p), entropy)) for entropy in (0.1, 5.0))
    moves = not np.array_equal(low, high)
    assert Rule(name).reads_entropy == moves, f"say so in Rule.reads_entropy: {moves}"


@shared_rule
def test_a_rule_has_shares_of_its_own(name: str) -> None:
    """Probabilities, and not those of another rule."""
    p = np.linspace(0, 1, 101)
    shares = {other: chain_shares(Rule(other), p) for other in PARAMETERS if other not in NO_SHARES}
    assert (shares[name] >= 0).all() and (shares[name] <= 1 + 1e-12).all() and shares[name][0] == 0
    assert not [other for other in shares if other != name and np.array_equal(shares[other], shares[name])]


@shared_rule
def test_a_rule_has_the_limit_of_its_ratio(name: str) -> None:
    """Shares / p where p is next to nothing, and at nothing: of the first sibling, and in trees of a later one.

    The ratio weights what follows the text's own token, whose p may be 0 where only a lower bound of it is known; it
    may be any of the siblings.
    """
    spelled = [spelled for spelled in RULES if parse_rule(spelled).name == name]
    for rule in (*map(parse_rule, spelled), Rule(name)):
        before = [[], *([] if rule.chains_only else [[0.1], [0.3], [0.45], [0.6], [0.8], [0.2, 0.15], [0.65, 0.1]])]
        for earlier in before:
            tiny, nothing = (np.array([[*earlier, p]]) for p in (1e-9, 0.0))
            ratios = [share_ratios(rule, p, taken_shares(rule, p, np.array([0.5])))[:, -1] for p in (tiny, nothing)]
            np.testing.assert_allclose(*ratios, rtol=1e-6, atol=1e-6, err_msg=f"{rule} behind siblings of {earlier}")


@shared_rule
def test_a_rule_is_held_against_the_process(name: str) -> None:
    """Its estimator against all texts of small targets (test_expectation.py), in trees too where it has them."""
    assert name in {parse_rule(spelled).name for spelled in RULES}, "add it to RULES of tests/support/rule_cases.py"
    in_trees = {parse_rule(spelled).name for spelled in TREE_RULES}
    assert (name in in_trees) != Rule(name).chains_only, "TREE_RULES and Rule.chains_only say otherwise"
