"""Rounds → one summary for each variant: counts first, ratios made from them.

Definitions (SGLang's, as its decode log and per-request counters use them): ``accepted`` leaves the bonus token out;
accept length = sum(accepted + 1) / rounds; ``histogram[a]`` = rounds with exactly a accepted tokens. A cut round
counts as a round like every other. ``nan`` stands where a ratio has no denominator; JSON says null there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay.analysis.bootstrap import DEFAULT_RESAMPLES
from replay.analysis.counts import (
    ROUNDS,
    Counts,
    alike,
    histograms,
    length_interval,
    lengths,
    per_request,
    position_rates,
    ratio,
    stacked_sums,
)
from replay.analysis.expected_length import ExpectedSummary, summarise_expected
from replay.analysis.json_document import JsonObject, object_json
from replay.analysis.positions import Interval, position_intervals, position_requests, reached_by_request
from replay.errors import UsageError
from replay.printable import html_table
from replay.traces.agreement import Agreement
from replay.traces.fields import show
from replay.traces.rounds import RequestInfo, Rounds, VariantInfo, VariantSettings, check_are_rounds

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What the server reported for the same requests.

    ``requests`` of them reported something. ``accept_length`` = 1 + accepted / rounds where the server gave a
    histogram, else output tokens / rounds, its own definition. ``histogram`` is empty where none was given.
    """

    rounds: int
    accept_length: float
    histogram: tuple[int, ...]
    requests: int


@dataclass(frozen=True, slots=True)
class VariantSummary(VariantSettings):
    """One variant, its counts and ratios; the fields down to ``agreement`` are the JSON of ``replay simulate --json``.

    ``position_joint[j-1]`` = rounds with at least j accepted / rounds; ``position_conditional[j-1]`` = the same
    over the rounds with at least j-1, ``position_conditional_ci95`` its interval (positions.py), ``position_requests``
    how many requests have such a round.
    ``accept_length_server`` = completion tokens / verify rounds as SGLang's ``meta_info`` counts it (requests without a
    round are left out; the first token of a request comes from prefill and counts, tokens past the end do not).
    """

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
    position_conditional_ci95: tuple[Interval, ...]
    position_requests: tuple[int, ...]
    all_anchors_accept_length: float
    ties: int
    seconds: float
    observed: ServerCounts | None
    expected: ExpectedSummary | None
    agreement: Agreement | None
    played_requests: int
    cut_rounds: int
    anchors: int

    def __repr__(self) -> str:
        low, high = self.accept_length_ci95
        within = "" if math.isnan(low) else f" ({low:.2f} to {high:.2f})"
        counted = f"{self.accepted} of {self.drafted} drafted tokens in {self.rounds} rounds of {self.played_requests}"
        return f"VariantSummary({self.name!r}: accept length {self.accept_length:.3f}{within}, {counted} requests)"

    @property
    def accept_rate(self) -> float:
        """Accepted / drafted tokens; nan without drafted tokens."""
        return ratio(self.accepted, self.drafted)


class Summaries(list[VariantSummary]):
    """Summaries that a notebook shows as a table."""

    @property
    def table(self) -> "pl.DataFrame":
        """A row for each variant: name, ratios, counts, settings; null for what is not known.

        ``wiring`` and ``faults`` are as the command line spells them, ``histogram`` and the rates by position lists.
        """
        import polars as pl

        text, count, number = pl.String(), pl.Int64(), pl.Float64()
        kinds = {
            "variant": text, "accept_length": number, "ci95_low": number, "ci95_high": number, "accept_rate": number,
            "accepted": count, "drafted": count, "rounds": count, "requests": count, "histogram": pl.List(count),
            "position_joint": pl.List(number), "position_conditional": pl.List(number),
            "all_anchors_accept_length": number, "observed_accept_length": number, "expected_accept_length": number,
            "draft": text, "wiring": text, "steps": count, "topk": count, "num_draft_tokens": count,
            "precision": text, "numerics": text, "kv": text, "verify": text, "temperature": number, "engine": text,
            "faults": text, "seconds": number,
        }  # fmt: skip
        rows = [[_cell(row, name) for name in kinds] for row in self]
        table = pl.DataFrame(rows, kinds, orient="row")
        lists = pl.col("position_joint", "position_conditional").list.eval(pl.element().fill_nan(None))
        return table.with_columns(pl.col(pl.Float64).fill_nan(None), lists)

    def _repr_html_(self) -> str:
        rows = [
            [row.name, f"{row.accept_length:.3f}", _within(row), f"{row.accept_rate:.1%}", str(row.accepted),
             str(row.drafted), str(row.rounds), str(row.played_requests)]
            for row in self
        ]  # fmt: skip
        names = (
            "variant",
            "accept length",
            "95 % interval",
            "accept rate",
            "accepted",
            "drafted",
            "rounds",
            "requests",
        )
        return html_table(f"{len(self)} variants", names, rows)


