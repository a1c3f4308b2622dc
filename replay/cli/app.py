"""The ``replay`` command: its commands together, and how each of their errors ends.

Each command has a file of this folder, which parses, calls and prints. It makes no numbers, and heavy imports wait
inside its functions.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from replay import __version__
from replay.cli.capture import capture
from replay.cli.check import check
from replay.cli.compare import compare
from replay.cli.demo import demo
from replay.cli.diagnose import diagnose
from replay.cli.examples import epilog
from replay.cli.faults import faults
from replay.cli.import_dumps import import_dumps
from replay.cli.inspect import inspect
from replay.cli.interrupts import INTERRUPTED, STATUS
from replay.cli.plan import plan
from replay.cli.progress import add_verbosity
from replay.cli.report import report
from replay.cli.serve import serve
from replay.cli.show import show
from replay.cli.simulate import simulate
from replay.cli.terminal import say
from replay.cli.time import time_command
from replay.cli.trace import trace
from replay.cli.typed import refuse_repeats
from replay.errors import ReplayError
from replay.printable import one_line

# What a write to a full or failing disk ends in.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _Refusal(click.ClickException):
    """One sentence on stderr, exit code 1."""

    def show(self, file: Any = None) -> None:
        say(f"replay: {self.message}")


class _Interruption(_Refusal):
    """Ctrl-C; the exit code is that of a program that the signal ends."""

    exit_code = STATUS


class _Group(click.Group):
    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        with _spoken_interrupts(), _plain_usage_errors():
            return super().make_context(*arguments, **named)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            refuse_repeats(command, rest)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _spoken_interrupts(), _plain_usage_errors():
                return super().invoke(ctx)
        except ReplayError as error:
            raise _Refusal(str(error)) from error
        except MemoryError as error:
            raise _Refusal("the memory does not suffice for this; give less at once, or a larger machine") from error
        except OSError as error:
            if error.filename is None:
                raise
            said = f"{error.filename}: {error.strerror}; name a path that can be read and written"
            raise _Refusal(one_line(said)) from error


@contextmanager
def _spoken_interrupts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise _Interruption(INTERRUPTED) from error


@contextmanager
def _plain_usage_errors() -> Iterator[None]:
    """What was typed may come from elsewhere: a glob, another program."""
    try:
        yield
    except click.UsageError as error:
        said = error.format_message()
        if isinstance(error, click.exceptions.NoArgsIsHelpError) or one_line(said) == said:
            raise
        raise click.UsageError(one_line(said), error.ctx) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="replay")
def cli() -> None:
    """Replay EAGLE-3 draft heads offline: predict a server's accept length, and name what keeps it short.

    capture records what a target did into a trace, simulate runs draft heads on it, report shows the result again.
    """


_COMMANDS = (
    serve, capture, import_dumps, simulate, faults, report, show, compare, time_command, plan, inspect, diagnose, check,
    demo, trace,
)  # fmt: skip
for _command in _COMMANDS:
    assert _command.name is not None
    _command.epilog = epilog(_command.name)
    add_verbosity(_command)
    cli.add_command(_command)


def main() -> None:
    """Run the command (start.py)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 gets escapes, not a traceback
    try:
        cli()
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered would fail again at exit
        say(f"replay: the output cannot be written ({error.strerror}); make room, or send stdout elsewhere")
        sys.exit(1)
