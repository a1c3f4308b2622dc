"""How far a command is, on stderr: a bar on a terminal, elsewhere a line every so often. -q leaves out both."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click

from replay.cli.terminal import VERBOSITY, say, verbosity

# Seconds until the first line, so that what is short says nothing; between lines; and between them after -v.
FIRST, EVERY, VERBOSE = 5.0, 30.0, 5.0


@dataclass(frozen=True, slots=True)
class State:
    """``done`` of ``total`` (None: not known yet) ``unit``s in ``stage``, which began at ``since`` with ``first``."""

    stage: str
    unit: str = ""
    done: float = 0.0
    total: float | None = None
    since: float = 0.0
    first: float = 0.0
    also: str = ""  # what else is said of it

    def moved(self, stage: str, done: float, total: float | None, unit: str, also: str, now: float) -> "State":
        """How it is ``now``; another stage, or one that begins again, has a rate of its own."""
        if (stage, unit) != (self.stage, self.unit) or done < self.done:
            return State(stage, unit, done, total, now, done, also)
        return replace(self, done=done, total=total, also=also)

    def rate(self, now: float) -> float | None:
        """Units a second in this stage; None where nothing is known of it."""
        seconds, gained = now - self.since, self.done - self.first
        return gained / seconds if seconds > 0 and gained > 0 else None

    def line(self, now: float) -> str:
        """All of it in one line: stage, counts, rate and time left."""
        parts = [f"{self.stage} for {spell_seconds(now - self.since)}"]
        if self.total:
            parts.append(f"{self.done:,.0f} of {self.total:,.0f} {self.unit} ({self.done / self.total:.0%})")
        if (rate := self.rate(now)) is not None:
            parts.append(f"{rate:.3g} {self.unit}/s")
            if self.total and self.total > self.done:
                parts.append(f"about {spell_seconds((self.total - self.done) / rate)} left")
        return ", ".join([*parts, *filter(None, [self.also])])


def spell_seconds(seconds: float) -> str:
    """A time as people read it: ``42 s``, ``3 min``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class Progress:
    """What a command tells of itself while it works; ``show_progress`` makes one."""

    def __init__(
        self,
        stage: str,
        *,
        bar: Any = None,
        write: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bar, self._write, self._clock = bar, write, clock
        self.state = State(stage, since=clock())
        self._task = None if bar is None else bar.add_task(stage, total=None, rate="")

    def update(self, stage: str, done: float, total: float | None, unit: str, *, also: str = "") -> None:
        """It is at ``done`` of ``total`` units of ``stage``."""
        now = self._clock()
        self.state = self.state.moved(stage, done, total, unit, also, now)
        if self._bar is not None:
            rate = self.state.rate(now)
            told = ", ".join(filter(None, [unit, "" if rate is None else f"{rate:.3g}/s", also]))
            self._bar.update(self._task, description=stage, completed=done, total=total, rate=told)

    def tell(self) -> None:
        """One line of how far it is."""
        self._write(f"replay: {self.state.line(self._clock())}")

    def note(self, text: str) -> None:
        """Something that the user should know, whatever is shown."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, emoji=False)
        else:
            self._write(text)


@contextmanager
def show_progress(stage: str, *, first: float = FIRST, every: float = EVERY) -> Iterator[Progress]:
    """A bar, or lines, that are there while the block runs; ``stage`` is what it begins with."""
    from rich.console import Console

    loud = verbosity()
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal and loud == 0:
        with _bar(console) as bar:
            yield Progress(stage, bar=bar)
        return
    progress = Progress(stage)
    if loud < 0:
        yield progress
        return
    with _lines(progress, first, VERBOSE if loud else every):
        yield progress


@contextmanager
def _lines(progress: Progress, first: float, every: float) -> Iterator[None]:
    """A line now and then, from a thread: also while no event comes."""
    over = threading.Event()

    def run() -> None:
        pause = first
        while not over.wait(pause):
            progress.tell()
            pause = every

    thread = threading.Thread(target=run, name="replay-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bar(console: Any) -> Any:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"),
               TimeRemainingColumn())  # fmt: skip
    return Progress(*columns, console=console, transient=True)


def add_verbosity(command: click.Command) -> None:
    """Give ``command``, and each command in it, the options -q and -v."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            add_verbosity(inner)
        return
    for names, what, by in (
        (("-q", "--quiet"), "Say nothing on stderr but why a command ends.", -1),
        (("-v", "--verbose"), "Say more often how far it is, and by lines on a terminal too.", 1),
    ):
        command.params.append(click.Option(names, is_flag=True, expose_value=False, help=what, callback=_set(by)))


def _set(by: int) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(context: click.Context, _: click.Parameter, given: bool) -> None:
        if not given:
            return
        if context.meta.get(VERBOSITY, by) != by:
            raise click.UsageError("give one of --quiet and --verbose")
        context.meta[VERBOSITY] = by

    return callback
