"""Web pages of several commands: asked for by --html, refused before the work, written whole."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replay.cli.options import PATH, Command
from replay.cli.terminal import Visible, refuse_existing
from replay.errors import OutputError

if TYPE_CHECKING:
    from rich.console import RenderableType


def page_options(command: Command) -> Command:
    """``html`` and ``force``."""
    for option in (
        click.option("--force", is_flag=True, help="Replace an existing web page."),
        click.option("--html", type=PATH, metavar="FILE", help="Write what is shown as a web page in one file too."),
    ):
        command = option(command)
    return command


def refuse_page(path: Path | None, force: bool) -> None:
    """Before the work: raises OutputError for a place that cannot be written, UsageError without the library."""
    if path is None:
        return
    from replay.analysis.page.draw import check_drawing

    refuse_existing(path, force, ours=is_web_page)
    check_drawing()


def is_web_page(path: Path) -> bool:
    """Whether ``path`` begins as the pages that replay writes."""
    from replay.analysis.page.document import START

    with path.open("rb") as file:
        return file.read(len(START)) == START.encode()


def write_page_file(path: Path, make: Callable[[str], str], report: "RenderableType") -> None:
    """What ``make`` makes of the report's text, as a whole file. Raises OutputError where it cannot be written."""
    from replay.traces.files import write_whole

    page = make(_plain_text(report))
    try:
        write_whole(path, [page.encode()])
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}); choose another --html") from error


def _plain_text(renderable: "RenderableType") -> str:
    """As a terminal of 100 columns shows it, without colour."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100, color_system=None, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(Visible(renderable))
    return capture.get()
