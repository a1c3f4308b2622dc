"""Recording a server that anybody's own command starts: ``REPLAY_RECORD`` names a folder, and nothing else is needed.

SGLang loads the plugin in the process that starts a server (its launchers, or a script with ``sgl.Engine``) before it
starts schedulers. There what is asked is checked, and each launch gets a folder and a lock of its own. The schedulers
then find in REPLAY_LAUNCH what ``replay serve`` would tell them (recording.py).

What is typed wrong ends the process before it loads a model. SystemExit, because SGLang 0.5.23 plugins/__init__.py logs
every other error of a plugin and serves on. What can change by itself between two starts, as a full disk, does not: a
pod that is restarted would never serve again.
"""

import errno
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.capture.launches import drop_launches, lock_launch
from replay.capture.options import parse_distinct_taps
from replay.capture.plugin.arguments import has_option
from replay.capture.plugin.facts import without_secrets
from replay.capture.plugin.launch import lacking_start, room_notes, simulated_lengths, target_shape
from replay.capture.plugin.recording import LAUNCH_VARIABLE, RECORD_VARIABLE, Recording
from replay.capture.plugin.seams import Place
from replay.capture.spool import SPOOL, launch_folder
from replay.errors import CaptureError, OutputError, ReplayError, UsageError
from replay.traces.files import LOCK, take_lock
from replay.traces.taps import FINAL, parse_taps

logger = logging.getLogger(__name__)

TAPS, WIRING, TOPK = "REPLAY_TAPS", "REPLAY_WIRING", "REPLAY_TOPK"
SCHEDULERS = Place("sglang.srt.entrypoints.engine", "Engine._launch_scheduler_processes", ("server_args",))
_OPTIONS = {"--trace": RECORD_VARIABLE, "--taps": TAPS, "--wiring": WIRING, "--topk": TOPK}  # as messages call them
_OTHER_WAYS = ("--use-ray", "--smg-grpc-mode", "--grpc-mode")  # of SGLang 0.5.23 launch_server.py
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)  # of a disk that may be well at the next start
_TRIES, _PAUSE = 5, 0.1  # to make a launch folder that another server's start takes for a dead one's, and seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """What the variables say, checked: an absolute folder; taps and wiring as typed."""

    folder: Path
    taps: str | None
    wiring: str | None
    topk: int


def read_asked(environment: Mapping[str, str]) -> Asked:
    """What is asked for; ``REPLAY_RECORD`` is set. Raises UsageError, OutputError."""
    folder = Path(environment[RECORD_VARIABLE])
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise OutputError(f"{RECORD_VARIABLE}={folder} is no folder: name one to record into, or a new one")
    taps, wiring, topk = (environment.get(name) or None for name in (TAPS, WIRING, TOPK))
    _check_names(TAPS, taps)
    _check_names(WIRING, wiring)
    if topk is not None and not (re.fullmatch(r"\d{1,4}", topk, re.ASCII) and 1 <= int(topk) <= 4096):
        raise UsageError(f"{TOPK}={topk} cannot be: type a number from 1 to 4096")
    if (problem := simulated_lengths(environment)) is not None:
        raise UsageError(problem)
    return Asked(folder.absolute(), taps, wiring, 32 if topk is None else int(topk))


def _check_names(variable: str, value: str | None, layers: int | None = None) -> None:
    parse = parse_distinct_taps if variable == TAPS else parse_taps
    try:
        names = () if value is None else parse(value, layers=layers)
    except UsageError as error:
        raise UsageError(f"{variable}={value} cannot be: {error}") from error
    if variable == WIRING and FINAL in names:
        raise UsageError(f"{WIRING}={value} names final, which no SGLang draft is fed: leave it out")


def begin(register: Callable[[str, Callable[..., Any]], None]) -> None:
    """In the process that may start a server: look at what is asked, and let each launch be recorded.

    ``register(place, hook)`` lets ``hook(original, *arguments)`` run in place of a function of SGLang. Exits with one
    sentence where nothing that was asked for can be had.
    """
    try:
        asked = read_asked(os.environ)
        check_way(_typed())
        lacking = SCHEDULERS.problem() or lacking_start()
        if lacking is not None:
            raise CaptureError(f"this SGLang has no {lacking}, where recording begins: unset {RECORD_VARIABLE}")
    except ReplayError as error:
        raise refusal(error) from error
    register(f"{SCHEDULERS.module}.{SCHEDULERS.name}", Launcher(asked).launch)


def refusal(error: ReplayError) -> SystemExit:
    """The end of a process that would start a server, with the sentence of ``error``; options by their variables."""
    said = str(error)
    for option, variable in _OPTIONS.items():
        said = said.replace(option, variable)
    return SystemExit(f"replay: {said}")


