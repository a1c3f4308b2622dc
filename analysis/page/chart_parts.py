"""What the charts of every page share: their frame, their axes of names, their colours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

WIDTH = 350  # pixels of a whole chart: what a phone of 390 has room for
ROW = 34  # pixels of a row of ``rows``: its name and its mark
INK = "currentColor"  # as the page's text, light or dark
BLUE, GREY, RED, GREEN = "#2b6cb0", "#718096", "#c2410c", "#15803d"  # page.css has others of them for the dark
_NAME = {"type": "text", "align": "left", "baseline": "middle", "yOffset": -8, "limit": WIDTH - 4, "fontSize": 11}
_LOWER = 7  # pixels: where the mark of a row stands below its name


@dataclass(frozen=True, slots=True)
class Chart:
    """A specification, a heading and a sentence on how to read it.

    Values of the specification with the key ``said`` tell in words what a mark stands for: its name and its numbers.
    """

    heading: str
    caption: str
    spec: Spec


SAID: Spec = {"field": "said"}  # of the channel ``description``: draw.py makes a tooltip of it


def rows(values: Sequence[Spec], field: str, title: str, layers: Sequence[Spec]) -> Spec:
    """A chart with a row for each value of ``field`` in their order: its name, and below it what ``layers`` draw.

    Names stand above marks, not beside them, so that they have a line of the whole width.
    """
    names = list(dict.fromkeys(value[field] for value in values))
    y = {"field": field, "type": "nominal", "sort": names, "axis": _above(title)}
    text = {
        "name": "names",
        "data": {"values": [{field: name} for name in names]},
        "mark": {**_NAME, "color": INK, "aria": False},
        "encoding": {"x": {"value": 0}, "text": {"field": field}, "description": None},
    }
    spec = {"data": {"values": list(values)}, "encoding": {"y": y, "description": SAID}, "layer": [*layers, text]}
    return framed(spec, 75 + ROW * len(names))


def mark(kind: str, **more: Any) -> Spec:
    """A mark of ``rows``, below the name of its row."""
    filled = {"filled": True, "size": 70, "opacity": 1} if kind == "point" else {}
    sized = {"height": 12} if kind == "bar" else {}
    return {"type": kind, "yOffset": _LOWER, **filled, **sized, **more}


def _above(title: str) -> Spec:
    """An axis of names that stand elsewhere: its title alone, above them."""
    upright = {"titleAngle": 0, "titleAlign": "left", "titleBaseline": "bottom", "titleX": 0, "titleY": -3}
    return {"title": title, "labels": False, "ticks": False, "domain": False, **upright}


def beside(title: str) -> Spec:
    """An axis of short names with its title above them; a name has a line for each of its own."""
    upright = {"titleAngle": 0, "titleAlign": "right", "titleBaseline": "bottom", "titleX": -6, "titleY": -4}
    return {"title": title, "labelLimit": 170, "labelExpr": "split(datum.label, '\\n')", **upright}


def panels(values: Sequence[Spec], field: str, spec: Spec, *, width: int, height: int) -> Spec:
    """The same small chart for each value of ``field``, two in a row; one alone has the whole width."""
    names = list(dict.fromkeys(value[field] for value in values))
    header = {"title": None, "labelFontSize": 10.5, "labelColor": INK, "labelAlign": "left", "labelAnchor": "start"}
    header |= {"labelExpr": "split(datum.value, '\\n')", "labelLimit": width + 30}
    alone = len(names) == 1
    inner = {**spec, "width": WIDTH - 60 if alone else width, "height": 2 * height if alone else height}
    facet = {"field": field, "type": "nominal", "sort": names, "header": header}
    return configured({"data": {"values": list(values)}, "facet": facet, "columns": 2, "spec": inner, "spacing": 14})


def framed(spec: Spec, height: int) -> Spec:
    """A chart of this width and so many pixels high, its axes included."""
    return configured({**spec, "width": WIDTH, "height": height, "autosize": {"type": "fit", "contains": "padding"}})


def configured(spec: Spec) -> Spec:
    """With the page's fonts and lines."""
    text = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "labelColor": INK}
    lines = {"gridColor": GREY, "gridOpacity": 0.25, "domainColor": GREY, "tickColor": GREY}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",  # a name; nothing is fetched
        "background": None,
        "config": {
            "font": "Arial, Helvetica, 'Liberation Sans', sans-serif",
            "axis": {**text, **lines, "titleColor": INK},
            "legend": {**text, "titleColor": INK},
            "view": {"stroke": None},
        },
        **spec,
    }
