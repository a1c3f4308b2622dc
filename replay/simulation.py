"""A trace, heads and variants become rounds: what a server would have done, request by request."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replay.accept import Round, continuations, count_accepted, count_accepted_in_tree, served_walk
from replay.engines import ENGINES, NUMERICS, PRECISIONS, precision_of_dtype
from replay.errors import CheckpointError, UsageError
from replay.head import Head
from replay.passes import Drafts, draft_every_anchor
from replay.rows import DraftInput
from replay.traces.reader import RequestRows, Trace
from replay.traces.rounds import RequestInfo, Rounds, VariantInfo
from replay.traces.taps import FINAL
from replay.tree import Trees, TreeSize, draft_every_tree
from replay.variant import Variant, name_variants
from replay.weights import Checkpoint
from replay.wiring import Wiring, check_wiring, default_wiring, engine_ids, sglang_wiring

if TYPE_CHECKING:
    import polars as pl

# Rows packed into one pass, unless one request alone has more. Large enough to fill the matrix units.
PACK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` requests replayed under all variants."""

    done: int
    total: int


@dataclass(slots=True)
class _Tally:
    """Running sums of one variant."""

    seconds: float = 0.0
    anchors: int = 0
    anchors_accepted: int = 0
    ties: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """Variants that differ in steps and the size of their trees only: one run at the most steps serves them all."""

    head: Head
    wiring: Wiring
    topk: int
    kv: str
    sizes: tuple[TreeSize, ...]
    members: tuple[int, ...]


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
        precision=variant.precision or precision_of_dtype(target.dtype),
        numerics=variant.numerics or ENGINES[variant.engine].numerics,
    )


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


def simulate(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant],
    *,
    device: str = "cpu",
    on_event: Callable[[Progress], None] = lambda _: None,
) -> Rounds:
    """Replay every request of ``trace`` under every variant; rows are read a pack at a time.

    ``checkpoints`` maps the variants' ``draft`` to heads. All checks stand before the first tensor is read.
    Raises WiringError, CheckpointError, UsageError or TraceError.

    >>> rounds = replay.simulate(trace, {"head": head}, [replay.Variant("head", steps=3)])
    >>> rounds.variants[0].steps
    3
    """
    if not variants:
        raise UsageError("no variant was given; give at least one draft head with --draft")
    unknown = sorted({variant.draft for variant in variants} - set(checkpoints))
    if unknown:
        raise UsageError(f"no head is called {', '.join(unknown)}; there are {', '.join(checkpoints) or 'none'}")
    resolved = [resolve(variant, checkpoints[variant.draft], trace) for variant in variants]
    for variant in resolved:
        assert variant.wiring is not None
        check_fit(checkpoints[variant.draft], variant.wiring, trace)
        _check_topk(checkpoints[variant.draft], variant.topk)
    names = name_variants(resolved)
    groups = _group(resolved, checkpoints, trace, device)
    tallies = [_Tally() for _ in resolved]
    table = _RoundsTable(names)
    total = len(trace.requests)
    with torch.inference_mode():
        done = 0
        for pack in _packs(trace, groups):
            for group in groups:
                _replay_pack(group, pack, resolved, tallies, table)
            done += len(pack)
            on_event(Progress(done, total))
    return Rounds(
        table=table.frame(),
        variants=tuple(
            _variant_info(name, variant, tally, trace)
            for name, variant, tally in zip(names, resolved, tallies, strict=True)
        ),
        requests=tuple(_request_info(row) for row in trace.requests.iter_rows(named=True)),
        trace={**describe_trace(trace), "wirings": _describe_wirings(resolved, trace)},
        drafts={name: _describe_head(name, checkpoint, resolved, groups) for name, checkpoint in checkpoints.items()},
    )


# The most rows for which oneDNN's bf16 products gave every row the same bits as alone (torch 2.13, AMX). A server that
# decodes a few requests at a time stays below it.
SERVED_PRODUCT_ROWS = 32


def build_head(checkpoint: Checkpoint, variant: Variant, trace: Trace, device: str = "cpu") -> Head:
    """The head of a resolved variant, bound to the trace's target tables."""
    engine = trace.header.engine
    same_kernels = engine.name == "sglang" and engine.details.get("device") == "cpu" and device == "cpu"
    assert variant.precision is not None and variant.numerics is not None
    return Head(
        checkpoint,
        target_embed_VE=trace.embed_weight(),
        target_lm_head_VE=trace.lm_head_weight() if checkpoint.config.lm_head == "target" else None,
        profile=ENGINES[variant.engine],
        numerics=NUMERICS[variant.numerics],
        dtype=getattr(torch, PRECISIONS[variant.precision]),
        device=device,
        product_rows=SERVED_PRODUCT_ROWS if same_kernels and variant.numerics == "sglang" else None,
    )


