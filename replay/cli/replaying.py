"""The replay of a sweep on the terminal: its progress, what its cache says, where its rounds go."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from replay.cli.progress import show_progress
from replay.cli.terminal import refuse_existing
from replay.errors import OutputError, ReplayError, UsageError

if TYPE_CHECKING:
    from replay.checkpoint.checkpoint import Checkpoint
    from replay.simulator.variant import Variant
    from replay.traces.reader import Trace
    from replay.traces.rounds import Rounds

_TABLES = {".csv": "csv", ".md": "md"}  # endings of what --format prints
_OTHERS = (".tsv", ".txt", ".json", ".jsonl", ".html", ".xlsx", ".arrow", ".feather")  # which nothing here prints


def run_simulation(
    trace: "Trace",
    checkpoints: "Mapping[str, Checkpoint]",
    variants: "Sequence[Variant]",
    device: str,
    *,
    agreement: bool = True,
    cache: Path | None = None,
    workers: int | str | None = None,
) -> "Rounds":
    """Simulate and show how far it is; ``agreement`` also holds the variants against the trace's own server.

    ``cache`` is a folder of variants that were replayed before, ``workers`` as ``read_workers`` gave them.
    """
    from replay.simulator.binding import resolve
    from replay.simulator.cache import open_cache, simulate_cached
    from replay.simulator.held import requests_with_taps
    from replay.simulator.kept import keep_tasks
    from replay.simulator.progress import ReplayProgress
    from replay.simulator.workers import use_workers

    # Workers have the requests that are replayed, and no others: a rule may not go with these.
    asked = requests_with_taps(trace, [resolve(one, checkpoints[one.draft], trace) for one in variants], checkpoints)
    with show_progress("replaying") as progress:

        def on_event(event: ReplayProgress) -> None:
            progress.update(event.stage, event.done + event.part, event.total, "requests")

        with quiet_ray(workers), use_workers(workers, asked, checkpoints, device, progress.note) as hands:
            kernels = None if hands is None else hands.kernels
            kept = None
            if cache is not None:
                kept = open_cache(
                    cache, trace, checkpoints, device, agreement=agreement, kernels=kernels, on_note=progress.note
                )
            if cache is not None and kept is None:
                progress.note(f"note: the recording of {trace.path} has not ended, so --cache keeps nothing of it")
            notes = FoundNotes(progress.note, cache, len(variants), hands is not None)
            return simulate_cached(
                kept, trace, checkpoints, variants, device=device, agreement=agreement,
                workers=keep_tasks(kept, hands, notes.of_tasks), on_event=on_event, on_found=notes.of_variants,
            )  # fmt: skip


@contextmanager
def quiet_ray(workers: int | str | None) -> Iterator[None]:
    """While a cluster replays, Ray writes pages of a lost node's state on stdout, where a document may be awaited."""
    if not isinstance(workers, str):
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


@dataclass
class FoundNotes:
    """What is said of a cache: what it has of a sweep, or that it has other things alone.

    Where workers replay, the tasks of variants that are not whole are looked for as well before it has nothing.
    """

    note: Callable[[str], None]
    cache: Path | None
    variants: int
    by_task: bool
    _said: bool = False

    def of_variants(self, found: int) -> None:
        """So many variants were there whole."""
        self._tell(found, f"{found} of {self.variants} variants", last=not self.by_task)

    def of_tasks(self, found: int, tasks: int) -> None:
        """So many tasks of the others were there."""
        self._tell(found, f"{found} of {tasks} tasks", last=True)

    def _tell(self, found: int, what: str, last: bool) -> None:
        if found:
            self.note(f"note: {what} were replayed before, {self.cache} has them")
        elif last and not self._said and self.cache is not None and next(self.cache.glob("??/*.sha256"), None):
            self.note(
                f"note: {self.cache} has none of these variants whole as this version, its kernels and threads, the "
                "trace and the heads make them; they are replayed, and what lies there stays (a process has fewer "
                "threads with --workers)"
            )
        self._said = self._said or last or found > 0


def check_device(device: str, workers: int | str | None = None) -> None:
    """Whether heads can run there; of a cluster its nodes are asked. Raises UsageError."""
    import torch

    try:
        elsewhere = isinstance(workers, str) and torch.device(device).type == "cuda"
        if not elsewhere:
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); try cpu") from error


def refuse_output(path: Path, force: bool) -> None:
    """Before the work. Raises UsageError for a name that says another form than parquet, and as ``refuse_existing``."""
    from replay.traces.rounds_file import is_rounds_file

    refuse_existing(path, force, ours=is_rounds_file)
    ending = path.suffix.lower()
    if ending in _TABLES or ending in _OTHERS:
        table = f", or --format {_TABLES[ending]} > {path} for the table alone" if ending in _TABLES else ""
        raise UsageError(
            f"-o writes rounds as parquet, and {path} ends in {path.suffix}; type -o {path.with_suffix('.parquet')}"
            f"{table}"
        )


def write_after(rounds: "Rounds", path: Path, force: bool) -> ReplayError | None:
    """Why the rounds could not be written: said after the report, so that a full disk loses the file only."""
    from replay.traces.rounds_file import write_rounds

    try:
        write_rounds(rounds, path, force=force)
    except ReplayError as error:
        return error
    return None


@contextmanager
def say_unwritten(unwritten: ReplayError | None) -> Iterator[None]:
    """Behind what the block shows and writes, why the rounds were not written. Raises it, joined with what the block
    raises."""
    try:
        yield
    except ReplayError as error:
        if unwritten is None:
            raise
        raise OutputError(f"{unwritten}; {error}") from error
    if unwritten is not None:
        raise unwritten
