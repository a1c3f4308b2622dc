"""lm_head(final) against what the trace recorded: argmax, emitted tokens, log-sum-exp, log-probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay.errors import TraceError
from replay.traces.lm_head import Recomputed, recompute
from replay.traces.reader import Trace
from replay.traces.taps import FINAL

if TYPE_CHECKING:
    import torch

BATCH_ROWS = 1024  # output positions whose logits are made at once

_Finding = tuple[str, str | None, str]  # severity, request_id, sentence


@dataclass(frozen=True, slots=True)
class _Part:
    """The chosen output positions j [b] of one request and what was recorded there; final [b, H], ids [b, k + 1].

    The last column of ``ids`` is the emitted token.
    """

    request_id: str
    greedy: bool
    j: "torch.Tensor"
    final: "torch.Tensor"
    ids: "torch.Tensor"
    logprobs: "torch.Tensor"
    logsumexp: "torch.Tensor"


@dataclass(slots=True)
class _Counts:
    rows: int = 0
    greedy: int = 0
    argmax_ties: int = 0
    token_ties: int = 0
    narrow: int = 0


def lm_head_findings(trace: Trace, whole: Sequence[int], device: str, rows: int | None) -> Iterator[_Finding]:
    """Findings of the requests ``whole`` (indices), then the counts; at most about ``rows`` positions in all."""
    try:
        lm_head = trace.lm_head_weight()
    except TraceError as error:
        yield "warning", None, f"lm_head(final) was not checked: {error}"
        return
    counts = _Counts()
    dtype = trace.header.taps[FINAL].dtype
    total = sum(trace.records[index].output_tokens for index in whole)
    stride = 1 if rows is None else max(1, -(-total // max(rows, 1)))
    for batch in _batches(trace, whole, stride):
        yield from _batch_findings(batch, lm_head, dtype, device, counts)
    yield "note", None, _summary(counts, total, dtype)


def _batches(trace: Trace, whole: Sequence[int], stride: int) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    for index in whole:
        for part in _parts(trace, index, stride):
            if batch and sum(len(item.j) for item in batch) + len(part.j) > BATCH_ROWS:
                yield batch
                batch = []
            batch.append(part)
    if batch:
        yield batch


def _parts(trace: Trace, index: int, stride: int) -> Iterator[_Part]:
    import torch

    record = trace.records[index]
    rows = trace.read(index, [FINAL])
    ids_nk, logprobs_nk, logsumexp_n = trace.logits(index)
    emitted_n1 = rows.tokens[rows.prompt_tokens :, None]
    chosen = torch.arange(0, rows.output_tokens, stride)
    for start in range(0, len(chosen), BATCH_ROWS):
        j = chosen[start : start + BATCH_ROWS]
        yield _Part(
            request_id=record.request_id,
            greedy=record.source == "generated" and record.temperature == 0,
            j=j,
            final=rows.taps[FINAL][rows.prompt_tokens - 1 + j],
            ids=torch.cat([ids_nk[j], emitted_n1[j]], dim=1),
            logprobs=logprobs_nk[j],
            logsumexp=logsumexp_n[j],
        )


def _batch_findings(
    batch: Sequence[_Part], lm_head_VH: "torch.Tensor", dtype: str, device: str, counts: _Counts
) -> Iterator[_Finding]:
    import torch

    final_BH, ids_Bm = torch.cat([part.final for part in batch]), torch.cat([part.ids for part in batch])
    made = recompute(final_BH, lm_head_VH, ids_Bm, dtype=dtype, device=device)
    counts.narrow += int((made.best - made.second <= made.tie).sum())
    start = 0
    for part in batch:
        own = made.rows(slice(start, start + len(part.j)))
        start += len(part.j)
        counts.rows += len(part.j)
        yield from (("error", part.request_id, what) for what in _problems(part, own, counts))


def _problems(part: _Part, made: Recomputed, counts: _Counts) -> Iterator[str]:
    yield from _argmax_problem(part, made, counts)
    yield from _token_problem(part, made, counts)
    yield from _value_problems(part, made)


def _argmax_problem(part: _Part, made: Recomputed, counts: _Counts) -> Iterator[str]:
    gap = made.best - made.asked[:, 0]
    other = part.ids[:, 0] != made.best_id
    counts.argmax_ties += int((other & (gap <= made.tie)).sum())
    yield from _worst(part, other & (gap > made.tie), gap, made.tie, "lm_head(final) has another argmax than recorded")


def _token_problem(part: _Part, made: Recomputed, counts: _Counts) -> Iterator[str]:
    """Greedy tokens are the recorded argmax; a server that verifies drafts may break a near tie otherwise."""
    if not part.greedy:
        return
    counts.greedy += len(part.j)
    gap = made.asked[:, 0] - made.asked[:, -1]
    other = part.ids[:, 0] != part.ids[:, -1]
    near = gap.abs() <= made.tie
    counts.token_ties += int((other & near).sum())
    yield from _worst(part, other & ~near, gap.abs(), made.tie, "the emitted token is not the recorded argmax")


def _value_problems(part: _Part, made: Recomputed) -> Iterator[str]:
    off = (part.logsumexp - made.logsumexp).abs()
    yield from _worst(
        part, off > made.tolerance, off, made.tolerance, "the recorded log-sum-exp is not lm_head(final)'s"
    )
    # a log-probability is the difference of two values, each within the tolerance
    logprobs = made.asked[:, :-1] - made.logsumexp[:, None]
    off, bound = (part.logprobs - logprobs).abs().amax(dim=1), 2 * made.tolerance
    yield from _worst(part, off > bound, off, bound, "recorded log-probabilities are not lm_head(final)'s")


def _worst(part: _Part, wrong: "torch.Tensor", off: "torch.Tensor", bound: "torch.Tensor", what: str) -> Iterator[str]:
    """One sentence for all ``wrong`` positions: how many, the first, and the worst with its bound."""
    count = int(wrong.sum())
    if count:
        first = int(part.j[wrong][0])
        worst = int((off * wrong).argmax())
        yield (
            f"{what} at {count} of {len(wrong)} positions, first at output token {first}; the worst is off by "
            f"{float(off[worst]):.3g}, {float(bound[worst]):.2g} is possible"
        )


def _summary(counts: _Counts, total: int, dtype: str) -> str:
    return (
        f"lm_head(final) was computed for {counts.rows} of {total} output positions, {counts.greedy} of them greedy; "
        f"near ties, the two best logits within one {dtype} ulp, are {counts.narrow}, of which {counts.argmax_ties} "
        f"have the other as recorded argmax and {counts.token_ties} as emitted token"
    )
