"""replay serve without SGLang: what it refuses, what it sets, and that it is a faithful stand-in for the launcher."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from rig.server import free_port
from support.processes import living

import replay
from replay.capture.manifest import read_manifests
from replay.capture.plugin import hooks
from replay.capture.plugin import tether as tether_module
from replay.capture.plugin.arguments import typed_url
from replay.capture.plugin.facts import server_url
from replay.capture.plugin.launch import PLUGIN, STARTS, ServeOptions, open_folder, prepare
from replay.capture.plugin.recording import RECORD_VARIABLE, TRIED, Recording
from replay.capture.spool import row_file_names
from replay.errors import CaptureError, OutputError, UsageError

DRAFT = ("--model-path", "m", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "d")


@pytest.fixture(autouse=True)
def sglang_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.23" if name == "sglang" else version(name))


def options(
    tmp_path: Path, arguments: Sequence[str] = DRAFT, taps: str | None = None, wiring: str | None = None
) -> ServeOptions:
    return ServeOptions(tmp_path / "rec", arguments, taps, wiring)


def test_environment_asks_the_plugin_for_what_was_typed(tmp_path: Path) -> None:
    launch = prepare(options(tmp_path, (*DRAFT, "--api-key", "s3cret"), "embed,3", "embed,3,16"), {"PATH": "/bin"})
    recording = Recording.from_json(launch.environment[RECORD_VARIABLE])
    assert (recording.taps, recording.wiring, recording.folder) == ("embed,3", "embed,3,16", str(tmp_path / "rec"))
    assert "s3cret" not in launch.environment[RECORD_VARIABLE]
    assert launch.command == (sys.executable, "-P", "-m", "sglang.launch_server", *DRAFT, "--api-key", "s3cret")
    assert launch.environment["PATH"] == "/bin" and launch.folder.parent == tmp_path / "rec" / "spool"
    assert not (tmp_path / "rec").exists()


def test_server_without_draft_keeps_hidden_states_of_decodes(tmp_path: Path) -> None:
    launch = prepare(options(tmp_path, ("--model-path", "m")), {})
    assert launch.command[-1] == "--enable-return-hidden-states"
    assert any("no draft" in note for note in launch.notes)


def test_list_of_allowed_plugins_gets_this_one(tmp_path: Path) -> None:
    assert prepare(options(tmp_path), {"SGLANG_PLUGINS": "a,b"}).environment["SGLANG_PLUGINS"] == "a,b,replay"
    assert prepare(options(tmp_path), {"SGLANG_PLUGINS": "a, replay"}).environment["SGLANG_PLUGINS"] == "a, replay"
    assert "SGLANG_PLUGINS" not in prepare(options(tmp_path), {}).environment


@pytest.mark.parametrize(
    ("arguments", "taps", "wiring", "environment", "message"),
    [
        ((), None, None, {}, "no SGLang arguments"),
        (DRAFT, "3,x", None, {}, "'x' is not a tap"),
        (DRAFT, "3,embed,out:2", None, {}, "--taps 3,embed,out:2 names 3 twice"),
        (DRAFT, None, "embed,final", {}, "names final"),
        (("--model-path", "m"), None, "embed,3,16", {}, "needs a draft"),
        ((*DRAFT, "--nnodes", "2"), None, None, {}, "--nnodes 2 was given"),
        ((*DRAFT, "--nnodes=16"), None, None, {}, "--nnodes 16 was given"),
        ((*DRAFT, "--nnode", "3"), None, None, {}, "--nnodes 3 was given"),
        (DRAFT, None, None, {"SGLANG_SIMULATE_ACC_LEN": "2.5"}, "made up"),
    ],
)
def test_refused(
    tmp_path: Path,
    arguments: Sequence[str],
    taps: str | None,
    wiring: str | None,
    environment: dict[str, str],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(options(tmp_path, arguments, taps, wiring), environment)
    assert not (tmp_path / "rec").exists()


def test_one_node_is_no_reason(tmp_path: Path) -> None:
    prepare(options(tmp_path, (*DRAFT, "--nnodes", "1")), {})


@pytest.mark.parametrize("value", ["-1", "0", "", "0.0"])
def test_acceptance_that_is_not_simulated_is_no_reason(tmp_path: Path, value: str) -> None:
    prepare(options(tmp_path), {"SGLANG_SIMULATE_ACC_LEN": value})


def test_a_version_that_was_not_tried_is_said_so_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.6.1")
    assert any("SGLang 0.6.1 has not been tried" in note for note in prepare(options(tmp_path), {}).notes)
    monkeypatch.setattr(metadata, "version", lambda _: TRIED[-1])
    assert not any("not been tried" in note for note in prepare(options(tmp_path), {}).notes)


@pytest.mark.parametrize(("file", "text"), STARTS)
def test_an_sglang_in_which_nothing_would_begin_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    """The server would start and record nothing, and a --wiring would not stop it."""
    folder = fake_sglang(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: SimpleNamespace(submodule_search_locations=[str(folder)]))
    prepare(options(tmp_path), {})
    (folder / "srt" / file).write_text(text.replace("init_", "load_").replace("HookRegistry", "Hooks"))
    name = text.split()[-1]
    with pytest.raises(CaptureError, match=rf"SGLang 0.5.23 is installed and has no {name} in srt/{file}, .*pip inst"):
        prepare(options(tmp_path), {})


def fake_sglang(folder: Path) -> Path:
    """A package ``sglang`` in which recording could begin."""
    for file, text in STARTS:
        (folder / "sglang" / "srt" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sglang" / "srt" / file).write_text(text)
    return folder / "sglang"


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rec").touch()
    with pytest.raises(OutputError, match="is a file, a trace is a folder"):
        open_folder(prepare(options(tmp_path), {}))


def test_a_second_server_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = prepare(options(tmp_path), {})
    lock = open_folder(first)
    rows = first.folder / "rows-1-00000000.safetensors"
    rows.touch()
    with pytest.raises(OutputError, match=r"another server records into .*rec, .*--trace another folder"):
        open_folder(prepare(options(tmp_path), {}))
    assert row_file_names(first.folder) == [rows.name]
    os.close(lock)  # the first has ended
    os.close(open_folder(prepare(options(tmp_path), {})))
    assert not first.folder.exists()


def test_plugin_is_installed_with_this_package() -> None:
    (entry,) = metadata.entry_points(group="sglang.srt.plugins", name=PLUGIN)
    environment = {key: value for key, value in os.environ.items() if key != RECORD_VARIABLE}
    assert entry.value == "replay.capture.plugin.hooks:activate"
    # idle unless asked for: not even SGLang is imported
    code = f"import sys; from {entry.module} import {entry.attr}; {entry.attr}(); assert 'sglang' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, env=environment)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"replay/__init__.py": "raise ImportError('not it')"}, "(ImportError: not it): take the folder"),
        ({"replay.py": ""}, "'replay' is not a package): take the folder"),
        (
            {"old.dist-info/METADATA": "Name: old", "old.dist-info/entry_points.txt":
             "[sglang.srt.plugins]\nreplay = json:loads"},
            "json/__init__.py): take the folder",
        ),
    ],
)  # fmt: skip
def test_plugin_that_the_server_would_not_find_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    """SGLang would say so in its log, serve on, and record nothing."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CaptureError, match=re.escape(message)) as refusal:
        prepare(options(tmp_path), {"PYTHONPATH": str(tmp_path)})
    assert str(tmp_path) in str(refusal.value)


