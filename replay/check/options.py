"""Words → server arguments, by the table of options that scripts/sglang_options.py reads from SGLang's own parser.

argparse reads them here as it does there: a name may be cut short while it is the only one that begins so, a value may
stand behind ``=``, and the last of a repeated option counts.
"""

import argparse
import difflib
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from typing import Any, NoReturn

from replay.check.launch_line import is_placeholder, is_substituted
from replay.errors import UsageError
from replay.traces.fields import parse_json, show, show_name

_TABLE = "sglang_options.json"
_COUNT = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", re.ASCII)
_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_WANTED = {"int": "a whole number", "float": "a number", "count": "a whole number, such as 8192, 8k or 8Ki",
           "json": "JSON"}  # fmt: skip
_SHOWN = 8  # unknown options that are named
_COMPARED = 64  # characters of what was typed that are compared with what is known
_MOST_DIGITS = 18  # of a number that means anything here


@dataclass(frozen=True, slots=True)
class Option:
    """``names`` as typed, ``field`` as in SGLang's arguments; ``kind``: text, int, float, count, json, flag or switch.

    ``yaml``: whether a file of ``--config`` may hold it.
    """

    names: tuple[str, ...]
    field: str
    kind: str = "text"
    nargs: str | None = None
    choices: tuple[str | int, ...] | None = None
    yaml: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """What SGLang's parser stops at, in the words of a finding. ``field`` is empty for words that belong to none."""

    field: str
    what: str
    seen: str
    expected: str
    fix: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """``given``: values by field, of the options that stand there. ``open``: whether words were left to the shell."""

    given: Mapping[str, Any]
    refused: tuple[Refusal, ...] = ()
    open: bool = False


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A value that SGLang's parser does not take."""

    text: str


_UNKNOWN = object()  # a value that the shell puts in


@functools.cache
def table() -> tuple[Option, ...]:
    """Every option of the server, in the order in which its parser lists them."""
    rows = json.loads(resources.files("replay.check").joinpath(_TABLE).read_text(encoding="utf-8"))["options"]
    return tuple(map(_option, rows))


def _option(row: Mapping[str, Any]) -> Option:
    choices = row.get("choices")
    return Option(tuple(row["names"]), row["field"], row["kind"], row.get("nargs"),
                  None if choices is None else tuple(choices), row.get("yaml", True))  # fmt: skip


def read_options(words: Sequence[str], *, more: Sequence[Option] = (), strict: bool = True) -> Arguments:
    """``more``: options of the command beside those of the table. Words that belong to no option are refused, or passed
    over where the command may have others (not ``strict``)."""
    options = (*table(), *more)
    by_field = {option.field: option for option in options}
    try:
        namespace, extra = _parser(options).parse_known_args(list(words))
    except _StopError as stop:
        return Arguments({}, (_structural(str(stop)),))
    values = vars(namespace)
    refused = [_wrong(by_field[field], wrong) for field, wrong in _wrongs(values)]
    if strict:
        refused += _unknown(extra, options)
    given = {field: value for field, value in values.items() if not _unread(value)}
    return Arguments(given, tuple(refused), any(is_substituted(word) for word in extra))


