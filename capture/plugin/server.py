"""``replay serve``: SGLang's launcher as a child process, from its start to its end."""

import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import replay
from replay.capture.manifest import Manifest, read_manifests
from replay.capture.plugin.arguments import typed_key, typed_url
from replay.capture.plugin.launch import Launch, ServeOptions, open_folder, prepare
from replay.capture.spool import is_manifest, names_in
from replay.errors import CaptureError, TraceCorruptError, WiringError
from replay.traces.fields import parse_json

_TETHER = Path(__file__).with_name("tether.py")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_SECONDS = 0.5
_END_SECONDS = 30.0  # that a server gets to end after it was told to


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


def run_server(
    options: ServeOptions, tell: Callable[[str], None], on_ready: Callable[[Ready], None] | None = None
) -> int:
    """Run the server until it ends; its exit code (128 + n after signal n). Signals sent here are passed on.

    ``on_ready`` is called once it answers; what the server itself prints goes to stderr then. It ends with this
    process, after kill -9 too. Raises as ``prepare`` and ``open_folder``; CaptureError where the plugin never ran in
    it, which ends it; WiringError where it ended because a wiring could not be had, or because of layer ids at which
    it would have stopped later.
    """
    launch = prepare(options, os.environ)
    lock = open_folder(launch)
    for note in launch.notes:
        tell(note)
    url = typed_url(options.arguments)
    taken = _is_taken(url)
    try:
        server, tether = _start(launch, lock, None if on_ready is None else sys.stderr)
    except OSError as error:
        os.close(lock)
        raise CaptureError(f"{launch.command[0]} cannot be started: {error.strerror}") from error
    with _passing_signals(server):
        try:
            _wait_for_plugin(server, launch, None if taken else url, typed_key(options.arguments))
            if on_ready is not None and (ready := _wait_until_ready(server, launch, url)) is not None:
                on_ready(ready)
            code = server.wait()
        except BaseException:  # nobody would be left to pass signals on
            _end(server)
            raise
        finally:
            os.close(tether)  # which kills what is left of it
            server.kill()  # SGLang kills its own children when it ends, the keeper of the tether among them
            server.wait()
            os.close(lock)
    if code:
        _check_refusal(launch, options.wiring)
    return 128 - code if code < 0 else code


def _start(launch: Launch, lock: int, stdout: Any) -> "tuple[subprocess.Popen[bytes], int]":
    """The server, and the end of a pipe: once this is closed, by us or by our death, all of the server is killed.

    It has a session of its own, so that Ctrl-C reaches it once, from here, and not a second time from the terminal. It
    holds the lock too, and so keeps the folder until it is gone. Raises OSError.
    """
    read_end, write_end = os.pipe()
    try:
        command = (sys.executable, "-I", "-S", str(_TETHER), str(read_end), *launch.command)
        server = subprocess.Popen(
            command, env=dict(launch.environment), start_new_session=True, pass_fds=(lock, read_end), stdout=stdout
        )
    except OSError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return server, write_end


def _end(server: "subprocess.Popen[bytes]") -> None:
    """Ask the server to end, and give it time to."""
    server.terminate()
    try:
        server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        pass  # it is killed next


def _wait_for_plugin(server: "subprocess.Popen[bytes]", launch: Launch, url: str | None, key: str | None) -> None:
    """Return once the plugin has said anything, or the server has ended. ``url``: where only this server can answer.

    Raises CaptureError where it answers and the plugin never ran: SGLang logs that, and serves on.
    """
    while server.poll() is None and not _plugin_ran(launch):
        # An answer comes after loading, and every scheduler writes its manifest before. A full disk takes none.
        if url is not None and _answers(url) and not _plugin_ran(launch):
            if _tells_of_plugin(url, key):
                return
            raise CaptureError(
                f"the server answered at {url}, but the recording plugin never ran in it, so it was stopped: see what "
                "its log says of plugin replay, and pip install this package again where SGLang is installed"
            )
        time.sleep(_POLL_SECONDS)


def _wait_until_ready(server: "subprocess.Popen[bytes]", launch: Launch, url: str) -> Ready | None:
    """What the server says once it answers; None where it ended before."""
    while server.poll() is None:
        manifests = _manifests(launch)
        # None while the plugin runs: a manifest is being replaced just now.
        if all(one.state != "loading" for one in manifests) and (manifests or not _plugin_ran(launch)):
            ready = _ready(launch, url, manifests)
            if _answers(ready.url):
                return ready
        time.sleep(_POLL_SECONDS)
    return None


def _ready(launch: Launch, url: str, manifests: Sequence[Manifest]) -> Ready:
    none = Manifest(launch.folder.name, 0, "", "failed", False, f"the server wrote no manifest into {launch.folder}")
    worst = next((one for one in manifests if one.state != "recording"), (*manifests, none)[0])
    recorded = worst.state == "recording"
    return Ready(
        url=next((one.url for one in manifests if one.url), url),
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


def _is_taken(url: str) -> bool:
    """Whether something listens there before the server is started: what answers there later need not be ours."""
    try:
        parts = urllib.parse.urlsplit(url)
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1).close()
        return True
    except (OSError, ValueError):  # of a port or host that cannot be, the server itself says so
        return False


def _answers(url: str) -> bool:
    """Whether the server's health check is passed: it generates a token, so a busy machine gets time."""
    return _get(f"{url}/health") is not None


def _tells_of_plugin(url: str, key: str | None) -> bool:
    """Whether ``/server_info`` holds what the plugin adds to it."""
    try:
        info: Any = parse_json(_get(f"{url}/server_info", key) or b"", "/server_info", ValueError)
        return any("replay" in state for state in info["internal_states"])
    except (ValueError, KeyError, TypeError):
        return False


def _get(address: str, key: str | None = None) -> bytes | None:
    """What is answered with status 200."""
    own = ssl.create_default_context()  # a certificate of its own making is nothing to doubt in one's own child
    own.check_hostname, own.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=60, context=own) as response:
            data: bytes = response.read()
            return data if response.status == HTTPStatus.OK else None
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _plugin_ran(launch: Launch) -> bool:
    """Whether a scheduler process of this launch has written its manifest."""
    try:
        return any(map(is_manifest, names_in(launch.folder)))
    except CaptureError:  # the folder cannot be read now
        return False


def _manifests(launch: Launch) -> list[Manifest]:
    try:
        return read_manifests(launch.folder)
    except (TraceCorruptError, CaptureError):
        return []  # replaced while it was read, or not to be read at all


def _check_refusal(launch: Launch, wiring: str | None) -> None:
    """Why the server ended, where that was a wiring. Raises WiringError."""
    for one in _manifests(launch):
        if one.state == "stopped":
            raise WiringError(f"the server has ended before it served: {one.reason}")
        if one.state == "refused" and wiring is not None:
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
