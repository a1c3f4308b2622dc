"""The frame of every page: one HTML file that needs nothing beside it."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from replay.analysis.page.chart_parts import Chart
from replay.analysis.page.draw import draw
from replay.printable import one_line

START = (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="eagle-replay">'
)
_HEADING = re.compile(r"<h2>(.*?)</h2>")


def document(
    title: str,
    said: Sequence[str],
    charts: Iterable[Chart],
    sections: Iterable[str],
    text: str,
    last: Iterable[str] = (),
) -> str:
    """The HTML: a heading, sentences, charts, sections (HTML already), the terminal's ``text``, ``last`` sections.

    Every heading below the first one has a place in the list of contents. Raises UsageError where charts cannot be
    drawn.
    """
    heading = escape(one_line(title))
    body = "\n".join(
        [
            *figures(charts),
            *sections,
            f"<details><summary>The report as text</summary>\n<pre>{escape(text)}</pre></details>",
            *last,
        ]
    )
    names: list[str] = []

    def numbered(found: re.Match[str]) -> str:
        names.append(found[1])
        return f'<h2 id="part-{len(names)}">{found[1]}</h2>'

    body = _HEADING.sub(numbered, body)
    links = "".join(f'<a href="#part-{place}">{name}</a>' for place, name in enumerate(names, 1))
    parts = [
        START,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>replay: {heading}</title>",
        f"<style>\n{own_file('page.css')}</style>\n</head>\n<body>\n<main>\n<h1>{heading}</h1>",
        *(f"<p>{escape(one_line(sentence))}</p>" for sentence in said if sentence),
        f'<nav aria-label="Contents">{links}</nav>' if len(names) > 1 else "",
        body,
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def own_file(name: str) -> str:
    """A style or a script that lies beside this file."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def figures(charts: Iterable[Chart]) -> list[str]:
    """Charts side by side, as many as there is room for."""
    drawn = [_figure(chart) for chart in charts]
    return ['<div class="charts">', *drawn, "</div>"] if drawn else []


def _figure(chart: Chart) -> str:
    heading, caption = escape(one_line(chart.heading)), escape(one_line(chart.caption))
    return f"<figure>\n<h2>{heading}</h2>\n{draw(chart.spec)}\n<figcaption>{caption}</figcaption>\n</figure>"
