"""The target's probabilities after temperature, top-k and top-p, from the k likeliest tokens that a trace records.

What is not recorded is bounded: no token outside is likelier than the last one inside, and together they have the mass
that is left. At temperature 1 the mass is known exactly; at others the sum over the tail of p ** (1 / T) lies between
what equal tokens and what tokens as likely as allowed would give (Jensen's inequality). Every result is a pair of
bounds; they are equal wherever the trace decides.

The order is SGLang's: softmax(logits / T), then top-k, then top-p, each renormalised and each keeping all tokens that
are exactly as likely as the last one kept (sglang 0.5.23 srt/speculative/eagle_utils.py ``eagle_sample``,
kernels/ops/sampling/renorm_triton.py, which restates FlashInfer's kernels).

Suffixes: R rows, K recorded tokens of a row, P pairs of a row and a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TargetSampling:
    """How a request was sampled: temperature above 0, ``top_k`` below 1 and ``top_p`` 1 are no limit."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lowest and the highest value that what is recorded allows, elementwise."""

    low: Floats
    high: Floats


# log-probabilities [P] at temperature 1 of tokens outside the recorded ones: rows [P], ids [P] in.
Outside: TypeAlias = Callable[[Ints, Ints], Floats]


class TargetProbability:
    """Probabilities of one request's output rows.

    ``ids_RK`` and ``logprobs_RK`` as ``Trace.logits`` gives them (temperature 1, most likely first); ``outside``, where
    it is given, knows tokens that are not among them.
    """

    def __init__(
        self,
        ids_RK: Ints,
        logprobs_RK: Floats,
        sampling: TargetSampling,
        *,
        vocab_size: int,
        outside: Outside | None = None,
    ) -> None:
        self._ids_RK = ids_RK
        self._first_R = logprobs_RK[:, 0]
        self._sampling = sampling
        self._outside = outside
        self._unrecorded = vocab_size - ids_RK.shape[1]
        # Weights are probabilities divided by the likeliest's, to the power 1/T: sums of them never overflow.
        self._weight_RK = np.exp((logprobs_RK - self._first_R[:, None]) / sampling.temperature)
        self._tail = self._tail_weight(np.exp(logprobs_RK - self._first_R[:, None]))
        self._truncate_top_k()
        self._truncate_top_p()

    def _tail_weight(self, relative_RK: Floats) -> Bounds:
        """Sum of weights outside of the recorded tokens, before any truncation."""
        power = 1 / self._sampling.temperature
        mass_R = np.maximum(0.0, np.exp(-self._first_R) - relative_RK.sum(axis=1))
        if self._unrecorded == 0:
            return Bounds(np.zeros_like(mass_R), np.zeros_like(mass_R))
        alike_R = self._unrecorded * (mass_R / self._unrecorded) ** power
        largest_R = mass_R * relative_RK[:, -1] ** (power - 1)
        return Bounds(np.minimum(alike_R, largest_R), np.maximum(alike_R, largest_R))

    def _truncate_top_k(self) -> None:
        """Leaves ``_kept_RK`` and the tail of what top-k keeps."""
        top_k, recorded = self._sampling.top_k, self._ids_RK.shape[1]
        self._kept_RK = np.ones(self._ids_RK.shape, dtype=np.bool_)
        if top_k < 1 or top_k >= recorded + self._unrecorded:
            return
        low_R, high_R = self._tail.low, self._tail.high
        if top_k <= recorded:
            pivot_R1 = self._weight_RK[:, top_k - 1, None]
            self._kept_RK = self._weight_RK >= pivot_R1
            # Tokens outside stay only where the last one inside is as likely as the pivot, and they are too.
            self._tail = Bounds(np.zeros_like(low_R), np.where(self._kept_RK[:, -1], high_R, 0.0))
        else:
            self._tail = Bounds(low_R * (top_k - recorded) / self._unrecorded, high_R)

    def _truncate_top_p(self) -> None:
        """Leaves which tokens are kept for certain and perhaps, and bounds of the kept sum."""
        inside_RK = np.where(self._kept_RK, self._weight_RK, 0.0)
        sums = Bounds(inside_RK.sum(axis=1) + self._tail.low, inside_RK.sum(axis=1) + self._tail.high)
        top_p = self._sampling.top_p
        if top_p >= 1:
            self._sure_RK = self._perhaps_RK = self._kept_RK
            self._sum = sums
            self._tail_sure_R = np.full(len(inside_RK), self._sampling.top_k < 1)
            return
        above_RK = _strictly_above(inside_RK)
        self._sure_RK = self._kept_RK & (above_RK <= top_p * sums.low[:, None])
        self._perhaps_RK = self._kept_RK & (above_RK <= top_p * sums.high[:, None])
        # The tail is reached where all that is recorded leaves top_p unfilled, or shares its last token's likelihood.
        reached_R = (inside_RK.sum(axis=1) <= top_p * sums.high) | self._perhaps_RK[:, -1]
        self._tail = Bounds(np.zeros_like(self._tail.low), np.where(reached_R, self._tail.high, 0.0))
        least_R = np.maximum(np.where(self._sure_RK, inside_RK, 0.0).sum(axis=1), top_p * sums.low)
        most_R = np.where(self._perhaps_RK, inside_RK, 0.0).sum(axis=1) + self._tail.high
        self._sum = Bounds(np.minimum(least_R, most_R), most_R)
        self._tail_sure_R = np.zeros(len(inside_RK), dtype=np.bool_)

    @property
    def rows(self) -> int:
        """Output rows of the request."""
        return len(self._ids_RK)

    def of(self, rows_P: Ints, ids_P: Ints) -> Bounds:
        """Bounds of the probability [P] of token ``ids_P`` in row ``rows_P``."""
        found_PK = self._ids_RK[rows_P] == ids_P[:, None]
        column_P, inside_P = found_PK.argmax(axis=1), found_PK.any(axis=1)
        weight_P = self._weight_RK[rows_P, column_P]
        low_P = np.where(self._sure_RK[rows_P, column_P], weight_P, 0.0)
        high_P = np.where(self._perhaps_RK[rows_P, column_P], weight_P, 0.0)
        if not inside_P.all():
            out_P = ~inside_P
            low_P[out_P], high_P[out_P] = self._of_tail(rows_P[out_P], ids_P[out_P])
        with np.errstate(divide="ignore", invalid="ignore"):
            return Bounds(low_P / self._sum.high[rows_P], np.minimum(1.0, high_P / self._sum.low[rows_P]))

    def _of_tail(self, rows_P: Ints, ids_P: Ints) -> tuple[Floats, Floats]:
        """Bounds of the weights of tokens that are not recorded."""
        most_P = np.minimum(self._weight_RK[rows_P, -1], self._tail.high[rows_P])
        if self._outside is None:
            return np.zeros_like(most_P), most_P
        logprobs_P = self._outside(rows_P, ids_P)
        exact_P = np.exp((logprobs_P - self._first_R[rows_P]) / self._sampling.temperature)
        exact_P = np.minimum(exact_P, most_P)
        return np.where(self._tail_sure_R[rows_P], exact_P, 0.0), exact_P

    def entropy(self) -> Bounds:
        """Bounds of the entropy [R] in nats of each row's distribution."""
        ends = [
            _entropy(np.where(kept_RK, self._weight_RK, 0.0), self._tail, self._unrecorded, self._weight_RK[:, -1])
            for kept_RK in (self._sure_RK, self._perhaps_RK)
        ]
        return Bounds(np.minimum(ends[0].low, ends[1].low), np.maximum(ends[0].high, ends[1].high))


