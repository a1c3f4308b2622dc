"""``replay serve``: a real SGLang server with recording on. It sets the environment and starts SGLang's launcher.

The plugin (plugin.py) is installed with this package and found by SGLang itself. Nothing of SGLang is edited.
"""

import http.client
import os
import re
import secrets
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import metadata
from pathlib import Path

import replay
from replay.capture.manifest import Manifest, read_manifests
from replay.capture.plugin.facts import server_url, without_secrets
from replay.capture.plugin.recording import RECORD_VARIABLE, SIMULATED, VERSIONS, Recording
from replay.capture.spool import drop_launches, launch_folder
from replay.errors import CaptureError, OutputError, TraceCorruptError, UsageError, WiringError
from replay.traces.files import LOCK, take_lock
from replay.traces.taps import FINAL, parse_taps

PLUGIN = "replay"  # the name of the entry point
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_SECONDS = 0.5
_SILENT = 20  # polls


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
    """What is started: the command, its environment, and the launch folder where it will record."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answers. Where it does not record, ``state`` and ``reason`` say so, and taps and wirings are empty.

    ``wiring`` is what the draft is fed, in its order, ``server_wiring`` what it would be without ``--wiring``;
    ``versions``: of replay, sglang and what else the server says of itself (torch, transformers, accelerator).
    """

    url: str
    recording: str  # the folder
    launch: str
    state: str
    reason: str
    ranks: int
    taps: tuple[str, ...] = ()
    wiring: tuple[str, ...] = ()
    server_wiring: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def prepare(options: ServeOptions, environment: Mapping[str, str]) -> Launch:
    """Check everything that can be checked before a model is loaded; nothing is written.

    Raises UsageError, CaptureError.
    """
    arguments = list(options.arguments)
    _check(options, environment)
    notes = [f"the server records into {options.trace.resolve()}; capture --server joins it into a trace"]
    if not _has(arguments, "--speculative-algorithm"):
        arguments.append("--enable-return-hidden-states")
        notes.append("no draft: added --enable-return-hidden-states, which lets SGLang keep hidden states of decodes")
    launch = secrets.token_hex(8)
    folder = launch_folder(options.trace.resolve(), launch)
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
    return Launch(command, made, folder, tuple(notes))


def open_folder(launch: Launch) -> int:
    """Make the launch folder, and delete what servers that have ended left beside it.

    Returns the lock of the recording folder: one server at a time records there, until the descriptor is closed by all
    that hold it. Raises OutputError.
    """
    spool = launch.folder.parent
    try:
        spool.mkdir(parents=True, exist_ok=True)
        lock = take_lock(spool / LOCK)
    except BlockingIOError as error:
        raise OutputError(
            f"another server records into {spool.parent}, and a second one would delete its rows: stop it, or give "
            "--trace another folder"
        ) from error
    except OSError as error:
        raise _unwritable(spool.parent, error) from error
    try:
        launch.folder.mkdir()
        drop_launches(spool.parent, launch.folder.name)
    except OSError as error:
        os.close(lock)
        raise _unwritable(spool.parent, error) from error
    return lock


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to {folder}: {error.strerror}; give --trace another folder")


def serve(options: ServeOptions, tell: Callable[[str], None], on_ready: Callable[[Ready], None] | None = None) -> int:
    """Run the server until it ends; its exit code (128 + n after signal n). Signals sent here are passed on.

    ``on_ready`` is called once it answers; what the server itself prints goes to stderr then. Raises as ``prepare`` and
    ``open_folder``, and WiringError where the server ended because a wiring could not be had.
    """
    launch = prepare(options, os.environ)
    lock = open_folder(launch)
    for note in launch.notes:
        tell(note)
    try:
        # A session of its own: Ctrl-C reaches it once, from here, and not a second time from the terminal. It holds the
        # lock too, so that it keeps the folder should this process be killed.
        server = subprocess.Popen(
            launch.command, env=dict(launch.environment), start_new_session=True, pass_fds=(lock,),
            stdout=None if on_ready is None else sys.stderr,
        )  # fmt: skip
    except OSError as error:
        os.close(lock)
        raise CaptureError(f"{launch.command[0]} cannot be started: {error.strerror}") from error
    with _passing_signals(server):
        try:
            if on_ready is not None and (ready := _wait_until_ready(server, launch, options)) is not None:
                on_ready(ready)
        except BaseException:  # nobody would be left to pass signals on
            server.terminate()
            raise
        finally:
            code = server.wait()
            os.close(lock)
    if code and options.wiring is not None:
        _check_refusal(launch)
    return 128 - code if code < 0 else code


