"""Rows of prompt files as others have them, turned into rows of ours; one request each.

- ShareGPT and SpecForge: ``conversations``, a list of ``{"from": "human", "value": ...}`` or ``{"role", "content"}``.
- MT-Bench and Spec-Bench: ``turns``, a list of user turns, with ``question_id`` and ``category``.
- OpenAI batch files: ``custom_id`` and ``body``, with ``messages`` (chat completions), ``prompt`` (completions) or
  ``input`` (responses). What a body says of sampling is not read.

What is asked is the first user turn, with a system turn before it. A later one answers an answer of another model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from replay.errors import PromptError
from replay.printable import counted
from replay.traces.fields import show, some

_ROLES = {
    "human": "user", "user": "user", "system": "system", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "assistant": "assistant", "model": "assistant",
}  # fmt: skip
_OWN = ("prompt", "messages", "input_ids")
_SETTINGS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "stop", "seed", "n")


@dataclass(slots=True)
class Seen:
    """What was met that the user should know: rows with later turns, with settings, and without a user turn."""

    later: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """A sentence each."""
        found = [
            (self.later, "with later turns, which are not asked: only the first user turn is"),
            (self.settings, "of a batch file with settings of sampling, not read: the command's options count"),
            (self.silent, "without a user turn, left out"),
        ]  # fmt: skip
        return [f"{counted(len(names), 'row')} {said} ({some(names)})" for names, said in found if names]


def as_our_row(value: dict[str, Any], number: int, where: str, seen: Seen) -> dict[str, Any] | None:
    """A row in our own form: ``value`` itself where it is one, None where it asks nothing.

    ``number`` names a row without an id. Raises PromptError for a row of another's form that does not hold together.
    """
    if any(value.get(key) is not None for key in _OWN):
        return value
    for key, turned in _FORMS.items():
        if value.get(key) is not None:
            row = turned(value, number, where, seen)
            return None if row is None else {**_facts(value, number), **row}
    return value


def _facts(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {"id": _name(value, number), "category": value.get("category")}


def _name(value: Mapping[str, Any], number: int) -> str:
    """Ids of others may be numbers."""
    for key in ("id", "custom_id", "question_id"):
        if isinstance(value.get(key), str | int) and not isinstance(value.get(key), bool):
            return str(value[key])
    return str(number)


def _conversation(value: dict[str, Any], number: int, where: str, seen: Seen) -> dict[str, Any] | None:
    said = value.get("conversations")
    if not isinstance(said, list):
        raise PromptError(
            f'{where}: conversations is {show(said)}, a list of {{"from": ..., "value": ...}} was expected'
        )
    # What comes after the first user turn is not asked, whoever says it: a tool, an observation.
    first = next((place for place, one in enumerate(said) if _role(one) == "user"), None)
    asked = [_message(one, where) for one in said[: None if first is None else first + 1]]
    if first is None:
        seen.silent.append(_name(value, number))
        return None
    if any(_role(one) == "user" for one in said[first + 1 :]):
        seen.later.append(_name(value, number))
    return {"messages": [one for one in asked if one["role"] != "assistant"]}


def _role(turn: object) -> str | None:
    """Whose turn it is; None for a role that is not known."""
    role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
    return _ROLES.get(role.lower()) if isinstance(role, str) else None


def _message(one: object, where: str) -> dict[str, str]:
    role = one.get("from", one.get("role")) if isinstance(one, dict) else None
    text = one.get("value", one.get("content")) if isinstance(one, dict) else None
    if not isinstance(role, str) or role.lower() not in _ROLES:
        known = ", ".join(_ROLES)
        raise PromptError(f"{where}: a turn is said by {show(role)}, possible are {known}: mend it")
    return {"role": _ROLES[role.lower()], "content": _content(text, where)}


def _content(text: object, where: str) -> str:
    """A text, or the texts of its parts."""
    if isinstance(text, list) and text and all(isinstance(part, dict) for part in text):
        parts = [part.get("text") for part in text if part.get("type") in ("text", "input_text", "output_text")]
        if len(parts) == len(text) and all(isinstance(part, str) for part in parts):
            return "\n".join(str(part) for part in parts)
    if not isinstance(text, str):
        raise PromptError(f"{where}: a turn holds {show(text)}, only text can be asked: mend it or take the row out")
    return text


def _turns(value: dict[str, Any], number: int, where: str, seen: Seen) -> dict[str, Any]:
    turns = value["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise PromptError(f'{where}: turns is {show(turns)}, a list of user turns such as ["Hello"] was expected')
    if len(turns) > 1:
        seen.later.append(_name(value, number))
    return {"prompt": turns[0]}


def _batch(value: dict[str, Any], number: int, where: str, seen: Seen) -> dict[str, Any]:
    body = value["body"]
    kinds = [key for key in ("messages", "prompt", "input") if isinstance(body, dict) and body.get(key) is not None]
    if len(kinds) != 1:
        raise PromptError(f"{where}: the body of a batch row holds {some(kinds) or 'no prompt'}: it has exactly one of "
                          "messages, prompt, input")  # fmt: skip
    if any(body.get(key) is not None for key in _SETTINGS):
        seen.settings.append(_name(value, number))
    (kind,) = kinds
    given = body[kind]
    if kind == "prompt" and isinstance(given, list) and given and all(type(token) is int for token in given):
        return {"input_ids": given}
    if isinstance(given, str):
        return {"prompt": given}
    if kind == "prompt" or not isinstance(given, list):
        raise PromptError(f"{where}: {kind} of a batch row is {show(given)}, one text was expected")
    return {"messages": [_message(one, where) for one in given]}


_FORMS: Mapping[str, Callable[[dict[str, Any], int, str, Seen], dict[str, Any] | None]] = {
    "conversations": _conversation,
    "turns": _turns,
    "body": _batch,
}
