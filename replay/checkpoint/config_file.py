"""A checkpoint's JSON: read strictly, then typed field by field. Each refusal is a CheckpointError with an advice.

A config leaves out what its program has a default for, and writes null for the same; here both are None.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.errors import CheckpointError
from replay.traces.fields import is_integer, is_number, read_json, show
from replay.traces.files import describe_path

CONFIG = "config.json"
_MOST_JSON = 1 << 24  # bytes of a config.json
_LARGEST = 1 << 40  # of a count
_LARGEST_SIZE = (1 << 31) - 1
_MOST_TEXT = 200  # characters of a word
_MOST_IDS = 256  # layer ids in a list
_LARGEST_ID = 10_000  # no target has as many layers


@dataclass(frozen=True, slots=True)
class Settings:
    """Typed access to one JSON object of a config; ``where`` is what messages and evidence call it."""

    values: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        """Whether the field is there at all, be it null."""
        return key in self.values

    def count(self, key: str) -> int | None:
        value: int | None = self._read(key, lambda value: is_integer(value, 0, _LARGEST), "a whole number")
        return value

    def size(self, key: str, default: int | None = None, *, most: int = _LARGEST_SIZE) -> int:
        """A count from 1 to ``most``, which must be there unless there is a ``default``."""
        wanted = f"an integer from 1 to {most}"
        return int(self._needed(key, default, lambda value: is_integer(value, 1, most), wanted))

    def number(self, key: str) -> float | None:
        value: float | None = self._read(key, lambda value: is_number(value, -1e300, 1e300), "a number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0, which must be there unless there is a ``default``."""
        fits = lambda value: is_number(value, 0, 1e300) and value > 0  # noqa: E731
        return float(self._needed(key, default, fits, "a positive number"))

    def flag(self, key: str) -> bool | None:
        value: bool | None = self._read(key, lambda value: type(value) is bool, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A word: text of this length or with control characters is none that a config has."""
        value: str | None = self._read(key, lambda value: isinstance(value, str), "a string")
        if value is not None and not is_word(value):
            raise self.refuse(key, f"a string of at most {_MOST_TEXT} printable characters")
        return value

    def ids(self, key: str) -> tuple[int, ...] | None:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(is_integer(item, -_LARGEST_ID, _LARGEST_ID) for item in value)

        value = self._read(key, fits, "a list of layer ids, such as [1, 14, 26]")
        if value is not None and len(value) > _MOST_IDS:
            raise self.refuse(key, f"a list of at most {_MOST_IDS} layer ids")
        return None if value is None else tuple(value)

    def inner(self, key: str) -> "Settings":
        """The object there, empty where there is none."""
        value = self._read(key, lambda value: isinstance(value, dict), "an object")
        return Settings(value or {}, f"{self.where}: {key}")

    def refuse(self, key: str, wanted: str) -> CheckpointError:
        """What to raise where the value of ``key`` is not the one ``wanted``."""
        return CheckpointError(
            f"{self.where}: {key} is {show(self.values.get(key))}, {wanted} was expected; mend the file"
        )

    def _read(self, key: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        value = self.values.get(key)
        if value is not None and not fits(value):
            raise self.refuse(key, wanted)
        return value

    def _needed(self, key: str, default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        value = self._read(key, fits, wanted)
        if value is None and default is None:
            raise CheckpointError(f"{self.where} has no {key}, {wanted} was expected; add it")
        return default if value is None else value


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint's folder. Raises CheckpointError."""
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} {describe_path(folder)}; give the folder that holds a checkpoint's {CONFIG}")
    path = folder / CONFIG
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} holds no {CONFIG}; give the folder of a checkpoint")
    return read_object(path, _MOST_JSON)


def read_object(path: Path, most: int) -> dict[str, Any]:
    """The JSON object in a checkpoint's file of at most ``most`` bytes. Raises CheckpointError."""
    document = read_json(path, most, _refusal, follow=True, constants=True)
    if not isinstance(document, dict):
        raise _refusal(f"{path} holds {show(document)}, a JSON object was expected")
    return document


def is_word(value: object) -> bool:
    """Whether it is text of a word's length that a terminal shows as it stands."""
    return isinstance(value, str) and len(value) <= _MOST_TEXT and value.isprintable()


def _refusal(said: str) -> CheckpointError:
    return CheckpointError(f"{said}; mend the file, or copy or export the checkpoint again")
