"""Texts of two recordings of the same prompts: how far they agree, and which anchors see the same tokens in both.

Two targets, or one in two precisions, answer a prompt in two ways. Their texts agree up to some token; a round that
starts before it drafts after the same tokens in both recordings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replay.analysis.counts import ACCEPTED, ROUNDS, Counts, ratio
from replay.errors import TraceError, UsageError
from replay.traces.rounds import RequestInfo, Rounds


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of one request, prompt and output."""

    tokens: tuple[int, ...]
    prompt_tokens: int


Texts = Mapping[str, Text]  # by request id


@dataclass(frozen=True, slots=True)
class TextGap:
    """One prompt: how long its two outputs are, how many tokens they share from their start, and B against A."""

    request_id: str
    output_tokens_a: int
    output_tokens_b: int
    common_tokens: int
    accept_length_a: float
    accept_length_b: float


@dataclass(frozen=True, slots=True)
class TextAgreement:
    """Two recordings of ``requests`` prompts; ``equal`` texts do not part before one of them ends.

    Token counts are of outputs. ``each`` is in the order of the requests, under A and the first B.
    """

    requests: int
    equal: int
    output_tokens_a: int
    output_tokens_b: int
    common_tokens: int
    each: tuple[TextGap, ...]


def common_prefix(a: Text, b: Text) -> int:
    """How many tokens two texts share from their start."""
    pairs = zip(a.tokens, b.tokens, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(a.tokens), len(b.tokens)))


def shared_tokens(a: Texts, b: Texts, requests: Sequence[str]) -> dict[str, int]:
    """By request, the tokens that both texts share from their start. Raises UsageError where prompts differ."""
    shared = {name: common_prefix(a[name], b[name]) for name in requests}
    for name, common in shared.items():
        if a[name].prompt_tokens != b[name].prompt_tokens or common < a[name].prompt_tokens:
            raise UsageError(
                f"request {name!r} has one prompt in the first trace and another in the second; compare recordings of "
                "the same prompts"
            )
    return shared


def agree(texts: tuple[Texts, Texts], shared: Mapping[str, int], counts_a: Counts, counts_b: Counts) -> TextAgreement:
    """What ``TextAgreement`` holds; ``shared`` by request in the order of the rows of the counts."""
    a, b = texts
    each = tuple(
        TextGap(
            name,
            len(a[name].tokens) - a[name].prompt_tokens,
            len(b[name].tokens) - b[name].prompt_tokens,
            common - a[name].prompt_tokens,
            _length(counts_a[row]),
            _length(counts_b[row]),
        )
        for row, (name, common) in enumerate(shared.items())
    )
    return TextAgreement(
        requests=len(each),
        equal=sum(one.common_tokens == min(one.output_tokens_a, one.output_tokens_b) for one in each),
        output_tokens_a=sum(one.output_tokens_a for one in each),
        output_tokens_b=sum(one.output_tokens_b for one in each),
        common_tokens=sum(one.common_tokens for one in each),
        each=each,
    )


def _length(row: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> float:
    return ratio(int(row[ACCEPTED] + row[ROUNDS]), int(row[ROUNDS]))


def check_told(rounds: Rounds, texts: Texts, called: str) -> None:
    """Refuse ``texts`` that are not those of ``rounds``, by lengths and by the tokens that chains accepted.

    Raises TraceError.
    """
    for request in rounds.requests:
        text = texts.get(request.request_id)
        if text is None or _lengths(text) != (request.prompt_tokens, request.output_tokens):
            raise _other(request, called)
    chains = [variant.name for variant in rounds.variants if variant.topk == 1]
    own = {request.request_id: request for request in rounds.requests}
    columns = ("variant", "request_id", "anchor", "drafted", "accepted")
    for variant, name, anchor, drafted, accepted in rounds.table.select(columns).iter_rows():
        taken = texts[name].tokens[anchor + 1 : anchor + 1 + accepted]  # shorter where the end of the output cuts
        if variant in chains and tuple(drafted[: len(taken)]) != taken:
            raise _other(own[name], called)


def _lengths(text: Text) -> tuple[int, int]:
    return text.prompt_tokens, len(text.tokens) - text.prompt_tokens


def _other(request: RequestInfo, called: str) -> TraceError:
    return TraceError(
        f"the trace given for {called} has another text of request {request.request_id!r}; name the trace that its "
        "rounds were simulated on"
    )
