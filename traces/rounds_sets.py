"""Rounds of some requests out of many, and rounds of several traces as one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from replay.errors import TraceError, UsageError
from replay.printable import counted
from replay.traces.agreement import Agreement
from replay.traces.given import check_named
from replay.traces.header import ONE_TARGET
from replay.traces.parts import Part, check_part, choose, say_part
from replay.traces.rounds import (
    Expected,
    JsonObject,
    RequestInfo,
    Rounds,
    VariantInfo,
    VariantSettings,
    check_are_rounds,
)

_NOT_SHARED = ("path", "requests", "missing", "doubts", "taps", "wirings", "engine", "engine_version", "part")


def take_part(rounds: Rounds, part: Part) -> Rounds:
    """The rounds of the requests that ``part`` asks for; all of them where it asks for nothing.

    What was counted over the whole trace and cannot be told apart, how the trace's own server agrees, is left out.
    Raises UsageError as ``choose``, TraceError for rounds from before variants had their sums by request.
    """
    check_are_rounds("rounds", rounds)
    check_part(part)
    if part.whole:
        return rounds
    kept = keep_requests(rounds, choose(part, rounds.requests))
    said = say_part(part, len(kept.requests), len(rounds.requests), str(rounds.trace.get("part") or ""))
    return replace(kept, trace={**kept.trace, "part": said})


def keep_requests(rounds: Rounds, ids: Collection[str]) -> Rounds:
    """The rounds of these requests. Raises TraceError as ``take_part``."""
    import polars as pl

    places = [place for place, request in enumerate(rounds.requests) if request.request_id in ids]
    return replace(
        rounds,
        table=rounds.table.filter(pl.col("request_id").is_in(list(ids))),
        variants=tuple(_variant_of(variant, places) for variant in rounds.variants),
        requests=tuple(rounds.requests[place] for place in places),
        trace={**rounds.trace, "requests": len(places)},
    )


def _variant_of(variant: VariantInfo, places: Sequence[int]) -> VariantInfo:
    if variant.by_request is None:
        raise TraceError(
            f"variant {variant.name!r} does not say what was counted in each request, so that no part of its rounds "
            "can be taken; simulate again with -o"
        )
    sums = tuple(variant.by_request[place] for place in places)
    expected = variant.expected
    return replace(
        variant,
        **_totals(sums),
        by_request=sums,
        agreement=None,
        expected=None if expected is None else replace(expected, sums=tuple(expected.sums[place] for place in places)),
    )


def _totals(sums: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    anchors, accepted, ties = (sum(row[column] for row in sums) for column in range(3))
    return {"anchors": anchors, "anchors_accepted": accepted, "ties": ties}


def pool_rounds(apart: Mapping[str, Rounds]) -> Rounds:
    """Rounds of the same variants on several traces, by the trace's name, as those of one.

    Each request says of which trace it is; where two traces have requests of one name, every name gets its trace in
    front. Raises TraceError where targets differ, UsageError where the variants do.
    """
    import polars as pl

    check_named("apart", apart, Rounds, 'rounds by the name of their trace were expected; pass {"monday": rounds, ...}')
    first_name, first = next(iter(apart.items()))
    for name, rounds in apart.items():
        _check_alike(first_name, first, name, rounds)
    ids = [request.request_id for rounds in apart.values() for request in rounds.requests]
    prefixes = dict.fromkeys(apart, "") if len(set(ids)) == len(ids) else {name: f"{name}/" for name in apart}
    tables = [
        rounds.table.with_columns(pl.concat_str(pl.lit(prefixes[name]), "request_id").alias("request_id"))
        for name, rounds in apart.items()
    ]
    return Rounds(
        table=pl.concat(tables),
        variants=tuple(_pooled(same) for same in zip(*(rounds.variants for rounds in apart.values()), strict=True)),
        requests=tuple(
            _of_trace(request, name, prefixes[name]) for name, rounds in apart.items() for request in rounds.requests
        ),
        trace=_describe(apart),
        drafts=first.drafts,
    )


def _of_trace(request: RequestInfo, name: str, prefix: str) -> RequestInfo:
    return replace(request, request_id=f"{prefix}{request.request_id}", trace=name)


def _check_alike(first_name: str, first: Rounds, name: str, rounds: Rounds) -> None:
    for fact in _facts(first.trace, rounds.trace):
        one, other = first.trace.get(fact), rounds.trace.get(fact)
        if one != other:
            raise TraceError(
                f"the traces are of two targets: {fact.replace('_', ' ')} is {one!r} in {first_name} and {other!r} in "
                f"{name}; replay each by itself"
            )
    if len(first.variants) != len(rounds.variants):
        raise UsageError(
            f"{first_name} has {counted(len(first.variants), 'variant')} and {name} has {len(rounds.variants)}; replay "
            "each by itself, or both with the same variants"
        )
    for one, other in zip(first.variants, rounds.variants, strict=True):
        for key in VariantSettings.__dataclass_fields__:
            if getattr(one, key) != getattr(other, key):
                raise UsageError(
                    f"{key} of variant {one.name!r} is {getattr(one, key)!r} in {first_name} and "
                    f"{getattr(other, key)!r} in {name}; replay each by itself"
                )


def _facts(one: JsonObject, other: JsonObject) -> tuple[str, ...]:
    """What makes one target; of rounds from before these said it all, what they say, and the target's name."""
    both = tuple(fact for fact in ONE_TARGET if fact in one and fact in other)
    return both if both == ONE_TARGET else ("target", "model_type", "layers", "hidden_size", "dtype", *both)