def _strictly_above(weight_RK: Floats) -> Floats:
    """Sum of the weights of tokens that are likelier than each, for weights that do not rise in a row."""
    before_RK = np.cumsum(weight_RK, axis=1) - weight_RK
    new_RK = np.diff(weight_RK, axis=1, prepend=np.inf) < 0
    above_RK: Floats = np.maximum.accumulate(np.where(new_RK, before_RK, 0.0), axis=1)
    return above_RK


def _entropy(inside_RK: Floats, tail: Bounds, unrecorded: int, largest_R: Floats) -> Bounds:
    """Entropy of recorded weights [R, K] and a tail of ``unrecorded`` tokens, none heavier than ``largest_R``.

    With share t of the tail it is h(t) + (1 - t) H(recorded) + t H(tail), concave in t, and H(tail) lies between that
    of tokens as heavy as allowed and log(unrecorded).
    """
    sum_R = inside_RK.sum(axis=1)
    share_RK = inside_RK / sum_R[:, None]
    recorded_R = -(share_RK * np.log(np.where(share_RK > 0, share_RK, 1.0))).sum(axis=1)
    shares = [weight_R / (sum_R + weight_R) for weight_R in (tail.low, tail.high)]
    if unrecorded == 0:
        return Bounds(recorded_R, recorded_R)
    least_R = np.log(np.maximum(1.0, tail.low / largest_R))
    lows = [_mixed(share_R, recorded_R, least_R) for share_R in shares]
    best_R = unrecorded / (unrecorded + np.exp(recorded_R))  # where h(t) + (1 - t) H + t log(unrecorded) is largest
    high_R = _mixed(np.clip(best_R, *shares), recorded_R, np.full_like(recorded_R, np.log(unrecorded)))
    return Bounds(np.minimum(*lows), high_R)


def _mixed(share_R: Floats, recorded_R: Floats, tail_R: Floats) -> Floats:
    rest_R = 1 - share_R
    logs_R = share_R * np.log(np.maximum(share_R, 1e-300)) + rest_R * np.log(np.maximum(rest_R, 1e-300))
    mixed_R: Floats = rest_R * recorded_R + share_R * tail_R - logs_R
    return mixed_R