def _wait_until_ready(server: "subprocess.Popen[bytes]", launch: Launch, options: ServeOptions) -> Ready | None:
    """What the server says once it answers; None where it ended before."""
    silent = 0  # answers of a server none of whose processes has said anything: another's, while ours starts?
    while server.poll() is None:
        manifests = _manifests(launch)
        if all(one.state != "loading" for one in manifests):
            ready = _ready(launch, options, manifests)
            if _answers(ready.url):
                silent += 1
                if manifests or silent > _SILENT:
                    return ready
        time.sleep(_POLL_SECONDS)
    return None


def _ready(launch: Launch, options: ServeOptions, manifests: Sequence[Manifest]) -> Ready:
    none = Manifest(launch.folder.name, 0, "", "failed", False, f"the server wrote no manifest into {launch.folder}")
    worst = next((one for one in manifests if one.state != "recording"), (*manifests, none)[0])
    recorded = worst.state == "recording"
    return Ready(
        url=next((one.url for one in manifests if one.url), _typed_url(options.arguments)),
        recording=str(launch.folder.parent.parent),
        launch=launch.folder.name,
        state=worst.state,
        reason=worst.reason,
        ranks=len(manifests),
        taps=tuple(worst.taps) if recorded else (),
        wiring=tuple(worst.wiring) if recorded else (),
        server_wiring=tuple(worst.server_wiring) if recorded else (),
        versions={
            "replay": replay.__version__,
            "sglang": worst.sglang,
            **{name: worst.details[name] for name in ("torch", "transformers", "accelerator") if name in worst.details},
        },
    )


def _answers(url: str) -> bool:
    """Whether the server's health check is passed: it generates a token, so a busy machine gets time."""
    own = ssl.create_default_context()  # a certificate of its own making is nothing to doubt in one's own child
    own.check_hostname, own.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60, context=own) as response:
            return bool(response.status == HTTPStatus.OK)
    except (OSError, http.client.HTTPException):
        return False


def _manifests(launch: Launch) -> list[Manifest]:
    try:
        return read_manifests(launch.folder)
    except (TraceCorruptError, CaptureError):
        return []  # replaced while it was read, or not to be read at all


def _check_refusal(launch: Launch) -> None:
    """Why the server ended, where that was a wiring. Raises WiringError."""
    for one in _manifests(launch):
        if one.state == "refused":
            raise WiringError(f"the server has ended, since its --wiring cannot be had: {one.reason}")


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
    """What --nnodes says, 1 where there is none."""
    nodes = _value(arguments, "--nnodes", "--nn") or "1"
    return int(nodes) if nodes.isdecimal() else 1  # what is no number SGLang refuses


def _typed_url(arguments: Sequence[str]) -> str:
    """Where a server that has said nothing of itself is asked."""
    names = {"host": "--hos", "port": "--po", "ssl_certfile": "--ssl-c"}
    typed = {name: _value(arguments, f"--{name.replace('_', '-')}", least) for name, least in names.items()}
    return server_url(typed)


def _value(arguments: Sequence[str], option: str, least: str) -> str | None:
    """What was typed for ``option`` or a beginning of it from ``least`` on, as argparse takes it; the last counts."""
    found = None
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        name, equals, value = argument.partition("=")
        if name.startswith(least) and option.startswith(name):
            found = value if equals else following
    return found