def _pooled(same: tuple[VariantInfo, ...]) -> VariantInfo:
    first = same[0]
    sums = [one.by_request for one in same]
    return replace(
        first,
        seconds=round(sum(one.seconds for one in same), 3),
        anchors=sum(one.anchors for one in same),
        anchors_accepted=sum(one.anchors_accepted for one in same),
        ties=sum(one.ties for one in same),
        by_request=None if None in sums else tuple(row for rows in sums if rows is not None for row in rows),
        expected=_expected([one.expected for one in same]),
        agreement=_agreement([one.agreement for one in same]),
    )


def _expected(parts: Sequence[Expected | None]) -> Expected | None:
    told = [part for part in parts if part is not None]
    if len(told) < len(parts) or not told:
        return None
    notes = "; ".join(dict.fromkeys(part.note for part in told))
    sums = tuple(row for part in told for row in part.sums)
    return Expected(told[0].rule, all(part.exact for part in told), notes, sums)


def _agreement(parts: Sequence[Agreement | None]) -> Agreement | None:
    """Counts are added; of noise the largest stands."""
    told = [asdict(part) for part in parts if part is not None]
    if len(told) < len(parts) or not told:
        return None
    added = ("rounds", "alike", "near_tie", "unexplained", "tokens", "flips", "flips_expected")
    joined = {name: (sum if name in added else max)(row[name] for row in told) for name in told[0]}
    return Agreement(**joined)


def _describe(apart: Mapping[str, Rounds]) -> JsonObject:
    """What the traces share stands as of one; the rest is told of each."""
    traces = [rounds.trace for rounds in apart.values()]
    shared = {key: value for key, value in traces[0].items() if key not in _NOT_SHARED}
    taps = [tap for tap in traces[0].get("taps", []) if all(tap in trace.get("taps", []) for trace in traces)]
    engines = dict.fromkeys((str(trace.get("engine")), str(trace.get("engine_version"))) for trace in traces)
    return {
        "path": ", ".join(str(trace.get("path")) for trace in traces),
        **shared,
        "engine": ", ".join(dict.fromkeys(name for name, _ in engines)),
        "engine_version": ", ".join(dict.fromkeys(version for _, version in engines)),
        "taps": taps,
        "missing": list(dict.fromkeys(what for trace in traces for what in trace.get("missing", []))),
        "doubts": [f"Of trace {name}: {said}" for name, one in apart.items() for said in one.trace.get("doubts", [])],
        "requests": sum(len(rounds.requests) for rounds in apart.values()),
        "wirings": traces[0].get("wirings", {}),
        "traces": [_told(name, rounds) for name, rounds in apart.items()],
    }


def _told(name: str, rounds: Rounds) -> JsonObject:
    told = {key: rounds.trace.get(key) for key in ("path", "engine", "engine_version", "part")}
    return {"name": name, **told, "requests": len(rounds.requests)}
