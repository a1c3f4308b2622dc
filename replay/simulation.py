"""A trace, heads and variants become rounds: what a server would have done, request by request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from replay.accept import Round, continuations, count_accepted, count_accepted_in_tree, served_walk
from replay.binding import Group, draft_input, group_variants, resolve, sampled_after_chunks
from replay.errors import UsageError
from replay.estimate import Estimator
from replay.expected import chain_parents
from replay.forced import force_every_anchor, path_tokens
from replay.packs import read_packs
from replay.passes import Drafts, FirstPass, draft_every_anchor, first_pass
from replay.rows import DraftInput
from replay.served_products import Span, served_spans
from replay.traces.reader import RequestRows, Trace
from replay.traces.rounds import RequestInfo, Rounds, VariantInfo
from replay.traces.taps import FINAL
from replay.tree import Trees, draft_every_tree
from replay.variant import Variant, name_variants
from replay.verify import parse_rule
from replay.walk import walk
from replay.weights import Checkpoint
from replay.wiring import engine_ids

if TYPE_CHECKING:
    import polars as pl

_Ints = NDArray[np.int64]


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
    estimator: Estimator | None = None


def simulate(
    trace: Trace,
    checkpoints: Mapping[str, Checkpoint],
    variants: Sequence[Variant],
    *,
    device: str = "cpu",
    follow: "pl.DataFrame | None" = None,
    served_products: bool = True,
    on_event: Callable[[Progress], None] = lambda _: None,
) -> Rounds:
    """Replay every request of ``trace`` under every variant; rows are read a pack at a time.

    ``follow`` is a table of rounds (``Trace.served_rounds``): every variant then drafts at the anchors of these rounds
    instead of its own, request by request, so that it can be held against them round for round; requests without
    rounds there are left out. ``served_products`` false runs matrix products as large as they fit instead of as large
    as a CPU server's: several times as fast, and near ties may fall otherwise.

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
    names = name_variants(resolved)
    groups = group_variants(resolved, checkpoints, trace, device, served_products=served_products)
    if follow is not None and any(group.sampled for group in groups):
        raise UsageError("rounds of a sampled draft are drawn, and follow no other run's; type --verify target-only")
    stems = [list(alike) for _, alike in groupby(groups, key=lambda group: group.stem)]
    tallies = [_Tally(estimator=_estimator(variant, checkpoints[variant.draft], trace)) for variant in resolved]
    table = _RoundsTable(names)
    total = len(trace.requests)
    led = None if follow is None else _leads(follow)
    exact = any(group.head.product_rows is not None for group in groups)
    spans = served_spans(trace.served_rounds()) if exact else {}
    with torch.inference_mode():
        done = 0
        for pack in read_packs(trace, _taps(groups)):
            played = [rows for rows in pack if led is None or rows.request_id in led]
            leads = [_Lead() if led is None else led[rows.request_id] for rows in played]
            for stem in stems if played else []:
                _replay_pack(stem, played, leads, trace, spans, tallies, table)
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


def _estimator(variant: Variant, checkpoint: Checkpoint, trace: Trace) -> Estimator | None:
    rule = parse_rule(variant.verify)
    if rule.name == "greedy":
        return None
    return Estimator(rule, trace, variant.steps, draft_vocab_size=checkpoint.config.draft_vocab_size)


def _taps(groups: Sequence[Group]) -> tuple[str, ...]:
    """Every tap that some variant reads."""
    taps = dict.fromkeys(tap for group in groups for tap in group.wiring.taps)
    if any(group.head.conduct.chunk is not None for group in groups):
        taps[FINAL] = None
    return tuple(taps)


def _replay_pack(
    stem: Sequence[Group],
    pack: Sequence[RequestRows],
    leads: Sequence["_Lead"],
    trace: Trace,
    spans: Mapping[str, Sequence[Span]],
    tallies: Sequence[_Tally],
    table: "_RoundsTable",
) -> None:
    """Groups of one stem: inputs and first pass are made once."""
    start = perf_counter()
    first_group = stem[0]
    chunk = first_group.head.conduct.chunk
    inputs = [
        replace(
            draft_input(
                rows,
                first_group.wiring,
                None if chunk is None else sampled_after_chunks(rows, trace, chunk),
                spans.get(rows.request_id, ()),
            ),
            only=lead.anchors_before(len(rows.tokens) - 1),
        )
        for rows, lead in zip(pack, leads, strict=True)
    ]
    anchors = sum(item.anchors for item in inputs)
    shares = anchors and not all(group.head.conduct.follows_walk for group in stem)
    first = first_pass(first_group.head, inputs) if shares else None
    members = sum(len(group.members) for group in stem)
    common = (perf_counter() - start) / members
    for group in stem:
        for member in group.members:
            tallies[member].seconds += common
        if group.head.conduct.follows_walk:
            _walk_in_order(group, pack, inputs, leads, tallies, table)
        elif group.sampled:
            _replay_sampled(group, pack, inputs, first, tallies, table)
        else:
            _replay_anchors(group, pack, inputs, first, tallies, table)


