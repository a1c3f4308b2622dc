"""What the charts of every page share: their frame, their axes of names, their colours."""

from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

WIDTH = 350  # pixels of a whole chart: what a phone of 390 has room for
MOST_LABEL = 40  # characters
BLUE, GREY, RED, GREEN = "#2b6cb0", "#718096", "#c2410c", "#15803d"


@dataclass(frozen=True, slots=True)
class Chart:
    """A specification, a heading and a sentence on how to read it."""

    heading: str
    caption: str
    spec: Spec


def above(title: str) -> Spec:
    """An axis of names with its title above them, where it is in no label's way."""
    upright = {"titleAngle": 0, "titleAlign": "right", "titleBaseline": "bottom", "titleX": -6, "titleY": -4}
    return {"title": title, "labelLimit": 150, **upright}


def framed(spec: Spec, height: int) -> Spec:
    """A chart of this width and so many pixels high, its axes included."""
    return configured({**spec, "width": WIDTH, "height": height, "autosize": {"type": "fit", "contains": "padding"}})


def configured(spec: Spec) -> Spec:
    """With the page's fonts and lines."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",  # a name; nothing is fetched
        "background": None,
        "config": {
            "font": "Arial, Helvetica, 'Liberation Sans', sans-serif",
            "axis": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "gridColor": "#e2e8f0"},
            "legend": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"},
            "view": {"stroke": None},
        },
        **spec,
    }
