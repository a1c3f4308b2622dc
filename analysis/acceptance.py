"""Rounds → one summary for each variant: counts first, ratios made from them.

Definitions (SGLang's, as its decode log and per-request counters use them): ``accepted`` leaves the bonus token out;
accept length = sum(accepted + 1) / rounds; ``histogram[a]`` = rounds with exactly a accepted tokens. A cut round
counts as a round like every other. ``nan`` stands where a ratio has no denominator; JSON says null there.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.analysis.bootstrap import Floats, percentile_interval, ratios, resampled_sums
from replay.traces.rounds import RequestInfo, Rounds, VariantInfo

JsonObject = dict[str, Any]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

DEFAULT_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Observed:
    """What the server reported for the same requests.

    ``requests`` of them reported something. ``accept_length`` = 1 + accepted / rounds where the server gave a
    histogram, else output tokens / rounds, its own definition. ``histogram`` is empty where none was given.
    """

    rounds: int
    accept_length: float
    histogram: tuple[int, ...]
    requests: int


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """One variant's counts and ratios; the fields down to ``observed`` are the JSON of ``replay simulate --json``.

    ``position_joint[j-1]`` = rounds with at least j accepted / rounds; ``position_conditional[j-1]`` = the same
    over the rounds with at least j-1. ``accept_length_server`` = completion tokens / verify rounds as SGLang's
    ``meta_info`` counts it (requests without a round are left out; the first token of a request comes from prefill and
    counts, tokens past the end do not).
    """

    name: str
    draft: str
    wiring: tuple[str, ...]
    steps: int
    topk: int
    num_draft_tokens: int
    precision: str
    numerics: str
    kv: str
    verify: str
    temperature: float
    engine: str
    faults: tuple[str, ...]
    requests: int
    rounds: int
    drafted: int
    accepted: int
    output_tokens: int
    accept_length: float
    accept_length_ci95: tuple[float, float]
    accept_length_server: float
    histogram: tuple[int, ...]
    position_joint: tuple[float, ...]
    position_conditional: tuple[float, ...]
    all_anchors_accept_length: float
    ties: int
    seconds: float
    observed: Observed | None
    played_requests: int
    cut_rounds: int
    anchors: int

    @property
    def accept_rate(self) -> float:
        """Accepted / drafted tokens; nan without drafted tokens."""
        return ratio(self.accepted, self.drafted)


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a variant's accept length lies from another's, both resampled with the same requests."""

    variant: str
    difference: float
    ci95: tuple[float, float]

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``equal`` (no resample tells them apart) or ``cannot tell`` (0 in the interval)."""
        low, high = self.ci95
        if self.difference == low == high == 0:
            return "equal"
        return "better" if low > 0 else "worse" if high < 0 else "cannot tell"


# Needed to explain a summary, not part of the documented JSON.
_NOT_IN_JSON = {"played_requests", "cut_rounds", "anchors"}


def summarise(rounds: Rounds, *, seed: int = 0, resamples: int = DEFAULT_RESAMPLES) -> list[VariantSummary]:
    """One summary for each variant, in the order of ``rounds.variants``.

    The interval is a percentile bootstrap over the requests that have a round, the same draws for all variants;
    (nan, nan) when fewer than two requests have one.
    """
    counts = per_request(rounds)
    intervals = _intervals(rounds, counts, seed=seed, resamples=resamples)
    histograms = _histograms(rounds)
    return [
        _summary(variant, rounds.requests, counts[variant.name], histograms[variant.name], intervals[variant.name])
        for variant in rounds.variants
    ]


def gaps(rounds: Rounds, reference: str, *, seed: int = 0, resamples: int = DEFAULT_RESAMPLES) -> dict[str, Gap]:
    """Accept length of every other variant minus that of ``reference``, by variant name.

    Paired: only requests that have rounds under both count, and one resample draws the same requests for both. The
    interval is (nan, nan) when fewer than two requests do.
    """
    counts = per_request(rounds)
    against = counts.pop(reference)
    return _paired(counts, against, seed=seed, resamples=resamples)


def observed_gaps(rounds: Rounds, *, seed: int = 0, resamples: int = DEFAULT_RESAMPLES) -> dict[str, Gap]:
    """Accept length of every variant minus the one the server reported for the same requests, by variant name.

    Paired as in ``gaps``, over the requests for which the server gave a histogram; empty when it gave none.
    """
    against = np.zeros((len(rounds.requests), _WIDTH), dtype=np.int64)
    for row, request in enumerate(rounds.requests):
        histogram = np.array(request.observed_histogram or (), dtype=np.int64)
        against[row, _ROUNDS] = histogram.sum()
        against[row, _ACCEPTED] = histogram @ np.arange(len(histogram))
    if not against.any():
        return {}
    return _paired(per_request(rounds), against, seed=seed, resamples=resamples)


def to_json(rounds: Rounds, summaries: Sequence[VariantSummary]) -> JsonObject:
    """The document of ``replay simulate --json``: JSON values only, null in place of nan."""
    return {"trace": rounds.trace, "draft": rounds.drafts, "variants": [_variant_json(row) for row in summaries]}


# Columns of the per-request counts.
_ROUNDS, _ACCEPTED, _DRAFTED, _CUT, _WIDTH = 0, 1, 2, 3, 4


def per_request(rounds: Rounds) -> dict[str, Counts]:
    """By variant [requests, 4]: rounds, accepted, drafted, cut rounds of each request, in the order of ``requests``."""
    import polars as pl

    row_of = {request.request_id: row for row, request in enumerate(rounds.requests)}
    counts = {variant.name: np.zeros((len(row_of), _WIDTH), dtype=np.int64) for variant in rounds.variants}
    grouped = rounds.table.group_by("variant", "request_id").agg(
        pl.len().cast(pl.Int64),
        pl.col("accepted").cast(pl.Int64).sum(),
        pl.col("drafted").list.len().cast(pl.Int64).sum(),
        pl.col("cut").cast(pl.Int64).sum(),
    )
    for variant, request_id, *values in grouped.iter_rows():
        counts[variant][row_of[request_id]] = values
    return counts


def _histograms(rounds: Rounds) -> dict[str, Counts]:
    """By variant [steps + 1]: rounds with exactly that many accepted tokens."""
    import polars as pl

    histograms = {variant.name: np.zeros(variant.steps + 1, dtype=np.int64) for variant in rounds.variants}
    for variant, accepted, count in rounds.table.group_by("variant", "accepted").agg(pl.len()).iter_rows():
        histograms[variant][accepted] = count
    return histograms


def _intervals(
    rounds: Rounds, counts: dict[str, Counts], *, seed: int, resamples: int
) -> dict[str, tuple[float, float]]:
    """By variant the interval of its accept length."""
    found: dict[str, tuple[float, float]] = {}
    for names, played in _alike({name: rows[:, _ROUNDS] > 0 for name, rows in counts.items()}):
        sums = _stacked_sums([counts[name][played] for name in names], seed=seed, resamples=resamples)
        found |= {name: _interval(_length(sums[i]), played) for i, name in enumerate(names)}
    return found


def _paired(counts: dict[str, Counts], against: Counts, *, seed: int, resamples: int) -> dict[str, Gap]:
    """By variant its accept length minus that of the counts ``against`` [requests, 4]."""
    found: dict[str, Gap] = {}
    both = {name: (rows[:, _ROUNDS] > 0) & (against[:, _ROUNDS] > 0) for name, rows in counts.items()}
    for names, played in _alike(both):
        kept = [against[played], *(counts[name][played] for name in names)]
        sums = _stacked_sums(kept, seed=seed, resamples=resamples)
        totals = _length(np.stack([rows.sum(axis=0) for rows in kept]).astype(np.float64))
        for i, name in enumerate(names, start=1):
            interval = _interval(_length(sums[i]) - _length(sums[0]), played)
            found[name] = Gap(name, float(totals[i] - totals[0]), interval)
    return found


def _alike(played: dict[str, Mask]) -> Iterator[tuple[list[str], Mask]]:
    """Names grouped by equal masks [requests], so that one set of draws serves a whole sweep."""
    groups: dict[bytes, list[str]] = {}
    for name, mask in played.items():
        groups.setdefault(mask.tobytes(), []).append(name)
    for names in groups.values():
        yield names, played[names[0]]


def _stacked_sums(counts: Sequence[Counts], *, seed: int, resamples: int) -> Floats:
    """Resampled sums [len(counts), resamples, 4] of counts [requests, 4], the same requests drawn for all."""
    sums = resampled_sums(np.hstack(counts), seed=seed, resamples=resamples)
    return sums.reshape(resamples, len(counts), _WIDTH).transpose(1, 0, 2)


def _interval(samples: Floats, played: Mask) -> tuple[float, float]:
    """The interval of ``samples``; none from a single request, whose resamples are all the same."""
    return percentile_interval(samples) if played.sum() > 1 else (math.nan, math.nan)


def _length(sums: Floats) -> Floats:
    """Accept length [n] of summed counts [n, 4]."""
    return ratios(sums[:, _ACCEPTED] + sums[:, _ROUNDS], sums[:, _ROUNDS])


def _summary(
    variant: VariantInfo,
    requests: Sequence[RequestInfo],
    counts: Counts,
    histogram: Counts,
    interval: tuple[float, float],
) -> VariantSummary:
    rounds, accepted, drafted, cut = (int(total) for total in counts.sum(axis=0))
    played = [request for request, row in zip(requests, counts, strict=True) if row[_ROUNDS] > 0]
    joint, conditional = position_rates(histogram)
    return VariantSummary(
        name=variant.name,
        draft=variant.draft,
        wiring=variant.wiring,
        steps=variant.steps,
        topk=variant.topk,
        num_draft_tokens=variant.num_draft_tokens,
        precision=variant.precision,
        numerics=variant.numerics,
        kv=variant.kv,
        verify=variant.verify,
        temperature=variant.temperature,
        engine=variant.engine,
        faults=variant.faults,
        requests=len(requests),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        output_tokens=sum(request.output_tokens for request in requests),
        accept_length=ratio(accepted + rounds, rounds),
        accept_length_ci95=interval,
        accept_length_server=ratio(sum(request.output_tokens for request in played), rounds),
        histogram=tuple(int(count) for count in histogram),
        position_joint=joint,
        position_conditional=conditional,
        all_anchors_accept_length=ratio(variant.anchors_accepted + variant.anchors, variant.anchors),
        ties=variant.ties,
        seconds=variant.seconds,
        observed=observed(requests),
        played_requests=len(played),
        cut_rounds=cut,
        anchors=variant.anchors,
    )


def position_rates(histogram: Sequence[int] | Counts) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Joint and conditional acceptance of draft positions 1..K from ``histogram`` [K + 1].

    Joint j: rounds with at least j accepted / rounds. Conditional j: the same / rounds with at least j - 1.
    """
    reached = reached_positions(histogram)
    joint = tuple(ratio(count, reached[0]) for count in reached[1:])
    return joint, tuple(ratio(count, before) for before, count in pairwise(reached))


