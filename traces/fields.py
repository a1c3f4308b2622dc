"""JSON that somebody else wrote: read strictly, and typed field by field with refusals that name what was seen.

This is the one way in for foreign JSON: trace files, checkpoints, server answers, prompts. A ``refusal`` makes the
error of a sentence, so that each reader raises the kind that its callers know, with its own advice at the end.
"""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from replay.errors import TraceCorruptError
from replay.traces.files import read_small

Refusal = Callable[[str], Exception]

MOST_DEPTH = 64  # objects and lists inside each other: more than any file of ours or of a checkpoint has
MOST_PARTS = 1 << 21  # names, objects and lists of a document: each takes some 200 bytes of memory
_MOST_DIGITS = 308  # of a whole number: a float holds no more
_SHOWN = 60  # characters of a foreign value in a message
_TOO_DEEP = f"it nests deeper than {MOST_DEPTH} levels"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DIGITS = re.compile(r"[0-9]{1,9}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Fields:
    """Typed access to one JSON object; each refusal names the field, its value and what was possible.

    Every field must be there; the ``optional`` ones may be null.
    """

    def __init__(self, where: str, value: object, refusal: Refusal = TraceCorruptError) -> None:
        if not isinstance(value, dict):
            raise refusal(f"{where} holds {show(value)} where a JSON object must stand")
        self.where = where
        self.values: dict[str, Any] = value
        self._refusal = refusal

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise self._refusal(f"{self.where} lacks the field {name}")
        return self.values[name]

    def refuse(self, name: str, must: str) -> Exception:
        return self._refusal(f"{self.where}: {show_name(name)} is {show(self.values.get(name))}, must be {must}")

    def object(self, name: str) -> "Fields":
        return Fields(f"{self.where}: {show_name(name)}", self.get(name), self._refusal)

    def objects(self, name: str) -> "list[Fields]":
        value = self.get(name)
        if not isinstance(value, list):
            raise self.refuse(name, "a list of objects")
        return [Fields(f"{self.where}: {name}[{place}]", item, self._refusal) for place, item in enumerate(value)]

    def only(self, possible: Sequence[str]) -> None:
        """Refuse fields that are not ``possible``."""
        if odd := sorted(self.values.keys() - set(possible)):
            raise self._refusal(f"{self.where} has the field {show_name(odd[0])}, possible are {', '.join(possible)}")

    def text(self, name: str, most: int | None = None) -> str:
        """A string, of at most ``most`` characters."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        if most is not None and len(value) > most:
            raise self.refuse(name, f"a string of at most {most} characters")
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
        if not is_integer(value, low, high):
            raise self.refuse(name, f"an integer from {low} to {high}")
        return int(value)

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self.get(name) is None else self.integer(name, low, high)

    def integers(self, name: str, low: int, high: int, most: int | None = None) -> tuple[int, ...]:
        """A list of at most ``most`` integers."""
        value = self.get(name)
        if not isinstance(value, list) or not all(is_integer(item, low, high) for item in value):
            raise self.refuse(name, f"a list of integers from {low} to {high}")
        if most is not None and len(value) > most:
            raise self.refuse(name, f"a list of at most {most} integers")
        return tuple(value)

    def optional_integers(self, name: str, low: int, high: int, most: int | None = None) -> tuple[int, ...] | None:
        return None if self.get(name) is None else self.integers(name, low, high, most)

    def number(self, name: str, low: float, high: float) -> float:
        value = self.get(name)
        if not is_number(value, low, high):
            raise self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def texts(self, name: str, most: int | None = None) -> tuple[str, ...]:
        """A list of at most ``most`` strings."""
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "a list of strings")
        if most is not None and len(value) > most:
            raise self.refuse(name, f"a list of at most {most} strings")
        return tuple(value)

    def sha256(self, name: str) -> str:
        value = self.text(name)
        if not _SHA256.fullmatch(value):
            raise self.refuse(name, "64 hexadecimal digits in lower case")
        return value

    def optional_sha256(self, name: str) -> str | None:
        return None if self.get(name) is None else self.sha256(name)


def is_integer(value: object, low: int, high: int) -> bool:
    """Whether it is a whole number in that range; true and false are none."""
    return type(value) is int and low <= value <= high


def is_number(value: object, low: float, high: float) -> bool:
    """Whether it is a number in that range; true, false and NaN are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def read_json(
    path: Path,
    most: int,
    refusal: Refusal = TraceCorruptError,
    *,
    follow: bool = False,
    constants: bool = False,
) -> object:
    """The JSON in a plain file of at most ``most`` bytes; a larger one, a pipe or a device is not read.

    Links are refused unless ``follow``: hub caches are folders of links. ``constants`` as in ``parse_json``. Raises
    what ``refusal`` makes, as ``parse_json`` does.
    """
    try:
        data = read_small(path, most, follow=follow)
    except TraceCorruptError as error:
        raise refusal(str(error)) from error
    return parse_json(data, str(path), refusal, constants=constants)


def parse_json(
    text: str | bytes, source: str, refusal: Refusal = TraceCorruptError, *, constants: bool = False
) -> object:
    """JSON as RFC 8259 has it, in UTF-8 without a mark: no NaN, no key twice.

    It is no deeper than MOST_DEPTH and has at most MOST_PARTS names, objects and lists; whole numbers have at most 308
    digits.

    ``constants``: NaN and Infinity are numbers that stand where Python writers put them, such as Transformers 4
    (``"time_step_limit": [0.0, Infinity]``). Whoever reads such a field refuses it then.
    Raises what ``refusal`` makes of one sentence that begins with ``source``.
    """
    try:
        return _parse(text, constants)
    except RecursionError as error:
        raise refusal(f"{source} is not valid JSON: {_TOO_DEEP}") from error
    except (json.JSONDecodeError, _UnfitError) as error:
        raise refusal(f"{source} is not valid JSON: {error}") from error


class _UnfitError(ValueError):
    """What Python's reader takes, and RFC 8259 or we do not."""


def _parse(text: str | bytes, constants: bool) -> object:
    text = _decoded(text)
    if sum(map(text.count, "{[:")) > MOST_PARTS:  # those inside of strings too: no honest document comes near
        raise _UnfitError(f"it holds more than {MOST_PARTS} names, objects and lists")
    strict: dict[str, Any] = {} if constants else {"parse_constant": _no_constant, "parse_float": _finite}
    document = json.loads(text, object_pairs_hook=_distinct, parse_int=_whole, **strict)
    _check_depth(document)
    if _SURROGATE.search(text):
        _check_text(document)
    return document


def _decoded(text: str | bytes) -> str:
    if isinstance(text, bytes):
        if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise _UnfitError("it is UTF-16; save it as UTF-8")
        if b"\0" in text:
            raise _UnfitError(f"it holds a zero byte, first at byte {text.index(0)}; save it as UTF-8 text")
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise _UnfitError(f"it is not UTF-8 ({error.reason} at byte {error.start})") from error
    if text.startswith("\ufeff"):
        raise _UnfitError("it begins with a byte order mark; save it as UTF-8 without one")
    return text


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _UnfitError(f"the key {show(counts.most_common(1)[0][0])} stands twice")
    return result


def _whole(digits: str) -> int:
    if (count := len(digits.removeprefix("-"))) > _MOST_DIGITS:
        raise _UnfitError(f"a number has {count} digits, at most {_MOST_DIGITS} are possible")
    return int(digits)


def _no_constant(name: str) -> object:
    raise _UnfitError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _UnfitError(f"the number {show_name(text)} is too large")
    return number


def _check_depth(document: object) -> None:
    """Level by level, so that nothing here recurses, nor in whoever reads the document after."""
    level = [document]
    for _ in range(MOST_DEPTH):
        level = [item for one in level for item in _inside(one) if isinstance(item, dict | list)]
        if not level:
            return
    raise _UnfitError(_TOO_DEEP)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_text(document: object) -> None:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _UnfitError("a string holds half a surrogate pair, which is no text") from error


def count_of(text: str) -> int | None:
    """The whole number from 0 on that ``text`` spells in at most nine digits; None for anything else."""
    return int(text) if _DIGITS.fullmatch(text) else None


def show(value: object) -> str:
    """A value short enough for a one-sentence message, control characters escaped."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def show_name(name: str) -> str:
    """A foreign name as it stands, where it is short and can be printed."""
    return name if name.isprintable() and len(name) <= _SHOWN else show(name)


def some(names: Sequence[str]) -> str:
    """The first few of foreign ``names``, and how many more there are."""
    shown = ", ".join(map(show_name, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
