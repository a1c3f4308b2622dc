"""Every depth, and every rule that stops drafting early by the head's own confidence, from one replay of a trace.

A greedy chain of k steps is the beginning of a longer one. So the accepted count at every anchor of the deepest chain
gives that of every other depth, and rounds follow by walking.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from replay.analysis.plan.policies import Played
from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.confidence import draft_with_confidence
from replay.drafting.product_sizes import served_spans
from replay.errors import UsageError
from replay.simulator.binding import build_head, resolve
from replay.simulator.held import requests_with_taps
from replay.simulator.inputs import draft_input, read_packs
from replay.simulator.progress import ReplayProgress
from replay.simulator.variant import CHAIN_KV, ResolvedVariant, Variant
from replay.traces.reader import RequestRows, Trace
from replay.verify.accept import continuations, count_accepted, served_walk

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


def draft_anchors(
    trace: Trace,
    checkpoint: Checkpoint,
    variant: Variant | ResolvedVariant,
    *,
    device: str = "cpu",
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> list[AnchorDrafts]:
    """The chains of ``variant`` at every anchor of every request; a pack of requests is in memory at a time.

    Raises UsageError for a variant that is no healthy greedy chain and for a head that drafts blocks, WiringError or
    CheckpointError where head, wiring and trace do not fit.
    """
    resolved = resolve(variant, checkpoint, trace)
    trace = requests_with_taps(trace, [resolved], {resolved.draft: checkpoint})
    if checkpoint.config.block is not None:
        raise UsageError(
            f"draft head {checkpoint.name} drafts blocks, and a shorter block is no beginning of a longer one; plan "
            "from a rounds file of replay simulate with each --steps"
        )
    greedy = resolved.verify.name == "greedy" and trace.header.capture.temperature == 0
    if variant.topk > 1 or not greedy:
        raise UsageError("a plan from a trace plays greedy chains; plan from a rounds file for trees and other rules")
    if resolved.faults or resolved.kv != CHAIN_KV:
        raise UsageError("a plan from a trace plays a healthy head; plan from a rounds file to plan with a fault")
    head = build_head(checkpoint, resolved, trace, device)
    spans = served_spans(trace.served_rounds()) if head.execution.product_rows is not None else {}
    found: list[AnchorDrafts] = []
    with torch.inference_mode():
        for pack in read_packs(trace, resolved.wiring.taps):
            inputs = [draft_input(rows, resolved.wiring, spans=spans.get(rows.request_id, ())) for rows in pack]
            for rows, drafts in zip(pack, draft_with_confidence(head, inputs, variant.steps), strict=True):
                found.append(_counted(rows, drafts.drafted_AK.numpy(), drafts.chance_AK.numpy()))
            on_event(ReplayProgress(len(found), len(trace.requests)))
    return found


def _counted(rows: RequestRows, drafted_AK: _Ints, chance_AK: NDArray[np.float32]) -> AnchorDrafts:
    steps, first = drafted_AK.shape[1], rows.prompt_tokens
    anchors_A = np.arange(first, first + len(drafted_AK))
    chosen_AK = continuations(rows.tokens.numpy(), rows.tail_ids.numpy(), anchors_A, steps)
    return AnchorDrafts(
        rows.request_id, first, len(rows.tokens), count_accepted(drafted_AK, chosen_AK), np.cumprod(chance_AK, axis=1)
    )


def play_depths(anchors: Sequence[AnchorDrafts], depths: Sequence[int]) -> list[Played]:
    """The rounds of each fixed depth."""
    return [_play(anchors, None, depth) for depth in depths]


def play_thresholds(anchors: Sequence[AnchorDrafts], thresholds: Sequence[float], deepest: int) -> list[Played]:
    """The rounds of each rule that verifies a token while the product of chances is at least the threshold.

    The step that falls below it is drafted, and not verified. At most ``deepest`` steps are drafted.
    """
    return [_play(anchors, threshold, deepest) for threshold in thresholds]


def _play(anchors: Sequence[AnchorDrafts], threshold: float | None, deepest: int) -> Played:
    counts = np.zeros((len(anchors), 2), dtype=np.int64)
    drafted, verified = (np.zeros((len(anchors), deepest + 1), dtype=np.int64) for _ in range(2))
    for row, one in enumerate(anchors):
        product_AK = one.product_AK[:, :deepest]
        sure_A = np.full(len(product_AK), deepest)
        if threshold is not None:
            sure_A = (product_AK >= threshold).sum(axis=1)
        accepted_A = np.minimum(one.accepted_A, sure_A)
        played = served_walk(accepted_A, prompt_tokens=one.prompt_tokens, tokens=one.tokens)
        visited = [round_.anchor - one.prompt_tokens for round_ in played]
        counts[row] = len(played), int(accepted_A[visited].sum())
        verified[row] = np.bincount(sure_A[visited], minlength=deepest + 1)
        drafted[row] = np.bincount(np.minimum(sure_A[visited] + 1, deepest), minlength=deepest + 1)
    return Played(threshold, deepest, counts, drafted, verified)
