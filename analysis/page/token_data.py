"""A view of tokens as the page's script reads it: each word once, rounds as short lists.

A round is [number, anchor, accepted, cut, known, drafted, taken, bonus, rejection]; a rejection [position, chosen,
reason, rank, probability, target's probability, target's probability of the drafted token, [[word, probability], ..]].
Words are places in ``words``, -1 for none; probabilities are whole parts of 10,000.
"""

from typing import Any

from replay.analysis.tokens.spelling import Token
from replay.analysis.tokens.view import RequestView, RoundView, View
from replay.printable import one_line

_MOST_PROMPT = 2000  # characters of the end of each prompt that the page holds


class _Words:
    """Each word once, by the place at which it was seen first."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, token: Token | None) -> int:
        if token is None:
            return -1
        word = f"#{token.id}" if token.text is None else visible(token.text)
        return self.places.setdefault(word, len(self.places))


def visible(text: str) -> str:
    """With everything visible that a reader would not see or that would act on a page."""
    escaped = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return one_line(escaped, 4 * _MOST_PROMPT)


def token_data(view: View) -> dict[str, Any]:
    """Plain lists, numbers and texts."""
    words = _Words()
    requests = [_request(one, words) for one in view.requests]
    return {
        "variant": visible(view.variant),
        "chain": view.topk == 1,
        "notes": [visible(note) for note in view.notes],
        "words": list(words.places),
        "requests": requests,
    }


def _request(view: RequestView, words: _Words) -> dict[str, Any]:
    prompt = None if view.prompt is None else visible(view.prompt[-_MOST_PROMPT:])
    return {
        "id": visible(view.request_id),
        "category": visible(view.category or "none"),
        "prompt_tokens": view.prompt_tokens,
        "output_tokens": view.output_tokens,
        "cached": view.cached_tokens,
        "pieces": list(view.pieces),
        "prompt": prompt,
        "played": view.played,
        "accepted": view.accepted,
        "rounds": [_round(one, words) for one in view.rounds],
    }


def _round(view: RoundView, words: _Words) -> list[Any]:
    return [
        view.round,
        view.anchor,
        view.accepted,
        int(view.cut),
        words.place(view.known),
        [words.place(token) for token in view.drafted],
        [words.place(token) for token in view.taken],
        words.place(view.bonus),
        _rejection(view, words),
    ]


def _rejection(view: RoundView, words: _Words) -> list[Any] | None:
    found = view.rejection
    if found is None:
        return None
    return [
        found.position,
        words.place(found.chosen),
        found.reason,
        found.rank,
        _parts(found.probability),
        _parts(found.target_probability),
        _parts(found.target_probability_of_drafted),
        [[words.place(one.token), _parts(one.probability)] for one in found.top],
    ]


def _parts(probability: float | None) -> int | None:
    return None if probability is None else round(10_000 * probability)