def _replay_anchors(
    group: Group,
    pack: Sequence[RequestRows],
    inputs: list[DraftInput],
    first: FirstPass | None,
    tallies: Sequence[_Tally],
    table: "_RoundsTable",
) -> None:
    start = perf_counter()
    drafts = _draft(group, inputs, first)
    seconds = perf_counter() - start
    for member, size, drafted in zip(group.members, group.sizes, drafts, strict=True):
        tallies[member].seconds += seconds / len(group.members)  # one run serves them all
        for rows, item, draft in zip(pack, inputs, drafted, strict=True):
            _walk(rows, item, draft, size.steps, tallies[member], table, member)


def _replay_sampled(
    group: Group,
    pack: Sequence[RequestRows],
    inputs: list[DraftInput],
    first: FirstPass | None,
    tallies: Sequence[_Tally],
    table: "_RoundsTable",
) -> None:
    """Rounds of a head that samples its drafts: one draw of the coins, given the recorded text."""
    start = perf_counter()
    most = max(size.steps for size in group.sizes)
    chances = force_every_anchor(group.head, inputs, [rows.temperature for rows in pack], most, first=first)
    seconds = perf_counter() - start
    for member, size in zip(group.members, group.sizes, strict=True):
        tally, steps = tallies[member], size.steps
        tally.seconds += seconds / len(group.members)
        assert tally.estimator is not None
        for rows, item, q_AK in zip(pack, inputs, chances, strict=True):
            path_AK = path_tokens(item, steps).numpy()
            accepted_A = tally.estimator.add_path(rows.request_id, q_AK[:, :steps].numpy(), path_AK)
            tally.anchors += len(accepted_A)
            tally.anchors_accepted += int(accepted_A.sum())
            played = served_walk(accepted_A, prompt_tokens=rows.prompt_tokens, tokens=len(rows.tokens))
            visited = [one.anchor - rows.prompt_tokens for one in played]
            # What was refused, and all behind it, is not drawn.
            drafted_AK = np.where(np.arange(steps) < accepted_A[:, None], path_AK, -1)
            table.add(member, rows.request_id, played, drafted_AK[visited])


def _walk_in_order(
    group: Group,
    pack: Sequence[RequestRows],
    inputs: list[DraftInput],
    leads: Sequence["_Lead"],
    tallies: Sequence[_Tally],
    table: "_RoundsTable",
) -> None:
    """Rounds whose draft KV depends on those before: each number of steps walks by itself, past the other anchors."""
    tails = [rows.tail_ids for rows in pack]
    for member, size in zip(group.members, group.sizes, strict=True):
        start = perf_counter()
        walked = walk(group.head, inputs, size.steps, tails, [lead.accepted or () for lead in leads])
        tallies[member].seconds += perf_counter() - start
        for rows, rounds in zip(pack, walked, strict=True):
            last = len(rows.tokens) - 1
            played = [
                Round(anchor, accepted, cut=anchor + accepted + 1 > last)
                for anchor, accepted in zip(rounds.anchors, rounds.accepted, strict=True)
            ]
            tallies[member].ties += int(rounds.tied_RK.sum())
            table.add(member, rows.request_id, played, rounds.drafted_RK.numpy())
            _expect(tallies[member], rows, np.array(rounds.anchors, dtype=np.int64), rounds.drafted_RK.numpy(), None)


