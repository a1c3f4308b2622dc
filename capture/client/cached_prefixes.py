"""Prefixes that a server took from its cache: the rows of the requests of this capture that computed them.

With ``--server-cache shared`` all requests of a capture have one salt, which nobody else has, so the cache of a process
holds under it what requests of this capture computed there before. SGLang 0.5.23 mem_cache/radix_cache.py, where
a draft of EAGLE's kind is served (``is_eagle``): a row is kept by its token and the next one (``is_bigram``), because
the draft's row embeds the next one. So a cached row is one of an earlier request with the same tokens up to the one
after it; without a draft, up to its own. ``insert`` keeps the row that is there: a request that computed it as well is
given the first one's, its draft KV too (``checkpoint``).

Which of several requests had computed a row that was kept cannot always be told: one may have been evicted before the
next. Then all of them must have the same bits, or the request is asked again without sharing. A salt under which rows
were computed that are not known, for example by a try that was given up, is used no more.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from replay.capture.client.join import NO_PREFIX, Prefix, Recorded
from replay.capture.client.spool_reader import SpoolReader
from replay.capture.encode import EncodedRequest
from replay.capture.spool import TAP, pid_of
from replay.traces.cached import Piece

if TYPE_CHECKING:
    import torch

    from replay.traces.writer import TraceWriter

_ROWS_AT_ONCE = 1024  # that are compared
_FIRST = 16  # tokens that are compared first


class UnsureError(Exception):
    """It is not known for sure which rows the server took from its cache."""


@dataclass(frozen=True, slots=True)
class Run:
    """The rows ``start`` to ``stop`` of a request, made by one forward of ``size`` rows (0: not told). ``recorded``
    holds them while the spool does; else the trace has them where they are ``stored``, or nobody."""

    start: int
    stop: int
    size: int
    place: tuple[str, int]
    recorded: Recorded | None = None
    stored: bool = False


@dataclass(slots=True)
class _Salted:
    """A request under a salt that others have too; ``left`` are its runs once they are no more in the spool."""

    request: EncodedRequest
    salt: str
    output: tuple[int, ...] = ()
    left: tuple[Run, ...] | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Rows of a run that may be what the cache holds of a prompt."""

    owner: str  # request_id
    start: int
    stop: int
    run: Run


