"""The frame of every page: one HTML file that needs nothing beside it."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from replay.analysis.page.chart_parts import Chart
from replay.analysis.page.draw import draw
from replay.printable import one_line

START = (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="eagle-replay">'
)


def document(
    title: str,
    said: Sequence[str],
    charts: Iterable[Chart],
    sections: Iterable[str],
    text: str,
    last: Iterable[str] = (),
) -> str:
    """The HTML: a heading, sentences, charts, sections (HTML already), the terminal's ``text``, ``last`` sections.

    Raises UsageError where charts cannot be drawn.
    """
    heading = escape(one_line(title))
    parts = [
        START,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>replay: {heading}</title>",
        f"<style>\n{own_file('page.css')}</style>\n</head>\n<body>\n<main>\n<h1>{heading}</h1>",
        *(f"<p>{escape(one_line(sentence))}</p>" for sentence in said if sentence),
        '<div class="charts">',
        *map(_figure, charts),
        "</div>",
        *sections,
        f"<details><summary>The report as text</summary>\n<pre>{escape(text)}</pre></details>",
        *last,
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def own_file(name: str) -> str:
    """A style or a script that lies beside this file."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def bullets(heading: str, said: Sequence[str]) -> Iterator[str]:
    """A section of sentences."""
    yield f"<section>\n<h2>{escape(heading)}</h2>\n<ul>"
    yield from (f"<li>{escape(one_line(sentence))}</li>" for sentence in said)
    yield "</ul></section>"


def _figure(chart: Chart) -> str:
    heading, caption = escape(one_line(chart.heading)), escape(one_line(chart.caption))
    return f"<figure>\n<h2>{heading}</h2>\n{draw(chart.spec)}\n<figcaption>{caption}</figcaption>\n</figure>"
