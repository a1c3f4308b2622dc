"""Prompt files: JSON Lines, one request a row, checked before any model is touched.

A row holds exactly one of

- ``prompt``: one user turn (put into the target's chat template where it has one, unless raw),
- ``messages``: a chat, a list of ``{"role": ..., "content": ...}``,
- ``input_ids``: token ids as they are,

and optionally ``id`` (a string, becomes the request id; otherwise the row's number counted from 0), ``category``, and
one of ``response`` (text) or ``output_ids`` (token ids), which the target then follows instead of generating.
Other keys are left alone. Blank lines are skipped. Rows as others write them (foreign_rows.py) are taken too, and so
is a file that is one JSON array of rows. ``-`` is standard input.
"""

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.capture.foreign_rows import Seen, as_our_row
from replay.errors import PromptError, TraceCorruptError
from replay.traces.fields import parse_json, show, some
from replay.traces.files import read_small

MAX_ID = 1024  # characters of a request id, as the trace format has it
STDIN = "-"  # typed for standard input
_MOST = 1 << 28  # bytes of a file
_KINDS = ("prompt", "messages", "input_ids")


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row as written: one of prompt, messages, input_ids is set, and at most one of response, output_ids."""

    line: int  # of the file, or its place in the array that the file is, counted from 1
    request_id: str
    category: str | None
    prompt: str | None
    messages: tuple[dict[str, Any], ...] | None
    input_ids: tuple[int, ...] | None
    response: str | None
    output_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PromptFile:
    """All rows of a file, in its order, at least one; ids are distinct."""

    path: Path
    sha256: str  # of the file's bytes
    rows: tuple[PromptRow, ...]
    notes: tuple[str, ...] = ()  # what the user should know of the rows, a sentence each

    def where(self, row: PromptRow) -> str:
        """Where a row stands, as messages name it: ``prompts.jsonl line 3``."""
        return f"{_named(self.path)} line {row.line}"


def read_prompts(path: Path) -> PromptFile:
    """Read and check a prompt file. Raises PromptError naming the file and the line."""
    data = _read(path)
    rows: list[PromptRow] = []
    lines: dict[str, int] = {}
    seen = Seen()
    for number, value in _values(data, path):
        where = f"{_named(path)} line {number}"
        ours = as_our_row(value, len(rows), where, seen)
        if ours is None:
            continue
        row = _row(ours, number, len(rows), where)
        if row.request_id in lines:
            raise PromptError(
                f"{_named(path)} line {number}: id {show(row.request_id)} is taken by line {lines[row.request_id]} "
                "(a row without id is named by its number, counted from 0): make the ids distinct"
            )
        if len(row.request_id) > MAX_ID:
            raise PromptError(
                f"{_named(path)} line {number}: the id has {len(row.request_id)} characters, possible are {MAX_ID}"
            )
        lines[row.request_id] = number
        rows.append(row)
    if not rows:
        raise PromptError(f'{_named(path)} holds no rows: write one JSON object a line, such as {{"prompt": "Hello"}}')
    return PromptFile(path, hashlib.sha256(data).hexdigest(), tuple(rows), tuple(seen.notes()))


def _named(path: Path) -> str:
    """How messages call it."""
    return "standard input" if str(path) == STDIN else str(path)


def _read(path: Path) -> bytes:
    if str(path) == STDIN:
        data = sys.stdin.buffer.read(_MOST + 1)
        if len(data) > _MOST:
            raise PromptError(f"standard input holds more than {_MOST} bytes: give --prompts a part of it")
        return data
    try:
        return read_small(path, _MOST, follow=True)
    except TraceCorruptError as error:
        raise PromptError(f"{error}: give --prompts a file of JSON lines") from error


def _values(data: bytes, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with its number, from 1: of lines, or of the array that the whole file is."""
    text = data.removeprefix(b"\xef\xbb\xbf")
    if text.lstrip().startswith(b"["):
        try:
            array = parse_json(text, str(path), PromptError, constants=True)
        except PromptError:
            array = None  # the line says what is wrong
        if isinstance(array, list) and array and isinstance(array[0], dict):
            for number, value in enumerate(array, start=1):
                yield number, _object(value, f"{path} row {number}")
            return
    for number, raw in enumerate(text.split(b"\n"), start=1):
        if raw.strip():
            yield number, _parse(raw, f"{_named(path)} line {number}")


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    return _object(parse_json(raw, where, _no_row, constants=True), where)  # pandas writes NaN for what is missing


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _no_row(f"{where} is {show(value)}")
    return value


def _no_row(said: str) -> PromptError:
    return PromptError(f'{said}: a row is an object such as {{"prompt": "Hello"}}')


def _row(value: dict[str, Any], line: int, number: int, where: str) -> PromptRow:
    kinds = [key for key in _KINDS if value.get(key) is not None]
    if len(kinds) != 1:
        seen = " and ".join(kinds) if kinds else f"none of them (its keys: {some(list(value)) or 'none'})"
        raise PromptError(f"{where} has {seen}: a row has exactly one of prompt, messages, input_ids")
    if value.get("response") is not None and value.get("output_ids") is not None:
        raise PromptError(f"{where} has response and output_ids: keep one of them")
    request_id = value.get("id")
    return PromptRow(
        line=line,
        request_id=str(number) if request_id is None else _text(request_id, "id", where),
        category=_optional_text(value, "category", where),
        prompt=_optional_text(value, "prompt", where),
        messages=None if value.get("messages") is None else _messages(value["messages"], where),
        input_ids=_optional_ids(value, "input_ids", where),
        response=_optional_text(value, "response", where),
        output_ids=_optional_ids(value, "output_ids", where),
    )


def _optional_text(value: dict[str, Any], key: str, where: str) -> str | None:
    return None if value.get(key) is None else _text(value[key], key, where)


def _optional_ids(value: dict[str, Any], key: str, where: str) -> tuple[int, ...] | None:
    ids = value.get(key)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise PromptError(f"{where}: {key} must be a list of one or more integers, such as [1, 42]")
    return tuple(ids)


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where}: {key} is {show(value)}, it must be a string (in double quotes)")
    if not value.strip():
        raise PromptError(f"{where}: {key} is empty: write some text or take the row out")
    return value


def _messages(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    shape = 'must be a list of one or more {"role": "user", "content": "..."} objects'
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: messages {shape}")
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise PromptError(f"{where}: messages {shape}")
        _text(message["role"], "a message's role", where)
        # A system turn may be empty on purpose: it keeps a template from writing its own.
        if message["content"] != "" or len(value) == 1:
            _text(message["content"], "a message's content", where)
    return tuple(value)
