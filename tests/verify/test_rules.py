"""Acceptance rules: their spelling, and their arithmetic against the kernels that servers run."""

from typing import Any

import numpy as np
import pytest
import torch
from rig.inprocess import sglang_module
from support.toy_target import shares_by_coin

from replay.errors import UsageError
from replay.simulator.variant import Variant, sweep
from replay.verify.expectation import draw_accepted, keep_probabilities
from replay.verify.rules import Rule, parse_rule, taken_shares


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("greedy", Rule()),
        ("target-only", Rule("target-only")),
        ("target-only:single=0.5", Rule("target-only", single=0.5)),
        ("target-only:acc=0.9,single=1", Rule("target-only", acc=0.9)),
        ("rejection", Rule("rejection")),
        ("typical:epsilon=0.2,delta=0.4", Rule("typical", epsilon=0.2, delta=0.4)),
    ],
)
def test_a_rule_is_read_and_spelled(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gready", "'gready' was asked for, possible are greedy, target-only"),
        ("greedy:acc=1", "takes no thresholds"),
        ("target-only:epsilon=0.1", "takes single and acc, each once, not 'epsilon=0.1'"),
        ("target-only:acc=0.5,acc=0.6", "each once"),
        ("target-only:acc", "acc of rule target-only is a number above 0 and up to 1, not ''"),
        ("target-only:acc=0", "not '0'"),
        ("typical:delta=1.5", "not '1.5'"),
        ("typical:epsilon=nan", "not 'nan'"),
        ("target-only:", "ends in a colon"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_rule(text)


def test_a_variant_spells_its_rule_one_way() -> None:
    assert str(parse_rule("target-only:acc=1,single=1.0")) == "target-only"
    assert len(sweep(draft=["h"], verify=["target-only", "target-only:acc=1", "rejection"])) == 2
    for verify in ("rejection", "typical"):
        with pytest.raises(UsageError, match="topk 4"):
            Variant("h", verify=verify, topk=4, num_draft_tokens=8)
    assert Variant("h", verify="target-only:acc=0.5", topk=4, num_draft_tokens=8).topk == 4


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.5), (0.4, 0.6)])
def test_siblings_share_a_coin_as_in_the_kernel(thresholds: tuple[float, float]) -> None:
    """Against the measure of the coins with which SGLang's loop takes each sibling; impossible ones among them."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        p = rng.dirichlet(np.full(6, 0.5))
        p[rng.integers(6)] = 0
        tokens = rng.permutation(6)[: rng.integers(1, 6)]
        rule = Rule("target-only", *thresholds)
        mine = taken_shares(rule, p[tokens][None], np.zeros(1))[0]
        np.testing.assert_allclose(mine, shares_by_coin(p, tokens, *thresholds), atol=1e-12)


def test_typical_takes_what_stands_above_entropy_or_epsilon() -> None:
    """Medusa, arXiv 2401.10774, section 2.3.1, worked by hand: of 4 equal tokens exp(-H) is 1/4, of 2 it is 1/2."""
    p, entropy = np.array([[0.25], [0.5], [0.08], [0.1]]), np.log([4.0, 2.0, 4.0, 4.0])
    assert taken_shares(Rule("typical"), p, entropy)[:, 0].tolist() == [1, 1, 1, 1]  # delta / 4 = 0.075
    assert taken_shares(Rule("typical", delta=0.4), p, entropy)[:, 0].tolist() == [1, 1, 0, 1]  # epsilon 0.09 < 0.1
    assert taken_shares(Rule("typical", epsilon=0.3, delta=1.0), p, entropy)[:, 0].tolist() == [0, 1, 0, 0]


def test_a_server_takes_drafts_with_p_over_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.23's own Triton kernel (kernels/ops/speculative/reject_sampling.py), interpreted on the CPU, takes as
    many drafted tokens as the same coins do under min(1, p/q): the definition that test_expectation.py enumerates.
    Given the draft it is p/q, given the text q/p, so p and q change places here."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "__call__", lambda self, *args, **kw: InterpretedFunction(self.fn)(*args, **kw))
    module: Any = sglang_module("kernels.ops.speculative.reject_sampling")
    kernel = InterpretedFunction(module.speculative_sampling_classic_kernel.fn)
    rounds, steps, words = 24, 4, 8
    generator = torch.Generator().manual_seed(5)
    target = torch.rand(rounds, steps + 1, words, generator=generator).pow(2)
    draft = target[:, :steps] * (0.2 + torch.rand(rounds, steps, words, generator=generator))
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    tokens = draft.view(-1, words).multinomial(1, generator=generator).view(rounds, steps)
    candidates = torch.cat([torch.zeros(rounds, 1, dtype=torch.long), tokens], 1)
    coins, last = torch.rand(rounds, steps, generator=generator), torch.rand(rounds, generator=generator)
    taken = torch.zeros(rounds, dtype=torch.int32)
    places = torch.arange(rounds * (steps + 1)).view(rounds, steps + 1)
    predicts, accepted = torch.zeros(rounds * (steps + 1), dtype=torch.int32), torch.full_like(places, -1)
    kernel[(rounds,)](
        predicts, accepted, taken, candidates, places, coins, last, target, draft,
        *candidates.stride(), *places.stride(), *coins.stride(), *target.stride(), *draft.stride(),
        NUM_SLOTS=steps + 1, VOCAB_SIZE=words, BLOCK_V=8,
    )  # fmt: skip
    q = draft.gather(2, tokens[:, :, None])[:, :, 0].double().numpy()
    p = target[:, :steps].gather(2, tokens[:, :, None])[:, :, 0].double().numpy()
    mine = draw_accepted(keep_probabilities(p, q), coins.double().numpy())
    assert mine.tolist() == taken.tolist()
    assert 0 < mine.sum() < rounds * steps