def _draft(group: Group, inputs: list[DraftInput], first: FirstPass | None) -> Sequence[Sequence[Drafts | Trees]]:
    """For each member of the group what it drafts, request by request."""
    if group.topk > 1:
        return draft_every_tree(group.head, inputs, topk=group.topk, sizes=group.sizes, kv=group.kv, first=first)
    chains = draft_every_anchor(group.head, inputs, max(size.steps for size in group.sizes), first=first)
    return [
        [Drafts(chain.drafted_AK[:, : size.steps], chain.tied_AK[:, : size.steps]) for chain in chains]
        for size in group.sizes
    ]


def _walk(
    rows: RequestRows,
    item: DraftInput,
    drafts: Drafts | Trees,
    steps: int,
    tally: _Tally,
    table: "_RoundsTable",
    member: int,
) -> None:
    drafted, tied = (
        (drafts.drafted_AN, drafts.tied_AN) if isinstance(drafts, Trees) else (drafts.drafted_AK, drafts.tied_AK)
    )
    anchors_A = item.anchors_A.numpy()
    chosen_AK = continuations(rows.tokens.numpy(), rows.tail_ids.numpy(), anchors_A, steps)
    if isinstance(drafts, Trees):
        accepted_A = count_accepted_in_tree(drafted.numpy(), drafts.parents_AN.numpy(), chosen_AK)
    else:
        accepted_A = count_accepted(drafted.numpy(), chosen_AK)
    last = len(rows.tokens) - 1
    if item.only is None:
        walk = served_walk(accepted_A, prompt_tokens=rows.prompt_tokens, tokens=len(rows.tokens))
        visited = [played.anchor - rows.prompt_tokens for played in walk]
    else:
        pairs = zip(anchors_A.tolist(), accepted_A.tolist(), strict=True)
        walk = [Round(anchor, accepted, cut=anchor + accepted + 1 > last) for anchor, accepted in pairs]
        visited = list(range(len(walk)))
    tally.anchors += len(accepted_A)
    tally.anchors_accepted += int(accepted_A.sum())
    tally.ties += int(tied[visited].sum())
    table.add(member, rows.request_id, walk, drafted.numpy()[visited])
    parents = drafts.parents_AN.numpy()[visited] if isinstance(drafts, Trees) else None
    _expect(tally, rows, anchors_A[visited], drafted.numpy()[visited], parents)


def _expect(tally: _Tally, rows: RequestRows, anchors_A: _Ints, drafted_AN: _Ints, parents_AN: _Ints | None) -> None:
    """Adds the expectation at the anchors of a walk; without parents the drafts are chains."""
    if tally.estimator is None:
        return
    if parents_AN is None:
        parents_AN = chain_parents(*drafted_AN.shape)
    chosen_AK = continuations(rows.tokens.numpy(), rows.tail_ids.numpy(), anchors_A, tally.estimator.steps)
    tally.estimator.add_walk(rows.request_id, anchors_A - rows.prompt_tokens, drafted_AN, parents_AN, chosen_AK)


@dataclass(frozen=True, slots=True)
class _Lead:
    """The rounds of one request in the run that is followed: their anchors and accepted tokens (None: follow none)."""

    anchors: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None

    def anchors_before(self, last: int) -> torch.Tensor | None:
        """The anchors from which something is left to draft."""
        return None if self.anchors is None else torch.tensor([a for a in self.anchors if a < last], dtype=torch.long)


def _leads(follow: "pl.DataFrame") -> dict[str, _Lead]:
    grouped = follow.sort("round").group_by("request_id", maintain_order=True).agg("anchor", "accepted")
    return {name: _Lead(tuple(anchors), tuple(accepted)) for name, anchors, accepted in grouped.iter_rows()}


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
        faults=tuple(map(str, variant.faults)),
        seconds=round(tally.seconds, 3),
        anchors=tally.anchors,
        anchors_accepted=tally.anchors_accepted,
        ties=tally.ties,
        expected=None if tally.estimator is None else tally.estimator.expected(),
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
    name: str, checkpoint: Checkpoint, variants: Sequence[Variant], groups: Sequence[Group]
) -> dict[str, Any]:
    config = checkpoint.config
    notes = [
        note
        for group in groups
        if variants[group.members[0]].draft == name
        for note in [*group.head.notes, *group.head.emulation.notes()]
    ]
    return {
        "taps": config.num_taps,
        "layers": config.num_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "vocab_size": config.vocab_size,
        "layer_ids": None if config.layer_ids is None else list(config.layer_ids),
        "dtype": config.dtype,
        "notes": list(dict.fromkeys([*checkpoint.notes, *notes])),
    }
