"""How far a diagnosis is: events for whoever waits."""

from collections.abc import Callable
from dataclasses import dataclass

from replay.simulator.progress import ReplayProgress


@dataclass(frozen=True, slots=True)
class Trying:
    """``done`` of ``total`` hypotheses (or other ``unit``s) of this stage replayed.

    ``part``: what is done of those that are under way, as a number of units.
    """

    stage: str
    done: int
    total: int
    part: float = 0.0
    unit: str = "hypotheses"


Tell = Callable[[Trying], None]


def within(tell: Tell, stage: str, done: int, many: int, total: int, unit: str = "hypotheses") -> "Told":
    """What tells of ``many`` units that are replayed together, after ``done`` of ``total``."""

    def on_event(event: ReplayProgress) -> None:
        share = (event.done + event.part) / event.total if event.total else 0.0
        tell(Trying(stage, done, total, many * share, unit))

    return on_event


Told = Callable[[ReplayProgress], None]


def say_nothing(_: Trying) -> None:
    """For whoever does not wait."""
