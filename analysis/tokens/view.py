"""The rounds of requests token by token: what was drafted, what the target chose, and why a token was rejected.

``Known`` holds what is known of one request beside its rounds; where a part of it is not at hand the view says less.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from replay.analysis.tokens.spelling import Spelling, Token, join_text, spell_after
from replay.traces.rounds import RequestInfo, Rounds, VariantInfo

RANKED, UNDRAFTABLE, UNKNOWN = "ranked lower", "not in the draft vocabulary", "unknown"


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of one round's first rejected position: where the head had the target's choice, and its likeliest tokens.

    ``rank`` counts from 1 and is None where the head cannot draft that token; ``probability`` is the head's for it.
    ``top`` are token ids with the head's probabilities, the likeliest first.
    """

    rank: int | None
    probability: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What a trace and a head add to the rounds of one request; ``rankings`` by round.

    ``tokens`` are those of prompt, output and, where recorded, behind its end. ``target`` maps a position to the
    target's own probabilities there by token id.
    """

    tokens: tuple[int, ...]
    rankings: Mapping[int, Ranking] = field(default_factory=dict)
    target: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    cached_tokens: int | None = None
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token with the head's probability for it."""

    token: Token
    probability: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """The first drafted token that the target did not take, at ``position`` 1, 2, ... of the draft.

    ``drafted`` is None in a tree, which has several there; ``chosen`` what the target took instead. ``reason`` is one
    of this file's words. ``rank`` and ``probability`` are the head's for the target's choice, ``target_probability``
    and ``target_probability_of_drafted`` the target's own; None where they are not known.
    """

    position: int
    drafted: Token | None
    chosen: Token | None
    reason: str
    rank: int | None
    probability: float | None
    target_probability: float | None
    target_probability_of_drafted: float | None
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class RoundView:
    """One round: ``known`` is the last token before the draft, ``bonus`` the target's own behind what it accepted.

    Of a chain ``accepted``, one rejected and the others make ``drafted``; of a tree ``taken`` are the accepted tokens,
    and ``drafted`` its nodes. Tokens that are not known are None.
    """

    round: int
    anchor: int
    known: Token | None
    drafted: tuple[Token, ...]
    accepted: int
    taken: tuple[Token, ...]
    bonus: Token | None
    cut: bool
    rejection: Rejection | None


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request. ``rounds`` are those asked for, of ``played`` in all; texts are None without a tokenizer.

    ``cached_tokens`` of the prompt came from the server's cache; ``pieces`` in which it prefilled the others. None and
    empty where the trace does not tell.
    """

    request_id: str
    category: str | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    pieces: tuple[int, ...]
    prompt: str | None
    output: str | None
    played: int
    accepted: int
    rounds: tuple[RoundView, ...]


@dataclass(frozen=True, slots=True)
class View:
    """Requests under one variant; ``notes`` say what could not be shown, and why."""

    variant: str
    topk: int
    requests: tuple[RequestView, ...]
    notes: tuple[str, ...]


def view_requests(
    rounds: Rounds,
    variant: VariantInfo,
    known: Mapping[str, Known],
    spelling: Spelling | None,
    *,
    first_rejected: bool = False,
    notes: Sequence[str] = (),
) -> View:
    """Every request of ``rounds`` under ``variant``; ``first_rejected`` leaves the rounds that accepted nothing.

    Requests without such a round are then left out.
    """
    viewed = (_request(rounds, variant, info, known.get(info.request_id), spelling) for info in rounds.requests)
    if first_rejected:
        viewed = (narrowed for one in viewed if (narrowed := _first_rejected(one)).rounds)
    return View(variant.name, variant.topk, tuple(viewed), tuple(notes))


def _first_rejected(view: RequestView) -> RequestView:
    return replace(view, rounds=tuple(one for one in view.rounds if one.accepted == 0))


def _request(
    rounds: Rounds, variant: VariantInfo, info: RequestInfo, known: Known | None, spelling: Spelling | None
) -> RequestView:
    import polars as pl

    wanted = (pl.col("variant") == variant.name) & (pl.col("request_id") == info.request_id)
    rows = rounds.table.filter(wanted).sort("round").to_dicts()
    tokens = () if known is None else known.tokens
    output = tokens[info.prompt_tokens : info.prompt_tokens + info.output_tokens]
    return RequestView(
        request_id=info.request_id,
        category=info.category,
        prompt_tokens=info.prompt_tokens,
        output_tokens=info.output_tokens,
        cached_tokens=None if known is None else known.cached_tokens,
        pieces=() if known is None else known.pieces,
        prompt=join_text(tokens[: info.prompt_tokens], spelling) if tokens else None,
        output=join_text(output, spelling) if tokens else None,
        played=len(rows),
        accepted=sum(row["accepted"] for row in rows),
        rounds=tuple(_round(row, variant, known, spelling) for row in rows),
    )


def _round(
    row: Mapping[str, object], variant: VariantInfo, known: Known | None, spelling: Spelling | None
) -> RoundView:
    anchor, accepted = int(str(row["anchor"])), int(str(row["accepted"]))
    drafted = [token for token in row["drafted"] if token >= 0]  # type: ignore[attr-defined]
    chain = variant.topk == 1
    tokens = () if known is None else known.tokens
    before, taken = tokens[: anchor + 1], _taken(tokens, drafted, anchor, accepted, chain=chain)
    bonus = _at(tokens, anchor + accepted + 1)
    number = int(str(row["round"]))
    rejected = accepted < variant.steps
    return RoundView(
        round=number,
        anchor=anchor,
        known=next(iter(spell_after(before[:-1], before[-1:], spelling)), None),
        drafted=spell_after(before, drafted, spelling) if chain else _each(before, drafted, spelling),
        accepted=accepted,
        taken=spell_after(before, taken, spelling),
        bonus=None if bonus is None else spell_after([*before, *taken], [bonus], spelling)[0],
        cut=bool(row["cut"]),
        rejection=_reject(_Place(number, anchor, accepted, chain), drafted, taken, known, spelling)
        if rejected
        else None,
    )


def _taken(tokens: Sequence[int], drafted: Sequence[int], anchor: int, accepted: int, *, chain: bool) -> Sequence[int]:
    """The accepted tokens: of a chain they are drafted in a row, of a tree the text says which they are."""
    return drafted[:accepted] if chain else tokens[anchor + 1 : anchor + 1 + accepted]


def _each(before: Sequence[int], ids: Sequence[int], spelling: Spelling | None) -> tuple[Token, ...]:
    """The nodes of a tree, each by itself: what stands before one is not kept in rounds."""
    return tuple(token for token_id in ids for token in spell_after((), [token_id], spelling))


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a round stands, and how far its draft was taken."""

    number: int
    anchor: int
    accepted: int
    chain: bool


