"""The deepest chain of a variant at every anchor, with the head's own confidence: a pack of requests at a time.

Suffixes: A anchors of one request, K steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.drafting.confidence import draft_with_confidence
from replay.drafting.rows import Span
from replay.engines.wiring import Wiring
from replay.head.model import Head
from replay.simulator.inputs import draft_input
from replay.traces.reader import RequestRows
from replay.verify.accept import continuations, count_accepted

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AnchorDrafts:
    """One request: tokens accepted of the full chain at each anchor [A], and the product of chances up to each step.

    ``product_AK`` falls with the step. ``tokens`` counts prompt and output.
    """

    request_id: str
    prompt_tokens: int
    tokens: int
    accepted_A: _Ints
    product_AK: NDArray[np.float32]


def draft_pack(
    head: Head, wiring: Wiring, steps: int, pack: Sequence[RequestRows], spans: Mapping[str, Sequence[Span]]
) -> Iterator[AnchorDrafts]:
    """The chains of a head at every anchor of a pack, request by request."""
    inputs = [draft_input(rows, wiring, spans=spans.get(rows.request_id, ())) for rows in pack]
    for rows, drafts in zip(pack, draft_with_confidence(head, inputs, steps), strict=True):
        yield _counted(rows, drafts.drafted_AK.numpy(), drafts.chance_AK.numpy())


def _counted(rows: RequestRows, drafted_AK: _Ints, chance_AK: NDArray[np.float32]) -> AnchorDrafts:
    steps, first = drafted_AK.shape[1], rows.prompt_tokens
    anchors_A = np.arange(first, first + len(drafted_AK))
    chosen_AK = continuations(rows.tokens.numpy(), rows.tail_ids.numpy(), anchors_A, steps)
    return AnchorDrafts(
        rows.request_id, first, len(rows.tokens), count_accepted(drafted_AK, chosen_AK), np.cumprod(chance_AK, axis=1)
    )
