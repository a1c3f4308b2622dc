"""Foreign text on its way to a reader: what a terminal would act on is made visible, what would flood it is shortened.

File names, tensor names, architectures, request ids and what servers say are written by others.
"""

import html
import re
from collections.abc import Sequence

MOST_SENTENCE = 1000  # characters of a refusal: the longest of ours has some 400

# Control characters (C0, DEL, C1), marks that turn or hide text, separators of lines, and halves of surrogate pairs.
# The joiners U+200C and U+200D are left: scripts and emoji need them.
_UNSAFE = (
    "\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff"
)
_ONE_LINE = re.compile(f"[{_UNSAFE}]")
_LINES = re.compile(f"(?![\n\t])[{_UNSAFE}]")


def one_line(text: str, most: int = MOST_SENTENCE) -> str:
    """``text`` in one line of at most ``most`` characters, escaped as Python writes them; a long one loses its middle.

    >>> one_line("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    return _ONE_LINE.sub(_escaped, shorten(_ONE_LINE.sub(_escaped, shorten(text, most)), most))


def lines(text: str) -> str:
    """``text`` with its lines and tabs as they are, everything else that a terminal would act on escaped."""
    return _LINES.sub(_escaped, text)


def json_text(text: str) -> str:
    """A JSON document with the same characters in JSON's own escapes, so that its values stay what they are."""
    return _LINES.sub(_json_escaped, text)


def counted(number: int, noun: str) -> str:
    """How many of what, the noun in its number.

    >>> counted(1, "round"), counted(1290, "round")
    ('1 round', '1,290 rounds')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def shorten(text: str, most: int) -> str:
    """``text`` where it has at most ``most`` characters, else its two ends with dots between them."""
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[len(text) - tail :]}"


def _escaped(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def _json_escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


def html_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of a notebook: a line above, the names of its columns, a row for each of ``rows``; all of it as text."""

    def cells(kind: str, texts: Sequence[str]) -> str:
        return "".join(f"<{kind}>{_plain(text)}</{kind}>" for text in texts)

    head = f"<thead><tr>{cells('th', names)}</tr></thead>" if names else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<p>{_plain(title)}</p><table>{head}<tbody>{body}</tbody></table>"


def _plain(text: str) -> str:
    return html.escape(one_line(text))
