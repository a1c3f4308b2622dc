"""The slow, obvious twin of states that cross between requests: those of one batch, step after step in lockstep.

Each is a run of a twin (``Twin.drafting``, ``trees.growing``) that gives its state before each step, and goes on from
the one that it is sent.
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

State = TypeVar("State")
Made = TypeVar("Made")


def mix(states: Sequence[State], crossed: str) -> list[State]:
    """The states of a batch, in the order of its rows, as they are handed on."""
    given = list(states)
    if crossed == "previous":
        return given[-1:] + given[:-1]
    if crossed == "next":
        return given[1:] + given[:1]
    if crossed == "reversed":
        return given[::-1]
    if crossed == "first":
        return given[:1] * len(given)
    if crossed == "pairs":
        for first in range(0, len(given) - 1, 2):
            given[first], given[first + 1] = given[first + 1], given[first]
    return given


def run_batch(
    runs: Sequence[Generator[State, State, Made]], crossed: str, *, once: bool
) -> tuple[list[Made], list[list[State]]]:
    """What each request of a batch makes, in the order of its rows; and of each step the states, as they were made."""
    made: list[Made] = []
    handed: list[State | None] = [None] * len(runs)
    steps: list[list[State]] = []
    while not made:
        states: list[State] = []
        for run, state in zip(runs, handed, strict=True):
            try:
                states.append(next(run) if state is None else run.send(state))
            except StopIteration as ended:
                made.append(ended.value)
        if states:
            crosses = not (once and steps)
            steps.append(states)
            handed = [*(mix(states, crossed) if crosses else states)]
    assert len(made) == len(runs)  # all of a batch draft as many steps
    return made, steps
