"""Between the commands and the terminal: text to stdout and stderr, JSON documents, web pages."""

import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay import printable
from replay.analysis.json_document import document
from replay.cli.plain import ascii_only, plain
from replay.errors import OutputError
from replay.traces.files import HEADER, is_ours

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


VERBOSITY = "replay.verbosity"  # in a context's meta: -1 after -q, 1 after -v
# As wide as nothing that is printed: what is piped is not wrapped, unless COLUMNS says how wide it may be.
_UNWRAPPED = 10_000


def verbosity() -> int:
    """-1 where the command was told to be quiet, 1 where it shall say more, else 0."""
    context = click.get_current_context(silent=True)
    return 0 if context is None else int(context.meta.get(VERBOSITY, 0))


def say(text: str) -> None:
    """Lines on stderr; none where the command was told to be quiet."""
    if verbosity() < 0:
        return
    text = printable.lines(text)
    click.echo(plain(text) if ascii_only(sys.stderr) else text, err=True)


def print_text(text: str) -> None:
    """Lines on stdout."""
    text = printable.lines(text)
    click.echo(plain(text) if ascii_only() else text)


def print_rich(renderable: "RenderableType") -> None:
    """A report on stdout: as wide as a terminal, or for a pipe or a file unwrapped and without spaces at line ends."""
    from rich.console import Console

    if (console := Console(soft_wrap=False, markup=False, emoji=False)).is_terminal:
        console.print(Visible(renderable, ascii_only=ascii_only()))
        return
    width = os.environ.get("COLUMNS", "")
    piped = Console(file=io.StringIO(), width=int(width) if width.isdecimal() and int(width) else _UNWRAPPED,
                    color_system=None, markup=False, emoji=False)  # fmt: skip
    with piped.capture() as capture:
        piped.print(Visible(renderable, ascii_only=ascii_only()))
    click.echo("\n".join(line.rstrip(" ") for line in capture.get().splitlines()))


class Visible:
    """What a report holds, with everything made visible that a terminal would act on, wherever it came from."""

    def __init__(self, renderable: "RenderableType", *, ascii_only: bool = False) -> None:
        self._renderable = renderable
        self._ascii_only = ascii_only

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment

        for text, style, control in console.render(self._renderable, options):
            shown = text if control else printable.lines(text)
            yield Segment(plain(shown) if self._ascii_only and not control else shown, style, control)


def print_json(body: Mapping[str, object]) -> None:
    """One JSON document on stdout, ``body`` behind the version of its schema."""
    text = json.dumps(document(body), indent=2, ensure_ascii=ascii_only(), allow_nan=False)
    click.echo(printable.json_text(text))


def refuse_existing(path: Path, force: bool, *, ours: Callable[[Path], bool] = os.path.isfile) -> None:
    """Before the work, so that nothing is lost after it: what --force may not replace, and what cannot be written.

    ``ours`` says whether a file is one that the command may replace. Raises OutputError saying what stands in the way.
    """
    if os.path.isdir(path):
        raise OutputError(f"{path} is a folder; name a file")
    there = os.path.lexists(path)
    if there and not os.path.isfile(path):  # --force would put a file in the place of a device
        raise OutputError(f"{path} is a device or a pipe and would be replaced; name a file")
    if there and not force:
        raise OutputError(f"{path} exists already; type another name, or --force to replace it")
    if there and not ours(path):
        raise OutputError(f"{path} is no file that this command writes, so --force spares it; type another name")
    if not os.path.isdir(path.parent):
        raise OutputError(f"{path.parent} is not a folder, so {path.name} cannot be written there; make it first")
    if os.path.lexists(path.parent / HEADER) and is_ours(path.name):
        raise OutputError(f"{path} would be taken for a part of the trace {path.parent}; name a file elsewhere")
    _try_writing(path)


def _try_writing(path: Path) -> None:
    """Rights alone say too little: of a disk that is full or read-only, or a name that is too long."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that can be written to and has room"
        ) from error
