"""Acceptance rules: how they are spelled, and with which probability each takes a drafted token. Pure functions.

- ``greedy``: the target's choice or nothing (accept.py).
- ``target-only[:single=S,acc=A]``: SGLang's rule for sampled requests. Siblings share one coin and their p add up: the
  next one is taken where coin < (sum of p so far) / A, or p >= S. With A = S = 1 the output is distributed as the
  target's (sglang 0.5.23 kernels/jit/include/sgl_kernel/speculative/sampling.cuh
  ``TreeSpeculativeSamplingTargetOnly``).
- ``rejection``: the head samples from q and a token is taken with min(1, p/q), which leaves the output distributed as
  the target's (Leviathan et al., arXiv 2211.17192, Chen et al., arXiv 2302.01318; sglang 0.5.23
  kernels/ops/speculative/reject_sampling.py, ``--speculative-use-rejection-sampling``: q = softmax(logits / T)).
- ``typical[:epsilon=E,delta=D]``: taken where p > min(E, D exp(-entropy of p)) (Medusa, arXiv 2401.10774, section
  2.3.1; the defaults are those of FasterDecoding/Medusa ``medusa/model/utils.py``).

p is the target's probability after temperature, top-k and top-p (target_probability.py).

Suffixes: A anchors, N siblings or drafted nodes in the order in which they are tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from replay.errors import UsageError

Floats: TypeAlias = NDArray[np.float64]

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "greedy": (),
    "target-only": ("single", "acc"),
    "rejection": (),
    "typical": ("epsilon", "delta"),
}
GRAMMAR = "greedy, target-only[:single=S,acc=A], rejection, typical[:epsilon=E,delta=D]"
MAX_STEPS = 64  # of a draft


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule with its thresholds, each above 0 and up to 1; those of other rules stand at their defaults."""

    name: str = "greedy"
    single: float = 1.0
    acc: float = 1.0
    epsilon: float = 0.09
    delta: float = 0.3

    def __str__(self) -> str:
        """As it is typed, without what is default."""
        said = [
            f"{field.name}={getattr(self, field.name):g}"
            for field in fields(self)
            if field.name in PARAMETERS[self.name] and getattr(self, field.name) != field.default
        ]
        return self.name + (f":{','.join(said)}" if said else "")

    @property
    def lossless(self) -> bool:
        """Whether the output is distributed as the target's own."""
        return self.name in ("greedy", "rejection") or (self.name == "target-only" and self.single == self.acc == 1)

    @property
    def chains_only(self) -> bool:
        """Whether trees have no such rule here: SGLang samples chains only, Medusa's choice among paths is another."""
        return self.name in ("rejection", "typical")

    @property
    def reads_entropy(self) -> bool:
        """Whether the target's whole distribution has a say, beside the probability of the drafted token."""
        return self.name == "typical"


def parse_rule(text: str) -> Rule:
    """``target-only:single=0.5,acc=0.9`` → Rule. Raises UsageError for a rule or threshold that cannot be."""
    name, colon, rest = text.partition(":")
    if colon and not rest:
        raise UsageError(
            f"acceptance rule {text!r} ends in a colon, thresholds belong behind it; possible are {GRAMMAR}"
        )
    if name not in PARAMETERS:
        raise UsageError(f"acceptance rule {text!r} was asked for, possible are {GRAMMAR}")
    values: dict[str, float] = {}
    for part in rest.split(",") if colon else []:
        key, _, number = part.partition("=")
        if key not in PARAMETERS[name] or key in values:
            possible = f"{' and '.join(PARAMETERS[name])}, each once" if PARAMETERS[name] else "no thresholds"
            raise UsageError(f"rule {name} takes {possible}, not {part!r}; possible rules are {GRAMMAR}")
        values[key] = _threshold(name, key, number)
    return Rule(name, **values)


def _threshold(name: str, key: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not 0 < value <= 1:
        raise UsageError(f"{key} of rule {name} is a number above 0 and up to 1, not {number!r}; type {key}=0.5 or so")
    return value


def taken_shares(rule: Rule, p_AN: Floats, entropy_A: Floats) -> Floats:
    """Probability [A, N] with which each sibling is the one that is taken, all of them tried in order.

    ``p_AN`` is the target's probability of each, 0 where there is no sibling; ``entropy_A`` that of its distribution
    in nats (read by ``typical`` only). Not for ``rejection``, whose acceptance depends on q as well.
    """
    if rule.name == "typical":
        threshold_A = np.minimum(rule.epsilon, rule.delta * np.exp(-entropy_A))
        reached_AN = (p_AN > threshold_A[:, None]).astype(np.float64)
    else:
        reached_AN = np.minimum(1.0, np.cumsum(p_AN, axis=1) / rule.acc)
        reached_AN = np.where((p_AN > 0) & (p_AN >= rule.single), 1.0, reached_AN)
    # Up to and with sibling n, a coin takes one of them with the largest share so far.
    total_AN = np.maximum.accumulate(reached_AN, axis=1)
    shares_AN: Floats = np.diff(total_AN, axis=1, prepend=0.0)
    return shares_AN


def share_ratios(rule: Rule, p_AN: Floats, shares_AN: Floats) -> Floats:
    """shares / p [A, N]: how much likelier a token is to be taken than to be sampled.

    At p = 0, the lower bound of a token of which nothing is recorded, the limit: 0 behind siblings that take all coins.
    """
    if rule.lossless:
        return np.ones_like(p_AN)
    limit = 0.0 if rule.name == "typical" else 1 / rule.acc
    taken_AN = np.logical_or.accumulate(p_AN >= rule.single, axis=1)
    open_AN = (np.cumsum(p_AN, axis=1) < rule.acc) & ~taken_AN
    ratios_AN: Floats = np.where(open_AN, limit, 0.0)
    np.divide(shares_AN, p_AN, out=ratios_AN, where=p_AN > 0)
    return ratios_AN
