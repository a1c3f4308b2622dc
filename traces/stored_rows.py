"""Rows of a trace's requests as they lie in its shards: where, whether they are whole, and fp8 made numbers again."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from replay.errors import TraceCorruptError, TraceError
from replay.traces.captured import unfinite_row
from replay.traces.feed import Feed, read_feed
from replay.traces.fp8 import dequantise, shake
from replay.traces.header import FP8, TraceHeader
from replay.traces.records import RequestRecord
from replay.traces.remote import entry_of
from replay.traces.stretches import TOKENS, runs, stretches
from replay.traces.tensors import Layout, fetch_rows, map_rows, take_rows
from replay.traces.verify import Verifier

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredRows:
    """The shards of the trace in the folder ``path``: ``records`` are all its requests, ``layouts`` go by file name.

    ``verifier`` holds each shard against its checksum when the first of its rows is read. With ``shaken`` rows in fp8
    are rounded once more.
    """

    path: Path
    header: TraceHeader
    records: Sequence[RequestRecord]
    layouts: Mapping[str, Layout]
    verifier: Verifier | None
    shaken: bool = False

    def absolute(self) -> Self:
        """The same, found from any working folder, and held against checksums anew."""
        path = self.path.absolute()
        return replace(
            self,
            path=path,
            layouts={name: replace(one, path=one.path.absolute()) for name, one in self.layouts.items()},
            verifier=None if self.verifier is None else Verifier(path),
        )

    def layout(self, shard: str) -> Layout:
        """A shard whose rows are about to be read. Raises TraceCorruptError where its bytes are not those it names."""
        layout = self.layouts[shard]
        if self.verifier is not None and entry_of(layout.path) is None:
            self.verifier.check(layout.path, layout.data_start, layout.metadata["data_sha256"])
        return layout

    def check_sums(self, record: RequestRecord) -> None:
        """Hold each shard that has rows of ``record`` against its checksum. Raises TraceCorruptError."""
        for one in stretches(self.records, record, 0, record.rows):
            self.layout(one.record.shard)

    def fetch(self, record: RequestRecord, taps: Sequence[str]) -> None:
        """Of a trace elsewhere, the tokens of ``record`` and its rows of ``taps``, which are about to be read."""
        if entry_of(self.path / record.shard) is None:
            return
        rows = stretches(self.records, record, record.rows_left_out, record.rows)
        wanted = [(one, name) for one in rows for tap in taps for name in (f"tap.{tap}", f"scale.{tap}")]
        wanted += [(one, TOKENS) for one in stretches(self.records, record, 0, record.tokens)]
        fetch_rows((self.layout(one.record.shard), name, *one.rows(name)) for one, name in wanted)

    def ids(self, record: RequestRecord) -> "torch.Tensor":
        """The tokens of ``record`` [T] int64. Raises TraceCorruptError for impossible ones."""
        import torch

        tokens = self._stretch(record, TOKENS, record.tokens).to(torch.int64)
        self._check_ids(record, "tokens", tokens)
        return tokens

    def tap(self, record: RequestRecord, tap: str) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """Its rows of ``tap`` as they are stored, from the first that is there on, and their scales where in fp8."""
        rows = self._stretch(record, f"tap.{tap}", record.rows, record.rows_left_out)
        if self.header.taps[tap].dtype != FP8:
            return rows, None
        return rows, self._stretch(record, f"scale.{tap}", record.rows, record.rows_left_out)

    def finite_tap(self, record: RequestRecord, tap: str) -> "torch.Tensor":
        """Its rows of ``tap`` in the target's dtype, from the first that is there on. Raises TraceCorruptError."""
        stored, scale = self.tap(record, tap)
        if scale is not None:
            self._check_scales(record, tap, self._finite(record, f"scale.{tap}", scale, record.rows_left_out))
            stored = self._dequantised(stored, scale)
        return self._finite(record, f"tap.{tap}", stored, record.rows_left_out)

    def some_of_tap(self, tap: str, wanted: Iterable[tuple[RequestRecord, Sequence[int]]]) -> "torch.Tensor":
        """The ``wanted`` positions of ``tap`` of requests in rising order [R, width]: a copy. Raises TraceError."""
        import torch

        there = ((record, self._held(record, rows)) for record, rows in wanted)
        places = runs(self.records, there, f"tap.{tap}")
        return torch.cat([self._taken(shard, tap, rows) for shard, rows in places])

    def _held(self, record: RequestRecord, rows: Sequence[int]) -> Sequence[int]:
        """The same rows. Raises TraceError where one was left out."""
        first = record.rows_left_out
        if (early := min(rows, default=first)) < first:
            raise TraceError(
                f"{self.path} holds no row {early} of request {record.request_id!r}, whose rows it has from {first} "
                "on; ask for later ones"
            )
        return rows

    def logits(self, record: RequestRecord) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """topk_ids [n, k] int64, topk_logprobs [n, k] float32, logsumexp [n] float32. Raises TraceCorruptError."""
        import torch

        ids = self._outputs(record, "topk_ids").to(torch.int64)
        self._check_ids(record, "topk_ids", ids)
        likely, norms = ((name, self._outputs(record, name)) for name in ("topk_logprobs", "logsumexp"))
        return ids, self._finite(record, *likely), self._finite(record, *norms)

    def feed(self, record: RequestRecord) -> Feed | None:
        """What the server's draft was fed in a few of its rows; None where that is not there.

        Raises TraceCorruptError for rows that cannot be.
        """
        number, requests = self._in_shard[record.request_id]
        return read_feed(self.layout(record.shard), number, requests, record.tokens)

    @cached_property
    def _in_shard(self) -> dict[str, tuple[int, int]]:
        """Of each request its number in its shard, and how many that holds."""
        counts = Counter(record.shard for record in self.records)
        seen: Counter[str] = Counter()
        found = {}
        for record in self.records:
            found[record.request_id] = (seen[record.shard], counts[record.shard])
            seen[record.shard] += 1
        return found

    def _taken(self, shard: str, tap: str, places: Sequence[int]) -> "torch.Tensor":
        """Some rows of a stored tap, by where they lie in the shard: a copy."""
        layout = self.layout(shard)
        values = take_rows(layout, f"tap.{tap}", places)
        if self.header.taps[tap].dtype != FP8:
            return values
        return self._dequantised(values, take_rows(layout, f"scale.{tap}", places))

    def _dequantised(self, values: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
        import torch

        rows = dequantise(values, scale, getattr(torch, self.header.target.dtype))
        return shake(rows) if self.shaken else rows

    def _stretch(self, record: RequestRecord, name: str, stop: int, start: int = 0) -> "torch.Tensor":
        """The positions ``start`` to ``stop`` of ``tokens``, of a tap or of its scales; a view where they lie in one
        place."""
        import torch

        places = stretches(self.records, record, start, stop)
        parts = [map_rows(self.layout(one.record.shard), name, *one.rows(name)) for one in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _outputs(self, record: RequestRecord, name: str) -> "torch.Tensor":
        start = record.output_start
        return map_rows(self.layout(record.shard), name, start, start + record.output_tokens)

    def _finite(self, record: RequestRecord, name: str, tensor: "torch.Tensor", first: int = 0) -> "torch.Tensor":
        """Rows from ``first`` on. Raises TraceCorruptError where one is not finite."""
        bad = unfinite_row(tensor)
        if bad is not None:
            raise TraceCorruptError(
                f"{self.path / self._where(record, bad).shard}: {name} holds NaN or Inf in row {first + bad} of "
                f"request {record.request_id!r}"
            )
        return tensor

    def _where(self, record: RequestRecord, row: int) -> RequestRecord:
        """The request with which a row of ``record`` lies."""
        return record if row >= record.shared else stretches(self.records, record, row, row + 1)[0].record

    def _check_scales(self, record: RequestRecord, tap: str, scale: "torch.Tensor") -> None:
        if bool((low := scale <= 0).any()):
            bad = int(low.nonzero()[0, 0])
            lies, row = self._where(record, bad), record.rows_left_out + bad
            raise TraceCorruptError(
                f"{self.path / lies.shard}: scale.{tap} is {float(scale[low][0]):g} in row {row} of request "
                f"{record.request_id!r}, it must be above 0"
            )

    def _check_ids(self, record: RequestRecord, name: str, ids: "torch.Tensor") -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.header.target.vocab_size:
            raise TraceCorruptError(
                f"{self.path / record.shard}: {name} of request {record.request_id!r} reach from {low} to {high}, the "
                f"target's ids are 0 to {self.header.target.vocab_size - 1}"
            )
