"""Benchmark: a sweep of 64 variants in one process and in several, for two kinds of sweep.

    PYTHONPATH=tests python -P tests/bench/bench_workers.py TRACE DRAFT [--workers 2 --workers 4] [--kind steps]

*Steps*: 4 wirings x 1 to 16 steps. *Faults*: 4 wirings x 1, 3, 5, 7 steps x 4 faults. Each number of workers is a
command of its own, ``replay simulate --workers N``, started as a user starts it; they run in turns, ``--runs`` times,
and the median counts. N workers share the cores as threads, so the first command is one process with the threads of one
worker alone: against it stands what workers gain. Against one process with the threads of all cores stands what a user
gains, which is less the better its products run in threads. Printed are wall time, both ratios, seconds of all
processors, and the most memory of a process: its share of all (Pss), and what it has for itself (anonymous), beside the
bytes of the trace and of the head. Looking at memory takes time from the workers, who have no idle core: it is looked
at seldom, so that a short peak may be missed, and the seconds that this took are printed. The rounds have to be equal.
``--machine`` also runs the first command in as many copies at once, which share nothing: cores that share caches and
memory are slower together, and no sweep can gain more than these do. Not part of ``make test``.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from replay.traces.rounds_file import read_rounds

WIRINGS = ("embed,3,16", "3,16,28", "3,embed,16", "embed,16,28")
FAULTS = ("none", "position.offset=1", "kv.slot-write=overwrite", "wiring.recycle-norm=other")
KINDS = {
    "steps": {"--steps": [str(steps) for steps in range(1, 17)]},
    "faults": {"--steps": ["1", "3", "5", "7"], "--fault": list(FAULTS)},
}
_MIB = 1 << 20
_LOOK_S = 1.0
_SHARES_EVERY = 10  # looks; the kernel walks all pages of a process for its share: 15 ms for 400 MiB


@dataclass
class Run:
    """One command: its seconds by the clock and of all processors, the most bytes of each process, where its rounds
    are, seconds of a processor that looking at it took."""

    wall: float
    cpu: float
    most: dict[str, tuple[float, float]]
    rounds: Path
    watched: float


@dataclass
class Watch:
    """The most memory of a command's processes, looked at while it runs: Pss and anonymous MiB by pid."""

    pid: int
    most: dict[int, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def look(self, ended: threading.Event) -> None:
        """Every so often until it has ended."""
        look = 0
        while not ended.wait(_LOOK_S):
            look += 1
            for pid, (share, own) in list(_memory(self.pid, shares=look % _SHARES_EVERY == 0)):
                before = self.most.get(pid, (0.0, 0.0))
                self.most[pid] = max(before[0], share), max(before[1], own)
        self.seconds = time.thread_time()

    def named(self) -> dict[str, tuple[float, float]]:
        """By what a process is; those that tidy up behind workers are left out, being small."""
        others = sorted((pid for pid in self.most if pid != self.pid), key=lambda pid: -self.most[pid][1])
        large = [pid for pid in others if self.most[pid][1] > 50]
        return {"command": self.most[self.pid]} | {f"worker {n}": self.most[pid] for n, pid in enumerate(large, 1)}


def _memory(pid: int, *, shares: bool) -> Iterator[tuple[int, tuple[float, float]]]:
    try:
        every = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in every:
        try:
            own = _kib(one.pid, "status", "RssAnon")
            share = _kib(one.pid, "smaps_rollup", "Pss") if shares else 0
        except (OSError, KeyError):
            continue  # it has ended
        yield one.pid, (share / 1024, own / 1024)


def _kib(pid: int, file: str, name: str) -> int:
    """One figure of a process, as the kernel tells it."""
    lines = (line.split() for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if words[-1] == "kB"}[f"{name}:"]


def run(trace: Path, draft: Path, options: Sequence[str], workers: int, threads: int | None, rounds: Path) -> Run:
    """One sweep with so many workers, in so many threads of all of them (None: as many as there are cores)."""
    told = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-Im", "replay", "simulate", str(trace), "--draft", str(draft), *options]
    command += ["--workers", str(workers), "-o", str(rounds), "--force", "--format", "csv"]
    started, ended = time.perf_counter(), threading.Event()
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **told}
    )  # fmt: skip
    watch = Watch(child.pid)
    looking = threading.Thread(target=watch.look, args=(ended,))
    looking.start()
    _, status, used = os.wait4(child.pid, 0)
    wall = time.perf_counter() - started
    ended.set()
    looking.join()
    if status:
        raise click.ClickException(f"replay simulate ended with {os.waitstatus_to_exitcode(status)}: {command}")
    return Run(wall, used.ru_utime + used.ru_stime, watch.named(), rounds, watch.seconds)


