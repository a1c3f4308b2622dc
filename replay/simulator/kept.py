"""Pieces of a replay, kept in a cache: a diagnosis, or workers, that were stopped go on.

Of a diagnosis what was replayed along a server's drafts, of workers each task.
"""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.analysis.followed import Followed
from replay.errors import TraceError
from replay.simulator.cache import Cache
from replay.simulator.cache_keys import rows_sha256
from replay.simulator.results import Played
from replay.simulator.tasks import Result, Task, Workers
from replay.simulator.variant import ResolvedVariant
from replay.traces import files
from replay.traces.fields import parse_json
from replay.verify.estimator import Estimate

if TYPE_CHECKING:
    import polars as pl

_MOST = 1 << 32  # bytes of an entry


def say_followed(rounds: "pl.DataFrame", scales: Sequence[float], served_products: bool) -> str:
    """What was asked beside the variant, as an entry's name has it."""
    return repr(("followed", rows_sha256(rounds), tuple(scales), served_products))


def find_followed(cache: Cache, variant: ResolvedVariant, asked: str) -> Followed | None:
    """What was kept of ``variant``; None where it is not there whole."""
    path = cache.place(variant, asked, ".npz")
    try:
        return _read(path) if cache.entries.holds(path) else None
    except TraceError:
        return None


def keep_followed(cache: Cache, variant: ResolvedVariant, asked: str, followed: Followed) -> None:
    """Raises OutputError."""
    path = cache.place(variant, asked, ".npz")
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {item.name: np.asarray(getattr(followed, item.name)) for item in fields(Followed)}
    np.savez(buffer, **arrays)
    cache.write(path, lambda: cache.write_bytes(path, buffer.getvalue()))


def _read(path: Path) -> Followed:
    with np.load(io.BytesIO(files.read_small(path, _MOST)), allow_pickle=False) as kept:
        values: dict[str, Any] = {item.name: kept[item.name] for item in fields(Followed)}
    values |= {"scales": tuple(values["scales"].tolist()), "choices": int(values["choices"])}
    return Followed(**{**values, "by_depth": bool(values["by_depth"])})


# ---- tasks of workers ----


@dataclass(frozen=True)
class KeptWorkers:
    """``workers`` that do no task which ``cache`` has, and keep what they do.

    Each time that they are given tasks ``on_found`` is told how many of how many were there.
    """

    cache: Cache
    workers: Workers
    on_found: Callable[[int, int], None] = lambda found, tasks: None

    @property
    def count(self) -> int:
        """As many as there are."""
        return self.workers.count

    @property
    def kernels(self) -> tuple[str | int, ...]:
        """As they are."""
        return self.workers.kernels

    def replay(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """As ``Workers.replay``; raises OutputError as well."""
        looked_up = enumerate(_find_task(self.cache, task) for task in tasks)
        found = {place: result for place, result in looked_up if result is not None}
        rest = [place for place in range(len(tasks)) if place not in found]
        self.on_found(len(found), len(tasks))
        yield from found.items()
        for number, result in self.workers.replay([tasks[place] for place in rest]):
            _keep_task(self.cache, tasks[rest[number]], result)
            yield rest[number], result


def keep_tasks(
    cache: Cache | None, workers: Workers | None, on_found: Callable[[int, int], None] = lambda found, tasks: None
) -> Workers | None:
    """Workers that keep what they do where there is a cache; ``on_found`` as KeptWorkers have it."""
    return workers if cache is None or workers is None else KeptWorkers(cache, workers, on_found)


def _say_task(task: Task) -> str:
    if task.scales is not None and task.rounds is not None:
        return say_followed(task.rounds, task.scales, task.served_products)
    return repr(("task", task.requests, rows_sha256(task.rounds), task.served_products))


def _find_task(cache: Cache, task: Task) -> Result | None:
    """Of all variants of the task, or None, as always of what says the head's confidence."""
    if task.confidence:
        return None
    asked = _say_task(task)
    if task.scales is not None:
        followed = [find_followed(cache, variant, asked) for variant in task.variants]
        whole = [one for one in followed if one is not None]
        return whole if len(whole) == len(followed) else None
    played = [_find_played(cache, variant, asked) for variant in task.variants]
    all_played = [one for one in played if one is not None]
    return all_played if len(all_played) == len(played) else None


def _keep_task(cache: Cache, task: Task, result: Result) -> None:
    asked = _say_task(task)
    for variant, one in zip(task.variants, result, strict=True):
        if isinstance(one, Followed):
            keep_followed(cache, variant, asked, one)
        elif isinstance(one, Played):
            _keep_played(cache, variant, asked, one)


def _keep_played(cache: Cache, variant: ResolvedVariant, asked: str, played: Played) -> None:
    path, data = cache.place(variant, asked, ".npz"), _bytes_of(played)
    cache.write(path, lambda: cache.write_bytes(path, data))


def _find_played(cache: Cache, variant: ResolvedVariant, asked: str) -> Played | None:
    path = cache.place(variant, asked, ".npz")
    try:
        return _played_of(path) if cache.entries.holds(path) else None
    except TraceError:
        return None


def _bytes_of(played: Played) -> bytes:
    estimates = {
        name: [one.sums, one.weights_K.tolist(), one.squares_K.tolist(), one.impossible]
        for name, one in played.estimates.items()
    }
    told = json.dumps([played.seconds, played.by_request, estimates, played.notes]).encode()
    table, buffer = io.BytesIO(), io.BytesIO()
    played.table.write_parquet(table)
    np.savez(buffer, told=np.frombuffer(told, np.uint8), table=np.frombuffer(table.getvalue(), np.uint8))
    return buffer.getvalue()


def _played_of(path: Path) -> Played:
    import polars as pl

    with np.load(io.BytesIO(files.read_small(path, _MOST)), allow_pickle=False) as kept:
        seconds, by_request, estimates, notes = _told_of(kept["told"].tobytes(), path)
        table = pl.read_parquet(io.BytesIO(kept["table"].tobytes()))
    found = {
        name: Estimate(tuple(sums), np.array(weights), np.array(squares), impossible)
        for name, (sums, weights, squares, impossible) in estimates.items()
    }
    return Played(seconds, by_request, found, table, tuple(notes))


def _told_of(text: bytes, path: Path) -> Any:
    return parse_json(text, str(path), constants=True)
