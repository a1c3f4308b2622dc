"""The feed of a trace held against its taps, bit for bit, and hypotheses held against the feed.

It turns rows of a trace into what the analysis judges (analysis/diagnosis/feed.py), which sees no tensors.
Shapes: F rows of one request's feed, N needed rows of a tap, H features of a slot; a place is a tap and a shift.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from replay.analysis.diagnosis.feed import Fed, Feeding, Place, Slot, borne_out, contradiction
from replay.diagnosis.case import Case
from replay.diagnosis.hypotheses import WIRED_OTHERWISE, Hypothesis, rewired
from replay.engines.wiring import Wiring
from replay.errors import TraceCorruptError
from replay.faults.table import FAULTS
from replay.simulator.binding import bind
from replay.simulator.variant import ResolvedVariant
from replay.traces.fp8 import dequantise, quantise
from replay.traces.tensors import tensor_bytes

if TYPE_CHECKING:
    import torch

    from replay.traces.feed import Feed
    from replay.traces.reader import Trace

SHIFTS = (0, -1, 1)
MOST_REQUESTS = 64  # whose feed is looked at
Bits = npt.NDArray[np.uint32]


# ---- hypotheses ----


def held_against_feed(case: Case, hypothesis: Hypothesis) -> tuple[str, bool]:
    """How what the draft was fed contradicts a hypothesis (empty: not), and whether it shows what that one says."""
    feeding = case.judged_feeding
    if feeding is None:
        return "", False
    fed = _fed(case, hypothesis.variant)
    return contradiction(feeding, fed), borne_out(feeding, fed)


def as_fed(case: Case, others: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The wiring that was really fed, where none of the ``others`` stands for it."""
    taps = None if case.judged_feeding is None else case.judged_feeding.wiring
    if taps is None or len(taps) != len(case.served.wiring.taps):
        return []
    if any(replace(_fed(case, one.variant), offset=0, max_position=None) == Fed(taps) for one in others):
        return []
    alike = [one.log_prior for one in others if one.kind == WIRED_OTHERWISE]
    return [rewired(case, Wiring(taps), max(alike, default=others[-1].log_prior))]


def _fed(case: Case, variant: ResolvedVariant) -> Fed:
    """What its draft is fed. Other faults than those of the feed are left out: some are costly to apply."""
    faults = tuple(fault for fault in variant.faults if FAULTS[fault.kind].changes_feed)
    subject = bind(replace(variant, faults=faults), case.checkpoint, case.trace)
    behaviour = subject.behaviour
    return Fed(
        subject.wiring.taps,
        shift=-(behaviour.pairing == "earlier-features"),
        zeros=behaviour.zero_slots,
        unrecorded=behaviour.unit_taps,
        own_token=behaviour.pairing == "own-token",
        offset=behaviour.offset,
        max_position=behaviour.max_position,
    )


# ---- counting ----


def read_feeding(trace: "Trace", most: int = MOST_REQUESTS) -> Feeding | None:
    """What the feeds of the first ``most`` requests that have one show; None for a trace without any.

    Of the taps only the rows that are compared are read, and not whether they are finite. Raises TraceCorruptError.
    """
    tally = _Tally(trace)
    for index in range(len(trace)) if trace.fed_rows else ():
        if tally.requests == most:
            break
        feed = trace.feed(index)
        if feed is not None:
            tally.add(index, feed)
    return tally.feeding() if tally.requests else None