def _reject(
    place: _Place, drafted: Sequence[int], taken: Sequence[int], known: Known | None, spelling: Spelling | None
) -> Rejection:
    tokens = () if known is None else known.tokens
    position = place.anchor + place.accepted + 1
    chosen = _at(tokens, position)
    before = [*tokens[: place.anchor + 1], *taken]
    refused = drafted[place.accepted] if place.chain and place.accepted < len(drafted) else None  # may not be drawn
    ranking = None if known is None else known.rankings.get(place.number)
    if chosen is None:  # behind the end of what was recorded nothing was rejected for a reason
        ranking = None
    shares = {} if known is None else known.target.get(position, {})

    def spelled(token_id: int | None) -> Token | None:
        return None if token_id is None else spell_after(before, [token_id], spelling)[0]

    return Rejection(
        position=place.accepted + 1,
        drafted=spelled(refused),
        chosen=spelled(chosen),
        reason=UNKNOWN if ranking is None else UNDRAFTABLE if ranking.rank is None else RANKED,
        rank=None if ranking is None else ranking.rank,
        probability=None if ranking is None or ranking.rank is None else ranking.probability,
        target_probability=None if chosen is None else shares.get(chosen),
        target_probability_of_drafted=None if refused is None else shares.get(refused),
        top=() if ranking is None else tuple(_alternatives(ranking, before, spelling)),
    )


def _alternatives(ranking: Ranking, before: Sequence[int], spelling: Spelling | None) -> Iterator[Alternative]:
    for token_id, probability in ranking.top:
        yield Alternative(spell_after(before, [token_id], spelling)[0], probability)


def accept_length(view: RequestView) -> float:
    """Accepted + 1 over all rounds of the request; nan without one."""
    return (view.accepted + view.played) / view.played if view.played else math.nan
