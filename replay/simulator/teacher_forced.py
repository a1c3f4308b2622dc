"""What training measures, computed on a trace: at every anchor the head drafts along the text, whatever it drafted.

Step j (from 0) of anchor S embeds the text's own token x[S+j] and is right where it drafts what the target would say
next. The head sees what it sees while it is trained: committed rows of true features up to the anchor, and the anchor's
own rows after them (training-time test: SafeAILab/EAGLE ``eagle/traineagle3/cnets.py``, SpecForge
``specforge/core/eagle3.py``).

Suffixes: A anchors of one request, K steps, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.every_anchor import draft_every_anchor
from replay.drafting.rows import DraftInput
from replay.errors import UsageError
from replay.simulator.binding import build_head, resolve
from replay.simulator.held import requests_with_taps
from replay.simulator.inputs import draft_input, read_packs
from replay.simulator.progress import ReplayProgress
from replay.simulator.variant import ResolvedVariant, Variant
from replay.traces.reader import RequestRows, Trace
from replay.verify.accept import continuations

if TYPE_CHECKING:
    import polars as pl

NOT_RECORDED = -1


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one request teaches at each anchor: ids fed to the steps after the first, ids that are right [A, K].

    NOT_RECORDED where the text, or what the target would say, does not reach so far.
    """

    fed_AK: Tensor
    right_AK: Tensor


def score_anchors(
    trace: Trace,
    checkpoint: Checkpoint,
    variant: Variant | ResolvedVariant,
    *,
    device: str = "cpu",
    on_event: Callable[[ReplayProgress], None] = lambda _: None,
) -> "pl.DataFrame":
    """Teacher-forced drafts of every anchor, counted by request and step.

    Columns ``request_id``, ``step`` (1..K), and as counts of anchors ``recorded`` (the target's token of this step is
    known), ``in_vocabulary`` (and the head can draft it), ``right`` (and it did), ``right_so_far`` (and so at every
    step before). A generated output is its own answer; of a given one the target's likeliest token is, as in training.
    Only a pack of requests is in memory. Raises UsageError for a variant that is no chain, follows the walk or
    hands states from request to request, WiringError or CheckpointError where head, wiring and trace do not fit.
    """
    import polars as pl

    resolved = resolve(variant, checkpoint, trace)
    trace = requests_with_taps(trace, [resolved], {resolved.draft: checkpoint})
    head = build_head(checkpoint, resolved, trace, device, served_products=False)
    if variant.topk > 1 or head.behaviour.follows_walk or head.behaviour.crosses:
        raise UsageError("training runs chains over committed rows; score anchors with topk 1 and without faults")
    known_V = torch.zeros(trace.header.target.vocab_size, dtype=torch.bool)
    known_V[head.target_ids_W.cpu()] = True
    frames = [pl.DataFrame(schema=_schema())]
    done, total = 0, len(trace.requests)
    with torch.inference_mode():
        for pack in read_packs(trace, resolved.wiring.taps):
            inputs = [draft_input(rows, resolved.wiring) for rows in pack]
            lessons = [
                _lesson(trace, index, rows, item, variant.steps)
                for index, (rows, item) in enumerate(zip(pack, inputs, strict=True), start=done)
            ]
            fed = [lesson.fed_AK.clamp_min(0) for lesson in lessons]
            for rows, lesson, drafts in zip(
                pack, lessons, draft_every_anchor(head, inputs, variant.steps, fed=fed), strict=True
            ):
                frames.append(_count(rows.request_id, drafts.drafted_AK, lesson.right_AK, known_V))
            done += len(pack)
            on_event(ReplayProgress(done, total))
    return pl.concat(frames)


def _lesson(trace: Trace, index: int, rows: RequestRows, item: DraftInput, steps: int) -> Lesson:
    anchors_A = item.anchors_A.numpy()
    text_AK = continuations(rows.tokens.numpy(), rows.tail_ids.numpy(), anchors_A, steps)
    right_AK = text_AK
    if rows.source == "forced":
        likeliest_N = trace.logits(index)[0][:, 0].numpy()
        said = np.concatenate([np.full(rows.prompt_tokens, NOT_RECORDED), likeliest_N])
        right_AK = continuations(said, np.empty(0, dtype=np.int64), anchors_A, steps)
    return Lesson(torch.from_numpy(text_AK), torch.from_numpy(right_AK))


def _count(request_id: str, drafted_AK: Tensor, right_AK: Tensor, known_V: Tensor) -> "pl.DataFrame":
    import polars as pl

    recorded_AK = right_AK != NOT_RECORDED
    in_vocabulary_AK = recorded_AK & known_V[right_AK.clamp_min(0)]
    hit_AK = recorded_AK & (drafted_AK == right_AK)
    so_far_AK = hit_AK.long().cumprod(dim=1)
    counts = {
        "recorded": recorded_AK,
        "in_vocabulary": in_vocabulary_AK,
        "right": hit_AK,
        "right_so_far": so_far_AK,
    }
    steps = drafted_AK.shape[1]
    columns = {name: flags_AK.sum(dim=0).tolist() for name, flags_AK in counts.items()}
    return pl.DataFrame({"request_id": [request_id] * steps, "step": range(1, steps + 1), **columns}, schema=_schema())


def _schema() -> "dict[str, pl.DataType]":
    import polars as pl

    counts = ("recorded", "in_vocabulary", "right", "right_so_far")
    return {"request_id": pl.String(), "step": pl.Int32(), **{name: pl.Int64() for name in counts}}
