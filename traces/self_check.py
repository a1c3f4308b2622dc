"""A cheap look at every trace that is replayed: whether its rows are those of its own requests.

A capture that mixes up its batch leaves rows of one request under the name of another, and a replay of them is only
somewhat worse than one of the right rows. ``traces/check.py`` reads everything; this looks at a few rows of a request.

- ``final`` against what was recorded of the target's choices: lm_head(final) gives the logits of the recorded ids,
  which takes only those rows of lm_head. They are held against each other by correlation, so that a target which scales
  or caps its logits raises no doubt.
- The taps against each other: a layer adds to the stream, so a row of one tap is like the row of the next one at the
  same position, and unlike another request's. It is judged by contrast with the other requests of the same trace, so
  that taps with nothing in common, as far ones are, say nothing.

Shapes: P requests, S sampled rows of each, D of their columns, k recorded choices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from replay.errors import TraceCorruptError, TraceError
from replay.printable import counted
from replay.traces.fields import some
from replay.traces.taps import EMBED, FINAL

if TYPE_CHECKING:
    import torch

    from replay.traces.reader import Trace

MOST_REQUESTS = 256  # that are looked at, spread over the trace
_OUTPUTS, _CHOICES = 3, 16  # output rows of each request, and choices of each, that go through lm_head
_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # of a logit, relative
# The least correlation of logits made and recorded, in the mean over a request's rows. It is above 0.98 for the right
# rows; of other rows it is 0, give or take 0.15.
_CORRELATED = 0.6
# Rows of a request, counted from the beginning of its prompt and of its output. The first ones are left out: they are
# like those of every request.
_ROWS = (2, 3, 5, 7, 9, 12, 15, 19, 24, 29, 35, 42)
_MORE_ROWS, _FEW_REQUESTS = tuple(range(2, 98, 2)), 16  # where there are few requests to tell them from
_LEAST_ROWS, _COLUMNS = 6, 256
# On SmolLM2-135M a request's mean cosine of two taps is within 25 % of the median of all requests wherever that is
# above 0.25, and no request's rows are as like another's as to their own. Rows of another request have the cosine of
# any two requests: 0.00 in outputs, with a standard deviation of 0.02 to 0.04.
_TELLING, _STRANGE, _SUSPECT = 0.25, 0.3, 0.85
_LEAST_REQUESTS = 8  # from which a median is taken
_MORE_LIKE, _ERRORS = 0.1, 8.0  # how much more like another's, and in standard errors
_MOST_SUSPECTS = 16


def self_check(trace: "Trace") -> tuple[str, ...]:
    """Sentences on what is odd in a few rows of ``trace``; none where nothing is."""
    try:
        return (*_final_doubts(trace), *tap_doubts(trace))
    except TraceCorruptError as error:  # whoever needs these rows refuses them
        return (f"A look at a few rows of the trace ended early: {error}.",)


# ---- final against the recorded choices ----


def _final_doubts(trace: "Trace") -> Iterator[str]:
    try:
        lm_head_VH = trace.lm_head_weight()
    except TraceCorruptError:
        raise
    except TraceError:
        return  # neither sidecar nor checkpoint: `inspect --check` says so
    places = _spread(len(trace), MOST_REQUESTS)
    wrong = [place for place in places if _correlation(trace, place, lm_head_VH) < _CORRELATED]
    if wrong:
        yield (
            f"In {len(wrong)} of {counted(len(places), 'request')} ({_named(trace, wrong)}) the rows of final "
            f"do not give the "
            "choices that were recorded with them: they are rows of other requests or of another target; type replay "
            "inspect --check, and capture again."
        )


def _correlation(trace: "Trace", place: int, lm_head_VH: "torch.Tensor") -> float:
    """Of the logits recorded with a few output rows of a request and lm_head(final); 1 where they say too little."""
    record = trace.records[place]
    outputs = _spread(record.output_tokens, _OUTPUTS)
    ids_nk, logprobs_nk, logsumexp_n = trace.logits(place)
    told_Sk = logprobs_nk[outputs, :_CHOICES] + logsumexp_n[outputs, None]
    final_SH = trace.tap_rows(place, FINAL, [record.prompt_tokens - 1 + output for output in outputs]).float()
    made_Sk = (lm_head_VH[ids_nk[outputs, :_CHOICES]].float() * final_SH[:, None]).sum(-1)
    rounding_S = told_Sk.abs().amax(1) * _ULP.get(trace.header.target.dtype, _ULP["bfloat16"])
    rough_S = told_Sk.std(1, correction=0) < 4 * rounding_S  # choices that rounding orders
    told_Sk, made_Sk = (one - one.mean(1, keepdim=True) for one in (told_Sk, made_Sk))
    found_S = (told_Sk * made_Sk).sum(1) / (told_Sk.norm(dim=1) * made_Sk.norm(dim=1)).clamp_min(1e-20)
    return 1.0 if bool(rough_S.all()) else float(found_S[~rough_S].mean())


# ---- taps against each other ----


def tap_doubts(trace: "Trace") -> Iterator[str]:
    """Sentences on requests whose taps are not of one request, where there are any. Raises TraceCorruptError.

    Requests are compared with those that have the same taps.
    """
    for tier in trace.tiers():
        yield from _doubts_of_tier(tier)


def _doubts_of_tier(trace: "Trace") -> Iterator[str]:
    names = [name for name in trace.taps if name != EMBED]  # whose rows follow from the tokens
    mixed: set[int] = set()
    partners: set[int] = set()
    for part in ("prompt", "output"):
        rows = _sampled(trace, part)
        places = list(rows)
        units = [_unit(trace.rows_of_many(name, rows), rows) for name in names] if len(places) > 1 else []
        for lower_PSD, upper_PSD in pairwise(units):
            for mine, other in _strangers(lower_PSD, upper_PSD):
                mixed.add(places[mine])
                partners |= set() if other is None else {places[other]}
    if mixed:
        like = f", but like those of another ({_named(trace, sorted(partners))})" if partners else ""
        yield (
            f"In {len(mixed)} of {counted(len(trace), 'request')} ({_named(trace, sorted(mixed))}) the rows of "
            f"some taps are not "
            f"like the other taps of the same request{like}: rows were mixed up in recording; capture again."
        )


def _sampled(trace: "Trace", part: str) -> dict[int, list[int]]:
    """Of the requests that are long enough, up to MOST_REQUESTS: which rows of their prompt or output are looked at."""
    rows = {}
    wanted = _ROWS if len(trace) > _FEW_REQUESTS else _MORE_ROWS
    for place, record in enumerate(trace.records):
        first, count = (
            (record.rows_left_out, record.prompt_tokens - record.rows_left_out)
            if part == "prompt"
            else (record.prompt_tokens - 1, record.output_tokens)
        )
        chosen = [first + row for row in wanted if row < count]
        if len(chosen) >= _LEAST_ROWS:
            rows[place] = chosen
    places = list(rows)
    return {places[at]: rows[places[at]] for at in _spread(len(places), MOST_REQUESTS)}


def _unit(tap_RH: "torch.Tensor", rows: Mapping[int, Sequence[int]]) -> "torch.Tensor":
    """The ``rows`` of a tap [P, S, D] in columns spread over its width, each column centred and scaled over all of them
    and each row of length 1; zeros where a request has no such row."""
    import torch

    tap_RD = tap_RH[:, :: max(1, tap_RH.shape[1] // _COLUMNS)][:, :_COLUMNS].float().nan_to_num()
    tap_RD = (tap_RD - tap_RD.mean(0)) / tap_RD.std(0, correction=0).clamp_min(1e-6)
    most = max(map(len, rows.values()))
    unit_PSD = tap_RD.new_zeros(len(rows), most, tap_RD.shape[1])
    known_PS = torch.tensor([[place < len(chosen) for place in range(most)] for chosen in rows.values()])
    unit_PSD[known_PS] = torch.nn.functional.normalize(tap_RD, dim=-1)
    return unit_PSD


def _strangers(lower_PSD: "torch.Tensor", upper_PSD: "torch.Tensor") -> Iterator[tuple[int, int | None]]:
    """Requests whose rows of two taps are not each other's, with the request that they are like, where there is one."""
    own_P = _cosine(lower_PSD, upper_PSD)
    middle = float(own_P.nanmedian())
    many = len(own_P) >= _LEAST_REQUESTS
    if many and middle < 0.1:
        return  # taps with nothing in common
    suspects = own_P.argsort()[:_MOST_SUSPECTS].tolist()
    for mine in suspects:
        own = float(own_P[mine])
        if many and own > _SUSPECT * middle:
            break
        if many and middle > _TELLING and own < _STRANGE * middle:
            yield mine, None
        for one_PSD, other_PSD in ((lower_PSD, upper_PSD), (upper_PSD, lower_PSD)):
            like_P = _cosine(one_PSD[mine], other_PSD)
            like_P[mine] = -math.inf
            other = int(like_P.nan_to_num(-math.inf).argmax())
            values = int((one_PSD[mine] * other_PSD[other] != 0).sum())
            if float(like_P[other]) - own > max(_MORE_LIKE, _ERRORS * _error(like_P, values)):
                yield mine, other


def _cosine(one_SD: "torch.Tensor", other_PSD: "torch.Tensor") -> "torch.Tensor":
    """The mean cosine of the rows that both have [P]."""
    both_PS = (one_SD != 0).any(-1) & (other_PSD != 0).any(-1)
    return (one_SD * other_PSD).sum((-2, -1)) / both_PS.sum(-1)


def _error(like_P: "torch.Tensor", values: int) -> float:
    """The standard deviation of a mean cosine with requests that have nothing to do with it.

    That of all requests but the most alike, and never less than that of so many independent ``values``; where there are
    too few requests, 1.5 times that, as much as was seen of far taps.
    """
    others = like_P[like_P.isfinite()].sort().values[:-1]
    least = 1 / math.sqrt(max(values, 1))
    return max(least, float(others.std())) if len(others) >= _LEAST_REQUESTS else 1.5 * least


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers below ``count``, the last among them."""
    step = -(-count // most) if count else 1
    return sorted(range(count - 1, -1, -step))


def _named(trace: "Trace", places: Sequence[int]) -> str:
    return some([trace.records[place].request_id for place in places])