class Launcher:
    """Launches of one process, each of which records by itself. It holds their locks until the process ends."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.locks: list[int] = []

    def launch(self, original: Callable[..., Any], engine: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of SGLang's own start of schedulers: the same, in an environment that asks them to record."""
        try:
            arguments = arguments_of(server_args)
            check_server(self.asked, arguments)
            recording = self._open(arguments)
        except ReplayError as error:
            raise refusal(error) from error
        os.environ[LAUNCH_VARIABLE] = recording.to_json()
        try:
            return original(engine, server_args, *args, **kwargs)
        finally:
            del os.environ[LAUNCH_VARIABLE]  # not for another server that this process starts

    def _open(self, arguments: Mapping[str, Any]) -> Recording:
        """A launch of its own, with its folder where the disk has room for one. Raises OutputError."""
        asked = self.asked
        launch = secrets.token_hex(8)
        try:
            self.locks.append(open_launch(asked.folder, launch))
        except OSError as error:
            if error.errno not in _PASSING:
                raise OutputError(
                    f"cannot write to {asked.folder} or lock it: {error.strerror}; name another folder in "
                    f"{RECORD_VARIABLE}"
                ) from error
            logger.error("replay: cannot write to %s: %s", asked.folder, error.strerror)  # each scheduler tries again
        notes = room_notes(arguments.get("model_path"), asked.folder, asked.taps, asked.topk)
        told = f"the server records into {asked.folder}; capture --server joins it into a trace"
        for note in (told, *notes):
            logger.warning("replay: %s", note)
        return Recording(str(asked.folder), launch, asked.taps, asked.wiring, asked.topk, _typed())


def check_way(typed: Sequence[str]) -> None:
    """Refuse launchers that start schedulers in a way of their own, as far as that is ``typed``. Raises UsageError."""
    way = next((flag for flag in _OTHER_WAYS if has_option(typed, flag)), None)
    if way is not None:
        raise UsageError(
            f"{way} was given, and a server that starts so is not recorded: leave it out, or unset {RECORD_VARIABLE}"
        )


def check_server(asked: Asked, arguments: Mapping[str, Any]) -> None:
    """Refuse servers that cannot be recorded as asked, by their ``arguments``. Raises UsageError."""
    if (nodes := int(arguments.get("nnodes") or 1)) > 1:
        raise UsageError(
            f"--nnodes {nodes} was given, recording works with servers of one node: leave --nnodes out, or unset "
            f"{RECORD_VARIABLE}"
        )
    if asked.wiring is not None and not arguments.get("speculative_draft_model_path"):
        raise UsageError(f"{WIRING}={asked.wiring} needs a draft: add --speculative-draft-model-path")
    if (shape := target_shape(arguments.get("model_path"))) is not None:
        _check_names(TAPS, asked.taps, shape[0])
        _check_names(WIRING, asked.wiring, shape[0])
    kept = arguments.get("enable_return_hidden_states") or arguments.get("return_hidden_states_mode") == "full"
    if not arguments.get("speculative_algorithm") and not kept:
        raise UsageError(
            "the server has no draft, and SGLang then drops the hidden states of its decodes: add "
            "--enable-return-hidden-states (enable_return_hidden_states=True), which replay serve adds by itself"
        )


def arguments_of(server_args: Any) -> Mapping[str, Any]:
    """Arguments by name, as SGLang resolved them (``resolved_dict`` of its ServerArgs; else their fields)."""
    resolved = getattr(server_args, "resolved_dict", None)
    return dict(vars(server_args)) if resolved is None else dict(resolved())


def open_launch(folder: Path, launch: str) -> int:
    """Make the folder of a launch and lock it; delete what dead servers left beside it. Raises OSError.

    Others may record into ``folder`` at the same time: each has a launch folder and a lock of its own.
    """
    (folder / SPOOL).mkdir(parents=True, exist_ok=True)
    try:
        starting = take_lock(folder / SPOOL / LOCK)
    except BlockingIOError:  # a `replay serve`, or another start: who holds it cleans up
        return _lock(folder, launch)
    try:
        drop_launches(folder, launch)
        return _lock(folder, launch)
    finally:
        os.close(starting)


def _lock(folder: Path, launch: str) -> int:
    place = launch_folder(folder, launch)
    for tries_left in reversed(range(_TRIES)):
        place.mkdir(exist_ok=True)
        try:
            return lock_launch(place)
        except (FileNotFoundError, BlockingIOError):  # taken for a dead one's between the two, and being deleted
            if not tries_left:
                raise
            time.sleep(_PAUSE)
    raise AssertionError("there is a try at least")


def not_begun(*_: Any) -> None:
    """In a scheduler whose launcher asked for nothing: say so. Raises CaptureError where a wiring was asked for."""
    said = "this server is not recorded: it was started in a way that replay does not know; start it by replay serve"
    logger.error("replay: %s", said)
    if os.environ.get(WIRING):
        raise CaptureError(f"{WIRING}={os.environ[WIRING]} cannot be had: {said}")


def _typed() -> list[str]:
    """The command line, where it is that of an SGLang launcher and not of somebody's script."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    launcher = getattr(main, "name", "") == "sglang.launch_server" or Path(sys.argv[0]).name == "sglang"
    return without_secrets(sys.argv[1:]) if launcher else []
