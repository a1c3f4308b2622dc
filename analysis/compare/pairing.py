"""Rounds of one or two files brought together for a comparison, refused where they are not of one trace.

With the texts of two traces, they may be two recordings of the same prompts (texts.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from replay.analysis.compare.texts import Texts, check_told, shared_tokens
from replay.analysis.json_document import JsonObject
from replay.errors import TraceError, UsageError
from replay.traces.rounds import Rounds, VariantInfo, VariantSettings
from replay.traces.rounds_join import tell_heads

if TYPE_CHECKING:
    import polars as pl

# What the trace says of itself that a copy of it cannot change.
_TRACE_FACTS = ("target", "model_type", "layers", "hidden_size", "dtype", "engine", "engine_version")
_REQUEST_FACTS = ("prompt_tokens", "output_tokens", "source", "temperature", "tokens_sha256")


@dataclass(frozen=True, slots=True)
class PairedRounds:
    """The requests that both have, under A and every B. ``shown`` has the variants' own names, by those in ``rounds``:
    ``A`` and ``B``, or ``B1``, ``B2`` and on; to a name that several have, what they differ in is added. ``files``: how
    many rounds files they came from.

    ``only_a`` and ``only_b`` name the requests that were left out because one of the two does not have them.
    ``texts`` are those of two recordings, and ``shared`` the tokens that both begin with, by request in the order of
    ``rounds.requests``; both are None where the rounds are of one trace. ``traces``: what those of A and B say of
    themselves.
    """

    rounds: Rounds
    a: VariantInfo
    others: tuple[VariantInfo, ...]
    shown: dict[str, str]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    files: int = 1
    texts: tuple[Texts, Texts] | None = None
    shared: Mapping[str, int] | None = None
    traces: tuple[JsonObject, ...] = ()


def pair_rounds(
    first: Rounds,
    second: Rounds | None = None,
    *,
    variant_a: str | None = None,
    variant_b: str | None = None,
    called: Sequence[str] = ("the first rounds file", "the second rounds file"),
    texts: tuple[Texts, Texts] | None = None,
) -> PairedRounds:
    """A from ``first``, every B from ``second``; from one alone its first variant is A and every other a B.

    ``called``: what messages call the two, such as the names of their files. ``texts`` of the traces that the two files
    were simulated on, where these are two recordings of the same prompts.

    Raises UsageError for a variant that is not there or not named where there are several, and where there is nothing
    to compare; TraceError where the two are not of one trace.
    """
    if second is not None:
        first, second = _told_heads(first, second)
    a = _choose_a(first, variant_a, called[0], alone=second is None)
    if second is None:
        others = _choose_others(first, variant_b, called[0], leave=a.name)
    else:
        others = _choose_others(second, variant_b, called[1], leave=None)
    source = first if second is None else second
    if second is not None and texts is None:
        _check_trace(first, second)
    ids_a, ids_b = ([request.request_id for request in rounds.requests] for rounds in (first, source))
    common = set(ids_a) & set(ids_b)
    if not common:
        raise UsageError(f"no request is in both, the first has {len(ids_a)} and the second {len(ids_b)} of other "
                         "names; give two rounds files that simulate wrote from one trace")  # fmt: skip
    shared = None
    if second is not None and texts is not None:
        _check_texts(first, second, texts, called)
        shared = shared_tokens(*texts, [name for name in ids_a if name in common])
    elif second is not None:
        _check_requests(first, second, _REQUEST_FACTS)
        _check_tokens(first, a, second, others[0])
    letters = ["B"] if len(others) == 1 else [f"B{number}" for number in range(1, len(others) + 1)]
    renamed = [replace(a, name="A"), *(replace(b, name=name) for b, name in zip(others, letters, strict=True))]
    chosen = [_part(first, a.name, "A", common)]
    chosen += [_part(source, b.name, new.name, common) for b, new in zip(others, renamed[1:], strict=True)]
    rounds = Rounds(
        table=_concat(chosen),
        variants=tuple(renamed),
        requests=tuple(request for request in first.requests if request.request_id in common),
        trace=first.trace,
        drafts={**source.drafts, **first.drafts},
    )
    shown = dict(zip((new.name for new in renamed), _own_names([a, *others], two=second is not None), strict=True))
    only = [tuple(name for name in names if name not in common) for names in (ids_a, ids_b)]
    files, traces = (1, (first.trace,)) if second is None else (2, (first.trace, second.trace))
    return PairedRounds(rounds, renamed[0], tuple(renamed[1:]), shown, only[0], only[1], files, texts, shared, traces)


def _told_heads(first: Rounds, second: Rounds) -> tuple[Rounds, Rounds]:
    """Both with names of heads that tell those of the two files apart."""
    heads, called = tell_heads({"first file": first, "second file": second})

    def renamed(rounds: Rounds, file: str) -> Rounds:
        own = tuple(replace(one, draft=called[file, one.draft]) for one in rounds.variants)
        return replace(rounds, variants=own, drafts=heads)

    return renamed(first, "first file"), renamed(second, "second file")


def _own_names(variants: Sequence[VariantInfo], *, two: bool) -> list[str]:
    """Their names; of ``two`` files, which name their variants each by itself, with what sets A apart from all others.

    So may two of them use one name for different ones. Where they are of several heads each name has its head, unless
    it says it already.
    """
    heads = _head_names(variants)
    between = _between(variants) if two else []
    return [
        " · ".join(filter(None, [heads[one.draft], _apart(one, [o for o in variants if o.name == one.name], between)]))
        for one in variants
    ]


def _between(variants: Sequence[VariantInfo]) -> list[str]:
    """The settings of drafting that all variants of the one file have alike and A has otherwise."""
    first, *others = variants
    return [
        name
        for name in ("steps", "topk", "num_draft_tokens")
        if not (name == "num_draft_tokens" and all(one.topk == 1 for one in variants))
        and all(_setting(one, name) != _setting(first, name) for one in others)
        and len({_setting(one, name) for one in others}) == 1
    ]


def _head_names(variants: Sequence[VariantInfo]) -> dict[str, str]:
    """What stands in front of a name for its head: nothing where there is one head, or every name says its own."""
    drafts = dict.fromkeys(variant.draft for variant in variants)
    if len(drafts) == 1 or all(variant.draft in variant.name for variant in variants):
        return dict.fromkeys(drafts, "")
    short = [PurePath(draft).name for draft in drafts]
    return dict(zip(drafts, short if len(set(short)) == len(short) else drafts, strict=True))


def _apart(variant: VariantInfo, alike: Sequence[VariantInfo], between: Sequence[str]) -> str:
    """Its name, what sets it apart from others of that name beside the head, and of ``between`` what it leaves out."""
    apart = [
        field.name
        for field in fields(VariantSettings)
        if field.name not in ("name", "draft")
        and any(_setting(one, field.name) != _setting(variant, field.name) for one in alike)
    ]
    apart += [name for name in between if name not in apart and _setting(variant, name) not in variant.name.split()]
    return " ".join([variant.name, *(_setting(variant, name) for name in apart)])


def _setting(variant: VariantInfo, name: str) -> str:
    match name:
        case "faults":
            return "+".join(variant.faults) or "no fault"
        case "wiring":
            return ",".join(variant.wiring)
        case _:
            return f"{name}={asdict(variant)[name]}"


def _choose_a(rounds: Rounds, wanted: str | None, called: str, *, alone: bool) -> VariantInfo:
    if wanted is None and rounds.variants and (alone or len(rounds.variants) == 1):
        return rounds.variants[0]
    return _named(rounds, wanted, called, "--variant-a")


def _choose_others(rounds: Rounds, wanted: str | None, called: str, *, leave: str | None) -> list[VariantInfo]:
    if wanted is not None:
        return [_named(rounds, wanted, called, "--variant-b")]
    others = [variant for variant in rounds.variants if variant.name != leave]
    if not others:
        raise UsageError(f"{called} has one variant, two are needed to compare; give a second rounds file")
    return others


def _named(rounds: Rounds, wanted: str | None, called: str, option: str) -> VariantInfo:
    found = [variant for variant in rounds.variants if variant.name == wanted]
    if not found:
        names = ", ".join(repr(variant.name) for variant in rounds.variants) or "none"
        seen = f"{called} has {len(rounds.variants)} variants, {names}"
        if wanted is not None:
            seen = f"{called} has no variant {wanted!r}, it has {names}"
        raise UsageError(f"{seen}; type one of them after {option}")
    return found[0]


def _check_trace(first: Rounds, second: Rounds) -> None:
    for fact in _TRACE_FACTS:
        one, other = first.trace.get(fact), second.trace.get(fact)
        if one != other:
            raise TraceError(
                f"the rounds are of two traces: {fact.replace('_', ' ')} is {one!r} in the first and {other!r} in the "
                "second; simulate both on one trace, or name the two by --trace-a and --trace-b"
            )


def _check_texts(first: Rounds, second: Rounds, texts: tuple[Texts, Texts], called: Sequence[str]) -> None:
    """Each of ``texts`` is of its rounds, and both were recorded in one way. Raises TraceError."""
    for rounds, own, name in zip((first, second), texts, called, strict=True):
        check_told(rounds, own, name)
    _check_requests(first, second, ("source", "temperature"))


def _check_requests(first: Rounds, second: Rounds, facts: Sequence[str]) -> None:
    others = {request.request_id: request for request in second.requests}
    for request in first.requests:
        twin = others.get(request.request_id)
        for fact in facts if twin is not None else ():
            one, other = getattr(request, fact), getattr(twin, fact)
            if fact == "tokens_sha256" and None in (one, other):
                continue  # files from before there was it
            if one != other and fact == "tokens_sha256":
                raise TraceError(
                    f"the rounds are of two traces: the tokens of request {request.request_id!r} differ; simulate both "
                    "on one trace, or name the two by --trace-a and --trace-b"
                )
            if one != other:
                raise TraceError(
                    f"the rounds are of two traces: {fact.replace('_', ' ')} of request {request.request_id!r} is "
                    f"{one!r} in the first and {other!r} in the second; simulate both on one trace"
                )


def _check_tokens(first: Rounds, a: VariantInfo, second: Rounds, b: VariantInfo) -> None:
    """Accepted tokens are the target's: where both walks tell the same position's, they must be the same.

    Chains only: which nodes of a tree were accepted is not in the table.
    """
    import polars as pl

    if a.topk > 1 or b.topk > 1:
        return
    told = _emitted(first, a.name).join(_emitted(second, b.name), on=["request_id", "position"], suffix="_b")
    wrong = told.filter(pl.col("token") != pl.col("token_b")).head(1)
    for request_id, position, one, other in wrong.iter_rows():
        raise TraceError(
            f"the rounds are of two traces: the target emitted token {one} at position {position} of request "
            f"{request_id!r} in the first and {other} in the second; simulate both on one trace"
        )


def _emitted(rounds: Rounds, variant: str) -> "pl.DataFrame":
    """Tokens [request_id, position, token] that the accepted drafts tell: the i-th of anchor S is token S + i."""
    import polars as pl

    taken = rounds.table.filter((pl.col("variant") == variant) & (pl.col("accepted") > 0)).select(
        "request_id",
        (pl.col("anchor") + pl.int_ranges(1, pl.col("accepted") + 1)).alias("position"),
        pl.col("drafted").list.head(pl.col("accepted")).alias("token"),
    )
    return taken.explode("position", "token").unique(["request_id", "position"], maintain_order=True)


def _part(rounds: Rounds, name: str, new: str, requests: set[str]) -> "pl.DataFrame":
    import polars as pl

    kept = rounds.table.filter((pl.col("variant") == name) & pl.col("request_id").is_in(list(requests)))
    return kept.with_columns(pl.lit(new).alias("variant"))


def _concat(parts: Sequence["pl.DataFrame"]) -> "pl.DataFrame":
    import polars as pl

    return pl.concat(parts)