class _StopError(Exception):
    """argparse gave up; its message."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _StopError(message)


@functools.cache
def _parser(options: tuple[Option, ...]) -> _Parser:
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for option in options:
        if option.kind == "flag":
            parser.add_argument(*option.names, dest=option.field, action="store_true")
        elif option.kind == "switch":
            parser.add_argument(option.names[0], dest=option.field, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(*option.names, dest=option.field, nargs=option.nargs, type=_reader(option))
    return parser


def _reader(option: Option) -> Any:
    """What argparse calls with a word: it never raises, so that one wrong value hides no other."""

    def read(word: str) -> Any:
        if is_substituted(word) or is_placeholder(word):
            return _UNKNOWN
        try:
            value = _converted(option.kind, word)
        except (ValueError, UsageError):
            return _Wrong(word)
        return value if option.choices is None or value in option.choices else _Wrong(word)

    return read


def _converted(kind: str, word: str) -> Any:
    if kind == "json":
        return parse_json(word, "the value", UsageError, constants=True)
    if kind == "float":
        return float(word)
    if kind not in ("int", "count"):
        return word
    shortened = _COUNT.fullmatch(word.strip()) if kind == "count" else None
    if shortened is not None and not ("." in shortened[1] and shortened[2].endswith("i")):
        return int(Decimal(shortened[1]) * _FACTORS[shortened[2]])
    if len(word) > _MOST_DIGITS:
        raise ValueError
    return int(word)


def _wrongs(values: Mapping[str, Any]) -> list[tuple[str, _Wrong]]:
    listed = ((field, value if isinstance(value, list) else [value]) for field, value in values.items())
    return [(field, one) for field, items in listed for one in items if isinstance(one, _Wrong)]


def _unread(value: Any) -> bool:
    return any(one is _UNKNOWN or isinstance(one, _Wrong) for one in (value if isinstance(value, list) else [value]))


def _wrong(option: Option, wrong: _Wrong) -> Refusal:
    """A value of the wrong type, or none of the choices."""
    name, seen = option.names[0], show_name(wrong.text)
    if option.choices is None:
        wanted = _WANTED[option.kind]
        return Refusal(option.field, f"SGLang stops: {name} takes {wanted}, {seen} is none", seen, wanted,
                       f"give {name} {wanted}")  # fmt: skip
    choices = [str(choice) for choice in option.choices]
    near = difflib.get_close_matches(wrong.text[:_COMPARED].lower(), choices, 1, 0.5)
    possible = ", ".join(choices)
    return Refusal(option.field, f"SGLang stops: {name} does not know {seen}", seen, possible,
                   f"{name} {near[0]}" if near else f"give {name} one of {possible}")  # fmt: skip


def _unknown(extra: Sequence[str], options: Sequence[Option]) -> list[Refusal]:
    """Options that are none, each with the nearest that is; and words that no option takes."""
    names = [name for option in options for name in option.names]
    unknown = dict.fromkeys(word.partition("=")[0] for word in extra if word.startswith("--") and word != "--")
    stray = dict.fromkeys(itertools.takewhile(lambda word: not word.startswith("--"), extra))
    words = [word for word in stray if not (is_substituted(word) or is_placeholder(word))]
    refused = [_stray(show_name(word)) for word in words[:_SHOWN]]
    return refused + [_no_option(name, names) for name in list(unknown)[:_SHOWN]]


def _stray(seen: str) -> Refusal:
    return Refusal("", f"SGLang stops: {seen} belongs to no option", seen, "an option",
                   "put the option before it, or take it away")  # fmt: skip


def _no_option(name: str, names: Sequence[str]) -> Refusal:
    dashed = name[:_COMPARED].replace("_", "-")
    near = [dashed] if dashed in names else difflib.get_close_matches(dashed, names, 1, 0.8)
    name = show_name(name)
    return Refusal("", f"SGLang 0.5.23 knows no option {name} and stops", name, near[0] if near else "an option of the "
                   "server", f"write {near[0]}" if near else f"take {name} away, or see what your version of SGLang "
                   "calls it")  # fmt: skip


def _structural(message: str) -> Refusal:
    """argparse's own words for what it cannot take apart, as SGLang prints them."""
    option = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
    name, said = (option[1].split("/")[0], option[2]) if option else ("", message)
    field = next((one.field for one in table() if name in one.names), "")
    if said.startswith("expected"):
        return Refusal(field, f"SGLang stops: {name} has no value", "absent", "a value", f"give {name} a value")
    if said.startswith("ignored explicit argument"):
        seen = show(said.removeprefix("ignored explicit argument ").strip("'"))
        return Refusal(field, f"SGLang stops: {name} takes no value, {seen} is given", seen, "absent",
                       f"write {name} alone")  # fmt: skip
    ambiguous = re.match(r"ambiguous option: (\S+) could match (.*)", said, re.DOTALL)
    if ambiguous is not None:
        seen, matches = show_name(ambiguous[1]), ambiguous[2]
        return Refusal("", f"SGLang 0.5.23 stops: {seen} is short for more than one option", seen, matches,
                       "write the whole name")  # fmt: skip
    return Refusal(field, f"SGLang stops: {show_name(message)}", "the line", "one that its parser takes",
                   "mend the line")  # fmt: skip
