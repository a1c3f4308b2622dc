"""The chart of training runs: the accept length of their checkpoints over the step of training."""

import math
from collections.abc import Sequence

from replay.analysis import wording
from replay.analysis.page.chart_parts import BLUE, SAID, Chart, Spec, panels
from replay.analysis.page.names import distinct, folded
from replay.analysis.report.curve import Curve

MOST_RUNS = 8  # curves that have a panel each
_PANEL = 24  # characters of a line above a panel


def step_chart(curves: Sequence[Curve]) -> Chart | None:
    """A panel for each curve; None where no run has two steps."""
    shown = curves[:MOST_RUNS]
    names = distinct([_name(curve, curves) for curve in shown], 3 * _PANEL)
    values: list[Spec] = [
        value for curve in shown for value in _values(curve, folded(names[_name(curve, curves)], _PANEL))
    ]
    if not values:
        return None
    x = {"field": "step", "type": "quantitative", "axis": {"title": "training step", "tickCount": 4, "format": "~s"}}
    y = {"field": "length", "type": "quantitative", "scale": {"zero": False},
         "axis": {"title": ["accept length", "(tokens / round)"], "tickCount": 4}}  # fmt: skip
    within = {"filter": "isValid(datum.low)"}
    layers: list[Spec] = [
        {"transform": [within], "mark": {"type": "area", "color": BLUE, "opacity": 0.2, "aria": False},
         "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"mark": {"type": "line", "color": BLUE, "strokeWidth": 2, "aria": False}, "encoding": {"x": x, "y": y}},
        {"mark": {"type": "point", "filled": True, "color": BLUE, "size": 32, "opacity": 1},
         "encoding": {"x": x, "y": y, "description": SAID}},
    ]  # fmt: skip
    left = len(curves) - len(shown)
    more = f" {wording.counted(left, 'more curve')} {'is' if left == 1 else 'are'} not shown." if left else ""
    caption = "The accept length of each checkpoint over the step that its folder names; the band is the 95 % interval."
    spec = panels(values, "curve", {"layer": layers}, width=118, height=100)
    return Chart("Accept length by training step", caption + more, spec)


def _name(curve: Curve, curves: Sequence[Curve]) -> str:
    """The run where there are several, and the setting where these differ."""
    run = curve.run if len({one.run for one in curves}) > 1 else ""
    return " · ".join(filter(None, [run, curve.setting])) or curve.run


def _values(curve: Curve, name: str) -> list[Spec]:
    return [
        {
            "curve": name,
            "step": point.step,
            "length": point.summary.accept_length,
            **({} if math.isnan(low) else {"low": low, "high": high}),
            "said": f"{name}, step {point.step:,}: accept length {wording.decimal(point.summary.accept_length)}"
            f"{'' if math.isnan(low) else f' ({wording.interval((low, high))})'} over "
            f"{wording.counted(point.summary.rounds, 'round')}",
        }
        for point in curve.points
        if point.summary.rounds
        for low, high in [point.summary.accept_length_ci95]
    ]
