"""Writing a trace: every batch of requests is there whole or not at all, whenever the process dies. See SPEC.md, 7."""

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from replay.errors import OutputError
from replay.traces import files
from replay.traces.captured import CapturedRequest, ServerCounters, check_request, check_weights, request_tensors
from replay.traces.header import VERSION, TraceHeader, read_header
from replay.traces.place import FORCE, NEW, RESUME, check_agreement, names_in, no_folder, refuse_foreign
from replay.traces.records import RequestRecord
from replay.traces.request_table import to_frame
from replay.traces.server_rounds import merge_rounds, read_served, rounds_of
from replay.traces.shard_writing import shard_parts, stream_of, write_shard
from replay.traces.shards import headers_sha256, scan_shards
from replay.traces.sharing import Sharing, shared_record
from replay.traces.weights import write_weights

if TYPE_CHECKING:
    import polars as pl
    import torch

__all__ = ["CapturedRequest", "ServerCounters", "TraceWriter", "read_header"]

_GO_ON = "type --resume"


class TraceWriter:
    """The one writer of a trace folder, from ``create`` or ``resume`` until ``finish`` or ``close``.

    Finished requests are on disk when ``add`` returns. A second writer of the same folder is refused; the lock dies
    with the process. Use it in a ``with`` block. Of a request whose first tokens and rows are bit for bit those of an
    earlier one, only the others are written; with ``share`` set to False all are.

    >>> with TraceWriter.create(Path("trace"), header) as writer:  # doctest: +SKIP
    ...     writer.add(requests)
    ...     writer.finish()
    """

    def __init__(self, path: Path, header: TraceHeader, lock: int, go_on: str) -> None:
        self.path = path
        self._go_on = go_on
        self.header = header
        self._lock: int | None = lock
        self._records: list[RequestRecord] = []
        self._shards = 0
        self.share = True
        self._sharing = Sharing(path)

    @classmethod
    def create(cls, path: Path, header: TraceHeader, *, force: bool = False, go_on: str = _GO_ON) -> Self:
        """Begin a trace in the new or empty folder ``path``; with ``force`` an earlier trace there is deleted.

        ``go_on`` says in messages what a user types after an interruption.

        Raises OutputError where something is there already, another process writes, or the disk refuses.
        """
        return cls._begin(path, header, FORCE if force else NEW, go_on)

    @classmethod
    def resume(cls, path: Path, header: TraceHeader, *, go_on: str = _GO_ON) -> Self:
        """Go on with the trace in ``path``, or begin it where none was begun. ``done_ids`` are the finished requests.

        Raises TraceError where target, taps, topk or settings differ from those it was begun with, naming both values;
        OutputError as ``create``.
        """
        return cls._begin(path, header, RESUME, go_on)

    @classmethod
    def _begin(cls, path: Path, header: TraceHeader, way: str, go_on: str) -> Self:
        path = files.as_path(path)
        with _says_what_is_kept(path, go_on):
            if os.path.lexists(path) and not os.path.isdir(path):
                raise no_folder(path)
            path.mkdir(parents=True, exist_ok=True)
            if not (path / files.LOCK).exists():  # so that none is left in a folder that is none of ours
                refuse_foreign(path, names_in(path), way)
            writer = cls(path, replace(_unfinished(header), weights=None), files.lock_folder(path), go_on)
        try:
            with _says_what_is_kept(path, go_on):
                writer._take_over(way)
        except BaseException:  # Ctrl-C too must give the lock back
            writer.close()
            raise
        return writer

    def _take_over(self, way: str) -> None:
        names = names_in(self.path)
        refuse_foreign(self.path, names, way)
        if names and way == FORCE:
            self._clear(names)
        if names and way == RESUME:
            self._load(names)
        else:
            self._write_header(self.header)

    def _clear(self, names: set[str]) -> None:
        for name in sorted(filter(files.is_ours, names), key=lambda name: name == files.HEADER):
            (self.path / name).unlink()  # the header last: until then the folder is known as a trace

    def _load(self, names: set[str]) -> None:
        begun = read_header(self.path)
        check_agreement(begun, self.header, self.path)
        self.header = begun
        for name in names:
            if name.endswith(files.TEMPORARY) and files.is_ours(name):
                (self.path / name).unlink()
        self._scan()

    def _scan(self) -> str:
        """Read what is on disk; the checksum of the shards' headers."""
        layouts, self._records = scan_shards(self.path, self.header)
        self._shards = len(layouts)
        return headers_sha256(layouts)

    @property
    def done_ids(self) -> frozenset[str]:
        """The request_id of every request that is whole on disk."""
        return frozenset(record.request_id for record in self._records)

    def add(self, requests: Sequence[CapturedRequest]) -> None:
        """Write ``requests`` as one shard: all of them are there when this returns, none where it raises.

        Requests of other taps go into a shard of their own; where the disk refuses in their middle, those of the shards
        before are there. A shard a batch: prefer some tens of requests to one, and about a GB at most. Raises
        CaptureError where a request is not what the header announces or holds NaN or Inf, TraceCorruptError where an
        earlier shard has changed, OutputError where the disk refuses.
        """
        self._check_open()
        if not requests:
            return
        with self._saying():
            if (self.path / files.shard_name(self._shards)).exists():  # an earlier add was interrupted after its rename
                self._scan()
            done = set(self.done_ids)
            for request in requests:
                check_request(request, self.header, done)
                done.add(request.request_id)
            alike: dict[tuple[str, ...] | None, list[CapturedRequest]] = {}
            for request in requests:
                alike.setdefault(request.taps_of(self.header), []).append(request)
            if self._shards + len(alike) > files.MAX_SHARDS:
                raise OutputError(
                    f"{self.path} holds {self._shards} shards, the most possible: add more requests at once"
                )
            self._reopen()
            for taps, same in alike.items():
                self._write_shard(same, taps)

    def _write_shard(self, requests: Sequence[CapturedRequest], taps: tuple[str, ...] | None) -> None:
        tensors = [request_tensors(request, self.header) for request in requests]
        bare = self._with_prefixes([request.record(self.header) for request in requests], tensors)
        parts = shard_parts(bare, tensors, [request.feed for request in requests], self.header, taps)
        if any(record.shared for record in bare) and self.header.version < VERSION:
            self._write_header(replace(self.header, version=VERSION))  # before anything an older reader would misread
        self._records += write_shard(self.path / files.shard_name(self._shards), bare, parts)
        self._shards += 1

    def _with_prefixes(
        self, bare: Sequence[RequestRecord], tensors: "Sequence[dict[str, torch.Tensor]]"
    ) -> list[RequestRecord]:
        """The records of requests, with what each has in common with an earlier one."""
        if not self.share:
            return list(bare)
        pairs = zip(bare, tensors, strict=True)  # rows from some row on are nobody's first ones
        streams = [{} if record.first_row else {name: one[name] for name in stream_of(one)} for record, one in pairs]
        records = list(self._records)
        for record, (owner, rows) in zip(bare, self._sharing.prefixes(self._records, streams), strict=True):
            records.append(shared_record(record, records, owner, rows))
        return records[len(self._records) :]

    def rows_on_disk(self, request_id: str, tap: str, start: int, stop: int) -> "torch.Tensor | None":
        """The rows ``start`` to ``stop`` of a tap as they are on disk; None where the request has not all of them."""
        numbers = (at for at in reversed(range(len(self._records))) if self._records[at].request_id == request_id)
        number = next(numbers, None)
        return None if number is None else self._sharing.rows_on_disk(self._records, number, tap, start, stop)

    def set_missing(self, missing: Sequence[str]) -> None:
        """Say anew what is not in the trace, a sentence each. Raises OutputError."""
        self._check_open()
        with self._saying():
            self._write_header(replace(self.header, missing=tuple(missing)))

    def write_target_weights(self, embed: "torch.Tensor", lm_head: "torch.Tensor | None") -> None:
        """Keep the target's embedding rows [V, H] and, unless tied, its output rows [V, H] beside the trace.

        Optional: without it a reader takes both from the checkpoint at ``header.target.path``. A sidecar that is
        there already stays. Raises CaptureError for shapes or dtypes that cannot be, OutputError.
        """
        self._check_open()
        check_weights(embed, lm_head, self.header)
        if self.header.weights is not None:
            return
        with self._saying():
            self._write_header(replace(self.header, weights=write_weights(self.path, embed, lm_head)))

    def add_rounds(self, rounds: "pl.DataFrame") -> None:
        """Keep the server's own rounds: columns request_id, round, anchor, drafted, accepted, and where known
        parents and batch (SPEC.md, section 6).

        Rounds of a request that came before are replaced. Call it before ``add`` of the same requests, so that a
        finished request never lacks its rounds; rounds of requests that never finish are dropped by ``finish``.
        Raises CaptureError for other columns or impossible values, OutputError.
        """
        self._check_open()
        with self._saying():
            merged = merge_rounds(self._rounds(), rounds)
            self._reopen()
            self._write_bytes(files.ROUNDS, _parquet(merged))

    def next_verify_pass(self) -> int:
        """A number above that of each verify pass in the rounds kept so far: 0 where there is none.

        A capture that goes on numbers its passes from there, so that they are never taken for those before.
        """
        rounds = self._rounds()
        last = None if rounds is None else rounds["verify_pass"].max()
        return 0 if last is None else int(last) + 1  # type: ignore[arg-type]

    def finish(self) -> None:
        """Make the trace complete: index its requests, mark the header, give the lock back.

        Killed in its middle, the trace is still incomplete and can be resumed and finished again. Raises OutputError.
        """
        self._check_open()
        with self._saying():
            sums = self._scan()  # what is on disk counts, whatever this process remembers
            table = _parquet(to_frame(self._records))
            rounds = self._rounds()
            header = replace(self.header, requests=len(self._records), requests_sha256=_sha256(table), state="complete")
            header = replace(header, rounds=False, rounds_sha256=None, shard_headers_sha256=sums)
            if rounds is not None:
                kept = _parquet(rounds_of(rounds, self.done_ids))
                self._write_bytes(files.ROUNDS, kept)
                header = replace(header, rounds=True, rounds_sha256=_sha256(kept))
            self._write_bytes(files.REQUESTS, table)
            self._write_header(header)
        self.close()

    def close(self) -> None:
        """Give the lock back; an unfinished trace stays resumable."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rounds(self) -> "pl.DataFrame | None":
        return read_served(self.path / files.ROUNDS) if (self.path / files.ROUNDS).exists() else None

    def _reopen(self) -> None:
        """A complete trace that gets more is recording again, before anything of it changes."""
        if self.header.state == "complete":
            self._write_header(_unfinished(self.header))

    def _write_header(self, header: TraceHeader) -> None:
        text = header.to_json()
        TraceHeader.from_json(text, "the header")  # nothing is written that no reader would take
        self._write_bytes(files.HEADER, text.encode())
        self.header = header

    def _write_bytes(self, name: str, data: bytes) -> None:
        files.write_whole(self.path / name, [data])

    def _check_open(self) -> None:
        if self._lock is None:
            raise ValueError("the TraceWriter is closed")

    def _saying(self) -> AbstractContextManager[None]:
        return _says_what_is_kept(self.path, self._go_on, len(self._records))


def _unfinished(header: TraceHeader) -> TraceHeader:
    """``header`` without what only ``finish`` can say."""
    open_ended = replace(header, state="recording", requests=None, requests_sha256=None,
                         shard_headers_sha256=None)  # fmt: skip
    return replace(open_ended, rounds=False, rounds_sha256=None)


@contextmanager
def _says_what_is_kept(path: Path, go_on: str, kept: int | None = None) -> Iterator[None]:
    """Turns an OSError into the one sentence that says what to do; ``kept`` is None while nothing was looked at."""
    try:
        yield
    except OSError as error:
        finished = "finished requests" if kept is None else f"the {kept} finished requests"
        raise OutputError(
            f"cannot write to {path}: {error.strerror or error}; {finished} are kept: mend this and {go_on}"
        ) from error


def _parquet(frame: "pl.DataFrame") -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