def at_once(copies: int, *asked: Any) -> float:
    """Seconds until so many copies of a run have ended that began together; ``asked`` as in ``run``."""
    *same_for_all, rounds = asked
    with ThreadPoolExecutor(copies) as pool:
        places = [rounds.with_name(f"{rounds.stem}-{copy}.parquet") for copy in range(copies)]
        return max(one.wall for one in pool.map(lambda place: run(*same_for_all, place), places))


def same(one: Path, other: Path) -> bool:
    """Whether two rounds files tell of the same rounds; the seconds that they took differ."""
    a, b = read_rounds(one), read_rounds(other)
    told = [[(info.name, info.anchors, info.anchors_accepted, info.by_request) for info in x.variants] for x in (a, b)]
    return a.table.equals(b.table) and told[0] == told[1]


def bytes_of(folder: Path) -> float:
    """MiB of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir()) / _MIB


def _report(kind: str, runs: dict[str, list[Run]]) -> None:
    alone, all_threads, *_ = (median(one.wall for one in every) for every in runs.values())
    first = next(iter(runs.values()))[0].rounds
    for name, every in runs.items():
        wall, cpu = (median(getattr(one, what) for one in every) for what in ("wall", "cpu"))
        equal = all(same(one.rounds, first) for one in every)
        print(
            f"{kind}, {name}: {wall:6.1f} s, {alone / wall:.2f} times as fast as one worker, {all_threads / wall:.2f} "
            f"as one process; processors {cpu:6.1f} s; rounds {'equal' if equal else 'DIFFER'}"
        )
        looked = median(one.watched for one in every)
        print(f"    looking at memory took {looked:.1f} s of a processor, beside these")
        for process, (share, own) in every[-1].most.items():
            print(f"    {process:<10} most memory: share {share:6.0f} MiB, its own {own:6.0f} MiB")
    sys.stdout.flush()


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("draft", type=click.Path(path_type=Path))
@click.option("--workers", "counts", type=int, multiple=True, default=(2,))
@click.option("--wiring", "wirings", multiple=True, default=WIRINGS)
@click.option("--kind", "kinds", type=click.Choice([*KINDS]), multiple=True, default=[*KINDS])
@click.option("--limit", type=int, help="requests")
@click.option("--runs", type=int, default=1)
@click.option("--machine", is_flag=True, help="Also what copies gain that share nothing.")
def main(
    trace: Path, draft: Path, counts: tuple[int, ...], wirings: tuple[str, ...], kinds: tuple[str, ...],
    limit: int | None, runs: int, machine: bool,
) -> None:  # fmt: skip
    """Print times, ratios and memory of each kind of sweep."""
    cores = len(os.sched_getaffinity(0))
    asked: dict[str, tuple[int, int | None]] = {"one worker": (1, max(1, cores // max(counts)))}
    asked |= {f"--workers {count}": (count, None) for count in (1, *counts)}
    print(f"trace {bytes_of(trace):.0f} MiB, head {bytes_of(draft):.0f} MiB, {cores} cores")
    part = [] if limit is None else ["--limit", str(limit)]
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            swept = {"--wiring": list(wirings), **KINDS[kind]}
            options = [*part, *(word for option, values in swept.items() for one in values for word in (option, one))]
            done: dict[str, list[Run]] = {name: [] for name in asked}
            for number in range(runs):
                for place, (name, (count, threads)) in enumerate(asked.items()):
                    rounds = Path(folder) / f"{kind}-{place}-{number}.parquet"
                    done[name].append(run(trace, draft, options, count, threads, rounds))
            _report(kind, done)
            if machine:
                alone, copies = median(one.wall for one in done["one worker"]), max(counts)
                place, threads = Path(folder) / "copies.parquet", asked["one worker"][1]
                together = at_once(copies, trace, draft, options, 1, threads, place)
                gained = copies * alone / together
                print(f"    {copies} copies of one worker at once: {together:.1f} s, so this machine gains "
                      f"{gained:.2f} times at most", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
