"""Accept lengths of the ladder's rungs, each for the requests as they are and for every resample of them.

One set of draws serves all levels: row 0 of every sum is the requests themselves, the others are resamples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import Floats, percentile_interval, ratios, resampled_sums
from replay.analysis.counts import ACCEPTED, ROUNDS, Counts, Mask, per_request, reached_positions
from replay.errors import UsageError
from replay.traces.rounds import RequestInfo, Rounds

if TYPE_CHECKING:
    import polars as pl

NOTHING_SERVED = "nothing was reported by the server; say what it showed, an accept length or histograms by request."


@dataclass(frozen=True, slots=True)
class Reached:
    """What a level rests on: ``right[j-1]`` of ``of[j-1]`` things called ``unit``, for positions j from 1."""

    right: tuple[int, ...]
    of: tuple[int, ...]
    unit: str


@dataclass(frozen=True, slots=True)
class Level:
    """An accept length: ``values[0]`` of the requests themselves, the others of resamples; ``reached`` its counts.

    ``drawn``: requests were resampled, at least two of them. A number that came alone is the same in every resample.
    """

    values: Floats
    reached: Reached | None
    drawn: bool

    @property
    def value(self) -> float:
        """Of the requests themselves."""
        return float(self.values[0])

    @property
    def ci95(self) -> tuple[float, float]:
        """(nan, nan) for one request, or a number without requests."""
        return percentile_interval(self.values[1:]) if self.drawn else (math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Reported:
    """What a server showed: one ``accept_length``, or rounds and accepted tokens by request; or neither.

    ``histograms`` [requests, most accepted + 1] counts rounds, by request and accepted tokens; None where only their
    sums are known.
    """

    what: str
    accept_length: float | None = None
    rounds_N: npt.NDArray[np.int64] | None = None
    accepted_N: npt.NDArray[np.int64] | None = None
    histograms: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, given: float | Mapping[str, Sequence[int]] | None, requests: Sequence[RequestInfo]) -> "Reported":
        """From an accept length, from histograms by request id, or from what the trace's requests hold.

        Raises UsageError for a number below 1 or histograms of none of these requests.
        """
        if isinstance(given, Mapping):
            known = [given.get(request.request_id, ()) for request in requests]
            if not any(map(any, known)):
                raise UsageError(
                    f"the {len(given)} histograms observed are of none of the trace's {len(requests)} requests; give "
                    "them by the trace's request ids, or one accept length"
                )
            return cls._of_histograms(known)
        if given is not None:
            if not (math.isfinite(given) and given >= 1):
                raise UsageError(
                    f"accept length {given:g} was observed, possible is 1 or more: it counts the bonus token"
                )
            return cls("The accept length that was given as observed.", accept_length=float(given))
        if any(request.observed_histogram for request in requests):
            return cls._of_histograms([request.observed_histogram or () for request in requests])
        if any(request.observed_rounds for request in requests):
            return cls._of_rounds(requests)
        return cls(f"Not measured: {NOTHING_SERVED}")

    @classmethod
    def _of_histograms(cls, known: Sequence[Sequence[int]]) -> "Reported":
        histograms = np.zeros((len(known), max(map(len, known))), dtype=np.int64)
        for row, counts in enumerate(known):
            histograms[row, : len(counts)] = counts
        accepted_N = histograms @ np.arange(histograms.shape[1])
        what = "1 + accepted / rounds, from the histograms that the server reported."
        return cls(what, None, histograms.sum(axis=1), accepted_N, histograms)

    @classmethod
    def _of_rounds(cls, requests: Sequence[RequestInfo]) -> "Reported":
        rounds_N = np.array([request.observed_rounds or 0 for request in requests], dtype=np.int64)
        tokens_N = np.array([request.output_tokens for request in requests], dtype=np.int64)
        # The first output token comes from prefill; what a cut round had beyond the end is not to be known.
        accepted_N = np.where(rounds_N > 0, np.maximum(tokens_N - 1 - rounds_N, 0), 0)
        what = "Output tokens after the first / rounds, from the rounds that the server counted."
        return cls(what, None, rounds_N, accepted_N)


class Levels:
    """Sums over requests, drawn once for all levels.

    The rungs of training stand on given outputs where there are some, else like all others on the target's own, and
    these where only some reported rounds on those that did (``left_out`` counts the others). ``texts``: which of the
    two kinds of outputs there are.
    """

    def __init__(
        self, anchors: "pl.DataFrame", rounds: Rounds, reported: Reported, *, seed: int, resamples: int
    ) -> None:
        requests = rounds.requests
        self._reported, self._rounds = reported, rounds
        self._walked = per_request(rounds)
        self._steps = max(anchors["step"].to_list(), default=0)
        self._anchors = self._by_request(anchors)
        tried_N = np.array([request.output_tokens > 1 for request in requests], dtype=np.bool_)
        forced_N = np.array([request.source == "forced" for request in requests], dtype=np.bool_) & tried_N
        own_N = tried_N & ~forced_N if (tried_N & ~forced_N).any() else tried_N
        played = int(own_N.sum())
        if reported.rounds_N is not None:
            own_N = own_N & (reported.rounds_N > 0)
        self.left_out = played - int(own_N.sum())
        self.texts: Literal["both", "generated", "forced"] = (
            "generated" if not forced_N.any() else "both" if (tried_N & ~forced_N).any() else "forced"
        )
        self._own_N: Mask = own_N
        self._taught_N: Mask = forced_N if self.texts == "both" else own_N
        self._seed, self._resamples = seed, resamples

    @property
    def taught_differ(self) -> bool:
        """Whether the rungs of training stand on given text."""
        return self.texts != "generated"

    def products(self, of: str) -> Level:
        """1 + the sum over steps of the product of their accuracies up to there, each right / ``of``."""
        right, denominator = self._taught("right"), self._taught(of)
        rates = np.nan_to_num(ratios(right, denominator))  # no target so deep: nothing is accepted there
        unit = "targets in the draft vocabulary" if of == "in_vocabulary" else "targets"
        return self._level(
            1 + np.cumprod(rates, axis=1).sum(axis=1), _reached(right, denominator, unit), self._taught_N
        )

    def joint_as_taught(self) -> Level:
        """1 + the sum over steps of anchors right up to there / anchors with a target."""
        return self._joint(self._taught("right_so_far"), self._taught("recorded"), self._taught_N)

    def joint_of_own(self) -> Level:
        """The same over the target's own outputs."""
        return self._joint(self._own("right_so_far"), self._own("recorded"), self._own_N)

    def walk(self, variant: str) -> Level:
        """1 + accepted / rounds of one variant."""
        columns = self._sums[f"walk {variant}"]
        values = 1 + ratios(columns[:, ACCEPTED], columns[:, ROUNDS])
        return self._level(values, self._walk_reached(variant), self._own_N)

    def observed(self) -> Level | None:
        """What the server showed; None where nothing was said."""
        reported = self._reported
        if reported.accept_length is not None:
            return Level(np.full(self._resamples + 1, reported.accept_length), None, drawn=False)
        if reported.rounds_N is None:
            return None
        columns = self._sums["observed"]
        values = 1 + ratios(columns[:, 1], columns[:, 0])
        return self._level(values, self._observed_reached(), self._own_N)

    def interval(self, values: Floats) -> tuple[float, float]:
        """The interval of something made of ``walk`` levels."""
        return percentile_interval(values[1:]) if self._own_N.sum() > 1 else (math.nan, math.nan)

    def _level(self, values: Floats, reached: Reached, mask_N: Mask) -> Level:
        return Level(values, reached, bool(mask_N.sum() > 1))

    def _joint(self, right: Floats, of: Floats, mask_N: Mask) -> Level:
        rates = np.nan_to_num(ratios(right, of))
        return self._level(1 + rates.sum(axis=1), _reached(right, of, "anchors"), mask_N)

    def _observed_reached(self) -> Reached:
        rounds, accepted = (int(count) for count in self._sums["observed"][0])
        if self._reported.histograms is None:
            return Reached((accepted,), (rounds,), "rounds, all positions together")
        right = reached_positions(self._reported.histograms[self._own_N].sum(axis=0))[1:]
        return Reached(tuple(right), (rounds,) * len(right), "rounds")

    def _taught(self, column: str) -> Floats:
        return self._sums[f"taught {column}"]

    def _own(self, column: str) -> Floats:
        return self._sums[f"own {column}"]

    @cached_property
    def _sums(self) -> dict[str, Floats]:
        """By name [1 + resamples, columns], every one from the same draws of requests that are in some level."""
        parts: dict[str, npt.NDArray[np.int64]] = {}
        for name, counts_NK in self._anchors.items():
            parts[f"taught {name}"] = counts_NK * self._taught_N[:, None]
            parts[f"own {name}"] = counts_NK * self._own_N[:, None]
        for variant, counts in self._walked.items():
            parts[f"walk {variant}"] = counts * self._own_N[:, None]
        if self._reported.rounds_N is not None and self._reported.accepted_N is not None:
            pair = np.stack([self._reported.rounds_N, self._reported.accepted_N], axis=1)
            parts["observed"] = pair * self._own_N[:, None]
        used_N = self._taught_N | self._own_N
        stacked = np.hstack(list(parts.values()))[used_N].astype(np.float64)
        drawn = resampled_sums(stacked, seed=self._seed, resamples=self._resamples)
        sums = np.concatenate([stacked.sum(axis=0, keepdims=True), drawn])
        ends = np.cumsum([part.shape[1] for part in parts.values()])[:-1]
        return dict(zip(parts, np.split(sums, ends, axis=1), strict=True))

    def _by_request(self, anchors: "pl.DataFrame") -> dict[str, Counts]:
        """By column of ``anchors`` [requests, steps], in the order of the rounds' requests."""
        row_of = {request.request_id: row for row, request in enumerate(self._rounds.requests)}
        names = ("recorded", "in_vocabulary", "right", "right_so_far")
        found = {name: np.zeros((len(row_of), self._steps), dtype=np.int64) for name in names}
        for request_id, step, *counts in anchors.select("request_id", "step", *names).iter_rows():
            for name, count in zip(names, counts, strict=True):
                found[name][row_of[request_id], step - 1] = count
        return found

    def _walk_reached(self, variant: str) -> Reached:
        right = self._positions[variant]
        return Reached(tuple(right[1:]), (right[0],) * (len(right) - 1), "rounds")

    @cached_property
    def _positions(self) -> dict[str, list[int]]:
        """By variant the rounds with at least j accepted, j from 0, of the requests that count."""
        import polars as pl

        own = [request.request_id for request, kept in zip(self._rounds.requests, self._own_N, strict=True) if kept]
        table = self._rounds.table.filter(pl.col("request_id").is_in(own))
        spread = {info.name: np.zeros(info.steps + 1, dtype=np.int64) for info in self._rounds.variants}
        for name, accepted, count in table.group_by("variant", "accepted").agg(pl.len()).iter_rows():
            spread[name][accepted] = count
        return {name: reached_positions(counts) for name, counts in spread.items()}


def _reached(right: Floats, of: Floats, unit: str) -> Reached:
    return Reached(tuple(int(count) for count in right[0]), tuple(int(count) for count in of[0]), unit)
