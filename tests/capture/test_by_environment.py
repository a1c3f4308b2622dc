"""Recording by REPLAY_RECORD alone: what is refused before a server loads, and what its schedulers find. No SGLang."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from replay.capture.plugin import by_environment, hooks
from replay.capture.plugin.by_environment import Asked, Launcher, check_server, open_launch, read_asked
from replay.capture.plugin.recording import LAUNCH_VARIABLE, RECORD_VARIABLE, Recording
from replay.capture.spool import SPOOL, launch_folder
from replay.errors import CaptureError, OutputError, UsageError
from replay.traces import files

DRAFTS = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d", "nnodes": 1}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "rec"))
    return Asked(tmp_path / "rec", "embed,3", None, 8)


def start(launcher: Launcher, arguments: Mapping[str, Any] = DRAFTS) -> Recording:
    """What the schedulers of one launch find in their environment."""
    found: list[str] = []
    args = SimpleNamespace(resolved_dict=lambda: dict(arguments))
    given = launcher.launch(lambda *_, **__: found.append(os.environ[LAUNCH_VARIABLE]) or "procs", "engine", args, 1)
    assert given == "procs"
    return Recording.from_json(found[0])


def close(launcher: Launcher) -> None:
    """As its process would by ending."""
    for lock in launcher.locks:
        os.close(lock)


# ---- what is typed ----


def test_what_the_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_asked({RECORD_VARIABLE: "rec"}) == Asked(tmp_path / "rec", None, None, 32)
    told = {"REPLAY_TAPS": "embed,3", "REPLAY_WIRING": "embed,3,16", "REPLAY_TOPK": "8"}
    assert read_asked({RECORD_VARIABLE: "/rec", **told}) == Asked(Path("/rec"), "embed,3", "embed,3,16", 8)
    assert read_asked({RECORD_VARIABLE: "/rec", "REPLAY_TAPS": "", "REPLAY_TOPK": ""}).topk == 32


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"REPLAY_TAPS": "3,x"}, "REPLAY_TAPS=3,x cannot be: 'x' is not a tap"),
        ({"REPLAY_TAPS": "3,out:2"}, "REPLAY_TAPS=3,out:2 cannot be: .* names 3 twice"),
        ({"REPLAY_WIRING": "embed,"}, "REPLAY_WIRING=embed, cannot be: "),
        ({"REPLAY_WIRING": "vllm:0,3"}, "REPLAY_WIRING=vllm:0,3 cannot be: "),
        ({"REPLAY_WIRING": "3,final"}, "REPLAY_WIRING=3,final names final"),
        ({"REPLAY_TOPK": "0"}, "REPLAY_TOPK=0 cannot be: type a number from 1 to 4096"),
        ({"REPLAY_TOPK": "4097"}, "REPLAY_TOPK=4097 cannot be"),
        ({"REPLAY_TOPK": "-1"}, "REPLAY_TOPK=-1 cannot be"),
        ({"REPLAY_TOPK": "1e3"}, "REPLAY_TOPK=1e3 cannot be"),
        ({"SGLANG_SIMULATE_ACC_LEN": "2.5"}, "SGLANG_SIMULATE_ACC_LEN is 2.5, .* made up"),
    ],
)
def test_what_cannot_be_is_named_by_its_variable(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_asked({RECORD_VARIABLE: "/nowhere/rec", **variables})


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "rec").touch()
    with pytest.raises(OutputError, match=r"REPLAY_RECORD=.*/rec is no folder"):
        read_asked({RECORD_VARIABLE: str(tmp_path / "rec")})


@pytest.mark.parametrize(
    ("wiring", "arguments", "message"),
    [
        (None, {**DRAFTS, "nnodes": 2}, "--nnodes 2 was given, recording works with servers of one node"),
        ("embed,3,16", {"speculative_algorithm": "NGRAM"}, "REPLAY_WIRING=embed,3,16 needs a draft"),
        (None, {}, "add --enable-return-hidden-states"),
    ],
)
def test_servers_that_cannot_be_recorded(wiring: str | None, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_server(Asked(Path("/rec"), None, wiring, 8), arguments)


@pytest.mark.parametrize("variable", ["REPLAY_TAPS", "REPLAY_WIRING"])
def test_a_tap_that_the_target_has_not_is_refused_before_it_is_loaded(tmp_path: Path, variable: str) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30, "hidden_size": 8}')
    asked = read_asked({RECORD_VARIABLE: "/rec", variable: "embed,31"})
    with pytest.raises(
        UsageError, match=rf"{variable}=embed,31 cannot be: tap 31 is R\[31\], the target has 30 layers"
    ):
        check_server(asked, {**DRAFTS, "model_path": str(tmp_path)})
    check_server(asked, {**DRAFTS, "model_path": "some/hub-id"})  # its config is not here: the plugin looks


@pytest.mark.parametrize("arguments", [{"enable_return_hidden_states": True}, {"return_hidden_states_mode": "full"}])
def test_a_server_without_draft_that_keeps_hidden_states(arguments: dict[str, Any]) -> None:
    check_server(Asked(Path("/rec"), None, None, 8), arguments)


@pytest.mark.parametrize("flag", ["--use-ray", "--smg-grpc-mode", "--grpc-mode"])
def test_launchers_that_start_schedulers_otherwise_are_refused(flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} was given, and a server that starts so is not recorded"):
        by_environment.check_way(["--model-path", "m", flag])


def test_recording_needs_no_package_that_sglang_may_lack() -> None:
    """A wheel copied to the server's machine and installed with --no-deps is enough: all that the plugin imports."""
    names = [path.stem for path in Path(hooks.__file__).parent.glob("*.py") if path.stem not in ("server", "tether")]
    lacking = "import sys; sys.modules.update(dict.fromkeys(('polars', 'click', 'rich', 'yaml', 'scipy')))"
    imports = "; ".join(f"import replay.capture.plugin.{name}" for name in sorted(names))
    done = subprocess.run([sys.executable, "-P", "-c", f"{lacking}; {imports}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---- launches ----


def test_each_launch_records_by_itself(asked: Asked) -> None:
    """Two servers at once into one folder, as two pods on a shared disk, and two engines of one process."""
    launcher, other = Launcher(asked), Launcher(asked)
    first, second, third = start(launcher), start(launcher), start(other)
    assert len({first.launch, second.launch, third.launch}) == 3
    assert (first.folder, first.taps, first.wiring, first.topk) == (str(asked.folder), "embed,3", None, 8)
    assert all(launch_folder(asked.folder, one.launch).is_dir() for one in (first, second, third))
    assert LAUNCH_VARIABLE not in os.environ and os.environ[RECORD_VARIABLE] == str(asked.folder)
    close(launcher)
    close(other)


def test_a_server_that_is_started_again_deletes_what_the_dead_one_left(asked: Asked) -> None:
    dead = Launcher(asked)
    left = launch_folder(asked.folder, start(dead).launch)
    (left / "rows-1-00000000.safetensors").touch()
    (left / "somebody.else").touch()
    close(dead)
    again = Launcher(asked)
    start(again)
    assert [path.name for path in left.iterdir()] == ["somebody.else"]
    close(again)


@pytest.mark.parametrize("moment", ["before it is locked", "while it is deleted", "after its lock was opened"])
def test_a_launch_taken_for_a_dead_one_is_made_again(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another start may delete the empty folder between its making and its locking."""
    take, tries, held = files.take_lock, [], []

    def late(path: Path) -> int:
        if path.parent.name == SPOOL:
            return take(path)
        tries.append(path)
        if len(tries) == 1 and moment == "before it is locked":
            path.parent.rmdir()
        if len(tries) == 1 and moment == "while it is deleted":
            held.append(take(path))
        if len(tries) == 2 and held:
            os.close(held.pop())
        lock = take(path)
        if len(tries) == 1 and moment == "after its lock was opened":
            path.unlink()
        return lock

    monkeypatch.setattr(files, "take_lock", late)
    monkeypatch.setattr(by_environment, "_PAUSE", 0)
    lock = open_launch(asked.folder, "0" * 16)
    assert len(tries) == 2
    assert os.path.samestat(os.fstat(lock), os.stat(launch_folder(asked.folder, "0" * 16) / files.LOCK))
    os.close(lock)


def test_a_full_disk_stops_no_server(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that is started again on a disk that has become full shall serve; its schedulers say that they cannot."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(by_environment, "open_launch", full)
    assert start(Launcher(asked)).folder == str(asked.folder)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, asked: Asked) -> None:
    (tmp_path / "file").touch()
    launcher = Launcher(Asked(tmp_path / "file" / "rec", None, None, 8))
    with pytest.raises(SystemExit, match=r"replay: cannot write to .*/file/rec or lock it: .* in REPLAY_RECORD"):
        start(launcher)


def test_a_server_that_cannot_be_recorded_ends_before_it_starts_schedulers(asked: Asked) -> None:
    with pytest.raises(SystemExit, match="replay: --nnodes 4 was given"):
        start(Launcher(asked), {**DRAFTS, "nnodes": 4})
    assert not (asked.folder / SPOOL).exists() and os.environ[RECORD_VARIABLE] == str(asked.folder)


# ---- the entry point ----

Hooks = dict[str, Callable[..., Any]]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    """What the plugin hooks, of an SGLang that has the places."""
    found: Hooks = {}
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda place, hook, kind: found.update({place: hook}))  # type: ignore[attr-defined]
    registry.HookType = SimpleNamespace(AROUND="around", BEFORE="before")  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(by_environment, "SCHEDULERS", SimpleNamespace(module="engine", name="start", problem=str))
    monkeypatch.setattr(by_environment.SCHEDULERS, "problem", lambda: None)
    monkeypatch.setattr(by_environment, "lacking_start", lambda: None)
    return found


def test_it_is_idle_unless_asked(registered: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        monkeypatch.delenv(RECORD_VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(RECORD_VARIABLE, value)
        hooks.activate()
    assert registered == {}


def test_the_launcher_hooks_the_start_of_schedulers(registered: Hooks, asked: Asked) -> None:
    hooks.activate()
    assert set(registered) == {"engine.start", hooks._START}
    assert registered[hooks._START] is by_environment.not_begun


def test_a_child_does_so_where_it_may_start_a_server(
    registered: Hooks, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detokenizer has not imported what starts schedulers; a server in a process of a script has."""
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "launcher")
    monkeypatch.delitem(sys.modules, hooks._ENGINE, raising=False)
    hooks.activate()
    assert registered == {}
    monkeypatch.setitem(sys.modules, hooks._ENGINE, ModuleType(hooks._ENGINE))
    hooks.activate()
    assert "engine.start" in registered


@pytest.mark.parametrize("variable", [RECORD_VARIABLE, LAUNCH_VARIABLE])
def test_a_scheduler_records(registered: Hooks, asked: Asked, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """As `replay serve` asks it, and where a script that sets REPLAY_RECORD has run again in it."""
    monkeypatch.setenv(variable, Recording("/rec", "0" * 16, None, None, 4).to_json())
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "launcher")
    hooks.activate()
    assert registered == {hooks._START: hooks._install}


def test_what_is_typed_wrong_ends_the_process(registered: Hooks, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SystemExit: SGLang logs what else a plugin raises, and serves on."""
    monkeypatch.setenv("REPLAY_TAPS", "x")
    with pytest.raises(SystemExit, match=r"^replay: REPLAY_TAPS=x cannot be"):
        hooks.activate()
    assert registered == {}


def test_an_sglang_that_starts_schedulers_otherwise_is_refused(
    registered: Hooks, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_environment.SCHEDULERS, "problem", lambda: "Engine.start in engine")
    with pytest.raises(SystemExit, match=r"this SGLang has no Engine.start in engine, .* unset REPLAY_RECORD"):
        hooks.activate()


def test_a_scheduler_that_no_launcher_asked_says_so(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As actors of Ray. What it would be fed instead of a wiring that was asked for is not to be served."""
    by_environment.not_begun(None)
    assert "this server is not recorded" in caplog.text
    monkeypatch.setenv("REPLAY_WIRING", "embed,3,16")
    with pytest.raises(CaptureError, match="REPLAY_WIRING=embed,3,16 cannot be had"):
        by_environment.not_begun(None)
