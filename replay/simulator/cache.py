"""Variants that were replayed before, kept in a folder: a sweep that was stopped goes on, and none is replayed twice.

An entry is named after all that it was made of: the trace, the head, the variant, what else was asked, and the program
with its kernels. So it never grows stale, and may be thrown away at any time, as the folder's bound does
(cache_files.py). Its bytes are held against a checksum; one that differs is replayed again.
"""

import json
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.checkpoint.checkpoint import Checkpoint
from replay.checkpoint.hub import step_of
from replay.errors import OutputError, TraceError, UsageError
from replay.simulator.agreement import with_agreement
from replay.simulator.binding import resolve
from replay.simulator.cache_files import Entries
from replay.simulator.cache_keys import (
    checkpoint_sha256,
    hashed_once,
    kernels_of,
    program_sha256,
    rows_sha256,
    sha256_of_parts,
    trace_sha256,
)
from replay.simulator.groups import check_variants, without_drafting
from replay.simulator.held import requests_with_taps
from replay.simulator.progress import ReplayProgress
from replay.simulator.results import describe_trace, describe_wirings, join_notes
from replay.simulator.simulation import simulate_with_notes
from replay.simulator.tasks import Workers
from replay.simulator.variant import ResolvedVariant, Variant, name_variants
from replay.traces import files
from replay.traces.place import check_writable
from replay.traces.reader import Trace
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import read_rounds, write_rounds
from replay.traces.sectors import bound

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Cache:
    """Entries in ``folder`` for one trace, its heads and one way to replay them.

    ``agreement``: whether the variants are held against the trace's own server as well. ``kernels`` of whoever
    replays; None of this process. ``entries`` are the files in it, in which those used least lately make room.
    """

    entries: Entries
    trace: Trace
    checkpoints: Mapping[str, Checkpoint]
    device: str
    agreement: bool
    kernels: tuple[str | int, ...] | None = None

    def find(self, variant: ResolvedVariant, also: str = "") -> Rounds | None:
        """The rounds of ``variant`` alone, ``also`` being what else was asked; None where they are not there whole."""
        path = self.place(variant, also, ".parquet")
        try:
            return read_rounds(path) if self.entries.holds(path) else None
        except TraceError:
            return None

    def keep(self, variant: ResolvedVariant, rounds: Rounds, also: str = "") -> None:
        """Keep the rounds of ``variant`` alone. Raises OutputError."""
        path = self.place(variant, also, ".parquet")
        self.write(path, lambda: write_rounds(rounds, path, force=True))

    def write(self, path: Path, write: Callable[[], None]) -> None:
        """Let ``write`` make an entry's file, and keep its checksum beside it. Raises OutputError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write()
            self._write_sum(path)
            self.entries.count(path)
        except OSError as error:
            folder = self.entries.folder
            raise OutputError(f"cannot write to {folder}: {error.strerror}; choose another --cache") from error

    def _write_sum(self, path: Path) -> None:
        """Where two write an entry at once, the checksum of one may come after the file of the other: whoever wrote a
        checksum last looks again, so that in the end the two belong together. Raises OSError."""
        written = ""
        with suppress(TraceError):  # another process has deleted the file
            while (found := files.sha256_of(path)) != written:
                written = found
                self.write_bytes(path.with_suffix(".sha256"), written.encode())

    def write_bytes(self, path: Path, data: bytes) -> None:
        """A file of an entry, whoever else writes the same one at once. Raises OSError."""
        files.write_whole(path, [data], apart=f".{os.getpid()}.{secrets.token_hex(4)}")

    def drafts_blocks(self, variant: ResolvedVariant) -> bool:
        """Whether the variant's head drafts blocks."""
        return self.checkpoints[variant.draft].config.block is not None

    def place(self, variant: ResolvedVariant, also: str, suffix: str) -> Path:
        """Where the entry of ``variant`` lies."""
        head = checkpoint_sha256(self.checkpoints[variant.draft])
        asked = repr(replace(variant, draft=""))  # the head counts by what it holds, not by its name
        key = sha256_of_parts([self._common.encode(), head.encode(), asked.encode(), also.encode()])
        return self.entries.folder / key[:2] / f"{key}{suffix}"

    @cached_property
    def _common(self) -> str:
        """What all entries share, as text."""
        kernels = self.kernels or kernels_of(self.device)
        return json.dumps((program_sha256(), trace_sha256(self.trace), self.device, self.agreement, *kernels))