def draft_input(rows: RequestRows, wiring: Wiring) -> DraftInput:
    """One request of the trace as the engine takes it."""
    features_RKD = torch.cat([rows.taps[tap] for tap in wiring.taps], dim=-1)
    return DraftInput(rows.tokens, features_RKD, rows.prompt_tokens)


def _group(
    variants: Sequence[Variant], checkpoints: Mapping[str, Checkpoint], trace: Trace, device: str
) -> list[_Group]:
    alike: dict[tuple[Variant, int, str | None], list[int]] = {}
    for place, variant in enumerate(variants):
        alike.setdefault((_without_drafting(variant), variant.topk, variant.kv), []).append(place)
    heads: dict[Variant, Head] = {}
    groups = []
    for members in alike.values():
        first = variants[members[0]]
        assert first.wiring is not None
        assert first.kv is not None
        wiringless = replace(_without_drafting(first), wiring=None)
        if wiringless not in heads:
            heads[wiringless] = build_head(checkpoints[first.draft], first, trace, device)
        sizes = tuple(_size(variants[member]) for member in members)
        groups.append(_Group(heads[wiringless], first.wiring, first.topk, first.kv, sizes, tuple(members)))
    return groups


def _without_drafting(variant: Variant) -> Variant:
    """What the head itself depends on: the variant with its chain or tree taken away."""
    return replace(variant, steps=1, topk=1)


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


def _packs(trace: Trace, groups: Sequence[_Group]) -> Iterator[list[RequestRows]]:
    """Requests in trace order, a few thousand rows at a time, with every tap that some variant reads."""
    taps = tuple(dict.fromkeys(tap for group in groups for tap in group.wiring.taps))
    pack: list[RequestRows] = []
    rows = 0
    for index in range(len(trace.requests)):
        request = trace.read(index, taps)
        if pack and rows + len(request.tokens) > PACK_ROWS:
            yield pack
            pack, rows = [], 0
        pack.append(request)
        rows += len(request.tokens)
    if pack:
        yield pack


def _replay_pack(
    group: _Group,
    pack: Sequence[RequestRows],
    variants: Sequence[Variant],
    tallies: Sequence[_Tally],
    table: "_RoundsTable",
) -> None:
    start = perf_counter()
    drafts = _draft(group, [draft_input(rows, group.wiring) for rows in pack])
    seconds = perf_counter() - start
    for member, drafted in zip(group.members, drafts, strict=True):
        tallies[member].seconds += seconds / len(group.members)  # one run serves them all
        for rows, draft in zip(pack, drafted, strict=True):
            _walk(rows, draft, variants[member].steps, tallies[member], table, member)


def _draft(group: _Group, inputs: list[DraftInput]) -> Sequence[Sequence[Drafts | Trees]]:
    """For each member of the group what it drafts, request by request."""
    if group.topk > 1:
        return draft_every_tree(group.head, inputs, topk=group.topk, sizes=group.sizes, kv=group.kv)
    chains = draft_every_anchor(group.head, inputs, max(size.steps for size in group.sizes))
    return [
        [Drafts(chain.drafted_AK[:, : size.steps], chain.tied_AK[:, : size.steps]) for chain in chains]
        for size in group.sizes
    ]


def _walk(
    rows: RequestRows, drafts: Drafts | Trees, steps: int, tally: _Tally, table: "_RoundsTable", member: int
) -> None:
    drafted, tied = (
        (drafts.drafted_AN, drafts.tied_AN) if isinstance(drafts, Trees) else (drafts.drafted_AK, drafts.tied_AK)
    )
    anchors_A = rows.prompt_tokens + np.arange(len(drafted))
    chosen_AK = continuations(rows.tokens.numpy(), rows.tail_ids.numpy(), anchors_A, steps)
    if isinstance(drafts, Trees):
        accepted_A = count_accepted_in_tree(drafted.numpy(), drafts.parents_AN.numpy(), chosen_AK)
    else:
        accepted_A = count_accepted(drafted.numpy(), chosen_AK)
    walk = served_walk(accepted_A, prompt_tokens=rows.prompt_tokens, tokens=len(rows.tokens))
    visited = [played.anchor - rows.prompt_tokens for played in walk]
    tally.anchors += len(accepted_A)
    tally.anchors_accepted += int(accepted_A.sum())
    tally.ties += int(tied[visited].sum())
    table.add(member, rows.request_id, walk, drafted.numpy()[visited])


