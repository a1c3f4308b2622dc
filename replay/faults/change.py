"""What a fault changes, and the words in which changes are written."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.config import HeadConfig
from replay.engines.behaviour import Behaviour
from replay.engines.precision import Precision
from replay.engines.wiring import Wiring
from replay.errors import ReplayError, UsageError

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


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One line of the table. ``values`` is the grammar as help shows it, ``default`` the value of a bare name (None:
    one must be given)."""

    name: str
    what: str
    values: str
    default: str | None
    change: Callable[[str], Change]


def set_fields(before: Subject, after: Subject) -> set[str]:
    """Names of what a change has set: fields of the behaviour, of the config and its RoPE, tensors, and the rest."""
    old, new = _flat(before), _flat(after)
    return set(after.said) | {name for name in new if name not in old or new[name] != old[name]}


def undone(names: Iterable[str], before: Subject, after: Subject, change: Change, healthy: Subject) -> set[str]:
    """Those of ``names``, fields that another fault had set, of which a change leaves nothing.

    It then gives there what it gives alone. Where it builds on what it finds it does not: taps are moved, formats and
    skipped norms added, rows of tensors stacked in another order.
    """
    try:
        alone = change(healthy)
    except ReplayError:  # alone it cannot be, so it builds on the other
        return set()
    old, new, single = _flat(before), _flat(after), _flat(alone)
    tensors, lone = after.checkpoint.tensors, alone.checkpoint.tensors
    loaded = {name for name in names if name in tensors and bool((tensors[name] == lone[name]).all())}
    return loaded | {name for name in names if name not in tensors and old[name] != new[name] == single[name]}


def _flat(subject: Subject) -> dict[str, Any]:
    """Every field that a change can set, by name; tensors by identity."""
    behaviour = {item.name: getattr(subject.behaviour, item.name) for item in fields(subject.behaviour)}
    rope = {f"rope.{item.name}": getattr(subject.config.rope, item.name) for item in fields(subject.config.rope)}
    config = {item.name: getattr(subject.config, item.name) for item in fields(subject.config) if item.name != "rope"}
    tensors = {name: id(tensor) for name, tensor in subject.checkpoint.tensors.items()}
    own = {name: getattr(subject, name) for name in ("wiring", "precision", "own_embedding", "tree_kv")}
    return {**tensors, **config, **rope, **behaviour, **own}


def choice(kind: str, value: str, changes: Mapping[str, Change]) -> Change:
    """The change that stands under ``value``. Raises UsageError."""
    if value not in changes:
        raise refuse(kind, value, ", ".join(changes))
    return changes[value]


def number_of(kind: str, value: str, possible: str, *, least: int | None = None) -> int:
    """``value`` as an integer of at least ``least``. Raises UsageError."""
    if re.fullmatch(r"[+-]?\d{1,9}", value, re.ASCII) is None or (least is not None and int(value) < least):
        raise refuse(kind, value, possible)
    return int(value)


def refuse(kind: str, value: str, possible: str) -> UsageError:
    """The refusal of a value."""
    return UsageError(f"fault {kind}={value} was asked for, possible values are {possible}; type {kind}=VALUE")


def behave(**changes: object) -> Change:
    """The change that replaces these fields of the behaviour."""
    return lambda subject: subject.with_behaviour(**changes)
