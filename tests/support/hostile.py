"""Commands on hostile input: every outcome is success, or a refusal in one bounded sentence that a terminal shows."""

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from click.testing import CliRunner

from replay.cli.app import cli
from replay.errors import ReplayError

MOST_REFUSAL, MOST_REPORT = 1_100, 40_000  # characters
# What a terminal acts on, or what hides or turns text; lines and tabs are a report's own.
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit code: 0, 1 or 2."""

    code: int
    stdout: str
    stderr: str

    @property
    def refusal(self) -> str:
        """The sentence with which it refused."""
        assert self.code == 1, (self.code, self.stdout[:300], self.stderr[:300])
        (line,) = self.stderr.splitlines()
        return line


def run(*arguments: object, seconds: float = 60.0) -> Outcome:
    """Run a command in this process. Fails for an error that is no refusal, and for output that is not harmless."""
    with within(seconds):
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    found = Outcome(result.exit_code, result.stdout, result.stderr)
    assert found.code in (0, 1, 2), found
    most_shown = 1 << 24 if "--json" in arguments else MOST_REPORT  # a document holds what the file held
    for text, most in ((found.stdout, most_shown), (found.stderr, MOST_REFUSAL)):
        assert not _ACTS.search(text), ascii(text[:500])
        assert len(text) <= most, (len(text), text[:300])
    if found.code == 1:
        assert len(found.stderr.splitlines()) == 1, found.stderr
    return found


def call(function: Callable[[], object], seconds: float = 60.0) -> str:
    """What a call refuses with, in one harmless line; empty where it does not refuse. Any other error is raised."""
    try:
        with within(seconds):
            function()
    except ReplayError as error:
        said = str(error)
        assert said.isprintable() and 0 < len(said) <= MOST_REFUSAL, ascii(said[:500])
        return said
    return ""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails a block that takes longer: input that hangs a command would hang the tests."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _socket(path: Path) -> None:
    folder = os.getcwd()
    os.chdir(path.parent)  # an address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(folder)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


# What may lie where a file should. None of these is one that any command can use.
KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": _socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "list of the kernel": lambda path: path.symlink_to("/proc/self/maps"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "terabyte of nothing": _sparse,
    "nothing": Path.touch,
    "byte order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf{}"),
    "UTF-16": lambda path: path.write_text("{}", encoding="utf-16"),
    "zero bytes": lambda path: path.write_bytes(bytes(1000)),
    "nested lists": lambda path: path.write_bytes(b"[" * 100_000),
    "a very long number": lambda path: path.write_bytes(b'{"hidden_size": ' + b"1" * 10_000 + b"}"),
}  # fmt: skip


def put(path: Path, kind: str) -> Path:
    """Let ``path`` be one of ``KINDS``."""
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    return path