class _RoundsTable:
    """Collects rounds as compact frames, one per variant and request: a few bytes for each number."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._frames: list[list[pl.DataFrame]] = [[] for _ in names]

    def add(self, member: int, request_id: str, walk: Sequence[Round], drafted_RN: "np.ndarray[Any, Any]") -> None:
        """One request's rounds under one variant, with the tokens drafted in each."""
        import polars as pl

        from replay.traces.rounds import table_schema

        frame = {
            "variant": [self._names[member]] * len(walk),
            "request_id": [request_id] * len(walk),
            "round": range(len(walk)),
            "anchor": [played.anchor for played in walk],
            "drafted": drafted_RN.tolist(),
            "accepted": [played.accepted for played in walk],
            "cut": [played.cut for played in walk],
        }
        self._frames[member].append(pl.DataFrame(frame, schema=table_schema()))

    def frame(self) -> "pl.DataFrame":
        """The table: variants in their order, requests in trace order."""
        import polars as pl

        from replay.traces.rounds import table_schema

        frames = [frame for member in self._frames for frame in member]
        return pl.concat(frames) if frames else pl.DataFrame(schema=table_schema())


def _variant_info(name: str, variant: Variant, tally: _Tally, trace: Trace) -> VariantInfo:
    assert variant.wiring is not None and variant.precision is not None and variant.numerics is not None
    assert variant.num_draft_tokens is not None and variant.kv is not None
    return VariantInfo(
        name=name,
        draft=variant.draft,
        wiring=variant.wiring.taps,
        steps=variant.steps,
        topk=variant.topk,
        num_draft_tokens=variant.num_draft_tokens,
        precision=variant.precision,
        numerics=variant.numerics,
        kv=variant.kv,
        verify=variant.verify,
        temperature=trace.header.capture.temperature,
        engine=variant.engine,
        faults=(),
        seconds=round(tally.seconds, 3),
        anchors=tally.anchors,
        anchors_accepted=tally.anchors_accepted,
        ties=tally.ties,
    )


def _request_info(row: Mapping[str, Any]) -> RequestInfo:
    histogram = row["server_histogram"]
    return RequestInfo(
        request_id=row["request_id"],
        category=row["category"],
        prompt_tokens=row["prompt_tokens"],
        output_tokens=row["output_tokens"],
        observed_rounds=row["server_verify_rounds"],
        observed_histogram=None if histogram is None else tuple(histogram),
        source=row["source"],
        temperature=row["temperature"],
    )


def describe_trace(trace: Trace) -> dict[str, Any]:
    """What a report and ``simulate --json`` say of the trace."""
    header = trace.header
    return {
        "path": str(trace.path),
        "target": header.target.name,
        "model_type": header.target.model_type,
        "layers": header.target.layers,
        "hidden_size": header.target.hidden_size,
        "engine": header.engine.name,
        "engine_version": header.engine.version,
        "taps": list(trace.taps),
        "dtype": header.target.dtype,
        "missing": list(header.missing),
        "requests": len(trace.requests),
    }


def _describe_wirings(variants: Sequence[Variant], trace: Trace) -> dict[str, list[dict[str, Any]]]:
    """For each wiring, the layer ids to write so that each engine feeds it."""
    target = trace.header.target
    wirings = dict.fromkeys(variant.wiring for variant in variants if variant.wiring is not None)
    return {
        str(wiring): [
            {"engine": said.engine, "ids": None if said.ids is None else list(said.ids), "note": said.note}
            for said in engine_ids(wiring, model_type=target.model_type, layers=target.layers)
        ]
        for wiring in wirings
    }


def _describe_head(
    name: str, checkpoint: Checkpoint, variants: Sequence[Variant], groups: Sequence[_Group]
) -> dict[str, Any]:
    config = checkpoint.config
    notes = [note for group in groups if variants[group.members[0]].draft == name for note in group.head.notes]
    return {
        "taps": config.num_taps,
        "layers": config.num_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "vocab_size": config.vocab_size,
        "layer_ids": None if config.layer_ids is None else list(config.layer_ids),
        "dtype": config.dtype,
        "notes": list(dict.fromkeys([*checkpoint.notes, *notes])),
    }
