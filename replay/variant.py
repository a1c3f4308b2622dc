"""A variant: everything that determines a replay, and how a sweep spells its members."""

from dataclasses import dataclass, fields
from itertools import product

from replay.engines import NUMERICS, PRECISIONS, engine_profile
from replay.errors import UsageError
from replay.wiring import Wiring

MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """What may differ between two replays of one trace.

    ``draft`` names one of the heads given to ``simulate``. ``wiring`` None means the one that the head states, read
    as ``engine`` reads it; ``precision`` None the target's; ``numerics`` None the engine's. This version replays
    chains (``topk`` 1) with committed draft KV from true features (``kv`` refresh), greedily verified, no faults.
    """

    draft: str
    wiring: Wiring | None = None
    steps: int = 5
    topk: int = 1
    precision: str | None = None
    numerics: str | None = None
    kv: str = "refresh"
    verify: str = "greedy"
    engine: str = "sglang"

    def __post_init__(self) -> None:
        """Raises UsageError for a value that cannot be."""
        engine_profile(self.engine)
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(f"{self.steps} steps were asked for, possible are 1 to {MAX_STEPS}")
        _one_of("topk", self.topk, (1,), "this version replays chains")
        _one_of("precision", self.precision, (None, *PRECISIONS))
        _one_of("numerics", self.numerics, (None, *NUMERICS))
        _one_of("kv", self.kv, ("refresh",))
        _one_of("verify", self.verify, ("greedy",))

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the target verifies per round, the known one included: a chain of K steps has K + 1."""
        return self.steps + 1


def _one_of(field: str, value: object, possible: tuple[object, ...], why: str = "") -> None:
    if value not in possible:
        choices = ", ".join(str(choice) for choice in possible if choice is not None)
        raise UsageError(
            f"{field} {value!r} was asked for, possible {'is' if len(possible) == 1 else 'are'} {choices}"
            + (f": {why}" if why else "")
        )


def sweep(**choices: list[object]) -> list[Variant]:
    """Every combination of the given values, a field each: ``sweep(draft=["h"], steps=[1, 3])``."""
    names = [field.name for field in fields(Variant) if field.name in choices]
    return [Variant(**dict(zip(names, values, strict=True))) for values in product(*(choices[name] for name in names))]


def name_variants(variants: list[Variant]) -> list[str]:
    """A short distinct name for each, made of the fields in which they differ."""
    columns = [field.name for field in fields(Variant)]
    differing = [name for name in columns if len({getattr(variant, name) for variant in variants}) > 1]
    if not differing:
        differing = ["wiring"]
    names = [" ".join(_spell(name, getattr(variant, name)) for name in differing) for variant in variants]
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[place] = f"{name} #{seen[name]}"
    return names


def _spell(name: str, value: object) -> str:
    if name in ("draft", "wiring", "precision", "numerics"):
        return str(value)
    return f"{name}={value}"
