"""Token ids as text. A character may lie across tokens: its bytes are joined before they are read."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Spelling = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Token:
    """A token id and what it is called; ``text`` is None where no tokenizer is at hand.

    A token that holds a part of a character is called by its bytes, as ``\\xe3``; the one that ends the character by
    the whole character.
    """

    id: int
    text: str | None = None


def spell_after(before: Sequence[int], ids: Sequence[int], spelling: Spelling | None) -> tuple[Token, ...]:
    """``ids`` as they are read behind the tokens ``before``, whose last ones may have begun a character."""
    if spelling is None:
        return tuple(map(Token, ids))
    begun = b""
    for token_id in before[-_LONGEST:]:
        begun = _read(begun, spelling(token_id))[1]
    found = []
    for token_id in ids:
        text, begun = _read(begun, spelling(token_id))
        found.append(Token(token_id, text))
    return tuple(found)


def join_text(ids: Sequence[int], spelling: Spelling | None) -> str | None:
    """The text of ``ids``; bytes that are no UTF-8 stand as ``\\xe3``. None without a spelling."""
    if spelling is None:
        return None
    return b"".join(map(spelling, ids)).decode("utf-8", "backslashreplace")


_LONGEST = 4  # tokens that a character of UTF-8 can lie across


def _read(begun: bytes, data: bytes) -> tuple[str, bytes]:
    """What a token of the bytes ``data`` is called where ``begun`` stood open, and what stands open after it."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    opened = decoder.decode(begun)
    text = (opened + decoder.decode(data)).removeprefix(_escaped(begun) if begun else "")
    left = decoder.getstate()[0]
    own = left[-len(data) :] if data else b""
    return text + _escaped(own), left


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)
