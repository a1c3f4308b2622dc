"""Server arguments as typed, or as a live server reports them → what rules look at."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay.errors import UsageError
from replay.traces.fields import Fields, parse_json, show

ENGINES_WITH_RULES = ("sglang", "vllm", "eagle")
_ALIASES = {
    "speculative_algo": "speculative_algorithm",
    "speculative_draft_model": "speculative_draft_model_path",
    "model": "model_path",
}
_NUMBERS = ("context_length", "max_model_len", "speculative_num_steps", "speculative_eagle_topk",
            "speculative_num_draft_tokens", "speculative_draft_window_size", "page_size",
            "speculative_accept_threshold_single", "speculative_accept_threshold_acc")  # fmt: skip
_TEXTS = ("dtype", "quantization", "kv_cache_dtype", "speculative_draft_kv_cache_dtype", "load_format",
          "speculative_draft_model_quantization", "speculative_algorithm", "attention_backend",
          "speculative_draft_load_format")  # fmt: skip
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Server:
    """How it is, or will be, served: arguments in snake_case, ``stated`` where any are known, ``live`` where asked."""

    engine: str = "sglang"
    version: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    stated: bool = False
    live: bool = False

    @property
    def where(self) -> str:
        """What evidence calls it."""
        return "/server_info" if self.live else "server arguments"


def check_engine(name: str | None) -> None:
    """Raises UsageError for an engine whose rules are not known."""
    if name is not None and name not in ENGINES_WITH_RULES:
        raise UsageError(f"engine {name!r} is not known; possible are {', '.join(ENGINES_WITH_RULES)}")


def parse_server_arguments(text: str, engine: str | None = None) -> Server:
    """A launch line or a part of one: leading VARIABLE=value words, then --options; other words are passed over.

    vLLM is known by ``--speculative-config`` or its name. Raises UsageError for a line or a number that cannot be.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError(f"--server-args cannot be split into words ({error}); close the quote") from error
    first = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    environment = dict(word.rstrip(";").split("=", 1) for word in words[:first] if _VARIABLE.fullmatch(word))
    arguments = _options(words[first:])
    known = engine or ("vllm" if "speculative_config" in arguments or "vllm" in words[:first] else "sglang")
    return Server(known, None, _checked(arguments), environment, stated=True)


def live_server(info: Any, url: str) -> Server:
    """From a /server_info document of SGLang. Raises UsageError where it is none."""
    if not isinstance(info, dict):
        raise UsageError(f"{url} answers no JSON object: --server takes the address of an SGLang server")
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    arguments = {**first, **{key: value for key, value in info.items() if key not in ("internal_states",)}}
    if "model_path" not in arguments:
        raise UsageError(f"{url} reports no model_path: --server takes the address of an SGLang server")
    version = info.get("version")
    return Server(
        "sglang", version if isinstance(version, str) else None, _checked(arguments), {}, stated=True, live=True
    )


def _options(words: Sequence[str]) -> dict[str, Any]:
    """``--a-b v``, ``--a-b=v`` and bare flags; the last of a repeated option counts, as in argparse."""
    options: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word, index = words[index], index + 1
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            listed = []
            while index < len(words) and not words[index].startswith("--"):
                listed.append(words[index])
                index += 1
            options[_ALIASES.get(name, name)] = True if not listed else listed[0] if len(listed) == 1 else listed
        else:
            options[_ALIASES.get(name, name)] = value
    return options


def _checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """With numbers as numbers; None where the server has not decided."""
    checked = {name: value for name, value in arguments.items() if value is not None}
    for name in _NUMBERS:
        if name in checked:
            checked[name] = _number(name, checked[name])
    for name in _TEXTS:
        if name in checked and not isinstance(checked[name], str):
            raise UsageError(
                f"server argument --{name.replace('_', '-')} is {show(checked[name])}, a word was expected"
            )
    if "speculative_config" in checked:
        checked |= _vllm_config(checked["speculative_config"])
    return checked


def _number(name: str, value: Any) -> int | float:
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f"server argument {option} is {show(value)}, a number was expected")
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"server argument {option} is {show(value)}, a number was expected") from None
    if not abs(number) < 1e15:
        raise UsageError(f"server argument {option} is {show(value)}, a number of sensible size was expected")
    return int(number) if number == int(number) and "threshold" not in name else number


def _vllm_config(text: Any) -> dict[str, Any]:
    option = "server argument --speculative-config"
    if not isinstance(text, str):
        raise UsageError(f"{option} is {show(text)}, a JSON object was expected")
    config = Fields(option, parse_json(text, option, UsageError), UsageError)
    return {f"vllm_{name}": value for name, value in config.values.items()}
