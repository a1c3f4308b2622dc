"""What is kept of each request: all taps of the first ones, fewer of the others, prompts from some row on.

The choices of `replay capture`: --taps-for with --then-taps, --rows, --prompt-rows (traces/SPEC.md, version 2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from replay.capture.asked import Asked
from replay.capture.encode import EncodedRequest
from replay.capture.options import CaptureOptions, ServerOptions
from replay.printable import counted
from replay.traces.captured import CapturedRequest
from replay.traces.header import FP8, OLDEST, VERSION, TapInfo, TraceHeader
from replay.traces.lacking import say_rounded
from replay.traces.taps import EMBED, FINAL, sort_taps


@dataclass(frozen=True, slots=True)
class Kept:
    """``taps`` are stored of the first requests, of which ``first`` are the ids (None: of all), ``then_taps`` of the
    others; of each prompt the last ``prompt_rows`` rows (None: all). In fp8 where ``rows`` is so, but for ``final``."""

    taps: tuple[str, ...]
    then_taps: tuple[str, ...] = ()
    first: frozenset[str] | None = None
    prompt_rows: int | None = None
    rows: str = "exact"

    def taps_of(self, request_id: str) -> tuple[str, ...]:
        """The stored taps of a request."""
        return self.taps if self.first is None or request_id in self.first else self.then_taps

    def tiers(self, requests: Sequence[EncodedRequest]) -> list[tuple[tuple[str, ...], list[EncodedRequest]]]:
        """The requests that have the same taps, with these; the first ones first."""
        alike: dict[tuple[str, ...], list[EncodedRequest]] = {}
        for request in requests:
            alike.setdefault(self.taps_of(request.request_id), []).append(request)
        return list(alike.items())

    def cut(self, request: CapturedRequest) -> CapturedRequest:
        """A request without the rows of its prompt that are not kept."""
        early = self.first_row(len(request.prompt_ids))
        if not early:
            return request
        return replace(request, taps={name: rows[early:] for name, rows in request.taps.items()}, first_row=early)

    def first_row(self, prompt_tokens: int) -> int:
        """The first row that is kept of a request with such a prompt."""
        return 0 if self.prompt_rows is None else max(0, prompt_tokens - self.prompt_rows)

    def asked(self, request: EncodedRequest) -> Asked:
        """What a recording server need hand over of a request."""
        taps = tuple(tap for tap in self.taps_of(request.request_id) if tap != FINAL)
        return Asked(taps, any(map(self._is_rounded, taps)), self.first_row(len(request.prompt_ids)))

    def asked_by_any(self) -> Asked:
        """What a recording server need hand over where other requests may take the rows: all that is stored of any."""
        return Asked(tuple(tap for tap in self.taps if tap != FINAL))

    def tap_infos(self, dtype: str, width: int) -> dict[str, TapInfo]:
        """The header's taps, of a target that computes in ``dtype``."""
        return {tap: TapInfo(FP8 if self._is_rounded(tap) else dtype, width) for tap in self.taps}

    def announce(self, header: TraceHeader) -> TraceHeader:
        """``header`` with the version that this takes, and what the trace then lacks."""
        version = VERSION if header.capture.choices else OLDEST
        return replace(header, version=version, missing=(*header.missing, *self._lacking()))

    def _lacking(self) -> Iterator[str]:
        fewer = [tap for tap in self.taps if tap not in self.then_taps]
        if self.first is not None and fewer:
            first = counted(len(self.first), "request")
            yield f"the taps {', '.join(fewer)} of some requests: they were recorded of the first {first} alone"
        if rounded := [tap for tap in self.taps if self._is_rounded(tap)]:
            yield say_rounded(rounded)
        if self.prompt_rows is not None:
            yield f"the rows of longer prompts before their last {self.prompt_rows}"

    def _is_rounded(self, tap: str) -> bool:
        return self.rows == "fp8" and tap != FINAL


def kept_of(
    options: CaptureOptions | ServerOptions,
    requests: Sequence[EncodedRequest],
    taps: Sequence[str],
    then_taps: Sequence[str],
    *,
    lookup: bool,
) -> Kept:
    """What ``options`` ask for, of ``requests`` in the order of the prompt file; ``lookup``: R[0] need not be stored.

    ``taps`` are those of the first requests, ``then_taps`` those of the others, as asked for. The others' are recorded
    of all.
    """
    first = None
    if options.taps_for is not None and options.taps_for < len(requests):
        first = frozenset(one.request_id for one in requests[: options.taps_for])

    def stored(names: Sequence[str]) -> tuple[str, ...]:
        """A lookup is not stored: a reader makes it from the token ids. Else it always is, or it would be lost."""
        return sort_taps([FINAL, *(tap for tap in names if tap != EMBED), *([] if lookup else [EMBED])])

    every = stored([*taps, *then_taps])
    return Kept(every, every if first is None else stored(then_taps), first, options.prompt_rows, options.rows)
