"""A comparison as a page: the paired difference of each pair with its interval."""

import math

from replay.analysis import wording
from replay.analysis.compare.compare import Comparison
from replay.analysis.compare.doubts import doubts
from replay.analysis.compare.report import answer
from replay.analysis.page.chart_parts import BLUE, GREY, Chart, Spec, mark, rows
from replay.analysis.page.document import document
from replay.analysis.page.names import numbered
from replay.analysis.page.parts import doubts_section


def write_comparison(comparison: Comparison, text: str) -> str:
    """The HTML; ``text`` is the comparison as the terminal shows it. Raises UsageError where charts cannot be drawn."""
    sections = doubts_section(doubts(comparison))
    return document(answer(comparison), (), comparison_charts(comparison), sections, text)


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """A dot and an interval for each pair that shares requests; none where no pair does."""
    told = [(place, pair) for place, pair in enumerate(comparison.pairs) if math.isfinite(pair.difference)]
    if not told:
        return []
    names = numbered([pair.b.variant for pair in comparison.pairs])
    values: list[Spec] = []
    for place, pair in told:
        low, high = pair.ci95
        bounds = {} if math.isnan(low) else {"low": low, "high": high}
        within = f" ({low:+.3f} to {high:+.3f})" if bounds else ""
        said = (
            f"{pair.b.variant} against {pair.a.variant}, {wording.counted(pair.requests, 'request')}: "
            f"{pair.difference:+.3f}{within}, {pair.verdict}"
        )
        values.append({"variant": names[place], "difference": pair.difference, **bounds, "said": said})
    layers: list[Spec] = [
        {"data": {"values": [{"none": 0, "said": "no difference"}]}, "mark": {"type": "rule", "color": GREY,
         "strokeDash": [4, 3]}, "encoding": {"x": _x("none"), "y": None}},
        {"mark": mark("rule", color=BLUE, strokeWidth=2), "encoding": {"x": _x("low"), "x2": {"field": "high"}}},
        {"mark": mark("point", color=BLUE), "encoding": {"x": _x("difference")}},
    ]  # fmt: skip
    requests = wording.counted(max(pair.requests for _, pair in told), "request")
    caption = (
        f"Accept length of B minus that of A ({told[0][1].a.variant}), paired over at most {requests}; the line is the "
        "95 % interval. Right of 0, B accepts more."
    )
    return [Chart("Difference in accept length", caption, rows(values, "variant", "variant B", layers))]


def _x(field: str) -> Spec:
    axis = {"title": "difference (tokens / round)", "tickCount": 5}
    return {"field": field, "type": "quantitative", "axis": axis}
