"""Recordings that replay itself makes, and a second head to record: what a calibration has without more servers.

A recording is made from one of a healthy server. Its text stays, because a target's text does not depend on drafts; its
rounds are those of a replay under a fault, in another rounding order than the one in which they will be replayed.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from support.calibration_cases import TABLE, Case, write_case
from support.calibration_record import Tell, is_recorded, share_weights
from support.heads import write_head

import replay
from replay.checkpoint.checkpoint import Checkpoint
from replay.diagnosis.diagnose import served_variant
from replay.errors import ReplayError
from replay.faults.table import parse_faults
from replay.simulator.variant import Variant
from replay.traces.captured import CapturedRequest, ServerCounters
from replay.traces.server_rounds import served_schema
from replay.traces.writer import TraceWriter

# Every kind of the table but NOT_MADE, with values that a short recording of the sample prompts shows.
FAULTS = (
    "none", "wiring.aux-layer-id=1", "wiring.aux-layer-id=default", "wiring.aux-layer-id=1:1", "wiring.aux-missing=0",
    "wiring.aux-missing=1", "wiring.aux-missing=2", "wiring.aux-capture-stage=normed", "wiring.concat-order=qkv",
    "wiring.concat-order=fc", "wiring.norm=residual", "wiring.norm=skip:hidden_norm",
    "wiring.norm=skip:input_layernorm", "wiring.norm=skip:post_attention_layernorm", "wiring.recycle-norm=other",
    "wiring.multi-layer=input_layernorm", "shift.alignment=token", "shift.alignment=features", "position.offset=1",
    "position.offset=-1", "position.offset=stuck", "position.rope-params=theta:500000",
    "position.rope-geometry=interleaved", "position.rope-geometry=partial:0.5", "position.max-len=48",
    "position.max-len=64:dummy", "attn.window=16", "attn.window=32", "vocab.d2t=absolute", "vocab.d2t=identity",
    "vocab.d2t=offset:1", "weights.overwritten=lm_head", "weights.missing=norm",
    "weights.missing=layers.0.self_attn.o_proj", "weights.missing=fc", "weights.layout=qkv-interleaved",
    "kv.rollback=stale", "kv.rollback=accumulate", "kv.rollback=hole", "kv.rollback=full-hole", "kv.prefix-reuse=16",
    "kv.prefix-reuse=16:masked", "kv.slot-write=overwrite", "kv.slot-write=unseen", "kv.chunk-boundary=16",
    "kv.skip-draft=4:24", "kv.handoff=empty", "kv.handoff=hidden", "kv.handoff=kv", "kv.none=alone",
    "state.hidden-row=drafted", "state.hidden-row=first", "state.hidden-row=previous", "state.hidden-row=hidden-only",
    "precision.draft-weights=fp8", "precision.draft-weights=int8", "precision.draft-weights=w4a16",
    "precision.draft-kv=fp8_e4m3", "precision.dtype-cast=fp16", "wiring.norm-eps=0.1", "attn.scale=2",
    "state.dropped=mlp", "state.dropped=attention", "state.noise=0.1", "shift.stale-row=anchor", "tree.parent-kv=path",
)  # fmt: skip
# Its rounds would be of batches that nobody ran.
# These need batches, or a head that drafts blocks.
NOT_MADE = {"state.crossed", "block.attention", "block.late-context", "block.mask-token", "block.size"}
ORDERS: Mapping[str, Mapping[str, Any]] = {"hf": {"numerics": "hf"}, "fp32": {"precision": "fp32"}}


def make_recordings(source: Path, head: Path, folder: Path, order: str, faults: Sequence[str], tell: Tell) -> list[str]:
    """From the trace ``source`` of a healthy server: one recording for each fault; the sentences say what could not be.

    ``order`` is the rounding order of the made rounds, of ``ORDERS``.
    """
    trace, checkpoint = replay.Trace.open(source), replay.load_head(head)
    served = served_variant(trace, checkpoint.name)
    problems = []
    for name in faults:
        case = Case(name, TABLE) if name != "none" else Case("healthy.made", "healthy")
        if is_recorded(folder, case):
            continue
        try:
            variant = dataclasses.replace(served, faults=parse_faults(name), **ORDERS[order])
            rounds = served_rounds(trace, checkpoint, variant)
        except ReplayError as error:
            problems.append(f"{name}: {error}")
            tell(problems[-1])
            continue
        place = folder / case.folder
        place.mkdir(parents=True, exist_ok=True)
        write_recording(trace, rounds, place / "trace")
        share_weights(folder, place / "trace" / "target.safetensors")
        write_case(folder, case, f"made by replay, order {order}, from {source}")
        tell(f"{name}: {rounds.height} rounds, accept length {1 + rounds['accepted'].sum() / rounds.height:.3f}")
    return problems


def served_rounds(trace: replay.Trace, checkpoint: Checkpoint, variant: Variant) -> pl.DataFrame:
    """The rounds of a variant's own walk, as a table of served rounds; nobody says how many were verified together."""
    table = replay.simulate(trace, {checkpoint.name: checkpoint}, [variant]).table
    schema = served_schema()
    unsaid = {name: pl.lit(None, dtype=kind) for name, kind in schema.items() if name not in table.columns}
    return table.with_columns(**unsaid).select(schema.names()).cast(schema)


def write_recording(trace: replay.Trace, rounds: pl.DataFrame, folder: Path) -> None:
    """The requests of ``trace`` with other rounds. What its draft was fed is left out: it was fed something else."""
    with TraceWriter.create(folder, dataclasses.replace(trace.header, weights=None), force=True) as writer:
        tied = trace.header.target.tie_word_embeddings
        writer.write_target_weights(trace.embed_weight(), None if tied else trace.lm_head_weight())
        writer.add_rounds(rounds)
        writer.add([_request(trace, index, rounds) for index in range(len(trace))])
        writer.finish()


def _request(trace: replay.Trace, index: int, rounds: pl.DataFrame) -> CapturedRequest:
    record, rows = trace.records[index], trace.read(index, list(trace.header.taps))
    ids, logprobs, logsumexp = trace.logits(index)
    accepted = rounds.filter(pl.col("request_id") == record.request_id)["accepted"].to_list()
    histogram = [accepted.count(number) for number in range(max(accepted, default=0) + 1)]
    return CapturedRequest(
        request_id=record.request_id,
        category=record.category,
        prompt_ids=rows.tokens[: record.prompt_tokens].tolist(),
        output_ids=rows.tokens[record.prompt_tokens :].tolist(),
        finish_reason=record.finish_reason,
        source=record.source,
        temperature=record.temperature,
        top_p=record.top_p,
        top_k=record.top_k,
        taps=dict(rows.taps),
        topk_ids=ids.to(torch.int32),
        topk_logprobs=logprobs,
        logsumexp=logsumexp,
        tail_ids=list(record.tail_ids),
        server=ServerCounters(record.output_tokens, len(accepted), histogram, 0),
    )


def perturbed_head(source: Path, folder: Path, *, size: float, seed: int = 1) -> Path:
    """A head like ``source`` that drafts otherwise: noise of ``size`` times a matrix's deviation on each matrix."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in replay.load_head(source).tensors.items():
        if tensor.is_floating_point() and tensor.ndim > 1:
            wide = tensor.float()
            drawn = torch.randn(wide.shape, generator=generator)
            tensor = (wide + size * wide.std() * drawn).to(tensor.dtype)
        tensors[name] = tensor
    return write_head(folder, json.loads((source / "config.json").read_text()), tensors)
