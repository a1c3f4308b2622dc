"""Rounds token by token: the trace and the head that a rounds file names are opened again, for a few requests alone.

What is gone or has changed is not shown: a note says so, and the view goes on with what is still known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from replay.analysis.tokens.spelling import Spelling
from replay.analysis.tokens.view import Known, Ranking, View, view_requests
from replay.capture.target_files import fingerprint_target
from replay.capture.token_bytes import read_spelling
from replay.checkpoint.checkpoint import read_checkpoint
from replay.drafting.product_sizes import served_spans
from replay.drafting.ranks import Ranked, rank_along
from replay.engines.wiring import Wiring
from replay.errors import ReplayError, TraceError, UsageError
from replay.faults.table import parse_faults
from replay.simulator.binding import resolve
from replay.simulator.groups import Group, group_variants, taps_of
from replay.simulator.inputs import FollowedRounds
from replay.simulator.play import stem_inputs
from replay.simulator.variant import Variant
from replay.traces.fields import some
from replay.traces.parts import Part, choose
from replay.traces.reader import RequestRows, Trace
from replay.traces.records import RequestRecord
from replay.traces.remote import as_source, local_folder
from replay.traces.rounds import RequestInfo, Rounds, VariantInfo

# Rounding moves a draft by some tenths of a nat; another head, wiring or trace moves it by several.
_SAME = 1.0  # nats


@dataclass(frozen=True, slots=True)
class Sources:
    """Where trace, head and target lie now, where that is not what the rounds file says. None: as it says.

    ``verify``: whether the trace is held against its checksums.
    """

    trace: Path | None = None
    draft: Path | None = None
    target: Path | None = None
    verify: bool = True


_AS_SAID = Sources()


@dataclass(slots=True)
class _Found:
    """What was found for the view, and what was not."""

    known: dict[str, Known] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    spelling: Spelling | None = None


def show_tokens(
    rounds: Rounds,
    part: Part,
    variant: str | None = None,
    sources: Sources = _AS_SAID,
    *,
    top: int = 3,
    first_rejected: bool = False,
) -> View:
    """The requests that ``part`` asks for, token by token under one variant.

    ``variant`` is its name, None the one of the largest accept length. ``top`` is how many of the draft's likeliest
    tokens are told where it was rejected. Raises UsageError for what the rounds do not hold, and the error of a trace,
    head or target in ``sources`` that cannot be read or is another one.
    """
    chosen = choose_variant(rounds, variant)
    kept = choose(part, rounds.requests)
    taken = replace(rounds, requests=tuple(one for one in rounds.requests if one.request_id in kept))
    found = _Found()
    for folder, requests in _by_trace(taken).items():
        _look(taken, chosen, sources.trace or folder, requests, sources, found, top)
    notes = list(dict.fromkeys(found.notes))
    return view_requests(taken, chosen, found.known, found.spelling, first_rejected=first_rejected, notes=notes)


def choose_variant(rounds: Rounds, name: str | None) -> VariantInfo:
    """The variant called ``name``, or that of the largest accept length. Raises UsageError."""
    import polars as pl

    if name is not None:
        found = next((one for one in rounds.variants if one.name == name), None)
        if found is None:
            there = some([one.name for one in rounds.variants])
            raise UsageError(f"no variant is called {name!r}, there are {there}; type one of these after --variant")
        return found
    means = dict(rounds.table.group_by("variant").agg(pl.col("accepted").mean()).iter_rows())
    if not means:
        raise UsageError("the rounds file holds no round; simulate requests of more than one output token")
    return max(rounds.variants, key=lambda one: means.get(one.name, -1.0))


def _by_trace(rounds: Rounds) -> Mapping[Path, list[RequestInfo]]:
    """The requests by the folder of their trace."""
    told = rounds.trace.get("traces")
    folders = {one.get("name"): one.get("path") for one in told} if isinstance(told, list) else {}
    found: dict[Path, list[RequestInfo]] = {}
    for request in rounds.requests:
        folder = folders.get(request.trace) or rounds.trace.get("path")
        found.setdefault(Path(str(folder)), []).append(request)
    return found


def _look(
    rounds: Rounds, variant: VariantInfo, folder: Path, requests: Sequence[RequestInfo], sources: Sources,
    found: _Found, top: int,
) -> None:  # fmt: skip
    """What one trace tells of its requests."""
    try:
        trace = Trace.open(folder, allow_incomplete=True, target=sources.target, verify=sources.verify)
        records = [_record(trace, request) for request in requests]
        told = {request.request_id: _of_trace(trace, index) for request, index in zip(requests, records, strict=True)}
        for request in requests:
            _check_text(rounds, variant, request, told[request.request_id], folder)
    except ReplayError as error:
        if sources.trace is not None:
            raise
        found.notes.append(f"the target's tokens and the draft's ranks: {error}; name the trace with --trace")
        return
    found.known |= told
    _read_words(trace, sources, found)
    _rank(rounds, variant, trace, list(zip(requests, records, strict=True)), sources.draft, found, top)


def _record(trace: Trace, request: RequestInfo) -> int:
    """The place of a request in its trace. Raises TraceError where it is not there, or another."""
    names = (request.request_id, request.request_id.removeprefix(f"{request.trace}/"))
    place = next((place for place, one in enumerate(trace.records) if one.request_id in names), None)
    if place is None:
        raise TraceError(f"{trace.path} holds no request {request.request_id!r}; name the trace that was simulated")
    record = trace.records[place]
    if (record.prompt_tokens, record.output_tokens) != (request.prompt_tokens, request.output_tokens):
        raise TraceError(
            f"request {request.request_id!r} of {trace.path} is another than was simulated: it has "
            f"{record.prompt_tokens} prompt and {record.output_tokens} output tokens, not {request.prompt_tokens} and "
            f"{request.output_tokens}; simulate again"
        )
    return place


def _of_trace(trace: Trace, index: int) -> Known:
    record, rows = trace.records[index], trace.read(index, ())
    return Known(
        tokens=(*rows.tokens.tolist(), *rows.tail_ids.tolist()),
        target=_target_shares(trace, index, record),
        cached_tokens=record.server_cached_tokens,
        pieces=record.server_prefill_rows or (),
    )


def _target_shares(trace: Trace, index: int, record: RequestRecord) -> Mapping[int, Mapping[int, float]]:
    """By position in the request what the target gave its likeliest tokens there."""
    ids_NP, logprobs_NP, _ = trace.logits(index)
    shares = zip(ids_NP.tolist(), logprobs_NP.exp().tolist(), strict=True)
    return {
        place: dict(zip(ids, chances, strict=True)) for place, (ids, chances) in enumerate(shares, record.prompt_tokens)
    }


def _check_text(rounds: Rounds, variant: VariantInfo, request: RequestInfo, known: Known, folder: Path) -> None:
    """Raises TraceError where accepted tokens are not those of the text."""
    if variant.topk > 1:
        return
    for row in _rows(rounds, variant, request):
        start, count = row["anchor"] + 1, row["accepted"]
        text = known.tokens[start : start + count]
        if tuple(row["drafted"][: len(text)]) != text:
            raise TraceError(
                f"request {request.request_id!r} of {folder} has another text than was simulated (round "
                f"{row['round']}); name the trace that was, with --trace"
            )


def _rows(rounds: Rounds, variant: VariantInfo, request: RequestInfo) -> list[dict[str, Any]]:
    import polars as pl

    wanted = (pl.col("variant") == variant.name) & (pl.col("request_id") == request.request_id)
    return rounds.table.filter(wanted).sort("round").to_dicts()


def _read_words(trace: Trace, sources: Sources, found: _Found) -> None:
    """The tokenizer in the target's folder, which is not fetched."""
    told = trace.header.target
    folder = sources.target or Path(told.path)
    try:
        if not folder.is_dir():
            if sources.target is not None:
                raise UsageError(f"--target {folder} is no folder; give that of the target's checkpoint")
            raise UsageError(f"the target's folder {told.path} is not here; name it with --target")
        if told.fingerprint and sources.target and fingerprint_target(folder) != told.fingerprint:
            raise UsageError(f"--target {folder} is not the checkpoint of {told.name} that was recorded; give that one")
        found.spelling = read_spelling(local_folder(folder))
    except ReplayError as error:
        if sources.target is not None:
            raise
        found.notes.append(f"texts, token ids stand in their place: {error}")


