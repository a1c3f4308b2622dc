"""Rounds of several files as those of one: every variant with its file in front, every head told from the others."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from replay.errors import TraceError, UsageError
from replay.traces.header import ONE_TARGET
from replay.traces.rounds import Expected, JsonObject, RequestInfo, Rounds, VariantInfo
from replay.traces.rounds_file import read_rounds

FILES = "files"  # in ``Rounds.trace`` where rounds of several files were joined
BETWEEN = ": "  # a file's name and that of a variant in it
_OLD_TARGET = ("target", "model_type", "layers", "hidden_size", "dtype")  # of rounds from before ``ONE_TARGET``
_REQUEST = ("prompt_tokens", "output_tokens", "source", "temperature", "observed_histogram")


def read_joined(paths: Sequence[Path]) -> Rounds:
    """The rounds of one file, or of several as ``join_rounds``.

    Raises UsageError for a file that is named twice, and as ``read_rounds``.
    """
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        twice = next(path for place, path in enumerate(paths) if path.resolve() in [p.resolve() for p in paths[:place]])
        raise UsageError(f"{twice} is named twice; name each rounds file once")
    if len(paths) == 1:
        return read_rounds(paths[0])
    names = short_names(paths)
    joined = join_rounds({name: read_rounds(path) for name, path in zip(names, paths, strict=True)})
    told = [f"{name} = {path}" for name, path in zip(names, paths, strict=True)]
    return replace(joined, trace={**joined.trace, FILES: told})


def short_names(paths: Sequence[PurePath]) -> list[str]:
    """The names of files without their ending; of files with one name the folders too in which they differ."""
    ends = [path.with_suffix("").parts for path in paths]
    names = []
    for place, parts in enumerate(ends):
        others = [other for at, other in enumerate(ends) if at != place]
        depth = next((n for n in range(1, len(parts)) if parts[-n:] not in [o[-n:] for o in others]), len(parts))
        name = "/".join(parts[-depth:])
        names.append(name if parts not in others else f"{name} ({place + 1})")  # r.parquet beside r.pq
    return names


def join_rounds(files: Mapping[str, Rounds]) -> Rounds:
    """Rounds of one trace, or of requests with other names, by what each file is called.

    A variant is called ``FILE: NAME``. A request that only some files have is one without rounds under the others'
    variants. Raises TraceError for files of several targets, and where requests of one name are not the same.
    """
    import polars as pl

    requests: dict[str, RequestInfo] = {}
    several = len({str(rounds.trace.get("path")) for rounds in files.values()}) > 1
    for name, rounds in files.items():
        _check_target(files, name)
        for request in rounds.requests:
            own = replace(request, trace=request.trace or name) if several else request
            first = requests.setdefault(request.request_id, own)
            _check_request(first, own, name)
            _check_text(first, own, name, several=several)
            if first.tokens_sha256 is None:
                requests[request.request_id] = replace(first, tokens_sha256=own.tokens_sha256)
    drafts, heads = tell_heads(files)
    variants, tables = [], []
    for name, rounds in files.items():
        variants += [_variant(name, one, rounds, requests, heads[name, one.draft]) for one in rounds.variants]
        tables.append(rounds.table.with_columns(pl.concat_str(pl.lit(name + BETWEEN), "variant").alias("variant")))
    trace = _trace(files, len(requests), several)
    return Rounds(pl.concat(tables), tuple(variants), tuple(requests.values()), trace, drafts)


def _check_target(files: Mapping[str, Rounds], name: str) -> None:
    first, other = next(iter(files.values())).trace, files[name].trace
    known = tuple(fact for fact in ONE_TARGET if fact in first and fact in other)
    for fact in known if known == ONE_TARGET else _OLD_TARGET:
        if first.get(fact) != other.get(fact):
            raise TraceError(
                f"the rounds are of two targets: {fact.replace('_', ' ')} is {first.get(fact)!r} in "
                f"{next(iter(files))} and {other.get(fact)!r} in {name}; make a report of each"
            )


def _check_request(first: RequestInfo, other: RequestInfo, name: str) -> None:
    for fact in _REQUEST:
        if getattr(first, fact) != getattr(other, fact):
            raise TraceError(
                f"the rounds are of two traces: {fact.replace('_', ' ')} of request {first.request_id!r} is "
                f"{getattr(other, fact)!r} in {name} and {getattr(first, fact)!r} in a file before it; make a report "
                "of each"
            )


def _check_text(first: RequestInfo, other: RequestInfo, name: str, *, several: bool) -> None:
    """Raises TraceError for two texts, and for sampled ones of two traces that may be two."""
    texts = (first.tokens_sha256, other.tokens_sha256)
    if None not in texts and texts[0] != texts[1]:
        raise TraceError(
            f"the rounds are of two traces: the tokens of request {first.request_id!r} in {name} are not those in a "
            "file before it; make a report of each"
        )
    if None in texts and several and first is not other and first.temperature > 0:
        raise TraceError(
            f"the rounds are of traces at two paths, and request {first.request_id!r} was sampled: whether its text in "
            f"{name} is that in a file before it is not in these files; simulate again with -o, or make a report of "
            "each"
        )


def tell_heads(files: Mapping[str, Rounds]) -> tuple[JsonObject, dict[tuple[str, str], str]]:
    """The heads of files by names that tell them apart, and this name by file and the name in it.

    Heads of one name are one where all is alike that their files say of them, but what was noted while they ran.
    """
    told: dict[str, list[tuple[str, JsonObject]]] = {}
    for file, rounds in files.items():
        for name in dict.fromkeys([*rounds.drafts, *(one.draft for one in rounds.variants)]):
            facts = rounds.drafts.get(name)
            told.setdefault(name, []).append((file, facts if isinstance(facts, dict) else {}))
    heads: JsonObject = {}
    called: dict[tuple[str, str], str] = {}
    for name, those in told.items():
        alike = all(_lasting(facts) == _lasting(those[0][1]) for _, facts in those)
        parents = [PurePath(str(facts.get("path") or "")).parent.name for _, facts in those]
        by_folder = len({str(_lasting(facts)) for _, facts in those}) == len(set(parents)) and all(parents)
        for (file, facts), parent in zip(those, parents, strict=True):
            own = name if alike else f"{name} in {parent}" if by_folder else f"{name} ({file})"
            notes = [*heads.get(own, {}).get("notes", ()), *facts.get("notes", ())]
            heads[own] = {**facts, "notes": list(dict.fromkeys(notes))} if facts else facts
            called[file, name] = own
    return heads, called


def _lasting(facts: JsonObject) -> JsonObject:
    return {key: value for key, value in facts.items() if key != "notes"}


def _variant(
    file: str, variant: VariantInfo, rounds: Rounds, requests: Mapping[str, RequestInfo], head: str
) -> VariantInfo:
    place = {request.request_id: row for row, request in enumerate(rounds.requests)}
    rows = [place.get(name) for name in requests]
    by_request, expected = variant.by_request, variant.expected
    return replace(
        variant,
        name=f"{file}{BETWEEN}{variant.name}",
        draft=head,
        by_request=None if by_request is None else tuple((0, 0, 0) if r is None else by_request[r] for r in rows),
        expected=None if expected is None else _expected(expected, rows),
    )


def _expected(expected: Expected, rows: Sequence[int | None]) -> Expected:
    width = len(expected.sums[0]) if expected.sums else 0
    return replace(expected, sums=tuple((0.0,) * width if row is None else expected.sums[row] for row in rows))


def _trace(files: Mapping[str, Rounds], requests: int, several: bool) -> JsonObject:
    """That of the first file; of several traces which they are, and what any of them lacks or raises."""
    traces = {name: rounds.trace for name, rounds in files.items()}
    first = next(iter(traces.values()))
    wirings = {key: ids for trace in reversed(traces.values()) for key, ids in dict(trace.get("wirings") or {}).items()}
    joined = {**first, "requests": requests, "wirings": wirings}
    for key in ("missing", "doubts"):
        joined[key] = list(dict.fromkeys(said for trace in traces.values() for said in trace.get(key) or ()))
    joined.pop("part", None)
    if parts := [f"{name}: {trace['part']}" for name, trace in traces.items() if trace.get("part")]:
        joined["part"] = "; ".join(parts)
    if several:
        joined["path"] = ", ".join(dict.fromkeys(str(trace.get("path")) for trace in traces.values()))
        joined["traces"] = [one for name, rounds in files.items() for one in _told(name, rounds)]
    return joined


def _told(name: str, rounds: Rounds) -> list[JsonObject]:
    known = rounds.trace.get("traces")
    if isinstance(known, list):
        return known
    told = {key: rounds.trace.get(key) for key in ("path", "engine", "engine_version", "part")}
    return [{"name": name, **told, "requests": len(rounds.requests)}]