class _Tally:
    """Counts over the requests so far, by slot and place; only one request's rows are in memory."""

    def __init__(self, trace: "Trace") -> None:
        self.trace = trace
        self.requests = self.rows = self.slots = self.next_token = self.own_token = 0
        self.positions: Counter[tuple[int, int]] = Counter()
        self.compared: Counter[Place] = Counter()
        self.zeros: Counter[int] = Counter()
        self.broken: Counter[int] = Counter()
        self.equal: Counter[tuple[int, Place]] = Counter()
        self.cosines: dict[tuple[int, Place], float] = {}

    def add(self, index: int, feed: "Feed") -> None:
        """Count request ``index``. Raises TraceCorruptError for one with another number of slots than those before."""
        fed_FSH = _bits(feed.features_FW).reshape(len(feed), -1, self.trace.header.target.hidden_size)
        slots = fed_FSH.shape[1]
        if self.requests and slots != self.slots:
            raise TraceCorruptError(
                f"{self.trace.path}: request {index} was fed {slots} slots, those before it {self.slots}"
            )
        row_F, token_F = feed.row_F.numpy(), feed.token_F.numpy()
        tokens_T = self.trace.read(index, ()).tokens.numpy()
        self.requests, self.rows, self.slots = self.requests + 1, self.rows + len(feed), slots
        self.next_token += int((token_F == tokens_T[row_F + 1]).sum())
        self.own_token += int((token_F == tokens_T[row_F]).sum())
        self.positions.update(zip(row_F.tolist(), feed.position_F.tolist(), strict=True))
        values_FSH = fed_FSH.view(np.float32)
        self.zeros.update(dict(enumerate((values_FSH == 0).all(2).sum(0).tolist())))
        self.broken.update(dict(enumerate((~np.isfinite(values_FSH)).any(2).sum(0).tolist())))
        rounded = self.trace.rounded_taps
        in_fp8_FSH = _through_fp8(fed_FSH, self.trace.header.target.dtype) if rounded else fed_FSH
        for place, there_F, rows_NH in self._places(index, row_F, len(tokens_T) - 1):
            self._compare(place, rows_NH, (in_fp8_FSH if place[0] in rounded else fed_FSH)[there_F])

    def _places(
        self, index: int, row_F: npt.NDArray[np.int32], rows: int
    ) -> Iterator[tuple[Place, npt.NDArray[np.bool_], Bits]]:
        """Of each place which of the fed rows have such a neighbour among the request's ``rows``, and these bits."""
        around = row_F + np.array(SHIFTS)[:, None]
        there = (around >= self.trace.records[index].rows_left_out) & (around < rows)
        needed = np.unique(around[there])
        for tap in self.trace.taps:
            tap_NH = _bits(self.trace.tap_rows(index, tap, needed.tolist()))
            for shift, wanted_F, there_F in zip(SHIFTS, around, there, strict=True):
                yield (tap, shift), there_F, tap_NH[np.searchsorted(needed, wanted_F[there_F])]

    def _compare(self, place: Place, rows_FH: Bits, fed_FSH: Bits) -> None:
        self.compared[place] += len(rows_FH)
        for slot in range(self.slots):
            fed_FH = fed_FSH[:, slot]
            self.equal[slot, place] += int((rows_FH == fed_FH).all(1).sum())
            self.cosines[slot, place] = self.cosines.get((slot, place), 0.0) + _cosines(rows_FH, fed_FH)

    def feeding(self) -> Feeding:
        """What has been counted."""
        offsets: Counter[int] = Counter()
        for (row, position), count in self.positions.items():
            offsets[position - row] += count
        offset, at_offset = max(offsets.items(), key=lambda item: (item[1], -abs(item[0])))
        slots = tuple(self._slot(slot) for slot in range(self.slots))
        return Feeding(
            self.requests, self.rows, slots, self.next_token, self.own_token, offset, at_offset, dict(self.positions)
        )

    def _slot(self, slot: int) -> Slot:
        places = [(tap, shift) for shift in SHIFTS for tap in self.trace.taps]
        means = {place: self.cosines[slot, place] / self.compared[place] for place in places if self.compared[place]}
        nearest = max(means, key=lambda place: means[place], default=None)
        cosine = math.nan if nearest is None else means[nearest]
        equal = {place: self.equal[slot, place] for place in places}
        compared = {place: self.compared[place] for place in places}
        return Slot(slot, self.rows, self.zeros[slot], equal, compared, nearest, cosine, self.broken[slot])


def _bits(tensor: "torch.Tensor") -> Bits:
    """The bits of a float tensor widened to float32, which loses nothing: equal where the values and signs are."""
    return np.frombuffer(tensor_bytes(tensor.float()), dtype=np.uint32).reshape(tuple(tensor.shape))


def _through_fp8(bits_FSH: Bits, dtype: str) -> Bits:
    """What a trace whose rows are in fp8 would say of these: equal where the rows are."""
    import torch

    rows = torch.from_numpy(bits_FSH.view(np.float32).reshape(-1, bits_FSH.shape[-1]).copy())
    return _bits(dequantise(*quantise(rows), getattr(torch, dtype))).reshape(bits_FSH.shape)


def _cosines(one_FH: Bits, other_FH: Bits) -> float:
    """The sum over the rows; -inf where NaN or Inf is among them."""
    one, other = (bits.view(np.float32).astype(np.float64) for bits in (one_FH, other_FH))
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return -math.inf
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(1) / np.where(lengths > 0, lengths, 1.0)).sum())
