"""Every depth, and every rule that stops drafting early by the head's own confidence, from one replay of a trace.

A greedy chain of k steps is the beginning of a longer one. So the accepted count at every anchor of the deepest chain
gives that of every other depth, and rounds follow by walking.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from replay.analysis.plan.policies import Played
from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.product_sizes import served_spans
from replay.errors import UsageError
from replay.simulator.anchors import AnchorDrafts, draft_pack
from replay.simulator.binding import build_head, resolve
from replay.simulator.held import requests_with_taps
from replay.simulator.inputs import read_packs
from replay.simulator.progress import ReplayProgress
from replay.simulator.tasks import Result, Task, Workers, plan_tasks, replay_tasks
from replay.simulator.variant import CHAIN_KV, ResolvedVariant, Variant
from replay.simulator.workers import use_workers
from replay.traces.reader import Trace
from replay.verify.accept import served_walk


def draft_anchors(
    trace: Trace,
    checkpoint: Checkpoint,
    variant: Variant | ResolvedVariant,
    *,
    device: str = "cpu",
    workers: "int | str | Workers | None" = None,
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> list[AnchorDrafts]:
    """The chains of ``variant`` at every anchor of every request; a pack of requests is in memory at a time.

    ``workers`` as in ``simulate``, ``on_note`` as in ``use_workers``. Raises UsageError for a variant that is no
    healthy greedy chain and for a head that drafts blocks, WiringError or CheckpointError where head, wiring and trace
    do not fit, and WorkerError.
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
    heads = {resolved.draft: checkpoint}
    with use_workers(workers, trace, heads, device, on_note) as hands:
        if hands is None:
            return _draft_here(trace, checkpoint, resolved, device, on_event)
        planned = plan_tasks(trace, heads, [resolved], None, hands.count, confidence=True)
        return _in_order(replay_tasks(hands, planned, on_event))


def _draft_here(
    trace: Trace,
    checkpoint: Checkpoint,
    variant: ResolvedVariant,
    device: str,
    on_event: Callable[[ReplayProgress], None],
) -> list[AnchorDrafts]:
    head = build_head(checkpoint, variant, trace, device)
    spans = served_spans(trace.served_rounds()) if head.execution.product_rows is not None else {}
    found: list[AnchorDrafts] = []
    with torch.inference_mode():
        for pack in read_packs(trace, variant.wiring.taps):
            found += draft_pack(head, variant.wiring, variant.steps, pack, spans)
            on_event(ReplayProgress(len(found), len(trace.requests)))
    return found


def _in_order(results: Iterable[tuple[Task, Result]]) -> list[AnchorDrafts]:
    """Those of all packs of one variant."""
    found: list[AnchorDrafts] = []
    for _, (of_variant,) in results:
        assert isinstance(of_variant, tuple)
        found += of_variant
    return found


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
