"""JSON that somebody else wrote: parsed strictly, and typed field by field with refusals that name what was seen."""

import json
import re
from typing import Any

from replay.errors import TraceCorruptError

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Fields:
    """Typed access to one JSON object; each refusal names the field, its value and what was possible."""

    def __init__(self, where: str, value: object) -> None:
        if not isinstance(value, dict):
            raise TraceCorruptError(f"{where} holds {show(value)} where a JSON object must stand")
        self.where = where
        self.values: dict[str, Any] = value

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise TraceCorruptError(f"{self.where} lacks the field {name}")
        return self.values[name]

    def refuse(self, name: str, must: str) -> TraceCorruptError:
        return TraceCorruptError(f"{self.where}: {name} is {show(self.values.get(name))}, must be {must}")

    def object(self, name: str) -> "Fields":
        return Fields(f"{self.where}: {name}", self.get(name))

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.get(name) is None else self.text(name)

    def choice(self, name: str, possible: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in possible:
            raise self.refuse(name, "one of " + ", ".join(possible))
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self.get(name) is None else self.integer(name, low, high)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        value = self.get(name)
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and low <= item <= high for item in value
        ):
            raise self.refuse(name, f"a list of integers from {low} to {high}")
        return tuple(value)

    def optional_integers(self, name: str, low: int, high: int) -> tuple[int, ...] | None:
        return None if self.get(name) is None else self.integers(name, low, high)

    def number(self, name: str, low: float, high: float) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "a list of strings")
        return tuple(value)

    def sha256(self, name: str) -> str:
        value = self.text(name)
        if not _SHA256.fullmatch(value):
            raise self.refuse(name, "64 hexadecimal digits in lower case")
        return value

    def optional_sha256(self, name: str) -> str | None:
        return None if self.get(name) is None else self.sha256(name)


def parse_json(text: str | bytes, source: str) -> object:
    """JSON as RFC 8259 has it: no NaN, no repeated keys. Raises TraceCorruptError."""
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TraceCorruptError(f"{source} is not valid JSON: {error}") from error


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def show(value: object) -> str:
    """A value short enough for a one-sentence message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
