"""Reading a trace: everything distrusted at opening, rows mapped one request at a time. See SPEC.md, 8."""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from replay.errors import TraceError, WiringError
from replay.printable import counted, html_table, one_line
from replay.traces import files
from replay.traces.cached import Piece
from replay.traces.damage import ReadingTrace
from replay.traces.feed import Feed, count_rows
from replay.traces.header import FP8, TraceHeader, read_header
from replay.traces.opening import find_requests, say_no_trace
from replay.traces.parts import NO_CATEGORY, Part, check_part, choose, say_part
from replay.traces.records import RequestRecord
from replay.traces.remote import as_source
from replay.traces.request_table import to_frame
from replay.traces.server_rounds import read_finished, rounds_of
from replay.traces.stored_rows import StoredRows
from replay.traces.taps import EMBED, sort_taps
from replay.traces.tensors import Layout
from replay.traces.tiers import having, is_looked_up, requests_with, taps_of, tiers
from replay.traces.verify import Verifier
from replay.traces.weights import TargetWeights

if TYPE_CHECKING:
    import polars as pl
    import torch


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request of a trace: L prompt tokens, n output tokens, T = L + n.

    ``tokens`` [T] int64; ``taps`` name -> [T-1, width], row i being the target's state at position i, and zeros before
    ``first_row``, where the trace does not have them; ``tail_ids`` [.] int64 is what the target would choose after the
    last output token, where recorded; ``pieces`` those in which the server prefilled the prompt, none where that is not
    known; ``cached`` what forwards made the rows before them, none where that is not known.
    """

    request_id: str
    category: str | None
    prompt_tokens: int
    output_tokens: int
    tokens: "torch.Tensor"
    taps: Mapping[str, "torch.Tensor"]
    tail_ids: "torch.Tensor"
    temperature: float
    source: str
    pieces: tuple[Piece, ...] = ()
    first_row: int = 0
    cached: tuple[Piece, ...] = ()


class Trace:
    """An opened trace. ``records`` are its requests in the order of capture; indices count in that order.

    >>> trace = replay.Trace.open(TRACE)
    >>> trace.read(0, ["embed", "3"]).taps["3"].shape[1] == trace.header.target.hidden_size
    True
    """

    def __init__(
        self,
        path: Path,
        header: TraceHeader,
        records: Sequence[RequestRecord],
        layouts: Sequence[Layout],
        target: Path | None = None,
        verify: bool = True,
    ) -> None:
        self.path = path
        self.target_folder = target
        self.header = header
        self.records = tuple(records)
        by_name = {layout.path.name: layout for layout in layouts}
        # of all requests of the folder, also where this is a part of it
        self._stored = StoredRows(path, header, self.records, by_name, Verifier(path) if verify else None)
        self.part = ""
        self.narrowed = ""

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        allow_incomplete: bool = False,
        target: str | Path | None = None,
        verify: bool = True,
    ) -> Self:
        """Open the trace in the folder ``path``, or at an address as ``s3://bucket/trace``; headers and request table
        are read and checked, rows are not.

        ``target`` is the folder of the target's checkpoint, where it has moved and the trace holds none of its weights.
        With ``verify`` the header is held against its checksum now, and each shard when the first of its rows is read.
        Of a shard elsewhere only ranges are read, so its header alone is held against a checksum (``check_sums`` too).

        Raises TraceError where there is none, TraceVersionError for another version, TraceIncompleteError where its
        recording has not ended (unless ``allow_incomplete``), TraceCorruptError for anything that disagrees,
        StorageError for storage elsewhere that cannot be read.
        """
        folder = as_source(path)
        if not os.path.lexists(folder / files.HEADER):
            raise TraceError(say_no_trace(folder))
        header = read_header(folder, verify=verify)
        layouts, records = find_requests(folder, header, allow_incomplete=allow_incomplete, verify=verify)
        return cls(folder, header, records, layouts, None if target is None else as_source(target), verify)

    def take(self, part: Part) -> Self:
        """The part of this trace that is asked for: a trace of its requests alone, which reads the same files.

        ``part`` of it says in words what was asked for. Raises UsageError as ``choose``.
        """
        check_part(part)
        if part.whole:
            return self
        ids = choose(part, self.records)
        taken = self._of([record for record in self.records if record.request_id in ids])
        taken.part = say_part(part, len(taken.records), len(self.records), self.part)
        return taken

    def having(self, taps: Iterable[str]) -> Self:
        """The trace of those of its requests that have all ``taps``; itself where all have them.

        ``narrowed`` of it says in a sentence how many these are. Raises WiringError where none has.
        """
        named, kept = having(self.records, self.header, taps)
        if len(kept) == len(self.records):
            return self
        if not kept:
            raise WiringError(
                f"no request of {self.path} has {named} at once; there are {self.say_tiers()}: choose among the taps "
                "of one, or record requests that have more (--taps-for)"
            )
        taken = self._of(kept)
        told = f"{len(kept)} of {counted(len(self.records), 'request')}"
        taken.part = f"{self.part}; of these with" if self.part else "with"
        taken.part += f" {named} ({len(kept)} of {len(self.records)})"
        taken.narrowed = f"{told} have {named}: only these are looked at."
        return taken

    def only(self, requests: Iterable[str]) -> Self:
        """The trace of those of its requests that are called so; itself where all are."""
        ids = set(requests)
        kept = [record for record in self.records if record.request_id in ids]
        return self if len(kept) == len(self.records) else self._of(kept)

    def tiers(self) -> tuple[Self, ...]:
        """The traces of those of its requests that have the same taps, those with the most taps first."""
        alike = tiers(self.records, self.header)
        return (self,) if len(alike) < 2 else tuple(map(self._of, alike))

    def say_tiers(self) -> str:
        """The taps of its requests, in words."""
        return "; ".join(f"{', '.join(tier.taps)} ({counted(len(tier), 'request')})" for tier in self.tiers())

    def _of(self, records: Sequence[RequestRecord]) -> Self:
        """The trace of some of its requests."""
        taken = copy.copy(self)
        taken.records = tuple(records)
        return taken

    @cached_property
    def whole(self) -> Self:
        """The trace of all requests of the folder; itself where it is no part of it."""
        if len(self.records) == len(self._stored.records):
            return self
        other = self._of(self._stored.records)
        other.part = other.narrowed = ""
        return other

    def __repr__(self) -> str:
        part = f", {self.part}" if self.part else ""
        held = f"{counted(len(self), 'request')} of {self.header.target.name}, taps {','.join(self.header.taps)}"
        return one_line(f"Trace({str(self.path)!r}: {held}{part})")

    def _repr_html_(self) -> str:
        rows: dict[str, list[int]] = {}
        for record in self.records:
            counts = rows.setdefault(record.category or NO_CATEGORY, [0, 0, 0])
            for column, number in enumerate((1, record.prompt_tokens, record.output_tokens)):
                counts[column] += number
        names = ("category", "requests", "prompt tokens", "output tokens")
        return html_table(repr(self), names, [[name, *map(str, counts)] for name, counts in rows.items()])

    def __getstate__(self) -> dict[str, object]:
        """For a copy, as another process has one: what was mapped or worked out stays behind, and is there again when
        it is asked for."""
        own = self.__dict__.items()
        return {name: value for name, value in own if not isinstance(getattr(type(self), name, None), cached_property)}

    def absolute(self) -> Self:
        """The same trace, found from any working folder of any machine that has it at this path; each of them holds its
        own files against their checksums."""
        other = copy.copy(self)
        other._stored = self._stored.absolute()
        other.path = other._stored.path
        other.target_folder = None if self.target_folder is None else self.target_folder.absolute()
        return other

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The parsed headers of its shards, in order."""
        return tuple(self._stored.layouts.values())

    def shaken(self) -> Self:
        """The same trace with its rows in fp8 rounded once more, to see how far such rounding moves a replay."""
        other = copy.copy(self)
        other._stored = replace(self._stored, shaken=True)
        return other

    def unverified(self) -> Self:
        """The same trace, whose shards are read without a look at their checksums."""
        other = copy.copy(self)
        other._stored = replace(self._stored, verifier=None)
        return other

    @property
    def verifies(self) -> bool:
        """Whether shards are held against their checksums when they are read."""
        return self._stored.verifier is not None

    def check_sums(self) -> None:
        """Hold all that its requests are read from against its checksums now, each file once.

        Raises TraceCorruptError; nothing of a trace that was opened without ``verify``.
        """
        for record in self.records:
            self._stored.check_sums(record)
        self._weights.check_sums()

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def requests(self) -> "pl.DataFrame":
        """One row per request, in the order of capture; columns as SPEC.md, section 4 has them."""
        return to_frame(self.records)

    @cached_property
    def taps(self) -> tuple[str, ...]:
        """The taps that ``read`` can give of one of its requests at least, in the order of the stream; ``embed`` where
        stored or to be looked up."""
        held = {tap for record in self.records for tap in taps_of(record, self.header)} or self.header.taps
        return sort_taps([*held, *([EMBED] if self._weights.can_look_up() else [])])

    @cached_property
    def tap_requests(self) -> dict[str, int]:
        """How many of its requests have each of the taps."""
        return {tap: requests_with(tap, self.records, self.header) for tap in self.taps}

    @cached_property
    def rounded_taps(self) -> tuple[str, ...]:
        """Those of its taps whose rows are not as the target computed them, but in fp8."""
        return tuple(tap for tap in self.taps if tap in self.header.taps and self.header.taps[tap].dtype == FP8)

    @cached_property
    def prompt_rows(self) -> int | None:
        """The fewest rows that are stored of a prompt some of whose rows are not; None where all are."""
        kept = [record.prompt_tokens - record.rows_left_out for record in self.records if record.rows_left_out]
        return min(kept, default=None)

    @cached_property
    def doubts(self) -> tuple[str, ...]:
        """Sentences on what it leaves out, and on what is odd in a few rows, looked at once (self_check.py)."""
        from replay.traces.self_check import self_check

        return (*filter(None, [self.narrowed]), *self._less_exact(), *self_check(self))

    @cached_property
    def _weights(self) -> TargetWeights:
        return TargetWeights(self.path, self.header, self.target_folder, self._stored.verifier)

    def _less_exact(self) -> Iterator[str]:
        if rounded := self.rounded_taps:
            exact = [tap for tap in self.taps if tap not in rounded]
            yield (
                f"The rows of {', '.join(rounded)} are stored in fp8, a byte a value, those of {' and '.join(exact)} "
                "exactly: a replay that is fed the former drafts other tokens at close calls, so no round of it is "
                "said to be alike to a server's."
            )

    @ReadingTrace()
    def read(self, index: int, taps: Sequence[str]) -> RequestRows:
        """Request ``index`` with ``taps`` (canonical names). Only its own rows are touched.

        The tensors are private: mappings of the shard, or copies where the first rows lie with earlier requests. They
        live on after the trace, and writing to them changes no file. Raises WiringError for a tap that the trace lacks,
        TraceCorruptError for NaN, Inf or impossible ids.
        """
        import torch

        record = self.records[index]
        held = [tap for tap in taps if tap in taps_of(record, self.header)]
        self._stored.fetch(record, held)
        tokens = self._stored.ids(record)
        return RequestRows(
            request_id=record.request_id,
            category=record.category,
            prompt_tokens=record.prompt_tokens,
            output_tokens=record.output_tokens,
            tokens=tokens,
            taps={tap: self._tap(record, tap, tokens) for tap in taps},
            tail_ids=torch.tensor(record.tail_ids, dtype=torch.int64),
            temperature=record.temperature,
            source=record.source,
            pieces=record.pieces,
            first_row=record.rows_left_out,
            cached=record.cached,
        )

    def tap_rows(self, index: int, tap: str, rows: Sequence[int]) -> "torch.Tensor":
        """``rows`` (0 to T-2) of one tap of request ``index`` [len(rows), width], a copy; no others are touched.

        They are given as they are, NaN and Inf included. Raises WiringError for a tap that the request lacks,
        TraceError for a row that it lacks, TraceCorruptError for impossible ids.
        """
        record = self.records[index]
        self._check_held(record, tap)
        if tap not in self.header.taps:
            return self.embed_weight()[self.read(index, ()).tokens[list(rows)]]
        return self.rows_of_many(tap, {index: rows})

    @ReadingTrace()
    def rows_of_many(self, tap: str, rows: Mapping[int, Sequence[int]]) -> "torch.Tensor":
        """``rows`` of one stored tap of many requests, by index in rising order [R, width]: a copy, as ``tap_rows``.

        Raises as that.
        """
        return self._stored.some_of_tap(tap, ((self.records[index], chosen) for index, chosen in rows.items()))

    @ReadingTrace()
    def stored_rows(self, index: int, tap: str) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """One stored tap of request ``index`` as it lies in the shards [T-1, width], less the rows that are left out,
        and the scales of its rows where it is in fp8."""
        self._check_held(self.records[index], tap)
        return self._stored.tap(self.records[index], tap)

    @ReadingTrace()
    def logits(self, index: int) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
        """The target's choices for the n output tokens of request ``index``.

        topk_ids [n, k] int64, topk_logprobs [n, k] float32 (most likely first), logsumexp [n] float32 of the logits.
        Raises TraceCorruptError for NaN, Inf or impossible ids.
        """
        return self._stored.logits(self.records[index])

    @ReadingTrace()
    def feed(self, index: int) -> Feed | None:
        """What the server's draft was fed in a few rows of request ``index``; None where that is not there.

        Raises TraceCorruptError for rows that cannot be.
        """
        return self._stored.feed(self.records[index])

    @property
    def fed_rows(self) -> int:
        """How many rows ``feed`` gives, of all requests of the folder."""
        return sum(count_rows(layout) for layout in self.layouts)

    def embed_weight(self) -> "torch.Tensor":
        """The target's embedding rows [V, H], mapped. Raises TraceError where no sidecar or checkpoint is here."""
        return self._weights.embed

    def lm_head_weight(self) -> "torch.Tensor":
        """The target's output rows [V, H], mapped; the embedding's where they are tied. Raises TraceError."""
        return self._weights.lm_head

    @ReadingTrace()
    def served_rounds(self) -> "pl.DataFrame":
        """The server's own rounds of the requests that are there (SPEC.md, section 6); empty where it told none.

        Raises TraceCorruptError.
        """
        served = read_finished(self.path, self.header)
        return rounds_of(served, {record.request_id for record in self.records})

    @cached_property
    def largest_batch(self) -> int:
        """The most requests of a verify pass in which one of these and another of the folder ran; 0 if none is known.

        Raises TraceCorruptError.
        """
        import polars as pl

        passes = self.served_rounds()["verify_pass"].drop_nulls().unique()
        told = self.whole.served_rounds().filter(pl.col("verify_pass").is_in(passes.implode()))
        batches = told.filter(pl.len().over("verify_pass") > 1)["batch"].drop_nulls().to_list()
        return max(batches, default=0)

    def _tap(self, record: RequestRecord, tap: str, tokens: "torch.Tensor") -> "torch.Tensor":
        import torch

        self._check_held(record, tap)
        if tap not in self.header.taps:
            return self.embed_weight()[tokens[:-1]]
        stored = self._stored.finite_tap(record, tap)
        if not record.rows_left_out:
            return stored
        return torch.cat([stored.new_zeros(record.rows_left_out, stored.shape[1]), stored])

    def _check_held(self, record: RequestRecord, tap: str) -> None:
        """Raises WiringError for a tap that the request does not have."""
        if tap in taps_of(record, self.header) or is_looked_up(tap, self.header):
            return
        if tap in self.header.taps:
            raise WiringError(
                f"request {record.request_id!r} of {self.path} has no tap {tap}; it has "
                f"{', '.join(record.taps or ())}: choose among these, leave it out (--request, --limit), or "
                "record all taps of it (--taps-for)"
            )
        raise self._lacks(tap)

    def _lacks(self, tap: str) -> WiringError:
        return WiringError(f"{self.path} holds no tap {tap}; it holds {', '.join(self.taps)}: choose among these")
