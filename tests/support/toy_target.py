"""A target and a head small enough to enumerate: every text of a few tokens over a few words, with exact probabilities.

The processes below follow the definitions of the rules (a server's loop over rounds), coin by coin where the kernel has
coins; they share no code with the estimators that the tests hold against them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

Text = tuple[int, ...]


@dataclass(frozen=True)
class Toy:
    """``words`` tokens; p and q depend on the last two tokens, q on the place in the chain as well."""

    words: int
    seed: int
    sharp: float = 1.5

    def p(self, text: Text) -> np.ndarray:
        """The target's distribution after ``text``; one word in some contexts is impossible."""
        rng = np.random.default_rng([self.seed, 1, *text[-2:]])
        weights = np.exp(self.sharp * rng.normal(size=self.words))
        if rng.random() < 0.3:
            weights[rng.integers(self.words)] = 0
        return weights / weights.sum()

    def q(self, text: Text, step: int) -> np.ndarray:
        """The head's distribution at ``step`` of a chain, ``text`` holding what it drafted so far."""
        rng = np.random.default_rng([self.seed, 2, step, *text[-2:]])
        weights = np.exp(rng.normal(size=self.words)) * (self.p(text) + 0.1)
        return weights / weights.sum()

    def chain(self, text: Text, steps: int) -> Text:
        """The argmax chain drafted after ``text``."""
        drafted: Text = ()
        for step in range(steps):
            drafted += (int(self.q(text + drafted, step).argmax()),)
        return drafted

    def paths(self, text: Text, length: int) -> Iterator[tuple[Text, float]]:
        """Every continuation of ``text`` that is possible, with its probability."""
        for path in product(range(self.words), repeat=length):
            chance = float(np.prod([self.p(text + path[:i])[token] for i, token in enumerate(path)]))
            if chance > 0:
                yield path, chance


def kernel_children(p: Sequence[float], tokens: Sequence[int], coin: float, single: float, acc: float) -> int | None:
    """Which of the siblings ``tokens`` one coin takes, line by line after SGLang 0.5.23's
    kernels/jit/include/sgl_kernel/speculative/sampling.cuh, ``TreeSpeculativeSamplingTargetOnly``."""
    prob_acc = 0.0
    for place, token in enumerate(tokens):
        target_prob_single = p[token]
        prob_acc += target_prob_single
        if target_prob_single > 0 and (coin < prob_acc / acc or target_prob_single >= single):
            return place
    return None


def shares_by_coin(p: Sequence[float], tokens: Sequence[int], single: float, acc: float) -> list[float]:
    """The measure of the coins that take each sibling: the kernel at one coin between every two of its thresholds."""
    edges = sorted({0.0, 1.0, *(min(1.0, float(edge) / acc) for edge in np.cumsum([p[token] for token in tokens]))})
    shares = [0.0] * len(tokens)
    for low, high in pairwise(edges):
        taken = kernel_children(p, tokens, (low + high) / 2, single, acc)
        if taken is not None:
            shares[taken] += high - low
    return shares


def greedy_draft_rounds(toy: Toy, text: Text, end: int, steps: int) -> tuple[float, float]:
    """Expected rounds and accepted tokens of target-only with an argmax chain, until ``end`` tokens are there."""
    if len(text) >= end:
        return 0.0, 0.0
    drafted = toy.chain(text, steps)[: end - len(text)]
    rounds, accepted, chance = 1.0, 0.0, 1.0
    for step in range(len(drafted) + 1):
        here = text + drafted[:step]
        p = toy.p(here) if len(here) < end else np.zeros(toy.words)
        if step < len(drafted):
            accepted += chance * p[drafted[step]]
            # Refused: one of the other words, with its own probability.
            others = [word for word in range(toy.words) if word != drafted[step]]
        else:
            others = list(range(toy.words)) if len(here) < end else []
        for word in others:
            more = greedy_draft_rounds(toy, (*here, word), end, steps) if p[word] > 0 else (0.0, 0.0)
            rounds, accepted = rounds + chance * p[word] * more[0], accepted + chance * p[word] * more[1]
        if step < len(drafted):
            chance *= p[drafted[step]]
    return rounds, accepted


def rejection_rounds(toy: Toy, text: Text, end: int, steps: int) -> tuple[float, float]:
    """Expected rounds and accepted tokens of rejection with a sampled chain, until ``end`` tokens are there."""
    if len(text) >= end:
        return 0.0, 0.0

    def verify(here: Text, step: int) -> tuple[float, float]:
        """Expected later rounds, and accepted tokens from here on, with ``step`` tokens of this round taken."""
        if len(here) >= end:
            return 0.0, 0.0
        p = toy.p(here)
        if step == steps:
            return mixture(here, p)
        q = toy.q(here, step)
        later, accepted, refused = 0.0, 0.0, 0.0
        for token in range(toy.words):
            take = q[token] * min(1.0, p[token] / q[token])
            refused += q[token] - take
            if take > 0:
                more = verify((*here, token), step + 1)
                later, accepted = later + take * more[0], accepted + take * (1 + more[1])
        residual = np.maximum(p - q, 0)
        if refused > 1e-15:
            more = mixture(here, residual / residual.sum())
            later, accepted = later + refused * more[0], accepted + refused * more[1]
        return later, accepted

    def mixture(here: Text, chances: np.ndarray) -> tuple[float, float]:
        nexts = [(chance, rejection_rounds(toy, (*here, token), end, steps)) for token, chance in enumerate(chances)]
        return sum(c * more[0] for c, more in nexts if c > 0), sum(c * more[1] for c, more in nexts if c > 0)

    later, accepted = verify(text, 0)
    return 1 + later, accepted
