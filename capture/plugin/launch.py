"""What ``replay serve`` starts: SGLang's own launcher, with an environment that asks the plugin to record.

All that can be refused is refused here, before a model is loaded. The plugin (hooks.py) is installed with this package
and found by SGLang itself; nothing of SGLang is edited.
"""

import importlib.util
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from replay.capture.launches import drop_launches
from replay.capture.options import parse_distinct_taps, without_embed
from replay.capture.plugin.arguments import has_option, typed_nodes, typed_value
from replay.capture.plugin.facts import without_secrets
from replay.capture.plugin.recording import RECORD_VARIABLE, SIMULATED, TRIED, Recording
from replay.capture.plugin.seams import untried_note
from replay.capture.size import RowSize, free_bytes, spell_bytes
from replay.capture.spool import SPOOL, launch_folder
from replay.errors import CaptureError, OutputError, TraceCorruptError, UsageError
from replay.traces.fields import Fields, read_json
from replay.traces.files import LOCK, is_locked, take_lock
from replay.traces.header import MAX_LAYERS, MAX_WIDTH
from replay.traces.place import check_writable, no_folder
from replay.traces.taps import FINAL, default_taps, parse_taps

_MOST_CONFIG = 1 << 24  # bytes of a config.json
# files below sglang/srt and what must stand in them
STARTS = (
    ("plugins/hook_registry.py", "class HookRegistry"),
    ("managers/scheduler.py", "def init_model_worker"),
)
PLUGIN = "replay"  # the name of the entry point
# SGLang is run from whatever folder the user is in. The safe path keeps that folder off the import path, or a folder
# `replay` in it would hide this package from SGLang; `multiprocessing` hands the flag on to the schedulers.
PYTHON = (sys.executable, "-P")
# Finds the plugin as SGLang 0.5.23 plugins/__init__.py does, and prints where it was found.
_FIND_PLUGIN = (
    "import sys; from importlib.metadata import entry_points\n"
    f"found = entry_points(group='sglang.srt.plugins', name={PLUGIN!r})\n"
    "print(*{sys.modules[one.load().__module__].__file__ for one in found}, sep='\\n')"
)


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


def prepare(options: ServeOptions, environment: Mapping[str, str]) -> Launch:
    """Check everything that can be checked before a model is loaded; nothing is written.

    Raises UsageError, OutputError, CaptureError.
    """
    _check_typed(options, environment)
    _check_folder(options.trace)
    told = _check_version()
    arguments = list(options.arguments)
    notes = [f"the server records into {options.trace.resolve()}; capture --server joins it into a trace", *told]
    if not has_option(arguments, "--speculative-algorithm"):
        arguments.append("--enable-return-hidden-states")
        notes.append("no draft: added --enable-return-hidden-states, which lets SGLang keep hidden states of decodes")
    model = typed_value(options.arguments, "--model-path", "--model")
    notes += room_notes(model, options.trace, options.taps, options.topk)
    launch = secrets.token_hex(8)
    folder = launch_folder(options.trace.resolve(), launch)
    made = _environment(options, environment, launch, arguments)
    _check_plugin(made)
    return Launch((*PYTHON, "-m", "sglang.launch_server", *arguments), made, folder, tuple(notes))


def room_notes(model: str | None, folder: Path, taps: str | None, topk: int) -> list[str]:
    """How far the disk of ``folder`` will reach, as the config of the target ``model`` tells; nothing where that is
    not here to be read."""
    shape = target_shape(model)
    if shape is None:
        return []
    layers, width = shape
    try:
        names = default_taps(layers) if taps is None else parse_distinct_taps(taps, layers=layers)
    except UsageError:  # the plugin says what is wrong with them
        return []
    size = RowSize(without_embed([FINAL, *names]), width, 2, topk)
    a_token, free = size.of(1, 1), free_bytes(folder)
    return [
        f"an output token takes about {spell_bytes(a_token)} in 16 bits, {spell_bytes(free)} are free in "
        f"{folder}: room for some {free // a_token:,} tokens"
    ]


def target_shape(model: str | None) -> tuple[int, int] | None:
    """Layers and hidden size, by the config in the folder ``model``; None where it is not here, or says none."""
    if model is None or not os.path.isfile(config := Path(model) / "config.json"):
        return None
    try:
        root = Fields(str(config), read_json(config, _MOST_CONFIG, follow=True))
        values = root.object("text_config") if "text_config" in root.values else root
        return values.integer("num_hidden_layers", 1, MAX_LAYERS), values.integer("hidden_size", 1, MAX_WIDTH)
    except TraceCorruptError:  # SGLang says what is wrong with it
        return None


