"""A comparison as a page: the paired difference of each pair with its interval."""

import math

from replay.analysis import wording
from replay.analysis.compare.compare import Comparison
from replay.analysis.compare.report import answer, doubts
from replay.analysis.page.chart_parts import BLUE, GREY, MOST_LABEL, Chart, Spec, above, framed
from replay.analysis.page.document import bullets, document
from replay.printable import shorten


def write_comparison(comparison: Comparison, text: str) -> str:
    """The HTML; ``text`` is the comparison as the terminal shows it. Raises UsageError where charts cannot be drawn."""
    sections = bullets("Doubts", tuple(doubts(comparison)) or ("none of the checks raised one",))
    return document(answer(comparison), (), comparison_charts(comparison), sections, text)


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """A dot and an interval for each pair that shares requests; none where no pair does."""
    told = [pair for pair in comparison.pairs if math.isfinite(pair.difference)]
    if not told:
        return []
    values: list[Spec] = []
    for place, pair in enumerate(told, 1):
        low, high = pair.ci95
        name = shorten(pair.b.variant, MOST_LABEL)
        bounds = {} if math.isnan(low) else {"low": low, "high": high}
        values.append({"variant": f"{place}. {name}", "difference": pair.difference, **bounds})
    y = {"field": "variant", "type": "nominal", "sort": None, "axis": above("variant B")}
    layers: list[Spec] = [
        {"data": {"values": [{"none": 0}]}, "mark": {"type": "rule", "color": GREY, "strokeDash": [4, 3]},
         "encoding": {"x": _x("none"), "y": None}},
        {"mark": {"type": "rule", "color": BLUE, "strokeWidth": 2},
         "encoding": {"x": _x("low"), "x2": {"field": "high"}}},
        {"mark": {"type": "point", "color": BLUE, "filled": True, "size": 70}, "encoding": {"x": _x("difference")}},
    ]  # fmt: skip
    spec = {"data": {"values": values}, "encoding": {"y": y}, "layer": layers}
    requests = wording.counted(max(pair.requests for pair in told), "request")
    caption = (
        f"Accept length of B minus that of A ({told[0].a.variant}), paired over at most {requests}; the line is the "
        "95 % interval. Right of 0, B accepts more."
    )
    return [Chart("Difference in accept length", caption, framed(spec, 80 + 22 * len(values)))]


def _x(field: str) -> Spec:
    axis = {"title": "difference (tokens / round)", "tickCount": 5}
    return {"field": field, "type": "quantitative", "axis": axis}
