"""Whether what was observed can be what a head does at all, before anything is made of it."""

import math

from replay.analysis.diagnosis.evidence import DRAFTED
from replay.diagnosis.observed import Observation

_ROUNDED = 0.005  # a log prints two digits
_LEAST_ROUNDS = 20
# A replay that itself comes so near to an end of the scale makes that end nothing odd: outputs may loop, a head be new.
_NEAR = 0.05


def implausible(observation: Observation, steps: int, replayed: float) -> str | None:
    """Why no fault can be named from an accept length at the very end of what ``steps`` can give; None where it is not.

    ``replayed`` is the accept length of the healthy replay.
    """
    length, rounds = _observed(observation)
    if rounds < _LEAST_ROUNDS:
        return None
    if length >= steps + 1 - _ROUNDED and not replayed >= steps + 1 - _NEAR:
        return (
            f"an accept length of {length:.4g} in {steps} steps is all that can be: every drafted token was accepted, "
            f"which no head does that only predicts its target (a healthy replay gives {replayed:.2f}); look for "
            "simulated acceptance (SGLANG_SIMULATE_ACC_LEN), NaN in the logits, or a draft that is a copy of the target"
        )
    if length <= 1 + _ROUNDED and observation.kind != DRAFTED and not replayed <= 1 + _NEAR:
        return (
            f"an accept length of {length:.4g} is the least that can be: not one drafted token was accepted, which "
            f"many faults do, as do a head that was not loaded and NaN in its logits (a healthy replay gives "
            f"{replayed:.2f}); the length alone names none of them"
        )
    return None


def _observed(observation: Observation) -> tuple[float, float]:
    """The accept length, and of how many rounds; of a number from elsewhere that is taken to be many."""
    if observation.given is not None:
        return observation.given.accept_length, observation.given.rounds or math.inf
    counts = list(observation.histograms.values())
    rounds = sum(map(sum, counts))
    accepted = sum(number * count for one in counts for number, count in enumerate(one))
    return 1 + accepted / rounds if rounds else math.nan, rounds
