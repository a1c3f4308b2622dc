"""Reading a trace: everything distrusted at opening, rows mapped one request at a time. See SPEC.md, 8."""

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from replay.errors import TraceCorruptError, TraceError, TraceIncompleteError, WiringError
from replay.printable import counted, html_table, one_line
from replay.traces import files
from replay.traces.captured import unfinite_row
from replay.traces.damage import AGAIN_OR_AS_IT_IS, ReadingTrace
from replay.traces.feed import Feed, count_rows, read_feed
from replay.traces.fp8 import dequantise, shake
from replay.traces.header import FP8, TraceHeader, read_header
from replay.traces.parts import NO_CATEGORY, Part, choose, say_part
from replay.traces.records import Piece, RequestRecord, check_same, headers_sha256, read_table, scan_shards, to_frame
from replay.traces.remote import as_source, entry_of, local_file
from replay.traces.server_rounds import MAX_BYTES, read_served, rounds_of, served_schema
from replay.traces.stretches import TOKENS, runs, stretches
from replay.traces.taps import EMBED, sort_taps
from replay.traces.tensors import Layout, fetch_rows, map_rows, take_rows
from replay.traces.verify import Verifier
from replay.traces.weights import find_weight, load_weight

if TYPE_CHECKING:
    import polars as pl
    import torch


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request of a trace: L prompt tokens, n output tokens, T = L + n.

    ``tokens`` [T] int64; ``taps`` name -> [T-1, width], row i being the target's state at position i, and zeros before
    ``first_row``, where the trace does not have them; ``tail_ids`` [.] int64 is what the target would choose after the
    last output token, where recorded; ``pieces`` those in which the server prefilled the prompt, none where that is not
    known.
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
        self._verifier = Verifier(path) if verify else None
        self.header = header
        self.records = tuple(records)
        self._layouts = {layout.path.name: layout for layout in layouts}
        self._every = self.records  # of the folder, also where this is a part of it
        self.part = ""
        self.narrowed = ""
        self._shaken = False

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
            raise TraceError(
                f"{folder} holds no {files.HEADER}, so it is no trace: give the folder that a capture wrote"
            )
        header = read_header(folder, verify=verify)
        layouts, records = scan_shards(folder, header)
        if header.state == "complete":
            _check_table(folder, header, records)
            if verify and header.shard_headers_sha256 not in (None, headers_sha256(layouts)):
                raise TraceCorruptError(
                    f"the headers of the shards of {folder} have changed since they were written: {AGAIN_OR_AS_IT_IS}"
                )
        elif not allow_incomplete:
            raise TraceIncompleteError(_say_unfinished(folder, len(records)))
        return cls(folder, header, records, layouts, None if target is None else as_source(target), verify)

    def take(self, part: Part) -> Self:
        """The part of this trace that is asked for: a trace of its requests alone, which reads the same files.

        ``part`` of it says in words what was asked for. Raises UsageError as ``choose``.
        """
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
        wanted = [tap for tap in sort_taps(list(taps)) if tap in self.header.taps]
        named = f"the taps {', '.join(wanted)}" if len(wanted) > 1 else f"the tap {''.join(wanted)}"
        kept = [record for record in self.records if record.taps is None or set(wanted) <= set(record.taps)]
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
        alike: dict[tuple[str, ...] | None, list[RequestRecord]] = {}
        for record in self.records:
            alike.setdefault(record.taps, []).append(record)
        if len(alike) < 2:
            return (self,)
        every = len(self.header.taps)
        return tuple(
            self._of(alike[taps]) for taps in sorted(alike, key=lambda one: -(every if one is None else len(one)))
        )

    def say_tiers(self) -> str:
        """The taps of its requests, in words."""
        return "; ".join(f"{', '.join(tier.taps)} ({counted(len(tier), 'request')})" for tier in self.tiers())

    def _of(self, records: Sequence[RequestRecord]) -> Self:
        """The trace of some of its requests."""
        taken = type(self)(self.path, self.header, self._every, self.layouts, self.target_folder, self.verifies)
        taken.records = tuple(records)
        taken._verifier = self._verifier  # what was found whole stays so
        taken.part, taken.narrowed, taken._shaken = self.part, self.narrowed, self._shaken
        return taken

    @cached_property
    def whole(self) -> Self:
        """The trace of all requests of the folder; itself where it is no part of it."""
        if len(self.records) == len(self._every):
            return self
        other = type(self)(self.path, self.header, self._every, self.layouts, self.target_folder)
        other._verifier, other._shaken = self._verifier, self._shaken
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
        """For another process: what was mapped or worked out stays behind, and is there again when it is asked for."""
        own = self.__dict__.items()
        return {name: value for name, value in own if not isinstance(getattr(type(self), name, None), cached_property)}

    def absolute(self) -> Self:
        """The same trace, found from any working folder of any machine that has it at this path; each of them holds its
        own files against their checksums."""
        other = copy.copy(self)
        other.path = self.path.absolute()
        other._verifier = None if self._verifier is None else Verifier(other.path)
        other.target_folder = None if self.target_folder is None else self.target_folder.absolute()
        other._layouts = {name: replace(one, path=one.path.absolute()) for name, one in self._layouts.items()}
        return other

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The parsed headers of its shards, in order."""
        return tuple(self._layouts.values())

    def shaken(self) -> Self:
        """The same trace with its rows in fp8 rounded once more, to see how far such rounding moves a replay."""
        other = self._copied()
        other._shaken = True
        return other

    def unverified(self) -> Self:
        """The same trace, whose shards are read without a look at their checksums."""
        other = self._copied()
        other._verifier = None
        return other

    def _copied(self) -> Self:
        """A copy that is read in another way, and so has a ``whole`` of its own."""
        other = copy.copy(self)
        vars(other).pop("whole", None)
        return other

    @property
    def verifies(self) -> bool:
        """Whether shards are held against their checksums when they are read."""
        return self._verifier is not None

    def check_sums(self) -> None:
        """Hold all that its requests are read from against its checksums now, each file once.

        Raises TraceCorruptError; nothing of a trace that was opened without ``verify``.
        """
        for record in self.records:
            for one in stretches(self._every, record, 0, record.rows):
                self._layout(one.record.shard)
        if self._verifier is not None and self.header.weights is not None:
            self._verifier.check(self.path / files.WEIGHTS, 0, self.header.weights.sha256)

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
        held = {tap for record in self.records for tap in record.taps or self.header.taps} or self.header.taps
        return sort_taps([*held, *([EMBED] if self._can_look_up() else [])])

    @cached_property
    def tap_requests(self) -> dict[str, int]:
        """How many of its requests have each of the taps."""
        looked_up = EMBED if self._is_looked_up(EMBED) else None
        return {
            tap: sum(tap == looked_up or tap in (record.taps or self.header.taps) for record in self.records)
            for tap in self.taps
        }

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

    def _less_exact(self) -> Iterator[str]:
        if rounded := self.rounded_taps:
            exact = [tap for tap in self.taps if tap not in rounded]
            yield (
                f"The rows of {', '.join(rounded)} are stored in fp8, a byte a value, those of {' and '.join(exact)} "
                "exactly: a replay that is fed the former drafts other tokens at close calls, so no round of it is "
                "said to be alike to a server's."
            )

    def _can_look_up(self) -> bool:
        if self.header.embed != "lookup":
            return False
        try:
            find_weight(self.path, self.header, EMBED, self.target_folder)
        except TraceCorruptError:
            raise
        except TraceError:
            return False
        return True

    @ReadingTrace()
    def read(self, index: int, taps: Sequence[str]) -> RequestRows:
        """Request ``index`` with ``taps`` (canonical names). Only its own rows are touched.

        The tensors are private: mappings of the shard, or copies where the first rows lie with earlier requests. They
        live on after the trace, and writing to them changes no file. Raises WiringError for a tap that the trace lacks,
        TraceCorruptError for NaN, Inf or impossible ids.
        """
        import torch

        record = self.records[index]
        self._fetch(record, taps)
        tokens = self._stored(record, TOKENS, record.tokens).to(torch.int64)
        self._check_ids(record, "tokens", tokens)
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
        )

    def tap_rows(self, index: int, tap: str, rows: Sequence[int]) -> "torch.Tensor":
        """``rows`` (0 to T-2) of one tap of request ``index`` [len(rows), width], a copy; no others are touched.

        They are given as they are, NaN and Inf included. Raises WiringError for a tap that the request lacks,
        TraceError for a row that it lacks, TraceCorruptError for impossible ids.
        """
        record = self.records[index]
        self._check_held(record, tap)
        if tap not in self.header.taps:
            return self._embed[self.read(index, ()).tokens[list(rows)]]
        if early := [row for row in rows if row < record.rows_left_out]:
            raise TraceError(
                f"{self.path} holds no row {early[0]} of request {record.request_id!r}, whose rows it has from "
                f"{record.rows_left_out} on; ask for later ones"
            )
        return self.rows_of_many(tap, {index: rows})

    @ReadingTrace()
    def rows_of_many(self, tap: str, rows: Mapping[int, Sequence[int]]) -> "torch.Tensor":
        """``rows`` of one stored tap of many requests, by index in rising order [R, width]: a copy, as ``tap_rows``."""
        import torch

        name = f"tap.{tap}"
        wanted = runs(self._every, ((self.records[index], chosen) for index, chosen in rows.items()), name)
        return torch.cat([self._tap_rows(shard, tap, places) for shard, places in wanted])

    @ReadingTrace()
    def stored_rows(self, index: int, tap: str) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """One stored tap of request ``index`` as it lies in the shards [T-1, width], less the rows that are left out,
        and the scales of its rows where it is in fp8."""
        self._check_held(self.records[index], tap)
        return self._stored_tap(self.records[index], tap)

    def _stored_tap(self, record: RequestRecord, tap: str) -> "tuple[torch.Tensor, torch.Tensor | None]":
        rows = self._stored(record, f"tap.{tap}", record.rows, record.rows_left_out)
        if self.header.taps[tap].dtype != FP8:
            return rows, None
        return rows, self._stored(record, f"scale.{tap}", record.rows, record.rows_left_out)

    @ReadingTrace()
    def logits(self, index: int) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
        """The target's choices for the n output tokens of request ``index``.

        topk_ids [n, k] int64, topk_logprobs [n, k] float32 (most likely first), logsumexp [n] float32 of the logits.
        Raises TraceCorruptError for NaN, Inf or impossible ids.
        """
        import torch

        record = self.records[index]
        where = (record.output_start, record.output_tokens)
        ids = self._rows(record, "topk_ids", *where).to(torch.int64)
        self._check_ids(record, "topk_ids", ids)
        return ids, self._finite(record, "topk_logprobs", *where), self._finite(record, "logsumexp", *where)

    @ReadingTrace()
    def feed(self, index: int) -> Feed | None:
        """What the server's draft was fed in a few rows of request ``index``; None where that is not there.

        Raises TraceCorruptError for rows that cannot be.
        """
        record = self.records[index]
        number, requests = self._in_shard[record.request_id]
        return read_feed(self._layout(record.shard), number, requests, record.tokens)

    @property
    def fed_rows(self) -> int:
        """How many rows ``feed`` gives, of all requests of the folder."""
        return sum(count_rows(layout) for layout in self.layouts)

    def embed_weight(self) -> "torch.Tensor":
        """The target's embedding rows [V, H], mapped. Raises TraceError where no sidecar or checkpoint is here."""
        return self._embed

    def lm_head_weight(self) -> "torch.Tensor":
        """The target's output rows [V, H], mapped; the embedding's where they are tied. Raises TraceError."""
        return self._lm_head

    @ReadingTrace()
    def served_rounds(self) -> "pl.DataFrame":
        """The server's own rounds of the requests that are there (SPEC.md, section 6); empty where it told none.

        Raises TraceCorruptError.
        """
        import polars as pl

        path = self.path / files.ROUNDS
        complete = self.header.state == "complete"
        if not (self.header.rounds if complete else os.path.lexists(path)):
            return pl.DataFrame(schema=served_schema())
        data = files.read_small(path, MAX_BYTES)
        if complete and hashlib.sha256(data).hexdigest() != self.header.rounds_sha256:
            raise TraceCorruptError(f"{path} is not the file that was finished: its SHA-256 differs from trace.json's")
        return rounds_of(read_served(path, data), {record.request_id for record in self.records})

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

    @cached_property
    def _in_shard(self) -> dict[str, tuple[int, int]]:
        """Of each request its number in its shard, and how many that holds."""
        counts = Counter(record.shard for record in self._every)
        seen: Counter[str] = Counter()
        found = {}
        for record in self._every:
            found[record.request_id] = (seen[record.shard], counts[record.shard])
            seen[record.shard] += 1
        return found

    @cached_property
    def _embed(self) -> "torch.Tensor":
        return self._weight("embed")

    @cached_property
    def _lm_head(self) -> "torch.Tensor":
        if self.header.target.tie_word_embeddings:
            return self._embed
        return self._weight("lm_head")

    def _tap(self, record: RequestRecord, tap: str, tokens: "torch.Tensor") -> "torch.Tensor":
        import torch

        self._check_held(record, tap)
        if tap not in self.header.taps:
            return self._embed[tokens[:-1]]
        stored, scale = self._stored_tap(record, tap)
        if scale is not None:
            stored = self._dequantised(stored, self._checked(record, f"scale.{tap}", scale, record.rows_left_out))
        self._checked(record, f"tap.{tap}", stored, record.rows_left_out)
        if not record.rows_left_out:
            return stored
        return torch.cat([stored.new_zeros(record.rows_left_out, stored.shape[1]), stored])

    def _tap_rows(self, shard: str, tap: str, places: Sequence[int]) -> "torch.Tensor":
        """Some rows of a stored tap, by where they lie in the shard: a copy."""
        layout = self._layout(shard)
        values = take_rows(layout, f"tap.{tap}", places)
        if self.header.taps[tap].dtype != FP8:
            return values
        return self._dequantised(values, take_rows(layout, f"scale.{tap}", places))

    def _dequantised(self, values: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
        import torch

        rows = dequantise(values, scale, getattr(torch, self.header.target.dtype))
        return shake(rows) if self._shaken else rows

    def _check_held(self, record: RequestRecord, tap: str) -> None:
        """Raises WiringError for a tap that the request does not have."""
        if tap in (record.taps or self.header.taps) or self._is_looked_up(tap):
            return
        if tap in self.header.taps:
            raise WiringError(
                f"request {record.request_id!r} of {self.path} has no tap {tap}; it has "
                f"{', '.join(record.taps or ())}: choose among these, leave it out (--request, --limit), or "
                "record all taps of it (--taps-for)"
            )
        raise self._lacks(tap)

    def _is_looked_up(self, tap: str) -> bool:
        return tap == EMBED and self.header.embed == "lookup"

    def _lacks(self, tap: str) -> WiringError:
        return WiringError(f"{self.path} holds no tap {tap}; it holds {', '.join(self.taps)}: choose among these")

    def _stored(self, record: RequestRecord, name: str, stop: int, start: int = 0) -> "torch.Tensor":
        """The positions ``start`` to ``stop`` of ``tokens``, of a tap or of its scales; a view where they lie in one
        place."""
        import torch

        places = stretches(self._every, record, start, stop)
        parts = [map_rows(self._layout(one.record.shard), name, *one.rows(name)) for one in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _fetch(self, record: RequestRecord, taps: Sequence[str]) -> None:
        """Of a trace elsewhere, what ``read`` is about to need."""
        if entry_of(self.path / record.shard) is None:
            return
        held = [tap for tap in taps if tap in (record.taps or self.header.taps)]
        rows = stretches(self._every, record, record.rows_left_out, record.rows)
        wanted = [(one, name) for one in rows for tap in held for name in (f"tap.{tap}", f"scale.{tap}")]
        wanted += [(one, TOKENS) for one in stretches(self._every, record, 0, record.tokens)]
        fetch_rows((self._layout(one.record.shard), name, *one.rows(name)) for one, name in wanted)

    def _rows(self, record: RequestRecord, name: str, start: int, count: int) -> "torch.Tensor":
        return map_rows(self._layout(record.shard), name, start, start + count)

    def _layout(self, shard: str) -> Layout:
        """A shard whose rows are about to be read. Raises TraceCorruptError where its bytes are not those it names."""
        layout = self._layouts[shard]
        if self._verifier is not None and entry_of(layout.path) is None:
            self._verifier.check(layout.path, layout.data_start, layout.metadata["data_sha256"])
        return layout

    @ReadingTrace()
    def _weight(self, which: str) -> "torch.Tensor":
        if self.header.weights is not None:
            path = local_file(self.path / files.WEIGHTS)  # all of it is used
            if self._verifier is not None:
                self._verifier.check(path, 0, self.header.weights.sha256)
        return load_weight(self.path, self.header, which, self.target_folder)

    def _finite(self, record: RequestRecord, name: str, start: int, count: int) -> "torch.Tensor":
        return self._checked(record, name, self._rows(record, name, start, count))

    def _checked(self, record: RequestRecord, name: str, tensor: "torch.Tensor", first: int = 0) -> "torch.Tensor":
        """Rows from ``first`` on. Raises TraceCorruptError where one is not finite."""
        bad = unfinite_row(tensor)
        if bad is not None:
            shard = (
                stretches(self._every, record, bad, bad + 1)[0].record.shard if bad < record.shared else record.shard
            )
            raise TraceCorruptError(
                f"{self.path / shard}: {name} holds NaN or Inf in row {first + bad} of request {record.request_id!r}"
            )
        return tensor

    def _check_ids(self, record: RequestRecord, name: str, ids: "torch.Tensor") -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.header.target.vocab_size:
            raise TraceCorruptError(
                f"{self.path / record.shard}: {name} of request {record.request_id!r} reach from {low} to {high}, the "
                f"target's ids are 0 to {self.header.target.vocab_size - 1}"
            )


def _say_unfinished(folder: Path, whole: int) -> str:
    if files.is_locked(folder):
        return f"{folder} is being recorded right now, {whole} requests are whole so far: wait until it has ended"
    return (
        f"the recording of {folder} has not ended, {whole} requests are whole: type the capture command again with "
        "--resume"
    )


@ReadingTrace()
def _check_table(folder: Path, header: TraceHeader, records: Sequence[RequestRecord]) -> None:
    """``requests.parquet`` is the finished one and says what the shards say. Raises TraceCorruptError."""
    path = folder / files.REQUESTS
    data = files.read_small(path, MAX_BYTES)
    if hashlib.sha256(data).hexdigest() != header.requests_sha256:
        raise TraceCorruptError(f"{path} is not the file that was finished: its SHA-256 differs from trace.json's")
    table = read_table(data, header, str(path))
    if len(table) != header.requests:
        raise TraceCorruptError(f"{path} lists {len(table)} requests, trace.json says {header.requests}")
    check_same(table, records, str(path))
