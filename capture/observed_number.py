"""What a server was observed to accept, wherever it was said."""

from dataclasses import dataclass

from replay.errors import UsageError


@dataclass(frozen=True, slots=True)
class Observed:
    """What a server reported. ``histogram`` and ``rounds`` where it counted them, else None; ``source`` in words, with
    the definition where it is another engine's."""

    accept_length: float
    source: str
    rounds: int | None = None
    histogram: tuple[int, ...] | None = None
    num_steps: int | None = None
    num_draft_tokens: int | None = None


def refuse_beyond(given: Observed, steps: int) -> None:
    """Raises UsageError for an accept length that ``steps`` drafted tokens a round cannot give."""
    if given.accept_length > steps + 1:
        raise UsageError(
            f"an accept length of {given.accept_length:g} was observed, {steps} steps give at most {steps + 1}; "
            "type the server's --steps"
        )
