"""What a variant asks for becomes what can run: wiring filled in, faults applied, a head bound to its target."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from replay.checkpoint.checkpoint import Checkpoint
from replay.engines.behaviour import HEALTHY, RECORDED
from replay.engines.precision import PLAIN, parse_precision
from replay.engines.profiles import NUMERICS, PRECISIONS, EngineProfile, engine_profile, precision_of_dtype
from replay.engines.wiring import Wiring, default_wiring, dflash_wiring, indices_wiring, sglang_wiring
from replay.errors import TraceError, UsageError
from replay.faults.change import Subject
from replay.faults.table import TREE_FAULT, apply_faults
from replay.head.held import Held
from replay.head.model import Head, TargetTables
from replay.head.products import WHOLE_PROMPTS, Execution
from replay.simulator.blocks import check_blocks
from replay.simulator.fit import check_fit, check_precision, check_prompt_rows, check_topk, samples_drafts
from replay.simulator.variant import ResolvedVariant, Variant, draft_tokens, kv_layout
from replay.targets.rules import release_of
from replay.traces.fields import count_of
from replay.traces.header import ONE_TARGET
from replay.traces.reader import Trace
from replay.traces.taps import FINAL
from replay.verify.rules import parse_rule

# The most rows for which oneDNN's bf16 products gave every row the same bits as alone (torch 2.13, AMX). A server that
# decodes a few requests at a time stays below it.
SERVED_PRODUCT_ROWS = 32


def resolve(variant: Variant | ResolvedVariant, checkpoint: Checkpoint, trace: Trace) -> ResolvedVariant:
    """The variant with all that it leaves open decided as its engine would; a resolved one stays as it is.

    Raises WiringError or UsageError.
    """
    if isinstance(variant, ResolvedVariant):
        return variant
    engine = engine_profile(variant.engine)
    precision = PLAIN if variant.precision is None else parse_precision(variant.precision)
    return ResolvedVariant(
        draft=variant.draft,
        wiring=variant.wiring or stated_wiring(checkpoint, engine, trace),
        steps=variant.steps,
        topk=variant.topk,
        num_draft_tokens=draft_tokens(variant.topk, variant.steps, variant.num_draft_tokens),
        precision=precision if precision.base else replace(precision, base=target_precision(trace)),
        numerics=NUMERICS[variant.numerics or engine.numerics],
        kv=kv_layout(variant.topk, variant.kv, engine),
        verify=parse_rule(variant.verify),
        engine=engine,
        faults=variant.faults,
    )


def check_one_target(traces: Mapping[str, Trace]) -> None:
    """Refuse traces of several targets before any is replayed. Raises TraceError."""
    (first_name, first), *others = traces.items()
    for name, trace in others:
        for fact in ONE_TARGET:
            one, other = getattr(first.header.target, fact), getattr(trace.header.target, fact)
            if one != other:
                raise TraceError(
                    f"the traces are of two targets: {fact} is {one!r} in {first_name} and {other!r} in {name}; replay "
                    "each by itself"
                )


def distinct(variants: Sequence[Variant], checkpoints: Mapping[str, Checkpoint], trace: Trace) -> list[Variant]:
    """Each once of those that come to the same, as what a head states and the taps that this is. Raises as resolve."""
    kept: dict[ResolvedVariant, Variant] = {}
    for variant in variants:
        kept.setdefault(resolve(variant, checkpoints[variant.draft], trace), variant)
    return list(kept.values())


def stated_wiring(checkpoint: Checkpoint, engine: EngineProfile, trace: Trace) -> Wiring:
    """What the engine feeds a head that states what this one does, from the trace's target. Raises WiringError."""
    target, config = trace.header.target, checkpoint.config
    if config.block is not None and not config.vllms:
        return dflash_wiring(config.layer_ids or (), layers=target.layers)
    if not config.use_aux_hidden_state:
        return Wiring((FINAL,))
    if config.vllms:
        return indices_wiring(config.layer_ids, layers=target.layers)
    if engine.reads_layer_ids:
        told = trace.header.engine
        release = release_of(told.version if told.name == "sglang" else None)  # the server's own, where one recorded
        return sglang_wiring(config.layer_ids, architecture=target.architecture, layers=target.layers, release=release)
    return default_wiring(target.layers)


def target_precision(trace: Trace) -> str:
    """The dtype that a server loads the head in where nobody says otherwise: the target's. Raises UsageError."""
    return precision_of_dtype(trace.header.target.dtype)


