"""What `replay time` is asked for, and the prompts that it asks."""

import random
from dataclasses import dataclass
from pathlib import Path

from replay.capture.client.capture import encode
from replay.capture.client.facts import ServerFacts
from replay.capture.options import ServerOptions
from replay.capture.prompts import PromptFile

_RANDOM_IDS = (32, 256)  # token ids that every vocabulary has, and that stand for no image


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """What to time. None: batches and a context that the server takes. ``tokens``: output of each request."""

    server: str
    batches: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    prompts: Path | None = None
    raw: bool = False
    tokens: int = 64
    repeats: int = 5
    seed: int = 0
    api_key: str | None = None
    allow_recording: bool = False
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run together, and tokens of each in the middle of its output."""

    batch: int
    context: int


class TimedPrompts:
    """Token ids for each request of a load: texts of a file one after another, or ids of chance, new in each repeat.

    Each repeat goes on in the file where the one before it ended. What a file of n texts leaves alike: every n-th
    request.
    """

    def __init__(self, options: TimingOptions, facts: ServerFacts, prompts: PromptFile | None) -> None:
        self.seed = options.seed
        self.sha256: str | None = None
        self.texts: tuple[tuple[int, ...], ...] = ()
        if options.prompts is not None and prompts is not None:
            asked = ServerOptions(options.server, options.prompts, Path(), raw=options.raw, max_new_tokens=1)
            self.texts = tuple(request.prompt_ids for request in encode(prompts, facts, asked).requests)
            self.sha256 = prompts.sha256

    def ids(self, load: Load, length: int, repeat: int) -> list[list[int]]:
        """``length`` ids for each request of ``load``; of texts the last one is whole where it fits."""
        if not self.texts:
            chance = random.Random(f"{self.seed} {load} {repeat}")
            return [[chance.randrange(*_RANDOM_IDS) for _ in range(length)] for _ in range(load.batch)]
        return [self._joined(repeat * load.batch + request, length) for request in range(load.batch)]

    def _joined(self, last: int, length: int) -> list[int]:
        pieces: list[tuple[int, ...]] = []
        missing = length
        while missing > 0:
            pieces.append(self.texts[(last - len(pieces)) % len(self.texts)])
            missing -= len(pieces[-1])
        return [token for piece in reversed(pieces) for token in piece][-length:]
