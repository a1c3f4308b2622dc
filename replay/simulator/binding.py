"""What a variant asks for becomes what can run: wiring filled in, faults applied, a head bound to its target."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from replay.checkpoint.checkpoint import Checkpoint
from replay.engines.behaviour import HEALTHY
from replay.engines.precision import PLAIN, parse_precision
from replay.engines.profiles import ENGINES, PRECISIONS, precision_of_dtype
from replay.engines.wiring import Wiring, default_wiring, sglang_wiring
from replay.errors import UsageError
from replay.faults.change import Subject
from replay.faults.table import TREE_FAULT, apply_faults
from replay.head.model import Head, TargetTables
from replay.head.products import Execution
from replay.simulator.fit import check_fit, check_precision, check_topk, samples_drafts
from replay.simulator.variant import Variant
from replay.traces.reader import Trace
from replay.traces.taps import FINAL
from replay.verify.rules import parse_rule

# The most rows for which oneDNN's bf16 products gave every row the same bits as alone (torch 2.13, AMX). A server that
# decodes a few requests at a time stays below it.
SERVED_PRODUCT_ROWS = 32


def resolve(variant: Variant, checkpoint: Checkpoint, trace: Trace) -> Variant:
    """The variant with wiring, precision and numerics filled in as its engine would. Raises WiringError, UsageError."""
    target = trace.header.target
    config = checkpoint.config
    wiring = variant.wiring
    if wiring is None and not config.use_aux_hidden_state:
        wiring = Wiring((FINAL,))
    elif wiring is None and ENGINES[variant.engine].reads_layer_ids:
        wiring = sglang_wiring(config.layer_ids, model_type=target.model_type, layers=target.layers)
    elif wiring is None:
        wiring = default_wiring(target.layers)
    return replace(
        variant,
        wiring=wiring,
        precision=_with_dtype(variant.precision, target.dtype),
        numerics=variant.numerics or ENGINES[variant.engine].numerics,
    )


def _with_dtype(text: str | None, target_dtype: str) -> str:
    """The precision with the target's dtype where it names none. Raises UsageError."""
    precision = parse_precision(text) if text else PLAIN
    return str(precision if precision.base else replace(precision, base=precision_of_dtype(target_dtype)))


def bind(variant: Variant, checkpoint: Checkpoint, trace: Trace) -> Subject:
    """A resolved variant's head, taps and behaviour with its faults in them.

    Raises UsageError, WiringError or CheckpointError where these do not fit each other or the trace.
    """
    assert variant.wiring is not None and variant.precision is not None
    layers = trace.header.target.layers
    healthy = Subject(variant.wiring, checkpoint, HEALTHY, layers, precision=variant.precision)
    subject = apply_faults(healthy, variant.all_faults)
    check_fit(subject.checkpoint, subject.wiring, trace)
    check_topk(subject.checkpoint, variant.topk)
    check_precision(parse_precision(subject.precision), subject.config, variant.draft)
    if variant.topk > 1 and subject.behaviour.chains_only:
        faults = "+".join(map(str, variant.all_faults))
        raise UsageError(f"fault {faults} is played on chains, topk {variant.topk} drafts trees; type --topk 1")
    if variant.topk == 1 and subject.tree_kv is not None:
        raise UsageError(
            f"fault {TREE_FAULT} is played in trees, topk 1 drafts chains; type --topk N and --num-draft-tokens M"
        )
    if subject.behaviour.chunk is not None and FINAL not in trace.taps:
        raise UsageError(
            f"chunks of {subject.behaviour.chunk} embed what the target would say after them, and the trace holds no "
            f"tap final; capture one with --taps {','.join((*trace.taps, FINAL))}"
        )
    if subject.behaviour.follows_walk and samples_drafts(parse_rule(variant.verify), trace):
        faults = "+".join(map(str, variant.all_faults))
        raise UsageError(
            f"fault {faults} follows the walk, and under rule {variant.verify} a text has many walks; type --verify "
            "target-only"
        )
    return subject


def build_head(
    checkpoint: Checkpoint,
    variant: Variant,
    trace: Trace,
    device: str = "cpu",
    subject: Subject | None = None,
    *,
    served_products: bool = True,
) -> Head:
    """The head of a resolved variant, bound to the trace's target tables; ``subject`` as ``bind`` gave it.

    ``served_products`` false gives up the last bits of a CPU server's products for speed.
    """
    subject = subject or bind(variant, checkpoint, trace)
    engine = trace.header.engine
    same_kernels = engine.name == "sglang" and engine.details.get("device") == "cpu" and device == "cpu"
    borrows = subject.config.lm_head == "target" or subject.behaviour.target_lm_head
    assert variant.numerics is not None
    precision = parse_precision(subject.precision)
    assert precision.base is not None
    profile = replace(ENGINES[variant.engine], numerics=variant.numerics)
    if subject.own_embedding is not None:
        profile = replace(profile, own_embedding=subject.own_embedding)
    small = served_products and same_kernels and variant.numerics == "sglang"
    return Head(
        subject.checkpoint,
        TargetTables(trace.embed_weight(), trace.lm_head_weight() if borrows else None),
        profile=profile,
        execution=Execution(
            dtype=getattr(torch, PRECISIONS[precision.base]),
            device=torch.device(device),
            product_rows=SERVED_PRODUCT_ROWS if small else None,
            prefill_rows=_prefill_rows(engine.details),
        ),
        behaviour=subject.behaviour,
        precision=precision,
    )


def _prefill_rows(details: Mapping[str, str]) -> int | None:
    """How many rows of a prompt the server prefilled at once, where it says so; it turns chunks off with -1."""
    said = details.get("chunked_prefill_size", "")
    return int(said) if said.isdecimal() and int(said) else None
