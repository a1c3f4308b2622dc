"""Parts of pages as HTML: sections of sentences, tables, pairs of words, text to copy. All text is escaped here."""

from collections.abc import Iterator, Sequence
from html import escape

from replay.printable import one_line


def bullets(heading: str, said: Sequence[str]) -> Iterator[str]:
    """A section of sentences."""
    yield f"<section>\n<h2>{escape(heading)}</h2>\n<ul>"
    yield from (f"<li>{escape(one_line(sentence))}</li>" for sentence in said)
    yield "</ul></section>"


def doubts_section(said: Sequence[str]) -> Iterator[str]:
    """What makes the numbers doubtful, or that nothing was found."""
    return bullets("Doubts", tuple(said) or ("none of the checks raised one",))


def table(heads: Sequence[str], body: Sequence[Sequence[str]], caption: str, *, left: Sequence[int] = ()) -> str:
    """A table that scrolls by itself where it is too wide. The first cell of a row names it.

    ``left``: columns of words. ``caption`` says what it is to those who do not see it.
    """
    kinds = ["left" if place == 0 or place in left else "" for place in range(len(heads))]
    head = "".join(f'<th scope="col"{_kind(kind)}>{escape(name)}</th>' for name, kind in zip(heads, kinds, strict=True))
    rows = "\n".join(_row(cells, kinds) for cells in body)
    said = escape(one_line(caption))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{said}"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(cells: Sequence[str], kinds: Sequence[str]) -> str:
    first, *others = (escape(one_line(cell)) for cell in cells)
    told = "".join(f"<td{_kind(kind)}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=True))
    return f'<tr><th scope="row">{first}</th>{told}</tr>'


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def section(heading: str, *parts: str) -> Iterator[str]:
    """A section with a heading; ``parts`` are HTML already."""
    yield f"<section>\n<h2>{escape(heading)}</h2>"
    yield from parts
    yield "</section>"


def sentence(text: str, kind: str = "") -> str:
    """A paragraph."""
    return f"<p{_kind(kind)}>{escape(one_line(text))}</p>"


def to_copy(text: str) -> str:
    """What a reader copies."""
    return f'<pre class="copy">{escape(one_line(text))}</pre>'


def pairs_section(heading: str, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Words and what is said of each."""
    told = (f"<dt>{escape(one_line(word))}</dt><dd>{escape(one_line(said))}</dd>" for word, said in pairs)
    return section(heading, "<dl>", *told, "</dl>")