def bind(variant: ResolvedVariant, checkpoint: Checkpoint, trace: Trace) -> Subject:
    """A resolved variant's head, taps and behaviour with its faults in them.

    Raises UsageError, WiringError or CheckpointError where these do not fit each other or the trace.
    """
    layers = trace.header.target.layers
    window = checkpoint.config.window
    if window is not None and variant.topk > 1:
        raise UsageError(
            f"draft head {checkpoint.name} sees {window} rows at most, which is played on chains, topk {variant.topk} "
            "drafts trees; type --topk 1"
        )
    healthy = Subject(variant.wiring, checkpoint, replace(HEALTHY, window=window), layers, variant.precision)
    subject = apply_faults(healthy, variant.all_faults)
    check_fit(subject.checkpoint, subject.wiring, trace)
    check_prompt_rows(subject, trace)
    check_topk(subject.checkpoint, variant.topk)
    check_precision(subject.precision, subject.config, variant.draft)
    check_blocks(subject, variant, trace)
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
    if subject.behaviour.chunk == RECORDED:
        _check_pieces(trace)
    if subject.behaviour.crosses:
        _check_crossing(subject, variant, trace)
    if subject.behaviour.follows_walk and samples_drafts(variant.verify, trace):
        faults = "+".join(map(str, variant.all_faults))
        raise UsageError(
            f"fault {faults} follows the walk, and under rule {variant.verify} a text has many walks; type --verify "
            "target-only"
        )
    return subject


def _check_crossing(subject: Subject, variant: ResolvedVariant, trace: Trace) -> None:
    faults = "+".join(map(str, variant.all_faults))
    if trace.largest_batch < 2:
        untold = (
            "no other request that a server verified together with one of those asked for"
            if trace.part
            else "no two of them that a server verified together"
        )
        raise UsageError(
            f"fault {faults} hands states from request to request of a batch, and {trace.path} tells of {untold}; "
            "record one by replay serve, and ask it for several at a time"
        )
    if subject.behaviour.follows_walk:
        raise UsageError(
            f"faults {faults} are a state of another request, which is played in the batches of the server, and one "
            "that follows the walk, which is not; type one of them"
        )
    if samples_drafts(variant.verify, trace):
        raise UsageError(
            f"fault {faults} hands on what other requests drafted, and under rule {variant.verify} drafts are drawn; "
            "type --verify target-only"
        )


def _check_pieces(trace: Trace) -> None:
    untold = sum(not record.pieces for record in trace.records)
    if untold:
        raise UsageError(
            f"{trace.path} does not say of {untold} of {len(trace)} requests in what pieces their prompts were "
            "prefilled, kv.chunk-boundary takes a number of tokens there; type kv.chunk-boundary=N, or record the "
            "server anew by replay serve"
        )


def build_head(
    checkpoint: Checkpoint,
    variant: ResolvedVariant,
    trace: Trace,
    device: str = "cpu",
    subject: Subject | None = None,
    *,
    served_products: bool = True,
    held: Held | None = None,
) -> Head:
    """The head of a resolved variant, bound to the trace's target tables; ``subject`` as ``bind`` gave it.

    ``served_products`` false gives up the last bits of a CPU server's products for speed. ``held`` has the weights of
    heads made before, which this one shares where it runs them alike.
    """
    subject = subject or bind(variant, checkpoint, trace)
    engine = trace.header.engine
    same_kernels = engine.name == "sglang" and engine.details.get("device") == "cpu" and device == "cpu"
    borrows = subject.config.lm_head == "target" or subject.behaviour.target_lm_head
    profile = replace(variant.engine, numerics=variant.numerics.name)
    if subject.own_embedding is not None:
        profile = replace(profile, own_embedding=subject.own_embedding)
    small = served_products and same_kernels and variant.numerics.name == "sglang"
    return Head(
        subject.checkpoint,
        TargetTables(trace.embed_weight(), trace.lm_head_weight() if borrows else None),
        profile=profile,
        execution=Execution(
            dtype=getattr(torch, PRECISIONS[subject.precision.base or target_precision(trace)]),
            device=torch.device(device),
            product_rows=SERVED_PRODUCT_ROWS if small else None,
            prefill_rows=_prefill_rows(engine.details),
        ),
        behaviour=subject.behaviour,
        precision=subject.precision,
        held=held,
    )


def _prefill_rows(details: Mapping[str, str]) -> int | None:
    """How many rows of a prompt the server prefilled at once; None where it does not say.

    SGLang 0.5.23 turns chunks off with -1 (server_args.py ``chunked_prefill_size``).
    """
    said = details.get("chunked_prefill_size", "")
    return WHOLE_PROMPTS if said == "-1" else count_of(said) or None
