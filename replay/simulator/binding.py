"""What a variant asks for becomes what can run: wiring filled in, faults applied, a head bound to its target."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from replay.checkpoint.checkpoint import Checkpoint
from replay.drafting.product_sizes import Span
from replay.drafting.rows import DraftInput, chunk_ends
from replay.drafting.trees import TreeSize
from replay.engines.behaviour import HEALTHY
from replay.engines.precision import PLAIN, parse_precision
from replay.engines.profiles import ENGINES, NUMERICS, PRECISIONS, precision_of_dtype
from replay.engines.wiring import Wiring, check_wiring, default_wiring, sglang_wiring
from replay.errors import CheckpointError, UsageError
from replay.faults.change import Subject
from replay.faults.table import TREE_FAULT, apply_faults
from replay.head.emulation import check_precision
from replay.head.model import Head
from replay.simulator.variant import Variant
from replay.traces.reader import RequestRows, Trace
from replay.traces.taps import FINAL
from replay.verify.estimator import check_rule, samples_drafts
from replay.verify.rules import parse_rule

# The most rows for which oneDNN's bf16 products gave every row the same bits as alone (torch 2.13, AMX). A server that
# decodes a few requests at a time stays below it.
SERVED_PRODUCT_ROWS = 32


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that differ in steps, the size of their trees and their rule only: one run at the most steps serves all.

    Groups with one ``stem`` have their first pass in common. ``sampled``: the head samples its drafts, and the run
    follows the recorded text (forced.py).
    """

    head: Head
    wiring: Wiring
    topk: int
    kv: str
    sizes: tuple[TreeSize, ...]
    members: tuple[int, ...]
    stem: Hashable
    sampled: bool = False


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


def check_fit(checkpoint: Checkpoint, wiring: Wiring, trace: Trace) -> None:
    """Refuse a head or wiring that does not fit the trace, from names and sizes alone.

    Raises WiringError or CheckpointError.
    """
    target = trace.header.target
    config = checkpoint.config
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"draft head {checkpoint.name} reads features {config.target_hidden_size} wide, the trace's target "
            f"{target.name} is {target.hidden_size} wide; give a head that was made for this target"
        )
    if config.hidden_size != config.target_hidden_size and config.vocab_size < target.vocab_size:
        raise CheckpointError(
            f"draft head {checkpoint.name} embeds {config.vocab_size} tokens, the trace's target {target.name} has "
            f"{target.vocab_size}; give a head that was made for this target"
        )
    # A head that reads the final state takes it as it stands where the widths agree: no fc (Head.fuse).
    skips_fc = not config.use_aux_hidden_state and target.hidden_size == config.hidden_size
    inputs = target.hidden_size if skips_fc else config.fc_inputs
    check_wiring(wiring, available=trace.taps, hidden_size=target.hidden_size, fc_inputs=inputs)


def bind(variant: Variant, checkpoint: Checkpoint, trace: Trace) -> Subject:
    """A resolved variant's head, taps and conduct with its faults in them.

    Raises UsageError, WiringError or CheckpointError where these do not fit each other or the trace.
    """
    assert variant.wiring is not None and variant.precision is not None
    layers = trace.header.target.layers
    healthy = Subject(variant.wiring, checkpoint, HEALTHY, layers, precision=variant.precision)
    subject = apply_faults(healthy, variant.all_faults)
    check_fit(subject.checkpoint, subject.wiring, trace)
    _check_topk(subject.checkpoint, variant.topk)
    check_precision(parse_precision(subject.precision), subject.config, variant.draft)
    if variant.topk > 1 and subject.conduct.chains_only:
        faults = "+".join(map(str, variant.all_faults))
        raise UsageError(f"fault {faults} is played on chains, topk {variant.topk} drafts trees; type --topk 1")
    if variant.topk == 1 and subject.tree_kv is not None:
        raise UsageError(
            f"fault {TREE_FAULT} is played in trees, topk 1 drafts chains; type --topk N and --num-draft-tokens M"
        )
    if subject.conduct.chunk is not None and FINAL not in trace.taps:
        raise UsageError(
            f"chunks of {subject.conduct.chunk} embed what the target would say after them, and the trace holds no "
            f"tap final; capture one with --taps {','.join((*trace.taps, FINAL))}"
        )
    if subject.conduct.follows_walk and samples_drafts(parse_rule(variant.verify), trace):
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
    borrows = subject.config.lm_head == "target" or subject.conduct.target_lm_head
    assert variant.numerics is not None
    precision = parse_precision(subject.precision)
    assert precision.base is not None
    return Head(
        subject.checkpoint,
        target_embed_VE=trace.embed_weight(),
        target_lm_head_VE=trace.lm_head_weight() if borrows else None,
        profile=ENGINES[variant.engine],
        numerics=NUMERICS[variant.numerics],
        dtype=getattr(torch, PRECISIONS[precision.base]),
        device=device,
        product_rows=SERVED_PRODUCT_ROWS if served_products and same_kernels and variant.numerics == "sglang" else None,
        prefill_rows=_prefill_rows(engine.details),
        conduct=subject.conduct,
        own_embedding=subject.own_embedding,
        precision=precision,
    )