def reached_positions(histogram: Sequence[int] | Counts) -> list[int]:
    """Rounds with at least j accepted, j from 0, of ``histogram`` [K + 1]."""
    return [int(count) for count in np.cumsum(np.asarray(histogram)[::-1])[::-1]]


def observed(requests: Sequence[RequestInfo]) -> Observed | None:
    """The server's own rounds over ``requests``; None when it reported none.

    Only requests with a histogram count when any has one, so that the two definitions are never mixed.
    """
    counted = [request for request in requests if request.observed_rounds]
    drawn = [request.observed_histogram for request in counted if request.observed_histogram]
    if drawn:
        histogram = [0] * max(map(len, drawn))
        for counts in drawn:
            for accepted, count in enumerate(counts):
                histogram[accepted] += count
        rounds = sum(histogram)
        tokens = rounds + sum(accepted * count for accepted, count in enumerate(histogram))
        return Observed(rounds, ratio(tokens, rounds), tuple(histogram), len(drawn))
    if counted:
        rounds = sum(request.observed_rounds or 0 for request in counted)
        tokens = sum(request.output_tokens for request in counted)
        return Observed(rounds, ratio(tokens, rounds), (), len(counted))
    return None


def _variant_json(summary: VariantSummary) -> JsonObject:
    row = {f.name: _json(getattr(summary, f.name)) for f in fields(summary) if f.name not in _NOT_IN_JSON}
    seen = summary.observed
    row["observed"] = (
        None
        if seen is None
        else {
            "rounds": seen.rounds,
            "accept_length": _json(seen.accept_length),
            "histogram": list(seen.histogram),
        }
    )
    return row


def _json(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return value


def ratio(count: int, of: int) -> float:
    """``count / of``; nan when there is nothing to divide by."""
    return count / of if of else math.nan
