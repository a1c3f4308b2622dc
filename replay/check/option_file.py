"""The YAML file of ``--config`` → the words that SGLang puts before the others (0.5.23
utils/server_args_config_parser.py)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replay.check.options import Option, Refusal, table
from replay.errors import TraceCorruptError, UsageError
from replay.traces.fields import show, show_name
from replay.traces.files import read_small

_MOST = 1 << 20  # bytes of such a file
_OPTION = "--config"
_SUFFIXES = (".yaml", ".yml")


def with_file(words: Sequence[str]) -> tuple[list[str], tuple[Refusal, ...]]:
    """``words`` with those of the file in place of ``--config FILE``; options that follow override it.

    Raises UsageError for a file that is not here or cannot be read: what it says is part of the line.
    """
    places = [index for index, word in enumerate(words) if word == _OPTION]
    if not places:
        return list(words), ()
    index = places[0]
    name = words[index + 1] if index + 1 < len(words) else ""
    rest = [*words[:index], *words[index + 2 :]]
    if len(places) > 1 or not name:
        what = "is given more than once" if len(places) > 1 else "names no file"
        return rest, (_refusal(f"SGLang stops: {_OPTION} {what}", str(len(places)), "one file", "name one file"),)
    if Path(name).suffix.lower() not in _SUFFIXES:
        seen = show_name(name)
        return rest, (_refusal(f"SGLang stops: {_OPTION} takes YAML, {seen} does not end so", seen,
                               " or ".join(_SUFFIXES), f"rename the file to end in {_SUFFIXES[0]}"),)  # fmt: skip
    said, refused = _words(_read(name))
    return said + rest, refused


def _read(name: str) -> Mapping[str, Any]:
    try:
        data = read_small(Path(name).resolve(), _MOST)
    except (TraceCorruptError, OSError, ValueError) as error:
        raise UsageError(
            f"{_OPTION} of --server-args cannot be read here ({show(str(error))}); type replay check where the file "
            "lies, or write its options into --server-args"
        ) from error
    document = _parsed(data, name)
    if not isinstance(document, dict):
        raise UsageError(f"{name} holds {show(document)}, a mapping of options was expected; write option: value lines")
    return {str(key): value for key, value in document.items()}


def _parsed(data: bytes, name: str) -> Any:
    """No aliases: a few hundred bytes of them can stand for gigabytes."""
    import yaml

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(data, Loader=yaml.SafeLoader)):
            raise UsageError(f"{name} repeats parts by YAML aliases, which replay does not follow; write them out")
        document = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{name} is no YAML that replay can read ({show(str(error))}); mend the file") from error
    return {} if document is None else document


def _words(document: Mapping[str, Any]) -> tuple[list[str], tuple[Refusal, ...]]:
    """As ``_convert_config_to_args`` makes them: true flags alone, false ones not at all, lists item by item."""
    by_key = {key: option for option in table() for key in _keys(option)}
    words: list[str] = []
    refused = []
    for key, value in document.items():
        option = by_key.get(key.replace("-", "_"))
        name = f"--{key}"
        if option is not None and not option.yaml:
            seen = show_name(key)
            refused.append(_refusal(f"SGLang stops: its YAML file takes no {seen}", seen, "absent",
                                    f"take {seen} out of the file and write {name} into the line"))  # fmt: skip
        elif isinstance(value, bool) and option is not None and option.kind == "flag":
            words += [name] if value else []
        elif isinstance(value, bool):
            words += [name, str(value).lower()]
        elif isinstance(value, list):
            words += [name, *map(str, value)] if value else []
        else:
            words += [name, json.dumps(value, default=str) if isinstance(value, dict) else str(value)]
    return words, tuple(refused)


def _keys(option: Option) -> set[str]:
    return {option.field, *(name.removeprefix("--").replace("-", "_") for name in option.names)}


def _refusal(what: str, seen: str, expected: str, fix: str) -> Refusal:
    return Refusal("config", what, seen, expected, fix)
