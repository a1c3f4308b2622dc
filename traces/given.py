"""What Python callers pass, whom no type checker has told: held against what a function takes, and refused in words."""

from collections.abc import Mapping

from replay.errors import UsageError
from replay.traces.fields import show

Kinds = type | tuple[type, ...]


def check_given(name: str, value: object, kinds: Kinds, wanted: str) -> None:
    """``wanted`` says in words what belongs there and how to get it. Raises UsageError for a value of other ``kinds``.

    True and False are no numbers here.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise UsageError(f"{name} is {show(value)}, {wanted}")


def check_list(name: str, values: object, kinds: Kinds, wanted: str) -> None:
    """As ``check_given`` of each of a list or tuple. A bare text is none: it would be read letter by letter."""
    check_given(name, values, (list, tuple), wanted)
    assert isinstance(values, list | tuple)
    for number, value in enumerate(values):
        check_given(f"{name}[{number}]", value, kinds, wanted)


def check_named(name: str, values: object, kinds: Kinds, wanted: str) -> None:
    """As ``check_given`` of each value of a mapping by texts, which has one at least."""
    check_given(name, values, Mapping, wanted)
    assert isinstance(values, Mapping)
    if not values:
        raise UsageError(f"{name} is empty, {wanted}")
    for key, value in values.items():
        check_given(f"a name in {name}", key, str, wanted)
        check_given(f"{name}[{show(key)}]", value, kinds, wanted)


def check_callable(name: str, value: object, wanted: str) -> None:
    """Raises UsageError for what cannot be called."""
    if not callable(value):
        raise UsageError(f"{name} is {show(value)}, {wanted}")