def _prefill_rows(details: Mapping[str, str]) -> int | None:
    """How many rows of a prompt the server prefilled at once, where it says so; it turns chunks off with -1."""
    said = details.get("chunked_prefill_size", "")
    return int(said) if said.isdecimal() and int(said) else None


def draft_input(
    rows: RequestRows, wiring: Wiring, sampled_T: torch.Tensor | None = None, spans: Sequence[Span] = ()
) -> DraftInput:
    """One request of the trace as the engine takes it; ``spans`` as ``served_spans`` gave them."""
    features_RKD = torch.cat([rows.taps[tap] for tap in wiring.taps], dim=-1)
    return DraftInput(rows.tokens, features_RKD, rows.prompt_tokens, sampled_T, spans=spans)


def sampled_after_chunks(rows: RequestRows, trace: Trace, chunk: int) -> torch.Tensor:
    """What the target would say after each chunk's last prompt row [T]; 0 elsewhere. Needs the tap ``final``."""
    from replay.traces.lm_head import recompute

    sampled_T = torch.zeros_like(rows.tokens)
    ends = torch.tensor(list(chunk_ends(rows.prompt_tokens, chunk)), dtype=torch.long)
    if len(ends):
        none = torch.empty((len(ends), 0), dtype=torch.long)
        weight_VE = trace.lm_head_weight()
        sampled_T[ends] = recompute(rows.taps[FINAL][ends], weight_VE, none, dtype=trace.header.target.dtype).best_id
    return sampled_T


def group_variants(
    variants: Sequence[Variant],
    checkpoints: Mapping[str, Checkpoint],
    trace: Trace,
    device: str,
    *,
    served_products: bool = True,
) -> list[Group]:
    """Resolved variants by what they can share, groups of one stem side by side.

    Raises UsageError, WiringError or CheckpointError before any tensor of the trace is read.
    """
    alike: dict[tuple[Variant, int, str | None, bool], list[int]] = {}
    for place, variant in enumerate(variants):
        rule = parse_rule(variant.verify)
        check_rule(rule, trace)
        sampled = samples_drafts(rule, trace)
        alike.setdefault((_without_drafting(variant), variant.topk, variant.kv, sampled), []).append(place)
    firsts = [variants[members[0]] for members in alike.values()]
    subjects = [bind(first, checkpoints[first.draft], trace) for first in firsts]
    heads: dict[Hashable, Head] = {}
    groups: list[Group] = []
    for (*_, sampled), members, first, subject in zip(alike, alike.values(), firsts, subjects, strict=True):
        assert first.kv is not None
        sizes = tuple(_size(variants[member]) for member in members)
        weights = (replace(_without_drafting(first), wiring=None, faults=(), kv=None), _weights_key(subject))
        if weights not in heads:
            heads[weights] = build_head(
                checkpoints[first.draft], first, trace, device, subject, served_products=served_products
            )
        head = heads[weights].variation(subject.conduct, subject.config)
        stem = (weights, subject.config, subject.conduct.of_first_pass(), subject.wiring)
        kv = subject.tree_kv or first.kv
        groups.append(Group(head, subject.wiring, first.topk, kv, sizes, tuple(members), stem, sampled))
    places = {stem: place for place, stem in reversed(list(enumerate(group.stem for group in groups)))}
    return sorted(groups, key=lambda group: places[group.stem])


def _weights_key(subject: Subject) -> Hashable:
    """What tells apart heads whose weights cannot be the same tensors in memory."""
    return (
        id(subject.checkpoint.tensors),
        subject.conduct.target_lm_head,
        subject.own_embedding,
        subject.precision,
    )


def _without_drafting(variant: Variant) -> Variant:
    """What the head itself depends on: the variant with its chain or tree, and their acceptance, taken away."""
    kv = None if variant.topk > 1 else variant.kv
    return replace(variant, steps=1, topk=1, kv=kv, verify="greedy")


def _size(variant: Variant) -> TreeSize:
    assert variant.num_draft_tokens is not None
    return TreeSize(variant.steps, variant.num_draft_tokens)


def _check_topk(checkpoint: Checkpoint, topk: int) -> None:
    """Raises UsageError."""
    if topk > checkpoint.config.draft_vocab_size:
        raise UsageError(
            f"topk {topk} was asked for, draft head {checkpoint.name} has {checkpoint.config.draft_vocab_size} tokens "
            "to draft; type a smaller --topk"
        )