class CachedPrefixes:
    """What the cache of a server may hold of this capture. ``unlike``: requests whose cached rows have the same bits in
    several requests, made by forwards of other sizes."""

    def __init__(self, spool: SpoolReader, drafts: bool) -> None:
        self._spool, self._beyond = spool, int(drafts)  # tokens beyond a row that must be equal
        self._asked: dict[str, _Salted] = {}
        self._rids: dict[str, str] = {}  # by request
        self._spoilt: set[str] = set()
        self._lock = threading.Lock()
        self.unlike = 0

    def salt_for(self, request: EncodedRequest, rid: str, tries: int) -> str | None:
        """The salt of a try; None for one of its own, where ``tries`` came before. Any thread may call it."""
        if tries:
            return None
        with self._lock:
            salt = self.salt
            self._asked[rid] = _Salted(request, salt)
            self._rids[request.request_id] = rid
            return salt

    def spoil(self, rid: str) -> None:
        """Use another salt, if this try had the one of now: what it computed is not known. Any thread may call it."""
        with self._lock:
            if rid in self._asked:
                self._spoilt.add(self._asked[rid].salt)

    @property
    def salt(self) -> str:
        """The salt of the next try that shares one."""
        return f"{self._spool.client}-shared-{len(self._spoilt)}"

    def shares(self, rid: str) -> bool:
        """Whether this try may have taken rows from the cache."""
        return rid in self._asked

    def has_prompt(self, request_id: str) -> bool:
        """Whether all rows of the prompt of a request are recorded, so that they are in the cache or soon will be."""
        rid = self._rids.get(request_id, "")
        recorded = self._spool.rows(rid)
        most = len(self._asked[rid].request.prompt_ids) if recorded else 0
        return any(one.entry.start + one.entry.rows >= most for one in recorded)

    def answered(self, rid: str, output_ids: tuple[int, ...]) -> None:
        """From now on its output may be in the cache too."""
        if rid in self._asked:
            self._asked[rid].output = output_ids

    def leave(self, rid: str, stored: bool) -> None:
        """Its rows leave the spool; whether the trace has them, under the id of its request."""
        one = self._asked.get(rid)
        if one is not None:
            one.left = tuple(_left(self._runs(rid, one), stored))

    def take(self, rid: str, cached: int, taps: Sequence[str], writer: "TraceWriter") -> Prefix:
        """The ``cached`` first rows of a request, as the server counted them, with ``taps``. Raises UnsureError."""
        one = self._asked.get(rid)
        if one is None:
            return NO_PREFIX
        own = self._runs(rid, one)
        if not own or own[0].start != cached:
            raise UnsureError(f"the server counted {cached} cached tokens, its first recorded row is another")
        if one.salt in self._spoilt:  # nothing cached: its rows may still have been exchanged for those of such a try
            raise UnsureError("a request was asked again, and what its first try left in the cache is not known")
        held = list(self._others(rid, one, pid_of(own[0].place[0])))
        chosen = []
        sizes_differ = False
        for candidates in candidates_of(held, own, cached, len(one.request.prompt_ids), one.request.request_id):
            first, *others = candidates
            for other in others:
                self._compare(first, other, taps, writer)
                sizes_differ = sizes_differ or other.run.size != first.run.size
            if first.start < cached:
                chosen.append(first)
        self.unlike += sizes_differ
        return self._joined(chosen, taps, writer)

    def _runs(self, rid: str, one: _Salted) -> tuple[Run, ...]:
        """Rows that this try computed and that can be in the cache: those with a token after them."""
        if one.left is not None:
            return one.left
        most = len(one.request.prompt_ids) + max(0, len(one.output) - 1)
        return tuple(runs_of(self._spool.rows(rid), most))

    def _others(self, rid: str, one: _Salted, pid: int) -> Iterator[Held]:
        with self._lock:
            asked = list(self._asked.items())
        prompt = one.request.prompt_ids
        for other, it in asked:
            if other == rid or it.salt != one.salt:
                continue
            common = alike(it.request.prompt_ids, prompt)
            if common == len(it.request.prompt_ids):
                common += alike(it.output, prompt[common:])
            rows = common - self._beyond
            for run in self._runs(other, it) if rows > 0 else ():
                if run.start < rows and pid_of(run.place[0]) == pid:
                    yield Held(it.request.request_id, run.start, min(run.stop, rows), run)

    def _compare(self, one: Held, other: Held, taps: Sequence[str], writer: "TraceWriter") -> None:
        import torch

        for low in range(one.start, one.stop, _ROWS_AT_ONCE):
            high = min(low + _ROWS_AT_ONCE, one.stop)
            for tap in taps:
                pair = [read_held(it, tap, low, high, writer) for it in (one, other)]
                if not torch.equal(*(rows.contiguous().view(torch.uint8) for rows in pair)):
                    raise UnsureError(f"two requests computed its rows from {low} on, and not with the same bits")

    def _joined(self, chosen: Sequence[Held], taps: Sequence[str], writer: "TraceWriter") -> Prefix:
        import torch

        if not chosen:
            return NO_PREFIX
        rows = {tap: torch.cat([read_held(it, tap, it.start, it.stop, writer) for it in chosen]) for tap in taps}
        return Prefix(chosen[-1].stop, rows, forwards_of(chosen))


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two sequences have in common."""
    most = min(len(one), len(other))
    low, high = 0, min(_FIRST, most)
    while one[low:high] == other[low:high]:
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:  # the first low are equal, the first high are not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def forwards_of(chosen: Sequence[Held]) -> tuple[Piece, ...]:
    """How many of these rows each forward made, and its size; nothing where that is not known of all."""
    if any(it.run.size == 0 for it in chosen):
        return ()
    one_forward = (list(parts) for _, parts in groupby(chosen, key=lambda it: it.run.place))
    return tuple((sum(it.stop - it.start for it in parts), parts[0].run.size) for parts in one_forward)


def runs_of(recorded: Sequence[Recorded], most: int) -> list[Run]:
    """What of the rows 0 to ``most`` each forward made, in the order of the rows; those that were left out are not."""
    runs = []
    for one in recorded:
        entry = one.entry
        stop = min(entry.start + entry.rows, most)
        if one.first_kept < stop:
            size = entry.forward_rows or entry.batch * (len(entry.drafted) + 1)
            runs.append(Run(one.first_kept, stop, size, one.place, one))
    return sorted(runs, key=lambda run: (run.start, run.place))


def _left(runs: Sequence[Run], stored: bool) -> Iterator[Run]:
    """``runs`` whose rows leave the spool. From a row on that was made twice nobody has what it was at first."""
    once = min((later.start for earlier, later in pairwise(runs) if later.start < earlier.stop), default=None)
    for run in runs:
        middle = run.stop if once is None else min(max(once, run.start), run.stop)
        if run.start < middle:
            yield Run(run.start, middle, run.size, run.place, stored=stored)
        if middle < run.stop:
            yield Run(middle, run.stop, run.size, run.place)


def candidates_of(
    held: Sequence[Held], own: Sequence[Run], cached: int, prompt_tokens: int, name: str
) -> Iterator[list[Held]]:
    """Stretch by stretch of a prompt, all that may be in the cache there, the one that came first before the others.

    Of the ``cached`` first rows those of the runs ``held`` by other requests, of the rows behind them ``own`` ones, and
    of others as far as they were there before. Raises UnsureError where there are none.
    """
    spans = [*((it.start, it.stop) for it in held), *((run.start, run.stop) for run in own)]
    edges = {edge for span in spans for edge in span if edge < prompt_tokens}
    for low, high in pairwise(sorted({0, prompt_tokens, *edges})):
        mine = [Held(name, low, high, run) for run in own if low >= cached and run.start <= low and high <= run.stop]
        mine = sorted(mine, key=lambda it: it.run.place)[-1:]  # of a prompt that was prefilled twice what is kept
        before = mine[0].run.place if mine else own[0].place
        found = [
            Held(it.owner, low, high, it.run)
            for it in held
            if it.start <= low and high <= it.stop and it.run.place < before
        ]
        if not mine and not found:
            raise UnsureError(f"no request of this capture is known to have computed its row {low}")
        yield [*mine, *sorted(found, key=lambda it: it.run.place)]


def read_held(it: Held, tap: str, low: int, high: int, writer: "TraceWriter") -> "torch.Tensor":
    """Rows low..high-1 of a tap. Raises UnsureError where nobody has them any more."""
    name = f"{TAP}{tap}"
    if it.run.recorded is not None and name in it.run.recorded.file.layout.tensors:
        return it.run.recorded.read_kept(name, low, high)
    rows = writer.rows_on_disk(it.owner, tap, low, high) if it.run.stored else None
    if rows is None:
        raise UnsureError(f"request {it.owner!r} computed its rows from {low} on, and they are not in the trace")
    return rows
