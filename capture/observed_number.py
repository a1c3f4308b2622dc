"""What a server was observed to accept, wherever it was said."""

from dataclasses import dataclass


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
