"""Results as JSON: the one way in which every command makes its document. docs/json.md says what is in each.

null stands for what is not known: a number that is not finite, a missing interval, None. An interval is two numbers. In
a dataclass it is a field of the type ``tuple[float, float]``, or of several of these; elsewhere ``interval_json`` says
that one is meant.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]

SCHEMA_VERSION = 1  # raised when a key goes or changes its meaning, not when one is added
OUTCOMES = ("better", "worse", "equal", "cannot tell")  # every word for how two things compare


def document(body: Mapping[str, object]) -> JsonObject:
    """The document of a command: the version of the schema, then ``body``."""
    return {"schema_version": SCHEMA_VERSION, **object_json(body)}


def object_json(value: object) -> JsonObject:
    """A dataclass or a mapping as a JSON object, in the order of its fields."""
    converted = json_value(value)
    assert isinstance(converted, dict)
    return converted


def json_value(value: object) -> Any:
    """``value`` in JSON's types. Raises TypeError for what has no place in a document."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {_key(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if is_dataclass(value):
        return {field.name: _field(getattr(value, field.name), field.type) for field in fields(value)}
    raise TypeError(f"{type(value).__name__} is no JSON value")


def interval_json(bounds: tuple[float, float]) -> list[float] | None:
    """The two ends; None where there is no interval."""
    return list(bounds) if all(map(math.isfinite, bounds)) else None


def _field(value: object, kind: object) -> Any:
    if kind == tuple[tuple[float, float], ...]:
        return [interval_json(one) for one in value]  # type: ignore[attr-defined]
    return interval_json(value) if kind == tuple[float, float] else json_value(value)  # type: ignore[arg-type]


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{key!r} is no key of a JSON object")
    return key