def open_cache(
    folder: Path,
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    device: str,
    *,
    agreement: bool,
    kernels: tuple[str | int, ...] | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Cache | None:
    """The cache in ``folder``; None for a trace whose recording has not ended, which no checksum names.

    ``on_note`` is told where an entry is damaged. Raises UsageError for a trace whose rows need not be those of its
    checksums.
    """
    _check_verified(trace.verifies)
    finished = trace.header.requests_sha256 is not None
    return Cache(Entries(folder, on_note), trace, checkpoints, device, agreement, kernels) if finished else None


def _check_verified(verifies: bool) -> None:
    if not verifies:
        raise UsageError(
            "a cache finds what was replayed by the checksums of the trace, and with --no-verify nothing is held "
            "against them; leave --no-verify or --cache out"
        )


def check_cache_folder(folder: Path, *, verify: bool = True) -> None:
    """Refuse, before anything is replayed, a folder that no entry can be put into, and a trace without ``verify``.

    Raises OutputError or UsageError.
    """
    _check_verified(verify)
    bound()
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise OutputError(f"{folder} {files.describe_path(folder)}, a cache is a folder: choose another --cache")
    check_writable(folder)


def simulate_kept(
    cache: Cache | None,
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[ResolvedVariant],
    *,
    device: str = "cpu",
    follow: "pl.DataFrame | None" = None,
    only: Collection[str] | None = None,
    served_products: bool = True,
    workers: Workers | None = None,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> Rounds:
    """``simulate`` in one go of those that ``cache`` lacks, together with those that it has. Raises as it does."""
    if cache is not None:
        cache, trace = _of_those_with_taps(cache, trace, variants)
    ask = partial(
        simulate_with_notes, trace, checkpoints, device=device, follow=follow, only=only,
        served_products=served_products, workers=workers, on_event=on_event,
    )  # fmt: skip
    if cache is None:
        return ask(variants)[0]
    also = repr((rows_sha256(follow), None if only is None else sorted(only), served_products))
    with hashed_once(cache.checkpoints.values()):
        found = {one: rounds for one in dict.fromkeys(variants) if (rounds := cache.find(one, also)) is not None}
        if missing := [one for one in dict.fromkeys(variants) if one not in found]:
            for variant, rounds in zip(missing, _apart(*ask(missing), checkpoints), strict=True):
                cache.keep(variant, rounds, also)
                found[variant] = rounds
    return _together(trace, checkpoints, variants, [found[one] for one in variants])


def simulate_cached(
    cache: Cache | None,
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant | ResolvedVariant],
    *,
    device: str = "cpu",
    agreement: bool = True,
    workers: Workers | None = None,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
    on_found: Callable[[int], None] = lambda _: None,
) -> Rounds:
    """``simulate``, and ``with_agreement`` where it is asked for, of the variants that ``cache`` lacks.

    Those that share their passes are replayed together, and kept before the next ones begin. ``on_found`` is told how
    many were there. The rounds are those of a run without a cache. Raises as these, and OutputError.
    """
    if cache is None:
        return _replay(trace, checkpoints, variants, device, agreement, workers, on_event)[0]
    with hashed_once(cache.checkpoints.values()):
        resolved = [resolve(variant, checkpoints[variant.draft], trace) for variant in variants]
        cache, trace = _of_those_with_taps(cache, trace, resolved)
        found = {variant: rounds for variant in dict.fromkeys(resolved) if (rounds := cache.find(variant)) is not None}
        on_found(sum(variant in found for variant in resolved))
        missing: dict[ResolvedVariant, list[ResolvedVariant]] = {}
        for variant in dict.fromkeys(resolved):
            if variant not in found:
                missing.setdefault(without_drafting(variant, cache.drafts_blocks(variant)), []).append(variant)
        check_variants([variant for alike in missing.values() for variant in alike], checkpoints, trace)
        lots = list(missing.values())
        if workers is not None and lots:  # who keeps each of their tasks, and share one sweep best
            lots = [[variant for alike in lots for variant in alike]]
        for number, alike in enumerate(lots):
            told = _counted(on_event, number, len(lots))
            played, notes = _replay(trace, checkpoints, alike, device, agreement, workers, told)
            for variant, rounds in zip(alike, _apart(played, notes, checkpoints), strict=True):
                cache.keep(variant, rounds)
                found[variant] = rounds
    return _together(trace, checkpoints, resolved, [found[variant] for variant in resolved])


def _of_those_with_taps(cache: Cache, trace: Trace, variants: Sequence[ResolvedVariant]) -> tuple[Cache, Trace]:
    """For the requests that all variants play, however many of these are to be found."""
    held = requests_with_taps(trace, variants, cache.checkpoints)
    return (cache if cache.trace is held else replace(cache, trace=held)), held


def _replay(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant | ResolvedVariant],
    device: str,
    agreement: bool,
    workers: Workers | None,
    on_event: Callable[[ReplayProgress], None],
) -> tuple[Rounds, list[Sequence[str]]]:
    rounds, notes = simulate_with_notes(
        trace, checkpoints, variants, device=device, workers=workers, on_event=on_event
    )  # fmt: skip
    if agreement:
        rounds = with_agreement(
            rounds, trace, checkpoints, variants, device=device, workers=workers, on_event=on_event
        )  # fmt: skip
    return rounds, notes


