"""Between the commands and the terminal: text to stdout and stderr, JSON documents, web pages, progress bars."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.analysis.json_document import document
from replay.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def say(text: str) -> None:
    """A line on stderr."""
    click.echo(text, err=True)


def print_rich(renderable: "RenderableType") -> None:
    """A report on stdout, as wide as the terminal."""
    from rich.console import Console

    Console(soft_wrap=False).print(renderable)


def print_json(body: Mapping[str, object]) -> None:
    """One JSON document on stdout, ``body`` behind the version of its schema."""
    click.echo(json.dumps(document(body), indent=2, ensure_ascii=False, allow_nan=False))


def refuse_existing(path: Path, force: bool) -> None:
    """Before the work, so that nothing is lost after it. Raises OutputError saying what stands in the way."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if path.exists() and not path.is_file():  # --force would put a file in the place of a device
        raise OutputError(f"{path} is a device or a pipe and would be replaced; name a file")
    if path.exists() and not force:
        raise OutputError(f"{path} exists already; type another name, or --force to replace it")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is not a folder, so {path.name} cannot be written there; make it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path.parent} cannot be written to; name a file in a folder that can")


@contextmanager
def show_progress(console: "Console") -> Iterator[Any]:
    """A bar that is there while the block runs, where ``console`` is a terminal; tasks take the field ``rate``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