def run_fake(
    tmp_path: Path, body: str, *typed: str, json_wanted: bool = False, arguments: Sequence[str] = DRAFT
) -> "subprocess.Popen[str]":
    """``replay serve`` in a process of its own, in a folder ``user``, where sglang.launch_server is ``body``."""
    package = fake_sglang(tmp_path / "fake")
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(body)
    (tmp_path / "user").mkdir(exist_ok=True)
    script = (
        "from importlib import metadata; from replay.cli.app import main\n"
        "version = metadata.version; metadata.version = lambda n: '0.5.23' if n == 'sglang' else version(n)\n"
        "main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "fake")}
    typed = ("serve", "--trace", str(tmp_path / "rec"), *typed, *(["--json"] if json_wanted else []), "--", *arguments)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script, *typed], env=environment, text=True, cwd=tmp_path / "user",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


# It prints its own process id and that of a child of its own, and ends by itself after a minute.
WITH_A_CHILD = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def test_no_process_of_the_server_outlives_its_launcher(tmp_path: Path) -> None:
    """kill -9 of replay serve ends the server and its children, and frees the folder."""
    with run_fake(tmp_path, WITH_A_CHILD) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        with pytest.raises(OutputError, match="another server records"):
            open_folder(prepare(options(tmp_path), {}))
        assert len(pids) == 2 and living(pids, within=0) == pids
        process.kill()
        assert process.stdout.read() == ""  # once nobody holds it any more
    assert living(pids) == []
    os.close(open_folder(prepare(options(tmp_path), {})))