def _cell(row: VariantSummary, column: str) -> object:
    """The value of one column of ``Summaries.table``."""
    special: dict[str, object] = {
        "variant": row.name, "wiring": ",".join(row.wiring), "faults": ",".join(row.faults),
        "ci95_low": row.accept_length_ci95[0], "ci95_high": row.accept_length_ci95[1],
        "observed_accept_length": row.observed.accept_length if row.observed else None,
        "expected_accept_length": row.expected.accept_length if row.expected else None,
    }  # fmt: skip
    value = special[column] if column in special else getattr(row, column)
    return list(value) if isinstance(value, tuple) else value


def _within(row: VariantSummary) -> str:
    low, high = row.accept_length_ci95
    return "" if math.isnan(low) else f"{low:.2f} to {high:.2f}"


# Needed to explain a summary, not part of the documented JSON.
_NOT_IN_JSON = ("played_requests", "cut_rounds", "anchors")


def summarise(rounds: Rounds, *, seed: int = 0, resamples: int = DEFAULT_RESAMPLES) -> Summaries:
    """One summary for each variant, in the order of ``rounds.variants``.

    The interval is a percentile bootstrap over the requests that have a round, the same draws for all variants;
    (nan, nan) when fewer than two requests have one. Raises UsageError for what is no Rounds.
    """
    check_are_rounds("rounds", rounds)
    _check_draws(seed, resamples)
    counts = per_request(rounds)
    intervals = _intervals(counts, seed=seed, resamples=resamples)
    reached = reached_by_request(rounds)
    spread = histograms(rounds)
    return Summaries(
        _summary(
            variant,
            rounds.requests,
            counts[variant.name],
            spread[variant.name],
            intervals[variant.name],
            reached[variant.name],
            _expected(variant, seed=seed, resamples=resamples),
        )
        for variant in rounds.variants
    )


def _check_draws(seed: object, resamples: object) -> None:
    for name, value, least in (("seed", seed, 0), ("resamples", resamples, 1)):
        if type(value) is not int or value < least:
            raise UsageError(f"{name} is {show(value)}; pass a whole number of {least} or more")


def _expected(variant: VariantInfo, *, seed: int, resamples: int) -> ExpectedSummary | None:
    found = variant.expected
    return None if found is None else summarise_expected(found, seed=seed, resamples=resamples)


def to_json(rounds: Rounds, summaries: Sequence[VariantSummary]) -> JsonObject:
    """The body of ``replay simulate --json``."""
    return {"trace": rounds.trace, "draft": rounds.drafts, "variants": [_variant_json(row) for row in summaries]}


def _intervals(counts: dict[str, Counts], *, seed: int, resamples: int) -> dict[str, Interval]:
    """By variant the interval of its accept length."""
    found: dict[str, Interval] = {}
    for names, played in alike({name: rows[:, ROUNDS] > 0 for name, rows in counts.items()}):
        sums = stacked_sums([counts[name][played] for name in names], seed=seed, resamples=resamples)
        found |= {name: length_interval(lengths(sums[i]), played) for i, name in enumerate(names)}
    return found


def _summary(
    variant: VariantInfo,
    requests: Sequence[RequestInfo],
    counts: Counts,
    histogram: Counts,
    interval: Interval,
    reached: Counts,
    expected: ExpectedSummary | None,
) -> VariantSummary:
    rounds, accepted, drafted, cut = (int(total) for total in counts.sum(axis=0))
    played = [request for request, row in zip(requests, counts, strict=True) if row[ROUNDS] > 0]
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
        position_conditional_ci95=position_intervals(reached),
        position_requests=position_requests(reached),
        all_anchors_accept_length=ratio(variant.anchors_accepted + variant.anchors, variant.anchors),
        ties=variant.ties,
        seconds=variant.seconds,
        observed=observed(requests),
        expected=expected,
        agreement=variant.agreement,
        played_requests=len(played),
        cut_rounds=cut,
        anchors=variant.anchors,
    )


def observed(requests: Sequence[RequestInfo]) -> ServerCounts | None:
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
        return ServerCounts(rounds, ratio(tokens, rounds), tuple(histogram), len(drawn))
    if counted:
        rounds = sum(request.observed_rounds or 0 for request in counted)
        tokens = sum(request.output_tokens for request in counted)
        return ServerCounts(rounds, ratio(tokens, rounds), (), len(counted))
    return None


def _variant_json(summary: VariantSummary) -> JsonObject:
    row = object_json(summary)
    for name in _NOT_IN_JSON:
        del row[name]
    if row["observed"] is not None:
        del row["observed"]["requests"]
    return row