def _rank(
    rounds: Rounds, variant: VariantInfo, trace: Trace, places: Sequence[tuple[RequestInfo, int]], draft: Path | None,
    found: _Found, top: int,
) -> None:  # fmt: skip
    try:
        group = _group(rounds, variant, trace, draft)
        for request, index in places:
            if played := _rows(rounds, variant, request):
                rankings = dict(_rankings(group, trace, index, played, top))
                found.known[request.request_id] = replace(found.known[request.request_id], rankings=rankings)
    except ReplayError as error:
        if draft is not None:
            raise
        found.notes.append(f"the draft's ranks: {error}")


def _group(rounds: Rounds, variant: VariantInfo, trace: Trace, typed: Path | None) -> Group:
    """The head of a variant, ready to run. Raises UsageError where ranks cannot be read of it."""
    told = rounds.drafts.get(variant.draft)
    path = typed or (told.get("path") if isinstance(told, Mapping) else None)
    if path is None:
        raise UsageError(
            f"the rounds file does not say where draft head {variant.draft} lies; name its folder with --draft"
        )
    checkpoint = read_checkpoint(as_source(path))
    asked = Variant(
        draft=variant.draft,
        wiring=Wiring(variant.wiring),
        steps=variant.steps,
        topk=variant.topk,
        num_draft_tokens=variant.num_draft_tokens,
        precision=variant.precision,
        numerics=variant.numerics,
        kv=variant.kv,
        verify=variant.verify,
        engine=variant.engine,
        faults=parse_faults("+".join(variant.faults)) if variant.faults else (),
    )
    heads = {variant.draft: checkpoint}
    (group,) = group_variants([resolve(asked, checkpoint, trace)], heads, trace, "cpu")
    _check_readable(group, variant)
    return group


