"""The folder of heads goes however a command ends; one whose command lives, or may live elsewhere, stays."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from support.heads import write_head
from support.processes import living
from support.served_maker import HEAD, make_checkpoint, make_served

import replay
from replay.simulator.heads_folder import open_heads_folder, remove
from replay.simulator.workers import open_workers

SCRIPT = """
import sys, time
import replay
from replay.simulator.workers import open_workers
trace, head = replay.Trace.open(sys.argv[1]), replay.load_head(sys.argv[2])
with open_workers(2, trace, {"h": head}, "cpu") as two:
    for one in [two._open().submit(time.sleep, 1) for _ in range(4)]:
        one.result()
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_folder_whose_processes_are_all_killed_goes_with_the_next_and_a_live_one_stays(
    tmp_path: Path, temporary: Path
) -> None:
    trace, path = make_served(tmp_path / "trace", make_checkpoint()), write_head(tmp_path / "h", HEAD)
    head = replay.load_head(path)

    def open_next() -> list[str]:
        """The folders that are there beside its own."""
        with open_workers(2, trace, {"h": head}, "cpu") as workers:
            return sorted({one.name for one in temporary.iterdir()} - {workers._turns.parent.name})

    line = [sys.executable, "-c", SCRIPT, str(trace.path), str(path)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = subprocess.Popen(line, stdout=subprocess.PIPE, env=environment, process_group=0)
    try:
        assert command.stdout is not None and command.stdout.readline() == b"begun\n"
        children = [one.pid for one in psutil.Process(command.pid).children()]
        (folder,) = os.listdir(temporary)
        assert folder.startswith("replay-heads-") and open_next() == [folder]
        for pid in children:  # which would else see that their parent is gone
            os.kill(pid, signal.SIGSTOP)
        command.kill()
        command.wait()
        assert open_next() == [folder]
    finally:
        os.killpg(command.pid, signal.SIGKILL)
        command.communicate()
    assert not living(children) and os.listdir(temporary) == [folder]
    assert open_next() == []
    assert os.listdir(temporary) == []


def make(folder: Path, machine: str) -> Path:
    (folder / "turns").mkdir(parents=True)
    (folder / "0.tensors").write_bytes(b"many")
    (folder / "lock").write_text(machine)
    return folder


def test_only_what_is_nobodys_is_removed_and_no_link_is_followed(tmp_path: Path, temporary: Path) -> None:
    here = socket.gethostname()
    precious = make(tmp_path / "precious", here)
    (make(temporary / "replay-heads-left", here) / "link").symlink_to(precious)
    (make(temporary / "replay-heads-linked", here) / "lock").unlink()
    (temporary / "replay-heads-linked" / "lock").symlink_to(precious / "lock")
    (temporary / "replay-heads-link").symlink_to(precious)
    make(temporary / "replay-heads-elsewhere", f"not-{here}")
    make(temporary / "replay-new-begun", here)  # its lock is about to be taken
    (temporary / "replay-heads-bare").mkdir()
    (temporary / "replay-heads-file").touch()
    before = set(os.listdir(temporary))
    with open_heads_folder() as folder:
        assert before - set(os.listdir(temporary)) == {"replay-heads-left"}
        assert os.listdir(folder) == ["lock"]
    assert before - set(os.listdir(temporary)) == {"replay-heads-left"} and not folder.exists()
    assert sorted(os.listdir(precious)) == ["0.tensors", "lock", "turns"]


def test_one_who_is_killed_while_he_removes_leaves_what_others_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "replay-heads-left", "")
    (folder / "turns").rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove(folder)
    assert os.listdir(folder) == ["lock"]
