"""``replay serve``: a real SGLang server with recording on. It sets the environment and starts SGLang's launcher.

The plugin (sglang_plugin.py) is installed with this package and found by SGLang itself. Nothing of SGLang is edited.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from replay.capture.recording import RECORD_VARIABLE, Recording
from replay.capture.sglang_facts import without_secrets
from replay.capture.spool import SPOOL, drop_launches, launch_folder
from replay.errors import CaptureError, OutputError, UsageError
from replay.traces.taps import FINAL, parse_taps

PLUGIN = "replay"  # the name of the entry point
VERSIONS = ("0.5.23",)  # of SGLang that the plugin knows
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """``arguments`` are SGLang's own; ``taps`` and ``wiring`` as typed, None for the defaults and the server's own."""

    trace: Path  # the recording folder
    arguments: Sequence[str]
    taps: str | None = None
    wiring: str | None = None
    topk: int = 32


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started: the command, its environment, and where it will record."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    notes: tuple[str, ...]


def prepare(options: ServeOptions, environment: Mapping[str, str]) -> Launch:
    """Check everything that can be checked before a model is loaded, and make the recording folder.

    Raises UsageError, CaptureError, OutputError.
    """
    arguments = list(options.arguments)
    _check(options, environment)
    notes = [f"the server records into {options.trace.resolve()}; capture --server joins it into a trace"]
    if not _has(arguments, "--speculative-algorithm"):
        arguments.append("--enable-return-hidden-states")
        notes.append("no draft: added --enable-return-hidden-states, which lets SGLang keep hidden states of decodes")
    launch = secrets.token_hex(8)
    folder = launch_folder(options.trace.resolve(), launch)
    try:
        folder.mkdir(parents=True)
        drop_launches(options.trace, launch)
    except OSError as error:
        raise OutputError(f"cannot write to {options.trace}: {error.strerror}; give --trace another folder") from error
    recording = Recording(
        folder=str(options.trace.resolve()),
        launch=launch,
        taps=options.taps,
        wiring=options.wiring,
        topk=options.topk,
        arguments=without_secrets(arguments),
    )
    made = {**environment, RECORD_VARIABLE: recording.to_json()}
    allowed = environment.get("SGLANG_PLUGINS", "")
    if allowed and PLUGIN not in {name.strip() for name in allowed.split(",")}:
        made["SGLANG_PLUGINS"] = f"{allowed},{PLUGIN}"
    command = (sys.executable, "-m", "sglang.launch_server", *arguments)
    return Launch(command, made, folder.parent.parent / SPOOL / launch, tuple(notes))


def serve(options: ServeOptions, tell: Callable[[str], None]) -> int:
    """Run the server until it ends; its exit code (128 + n after signal n). Signals sent here are passed on."""
    launch = prepare(options, os.environ)
    for note in launch.notes:
        tell(note)
    try:
        # A session of its own: Ctrl-C reaches it once, from here, and not a second time from the terminal.
        server = subprocess.Popen(launch.command, env=dict(launch.environment), start_new_session=True)
    except OSError as error:
        raise CaptureError(f"{launch.command[0]} cannot be started: {error.strerror}") from error
    with _passing_signals(server):
        code = server.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _passing_signals(server: "subprocess.Popen[bytes]") -> Iterator[None]:
    def pass_on(number: int, _: object) -> None:
        try:
            server.send_signal(number)
        except ProcessLookupError:
            pass

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check(options: ServeOptions, environment: Mapping[str, str]) -> None:
    if not options.arguments:
        raise UsageError("no SGLang arguments were given: type -- and after it what sglang.launch_server takes")
    for text in (options.taps, options.wiring):
        if text is not None:
            parse_taps(text)
    if options.wiring is not None:
        if FINAL in parse_taps(options.wiring):
            raise UsageError(f"--wiring {options.wiring} names final, which no SGLang draft is fed")
        if not _has(options.arguments, "--speculative-draft-model-path"):
            raise UsageError(f"--wiring {options.wiring} needs a draft: add --speculative-draft-model-path")
    nodes = _nodes(options.arguments)
    if nodes > 1:
        raise UsageError(f"--nnodes {nodes} was given, recording works with servers of one node: leave --nnodes out")
    simulated = environment.get(SIMULATED, "")
    if simulated and not re.fullmatch(r"-?0*\.?0*", simulated.strip()) and not simulated.strip().startswith("-"):
        raise UsageError(f"{SIMULATED} is {simulated}, so every accept length of the server would be made up: unset it")
    _check_version()
    _check_plugin()


def _check_version() -> None:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise CaptureError("sglang is not installed here: pip install 'eagle-replay[sglang]'") from error
    if version not in VERSIONS:
        raise CaptureError(
            f"SGLang {version} is installed, recording works with {', '.join(VERSIONS)}: pip install "
            f"sglang=={VERSIONS[-1]}"
        )


def _check_plugin() -> None:
    names = {entry.name for entry in metadata.entry_points(group="sglang.srt.plugins")}
    if PLUGIN not in names:
        raise CaptureError(
            "SGLang would not find the recording plugin, since this package was not installed with its entry points: "
            "pip install it again"
        )


def _has(arguments: Sequence[str], option: str) -> bool:
    return any(argument == option or argument.startswith(f"{option}=") for argument in arguments)


def _nodes(arguments: Sequence[str]) -> int:
    """What --nnodes (or a beginning of it that argparse takes) says; the last one counts, 1 where there is none."""
    nodes = "1"
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        option, equals, value = argument.partition("=")
        if option.startswith("--nn") and "--nnodes".startswith(option):
            nodes = value if equals else following
    return int(nodes) if nodes.isdecimal() else 1  # what is no number SGLang refuses