def _check_readable(group: Group, variant: VariantInfo) -> None:
    why = (
        "it drafts trees" if group.topk > 1
        else "its drafts are drawn" if group.sampled
        else "its draft KV depends on the rounds before" if group.head.behaviour.follows_walk
        else "it hands states from request to request" if group.crosses
        else "it drafts token 0 unasked" if group.head.behaviour.dummy_from is not None
        else None
    )  # fmt: skip
    if why:
        raise UsageError(f"of variant {variant.name} they are not read, because {why}; choose another with --variant")


def _rankings(
    group: Group, trace: Trace, index: int, played: Sequence[dict[str, Any]], top: int
) -> Iterator[tuple[int, Ranking]]:
    """By round what the head had at the first rejected position."""
    rows = trace.read(index, taps_of([group]))
    drafted_AK = torch.tensor([row["drafted"] for row in played])
    ranked = _read(group, trace, rows, played, drafted_AK, top)
    for place, row in enumerate(played):
        step = row["accepted"]
        if step < drafted_AK.shape[1]:
            rank = int(ranked.rank_AK[place, step])
            likeliest = zip(ranked.top_AKP[place, step].tolist(), ranked.chances_AKP[place, step].tolist(), strict=True)
            yield row["round"], Ranking(rank or None, float(ranked.chance_AK[place, step]), tuple(likeliest))


def _read(
    group: Group, trace: Trace, rows: RequestRows, played: Sequence[dict[str, Any]], drafted_AK: torch.Tensor, top: int
) -> Ranked:
    """Raises TraceError where this head would not have drafted what stands in the rounds."""
    anchors = [row["anchor"] for row in played]
    if not all(rows.prompt_tokens <= anchor < len(rows.tokens) for anchor in anchors):
        raise TraceError(f"rounds of request {rows.request_id!r} lie outside of its tokens; simulate again")
    lead = FollowedRounds(tuple(anchors), tuple(row["accepted"] for row in played))
    spans = served_spans(trace.served_rounds()) if group.head.execution.product_rows is not None else {}
    with torch.inference_mode():
        (item,) = stem_inputs([group], [rows], [lead], trace, spans)
        known_T = torch.cat([rows.tokens, rows.tail_ids, torch.full((drafted_AK.shape[1] + 1,), -1)])
        wanted_AK = known_T[torch.tensor(anchors)[:, None] + 1 + torch.arange(drafted_AK.shape[1])]
        ranked = rank_along(group.head, item, drafted_AK, wanted_AK, top)
    behind_A = ranked.behind_AK.amax(1)
    if not float(behind_A.max()) <= _SAME:  # NaN, of logits that are not finite, too
        raise TraceError(
            f"draft head {group.head.name} does not draft what the rounds hold (round {int(behind_A.argmax())} of "
            f"request {rows.request_id!r}): the head or the trace has changed; simulate again"
        )
    return ranked
