"""What a fault changes, and the words in which changes and kinds of faults are written."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import HeadConfig
from replay.engines.behaviour import Behaviour
from replay.engines.precision import Precision
from replay.engines.wiring import Wiring
from replay.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Subject:
    """What a fault changes: the taps fed, the head, how the engine runs it, whose embedding it reads (None: as the
    engine does), how trees lay out their KV, and the ``precision`` (engines/precision.py). ``layers`` counts the
    target's.

    ``said`` names the fields of the behaviour that were set, be it to what they were."""

    wiring: Wiring
    checkpoint: Checkpoint
    behaviour: Behaviour
    layers: int
    precision: Precision
    own_embedding: bool | None = None
    tree_kv: str | None = None
    said: frozenset[str] = frozenset()

    @property
    def config(self) -> HeadConfig:
        """The head's config."""
        return self.checkpoint.config

    def with_behaviour(self, **changes: object) -> "Subject":
        """With some fields of the behaviour replaced."""
        behaviour = replace(self.behaviour, **changes)  # type: ignore[arg-type]
        return replace(self, behaviour=behaviour, said=self.said.union(changes))

    def configured(self, **changes: object) -> "Subject":
        """With some fields of the head's config replaced."""
        config = replace(self.config, **changes)  # type: ignore[arg-type]
        return replace(self, checkpoint=replace(self.checkpoint, config=config))

    def with_tensors(self, changes: "Mapping[str, torch.Tensor]") -> "Subject":
        """With some of the head's tensors replaced."""
        tensors = {**self.checkpoint.tensors, **changes}
        return replace(self, checkpoint=replace(self.checkpoint, tensors=tensors))


Change = Callable[[Subject], Subject]


NO_REMEDY = "-"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One entry of the table (table.py). An empty part was forgotten; tests/faults/test_parts.py says which.

    Typed and listed: ``name`` and ``what`` it is; ``values``, their grammar as help shows it; ``default``, the value of
    a bare name (None: one must be given); ``change``, from a value to what it does, which raises UsageError for one
    that means nothing; ``kv``, its names in ``--kv``, each with the value it stands for (empty: typed behind a colon).

    For a diagnosis: ``reports``, public threads whose primary cause is of this kind, which make its prior;
    ``remedy``, what to change and where, in one sentence that may hold the braces of remedies.py, or ``NO_REMEDY``;
    ``changes_weights``, whether the head needs weights of its own; ``changes_feed``, whether most committed rows are
    fed other taps, tokens or positions.
    """

    name: str
    what: str
    values: str
    default: str | None
    change: Callable[[str], Change]
    reports: int = 0
    remedy: str = ""
    kv: Mapping[str, str] = field(default_factory=dict)
    changes_weights: bool = False
    changes_feed: bool = False


class FaultValueError(UsageError):
    """A value that a kind does not take; ``possible`` says which it does."""

    def __init__(self, kind: str, value: str, possible: str) -> None:
        super().__init__(f"fault {kind}={value} was asked for, possible values are {possible}; type {kind}=VALUE")
        self.possible = possible


def choice(kind: str, value: str, changes: Mapping[str, Change]) -> Change:
    """The change that stands under ``value``. Raises UsageError."""
    if value not in changes:
        raise FaultValueError(kind, value, ", ".join(changes))
    return changes[value]


def number_of(kind: str, value: str, possible: str, *, least: int | None = None) -> int:
    """``value`` as an integer of at least ``least``. Raises UsageError."""
    if re.fullmatch(r"[+-]?\d{1,9}", value, re.ASCII) is None or (least is not None and int(value) < least):
        raise FaultValueError(kind, value, possible)
    return int(value)


def positive_number(kind: str, value: str, possible: str) -> float:
    """``value`` as a number from 1e-30 to 1e30, in digits with a point or an exponent. Raises UsageError."""
    written = re.fullmatch(r"\d{1,9}(\.\d{1,17})?([eE][+-]?\d{1,2})?", value, re.ASCII)
    if written is None or not 1e-30 <= float(value) <= 1e30:
        raise FaultValueError(kind, value, possible)
    return float(value)


def behave(**changes: object) -> Change:
    """The change that replaces these fields of the behaviour."""
    return lambda subject: subject.with_behaviour(**changes)