def test_launcher_that_died_before_its_server_began_leaves_none(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    tether = subprocess.Popen(
        [sys.executable, tether_module.__file__, str(read_end), *command], pass_fds=(read_end,), start_new_session=True
    )
    os.close(read_end)
    assert tether.wait(30) == -signal.SIGKILL


# It tells where it and a process that it spawns, as SGLang spawns its schedulers, find the plugin.
SPAWNING = """
import multiprocessing, os
from pathlib import Path
def tell():
    from replay.capture.plugin import hooks
    print(hooks.__file__, Path("typed").read_text(), flush=True)
if __name__ == "__main__":
    tell()
    process = multiprocessing.get_context("spawn").Process(target=tell)
    process.start()
    process.join()
"""


def test_server_in_a_folder_that_holds_another_replay_finds_the_plugin(tmp_path: Path) -> None:
    """A checkout of this project is such a folder. Paths that are typed are still those of the user's folder."""
    (tmp_path / "user" / "replay").mkdir(parents=True)
    (tmp_path / "user" / "replay" / "__init__.py").write_text("raise ImportError('this is not the plugin')")
    (tmp_path / "user" / "typed").write_text("here")
    out, error = run_fake(tmp_path, SPAWNING).communicate(timeout=60)
    assert out.splitlines() == [f"{hooks.__file__} here"] * 2, error


# A server without a plugin: it answers, and says of itself what it is told to.
UNRECORDED = """
import http.server, json, os, sys
class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/server_info" and self.headers["Authorization"] == "Bearer s3cret":
            self.wfile.write(json.dumps({"internal_states": [SAID]}).encode())
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Server)
print(os.getpid(), flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("json_wanted", [False, True])
def test_server_whose_plugin_never_ran_is_stopped(tmp_path: Path, json_wanted: bool) -> None:
    body, port = UNRECORDED.replace("SAID", "{}"), free_port()
    process = run_fake(tmp_path, body, json_wanted=json_wanted, arguments=(*DRAFT, "--port", str(port)))
    out, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "{" not in out
    assert f"replay: the server answered at http://127.0.0.1:{port}, but the recording plugin never ran in it" in error
    pid = re.search(r"^\d+$", out + error, re.MULTILINE)
    assert pid is not None and living([int(pid[0])]) == []


def test_server_that_cannot_write_its_manifest_serves_on(tmp_path: Path) -> None:
    """On a full disk the plugin says only to those who ask that it does not record."""
    arguments = (*DRAFT, "--port", str(free_port()), "--api-key", "s3cret")
    body = UNRECORDED.replace("SAID", repr({"replay": {"state": "failed"}}))
    with run_fake(tmp_path, body, json_wanted=True, arguments=arguments) as process:
        assert process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            text += process.stdout.readline()
        assert process.poll() is None
        process.terminate()
    assert json.loads(text)["state"] == "failed"


def test_answer_of_another_server_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """It was there before: the server will not get the port, or has another one in a file of arguments."""
    path, port = tmp_path / "other.py", free_port()
    path.write_text(UNRECORDED.replace("SAID", "{}"))
    with subprocess.Popen([sys.executable, path, "--port", str(port)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        body = "import sys, time; print('ready', flush=True); time.sleep(2); sys.exit(5)"
        process = run_fake(tmp_path, body, arguments=(*DRAFT, "--port", str(port)))
        out, _ = process.communicate(timeout=60)
        other.kill()
    assert (process.returncode, out) == (5, "ready\n")


# A server that writes its manifest, then answers /health; what it prints is not the document.
ANSWERING = """
import http.server, os, sys
from pathlib import Path
from replay.capture.plugin.recording import RECORD_VARIABLE, TRIED, Recording
from replay.capture.manifest import Manifest, write_manifest
from replay.capture.spool import launch_folder
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
print("noise", flush=True)
recording = Recording.from_json(os.environ[RECORD_VARIABLE])
server = http.server.HTTPServer(("127.0.0.1", 0), Health)
said = dict(state="recording", writer=True, world=1, sglang="0.5.23", wiring=("embed", "3"), server_wiring=("2", "3"),
            taps=("embed", "3", "final"), url=f"http://127.0.0.1:{server.server_address[1]}", details={"torch": "2.13"})
said |= SAID
folder = launch_folder(Path(recording.folder), recording.launch)
write_manifest(folder, Manifest(recording.launch, os.getpid(), "here", **said))
if said["state"] == "stopped" or said["state"] == "refused" and recording.wiring:
    sys.exit(1)
while True:
    server.handle_request()
"""
RECORDED = {"taps": ["embed", "3", "final"], "wiring": ["embed", "3"], "server_wiring": ["2", "3"]}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({}, {"state": "recording", "reason": "", **RECORDED}),
        ({"state": "refused", "reason": "why"}, {"state": "refused", "reason": "why", "taps": [], "wiring": []}),
    ],
)
def test_json_is_one_document_once_the_server_answers(
    tmp_path: Path, said: dict[str, str], told: dict[str, object]
) -> None:
    process = run_fake(tmp_path, ANSWERING.replace("SAID", repr(said)), json_wanted=True)
    with process:
        assert process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            text += process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
    document = json.loads(text)
    assert document["url"].startswith("http://127.0.0.1:") and document["recording"] == str(tmp_path / "rec")
    assert document.items() >= told.items() and document["ranks"] == 1
    assert document["versions"] == {"replay": replay.__version__, "sglang": "0.5.23", "torch": "2.13"}
    assert len(read_manifests(tmp_path / "rec" / "spool" / document["launch"])) == 1


def test_server_that_ends_since_its_wiring_cannot_be_had_says_why(tmp_path: Path) -> None:
    said = {"state": "refused", "reason": "R[30] cannot be recorded"}
    with run_fake(tmp_path, ANSWERING.replace("SAID", repr(said)), "--wiring", "embed,3,30") as process:
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read() == (
            f"replay: the server records into {tmp_path / 'rec'}; capture --server joins it into a trace\n"
            "replay: the server has ended, since its --wiring cannot be had: R[30] cannot be recorded\n"
        )


def test_server_that_ends_since_its_layer_ids_never_fire_says_why(tmp_path: Path) -> None:
    said = {"state": "stopped", "reason": "R[-1] is never captured; type --wiring embed,2,4"}
    with run_fake(tmp_path, ANSWERING.replace("SAID", repr(said))) as process:
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read() == (
            f"replay: the server records into {tmp_path / 'rec'}; capture --server joins it into a trace\n"
            "replay: the server has ended before it served: R[-1] is never captured; type --wiring embed,2,4\n"
        )


def test_json_of_a_server_that_does_not_start_is_empty(tmp_path: Path) -> None:
    process = run_fake(tmp_path, "import sys; sys.exit(3)", json_wanted=True)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ({}, "http://127.0.0.1:30000"),
        ({"host": "0.0.0.0", "port": 1}, "http://127.0.0.1:1"),
        ({"host": "::", "port": "1", "ssl_certfile": "c"}, "https://[::1]:1"),
        ({"host": "box"}, "http://box:30000"),
    ],
)
def test_address_of_a_server(arguments: dict[str, object], url: str) -> None:
    assert server_url(arguments) == url


def test_address_as_it_was_typed() -> None:
    assert typed_url(["--port", "1", "--hos=box", "--ssl-certfile", "c"]) == "https://box:1"


def test_exit_code_and_arguments_are_passed(tmp_path: Path) -> None:
    process = run_fake(tmp_path, "import json, sys; print(json.dumps(sys.argv[1:])); sys.exit(7)")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 7 and json.loads(out) == list(DRAFT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    body = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); signal.signal(signal.SIGINT, lambda *_: sys.exit(4))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = run_fake(tmp_path, body)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(60) == {signal.SIGTERM: 3, signal.SIGINT: 4}[number]


def test_server_killed_by_a_signal_is_told_as_shells_do(tmp_path: Path) -> None:
    with run_fake(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)") as process:
        assert process.wait(60) == 128 + signal.SIGKILL
