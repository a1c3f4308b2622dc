"""From one answer of a text to a request of a trace.

Shapes: L prompt tokens, n output tokens, T = L + n; row i of T - 1 is the target's state at position i, and row
L - 1 + j chose output token j.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from replay.capture.dumps.border import Turn
from replay.capture.dumps.sample import Sample
from replay.capture.dumps.slots import Slots
from replay.capture.dumps.stage import logits_of
from replay.capture.dumps.target import DumpTarget
from replay.capture.logits import LogitsSummary, summarise_logits
from replay.traces.captured import CapturedRequest
from replay.traces.header import TapInfo
from replay.traces.taps import FINAL, sort_taps, tap_name

if TYPE_CHECKING:
    from torch import Tensor

_LOGIT_ROWS = 128  # rows of [V] logits held at once


def header_taps(sample: Sample, slots: Slots, target: DumpTarget) -> dict[str, TapInfo]:
    """What the trace stores, in the dtypes of its first text: slots in theirs, the last state's places in its own."""
    last = {FINAL, *([tap_name(target.info.layers)] if slots.stage == "before" else [])}
    names = sort_taps(slots.stored(target))
    dtypes = {name: sample.last_SH.dtype if name in last else sample.slots_SC.dtype for name in names}
    return {name: TapInfo(str(dtype).removeprefix("torch."), target.info.hidden_size) for name, dtype in dtypes.items()}


def request_of(
    sample: Sample, turn: Turn, taps: "Mapping[str, Tensor]", target: DumpTarget, topk: int
) -> tuple[CapturedRequest, float]:
    """The request of ``turn``, and the nats that its output costs; ``taps`` are rows [S, H] of the whole text."""
    import torch

    tokens = sample.tokens_S[: turn.end].tolist()
    rows = {name: tap[: turn.end - 1] for name, tap in taps.items()}
    said_n = sample.tokens_S[turn.start : turn.end]
    parts: list[LogitsSummary] = []
    nats = 0.0
    for final, said in zip(rows[FINAL][turn.start - 1 :].split(_LOGIT_ROWS), said_n.split(_LOGIT_ROWS), strict=True):
        logits = logits_of(final, target.output_VH)
        parts.append(summarise_logits(logits, topk))
        nats += float(torch.nn.functional.cross_entropy(logits, said, reduction="sum"))
    request = CapturedRequest(
        request_id=turn.name,
        category=None,
        prompt_ids=tokens[: turn.start],
        output_ids=tokens[turn.start :],
        finish_reason="forced",
        source="forced",
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        taps=rows,
        topk_ids=torch.cat([part.topk_ids for part in parts]),
        topk_logprobs=torch.cat([part.topk_logprobs for part in parts]),
        logsumexp=torch.cat([part.logsumexp for part in parts]),
    )
    return request, nats
