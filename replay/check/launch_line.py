"""A launch line as a shell takes it apart: environment, command, and the words that the command gets."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replay.errors import UsageError

_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.ASCII | re.DOTALL)
_SUBSTITUTED = re.compile(r"\$[A-Za-z_{(]|`")
_REDIRECTION = re.compile(r"(?:\d|&)?(?:>>?|<)(.*)", re.DOTALL)
_PLACEHOLDER = re.compile(r"\.\.\.|…|<[^<>]+>|\[[A-Za-z][\w .-]*\]", re.ASCII)
_CONTINUED = re.compile(r"\\\r?\n")  # a line end behind a backslash, which shlex leaves in place
_MOST = 1 << 17  # characters; Linux hands no longer word on to a program
_MOST_WORDS = 1000
_GOES_ON = re.compile(r"[ \t]*-")
_ENDS = ("|", "||", "&", "&&", ";")
_MODULES = ("sglang.launch_server", "sglang/launch_server.py")
_OTHERS = re.compile(r"(?:[\w-]+\.)*(?:sglang\w*\.[\w.]+|sglang|sglang_router)")  # dynamo.sglang, sglang_router...


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """``command``: ``launch_server``, ``serve``, ``vllm``, ``other`` (it may have options of its own), or None for a
    part of a line. ``words``: what comes after it, as far as the shell hands it on."""

    environment: Mapping[str, str]
    command: str | None
    words: tuple[str, ...]


def split_line(text: str) -> LaunchLine:
    """Quotes, comments, line ends, redirections, and what follows ``|`` or ``&&``, are the shell's. A line that begins
    with an option goes on with the one before it, with a backslash or without.

    Raises UsageError for a line that cannot be split.
    """
    if len(text) > _MOST:
        raise UsageError(f"--server-args holds {len(text)} characters, at most {_MOST} are possible; shorten the line")
    try:
        words = shlex.split(_ended(_CONTINUED.sub("", text).strip()), comments=True)
    except ValueError as error:
        raise UsageError(f"--server-args cannot be split into words ({error}); close the quote") from error
    if len(words) > _MOST_WORDS:
        raise UsageError(f"--server-args holds {len(words)} words, {_MOST_WORDS} are possible; shorten the line")
    command, first = _command(words)
    before = [word.rstrip(";") for word in words[:first]]
    environment = dict(word.split("=", 1) for word in before if _VARIABLE.fullmatch(word))
    after = [word for word in words[first:] if command is not None or word != ";"]
    return LaunchLine(environment, command, tuple(_handed_on(after)))


def _ended(text: str) -> str:
    """With ``;`` at line ends that are neither quoted nor followed by an option: there a command ends."""
    parts: list[str] = []
    quote, escaped = "", False
    for index, char in enumerate(text):
        ends = char == "\n" and quote in ("", "#") and not escaped
        if escaped:
            escaped = False
        elif quote:
            escaped = char == "\\" and quote == '"'
            quote = "" if char == ("\n" if quote == "#" else quote) else quote
        elif char in "'\"" or (char == "#" and (not index or text[index - 1].isspace())):
            quote = char
        else:
            escaped = char == "\\"
        parts.append("\n;\n" if ends and _GOES_ON.match(text, index + 1) is None else char)
    return "".join(parts)


def is_substituted(word: str) -> bool:
    """Whether the shell would put something else here, ``$TP`` or ``$(nproc)``, so that its value is not known."""
    return _SUBSTITUTED.search(word) is not None


def is_placeholder(word: str) -> bool:
    """Whether ``word`` stands for others in a text on how to start a server: ``...``, ``<model>`` or ``[options]``."""
    return _PLACEHOLDER.fullmatch(word) is not None


def _command(words: Sequence[str]) -> tuple[str | None, int]:
    """Which command it is, and the index of the first word after it."""
    for index, word in enumerate(words):
        after = words[index + 1] if index + 1 < len(words) else ""
        name = word.rpartition("/")[2]
        if word.endswith(_MODULES):
            return "launch_server", index + 1
        if name in ("sglang", "vllm") and after == "serve":
            return ("serve" if name == "sglang" else "vllm"), index + 2
        if word.startswith("vllm.entrypoints") or (name == "vllm" and not after.startswith("-")):
            return "vllm", index + 1
        if index and words[index - 1] == "-m" and _OTHERS.fullmatch(word):
            return "other", index + 1
    first = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    foreign = any(word not in _ENDS and not _VARIABLE.fullmatch(word) for word in words[:first])
    return ("other" if foreign else None), first


def _handed_on(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    index = 0
    while index < len(words) and words[index] not in _ENDS:
        word, index = words[index], index + 1
        redirection = None if is_placeholder(word) else _REDIRECTION.fullmatch(word)
        if redirection is not None:
            index += 0 if redirection[1] else 1
        elif word.endswith(";") and word != ";":
            return [*kept, word[:-1]]
        else:
            kept.append(word)
    return kept
