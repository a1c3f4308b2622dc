"""Server arguments as typed, or as a live server reports them → what rules look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from replay.check.launch_line import LaunchLine, split_line
from replay.check.option_file import with_file
from replay.check.options import Option, Refusal, read_options
from replay.errors import UsageError
from replay.printable import shorten
from replay.targets.rules import RELEASES, has_table
from replay.traces.fields import Fields, parse_json, show

ENGINES_WITH_RULES = ("sglang", "vllm", "eagle")
_SERVE = (Option(("--model-type",), "model_type"),)  # of `sglang serve` (cli/serve.py)
_HELP = (Option(("-h", "--help"), "help", "flag"),)
_ALIASES = {"speculative_draft_model": "speculative_draft_model_path", "model": "model_path"}
_NUMBERS = ("context_length", "max_model_len", "speculative_num_steps", "speculative_eagle_topk",
            "speculative_num_draft_tokens", "speculative_draft_window_size", "page_size",
            "speculative_accept_threshold_single", "speculative_accept_threshold_acc")  # fmt: skip
_TEXTS = ("dtype", "quantization", "kv_cache_dtype", "speculative_draft_kv_cache_dtype", "load_format",
          "speculative_draft_model_quantization", "speculative_algorithm", "attention_backend",
          "speculative_draft_load_format")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Server:
    """How it is, or will be, served: arguments in snake_case, ``stated`` where any are known, ``live`` where asked.

    ``whole``: the line names a command or a target, so what is not in it is not given at all. ``refused``: what the
    engine's own parser stops at.
    """

    engine: str = "sglang"
    version: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    stated: bool = False
    live: bool = False
    whole: bool = False
    refused: tuple[Refusal, ...] = ()

    @property
    def where(self) -> str:
        """What evidence calls it."""
        return "/server_info" if self.live else "server arguments"

    def integer(self, name: str) -> int | None:
        """A whole number among the arguments."""
        value = self.arguments.get(name)
        return value if type(value) is int else None

    def number(self, name: str) -> float | None:
        """A number among the arguments."""
        value = self.arguments.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, name: str) -> str | None:
        """A word among the arguments."""
        value = self.arguments.get(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool:
        """Whether a switch among the arguments is on."""
        return self.arguments.get(name) is True

    def variable(self, name: str) -> bool:
        """A switch of the environment, as SGLang 0.5.23 environ.py (EnvBool) reads it: anything odd is off."""
        return self.environment.get(name, "").lower() in ("true", "1", "yes", "y")

    def variable_number(self, name: str, default: float) -> float:
        """A number of the environment, as SGLang 0.5.23 environ.py (EnvFloat) reads it: anything odd is the default."""
        try:
            return float(self.environment[name])
        except (KeyError, ValueError):
            return default


def check_engine(name: str | None) -> None:
    """Raises UsageError for an engine whose rules are not known."""
    if name is not None and name not in ENGINES_WITH_RULES:
        raise UsageError(f"engine {name!r} is not known; possible are {', '.join(ENGINES_WITH_RULES)}")


def parse_server_arguments(text: str, engine: str | None = None) -> Server:
    """A launch line or a part of one, as a shell and then the engine's own parser take it apart.

    vLLM is known by its command or ``--speculative-config``. What SGLang's parser would stop at is in ``refused``.
    Raises UsageError for a line that cannot be split, for a file of ``--config`` that is not here, and for values of
    another engine that cannot be.
    """
    line = split_line(text)
    loose = _options(line.words)
    known = engine or ("vllm" if line.command == "vllm" or "speculative_config" in loose else "sglang")
    if known == "sglang":
        return _sglang(line)
    return Server(known, None, _checked(loose), line.environment, stated=True, whole=line.command is not None)


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
        "sglang",
        version if isinstance(version, str) else None,
        _checked(arguments),
        {},
        stated=True,
        live=True,
        whole=True,
    )


def of_version(server: Server, version: str) -> Server:
    """The same server, of this release of SGLang. Raises UsageError where that has no table, or for another engine."""
    if server.engine != "sglang":
        raise UsageError(f"--engine-version is of SGLang, the engine is {server.engine}: leave --engine-version out")
    if not has_table(version):
        raise UsageError(
            f"--engine-version {shorten(version, 40)} is no release whose targets are known, possible are "
            f"{', '.join(RELEASES)}; type one of them"
        )
    return replace(server, version=version)


def _sglang(line: LaunchLine) -> Server:
    """Sources: SGLang 0.5.23 server_args.py (prepare_server_args), cli/serve.py."""
    words, refused = with_file(_with_model(line))
    more = (*_HELP, *(_SERVE if line.command == "serve" else ()))
    read = read_options(words, more=more, strict=line.command != "other")
    given = dict(read.given)
    if (unread := given.pop("config", None)) is not None:
        refused = (*refused, _unread_file(str(unread)))
    if given.pop("help", False):
        refused = (*refused, Refusal("help", "SGLang prints its help and ends", "--help", "absent", "take --help away"))
    whole = not read.open and (line.command is not None or "model_path" in given)
    return Server("sglang", None, given, line.environment, stated=True, whole=whole, refused=(*refused, *read.refused))


def _with_model(line: LaunchLine) -> Sequence[str]:
    """`sglang serve` takes the target as its first word too."""
    if line.command == "serve" and line.words and not line.words[0].startswith("-"):
        return ("--model-path", *line.words)
    return line.words


def _unread_file(name: str) -> Refusal:
    """SGLang looks for the word ``--config`` itself; spelled otherwise it is parsed and then forgotten."""
    return Refusal("config", f"SGLang reads no file from {show(name)}: it looks for --config and FILE as two words",
                   show(name), "--config FILE", f"write --config {name}")  # fmt: skip


def _options(words: Sequence[str]) -> dict[str, Any]:
    """``--a-b v``, ``--a-b=v`` and bare flags, of an engine whose options are not in a table; the last one counts."""
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
