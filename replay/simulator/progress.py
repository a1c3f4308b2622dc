"""How far a replay is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """``done`` of ``total`` requests replayed under all variants; ``stage`` says in a few words for what.

    ``part``: what is done of the requests that are under way, as a number of requests.
    """

    done: int
    total: int
    stage: str = "replaying"
    part: float = 0.0