def _environment(
    options: ServeOptions, environment: Mapping[str, str], launch: str, arguments: Sequence[str]
) -> dict[str, str]:
    """``environment``, with what is to be recorded, and with the plugin among those that SGLang may load."""
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
    return made


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
        raise _busy(spool.parent) from error
    except OSError as error:
        raise _unwritable(spool.parent, error) from error
    try:
        launch.folder.mkdir()
        drop_launches(spool.parent, launch.folder.name)
    except OSError as error:
        os.close(lock)
        raise _unwritable(spool.parent, error) from error
    return lock


def _check_folder(folder: Path) -> None:
    """Refuse at once what ``open_folder`` would refuse. Raises OutputError."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise no_folder(folder)
    if is_locked(folder / SPOOL):
        raise _busy(folder)
    check_writable(folder.absolute())


def _busy(folder: Path) -> OutputError:
    return OutputError(
        f"another server records into {folder}, and a second one would delete its rows: stop it, or give --trace "
        "another folder"
    )


def _unwritable(folder: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write to {folder}: {error.strerror}; give --trace another folder")


def _check_typed(options: ServeOptions, environment: Mapping[str, str]) -> None:
    if not options.arguments:
        raise UsageError("no SGLang arguments were given: type -- and after it what sglang.launch_server takes")
    if options.taps is not None:
        parse_distinct_taps(options.taps)
    if options.wiring is not None:
        if FINAL in parse_taps(options.wiring):
            raise UsageError(f"--wiring {options.wiring} names final, which no SGLang draft is fed")
        if not has_option(options.arguments, "--speculative-draft-model-path"):
            raise UsageError(f"--wiring {options.wiring} needs a draft: add --speculative-draft-model-path")
    nodes = typed_nodes(options.arguments)
    if nodes > 1:
        raise UsageError(f"--nnodes {nodes} was given, recording works with servers of one node: leave --nnodes out")
    if (problem := simulated_lengths(environment)) is not None:
        raise UsageError(problem)


def simulated_lengths(environment: Mapping[str, str]) -> str | None:
    """What is wrong where SGLang would make the accept lengths up."""
    simulated = environment.get(SIMULATED, "").strip()
    if not simulated or re.fullmatch(r"-?0*\.?0*", simulated) or simulated.startswith("-"):
        return None
    return f"{SIMULATED} is {simulated}, so every accept length of the server would be made up: unset it"


def _check_version() -> list[str]:
    """What to say of the installed SGLang; what else its seams are is looked up where they are imported (seams.py).

    Raises CaptureError where none is installed, or one in which nothing could begin to record.
    """
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise CaptureError(
            "sglang is not installed here: type pip install '.[sglang]' in a checkout of replay"
        ) from error
    lacking = lacking_start()
    if lacking is not None:
        raise CaptureError(
            f"SGLang {version} is installed and has no {lacking}, where recording begins: pip install "
            f"sglang=={TRIED[-1]}"
        )
    return [] if version in TRIED else [untried_note(version)]


def lacking_start() -> str | None:
    """What of the start is not in the installed SGLang: that it loads plugins, and the method that is hooked first."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return "folder of modules"
    root = Path(found.submodule_search_locations[0]) / "srt"
    for file, text in STARTS:
        if not (root / file).is_file() or text not in (root / file).read_text(encoding="utf-8", errors="replace"):
            return f"{text.removeprefix('def ').removeprefix('class ')} in srt/{file}"
    return None


def _check_plugin(environment: Mapping[str, str]) -> None:
    """Look for the plugin as the server will: SGLang only logs that it could not load one, and serves on.

    Raises CaptureError where it is not found, or not the one beside this file.
    """
    ours = Path(__file__).with_name("hooks.py").resolve()
    found = subprocess.run(
        (*PYTHON, "-c", _FIND_PLUGIN), env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if found.returncode == 0 and not found.stdout.strip():
        raise CaptureError(
            "SGLang would not find the recording plugin, since this package was not installed with its entry points: "
            "pip install it again"
        )
    seen = [line for line in found.stdout.splitlines() if Path(line).resolve() != ours]
    if found.returncode or seen:
        why = f"it finds {seen[0]}" if seen else (found.stderr.splitlines() or ["no reason was given"])[-1]
        raise CaptureError(
            f"SGLang would not load the recording plugin {ours} ({why}): take the folder that holds another `replay` "
            f"out of PYTHONPATH, which is {environment.get('PYTHONPATH', '')!r}"
        )