def _counted(on_event: Callable[[ReplayProgress], None], number: int, lots: int) -> Callable[[ReplayProgress], None]:
    """Events of one of several lots, counted over all of them: the requests of each lot are requests to replay."""
    return lambda event: on_event(replace(event, done=number * event.total + event.done, total=lots * event.total))


def _apart(
    rounds: Rounds, notes: Sequence[Sequence[str]], checkpoints: Mapping[str, Checkpoint]
) -> list[Rounds]:  # fmt: skip
    """Each variant's rounds by themselves, with those of the ``notes`` that its passes left, which it may share."""
    tables = rounds.table.partition_by("variant", as_dict=True)
    return [
        replace(
            rounds,
            table=tables.get((info.name,), rounds.table.clear()),
            variants=(info,),
            drafts={info.draft: rounds.drafts[info.draft] | {"notes": join_notes(checkpoints[info.draft], [told])}},
        )
        for info, told in zip(rounds.variants, notes, strict=True)
    ]


def _together(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[ResolvedVariant],
    parts: Sequence[Rounds],
) -> Rounds:
    """One run's rounds, with names that tell its variants apart; head and trace are called as they are now."""
    import polars as pl

    names = name_variants(variants)
    infos = [
        replace(part.variants[0], name=name, draft=variant.draft)
        for name, variant, part in zip(names, variants, parts, strict=True)
    ]
    tables = [part.table.with_columns(variant=pl.lit(name)) for name, part in zip(names, parts, strict=True)]
    heads: dict[str, list[Mapping[str, Any]]] = {}
    for variant, part in zip(variants, parts, strict=True):
        heads.setdefault(variant.draft, []).extend(part.drafts.values())
    return Rounds(
        table=pl.concat(tables),
        variants=tuple(infos),
        requests=parts[0].requests,
        trace={**describe_trace(trace), "wirings": describe_wirings(variants, checkpoints, trace)},
        drafts={
            name: {
                **said[0],
                "path": checkpoints[name].path,
                "step": step_of(checkpoints[name].path),
                "notes": join_notes(checkpoints[name], (one["notes"] for one in said)),
            }
            for name, said in heads.items()
        },
    )
