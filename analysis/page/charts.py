"""Charts of a report as Vega-Lite specifications: data in, plain objects out. Each axis says its unit and what of."""

import math
from collections.abc import Iterator, Sequence

from replay.analysis import wording
from replay.analysis.counts import position_rates, ratio
from replay.analysis.page.chart_parts import BLUE, GREY, MOST_LABEL, Chart, Spec, above, configured, framed
from replay.analysis.report.assessment import Report
from replay.analysis.summary import VariantSummary
from replay.printable import shorten

MOST_CURVES = 8  # variants that one chart of curves or of histograms tells apart
_SERVER = "server"
# Eight colours that people with colour blindness tell apart (Okabe and Ito 2008); dashes tell the same.
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999", "#8a6d00"]
_DASHES = [[1, 0], [6, 2], [2, 2], [8, 2, 2, 2], [4, 4], [10, 3], [1, 3], [3, 1], [5, 1, 1, 1]]


def charts(report: Report) -> Iterator[Chart]:
    """Those for which there are numbers."""
    played = [row for row in report.summaries if row.rounds]
    if not played:
        return
    yield _forest(report, played)
    few = sorted(played, key=lambda row: -row.accept_length)[:MOST_CURVES]
    yield _positions(report, few, len(played))
    yield _histograms(report, few, len(played))
    if (found := _heat(report, played)) is not None:
        yield found
    if (found := _agreement(report, played)) is not None:
        yield found


def _names(report: Report, rows: Sequence[VariantSummary]) -> list[str]:
    """A label for each, distinct also where it was shortened."""
    names = [shorten(wording.label(row, report.facts) or "replay", MOST_LABEL) for row in rows]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, 1)]


def _forest(report: Report, rows: Sequence[VariantSummary]) -> Chart:
    order = sorted(zip(_names(report, rows), rows, strict=True), key=lambda pair: -pair[1].accept_length)
    values: list[Spec] = []
    for name, row in order:
        low, high = row.accept_length_ci95
        bounds = {} if math.isnan(low) else {"low": low, "high": high}
        values.append({"variant": name, "length": row.accept_length, **bounds})
    seen = order[0][1].observed
    layers: list[Spec] = [
        {
            "mark": {"type": "rule", "strokeWidth": 2, "color": BLUE},
            "encoding": {"x": _x("low"), "x2": {"field": "high"}},
        },
        {"mark": {"type": "point", "filled": True, "size": 70, "color": BLUE}, "encoding": {"x": _x("length")}},
    ]  # fmt: skip
    if seen is not None:
        layers.append(_server_line(seen.accept_length))
    most = max(row.rounds for row in rows)
    caption = (
        f"A dot is a variant's accept length over its rounds (at most {wording.count(most)}), the line its 95 % "
        f"interval over {wording.counted(rows[0].played_requests, 'request')}. Intervals may overlap where the paired "
        "difference in the table is sure." + ("" if seen is None else " The dashed line is what the server reported.")
    )
    y = {
        "field": "variant",
        "type": "nominal",
        "sort": [name for name, _ in order],
        "axis": above("variant"),
    }
    return Chart(
        "Accept length", caption,
        framed({"data": {"values": values}, "encoding": {"y": y}, "layer": layers}, 60 + 22 * len(values)),
    )  # fmt: skip


def _x(field: str) -> Spec:
    title = "accept length (tokens / round)"
    return {"field": field, "type": "quantitative", "scale": {"zero": False}, "axis": {"title": title, "tickCount": 5}}


def _server_line(length: float) -> Spec:
    return {
        "data": {"values": [{"length": length}]},
        "mark": {"type": "rule", "strokeDash": [4, 3], "color": GREY},
        "encoding": {"x": _x("length"), "y": None},
    }


def _positions(report: Report, rows: Sequence[VariantSummary], played: int) -> Chart:
    series = list(zip(_names(report, rows), (row.position_conditional for row in rows), strict=True))
    seen = rows[0].observed
    if seen is not None and seen.histogram:
        series.append((_SERVER, position_rates(seen.histogram)[1]))
    values = [
        {"variant": name, "position": place, "share": 100 * share}
        for name, shares in series
        for place, share in enumerate(shares, 1)
        if not math.isnan(share)
    ]
    names = [name for name, _ in series]
    legend = {"title": None, "orient": "bottom", "columns": 1, "labelLimit": 310, "symbolType": "stroke"}
    legend |= {"symbolSize": 600}
    encoding: Spec = {
        "x": {"field": "position", "type": "ordinal", "axis": {"title": "position in the draft", "labelAngle": 0}},
        "y": {
            "field": "share",
            "type": "quantitative",
            "axis": {"title": "accepted (% of rounds that got there)"},
            "scale": {"domain": [0, 100]},
        },
        "color": {
            "field": "variant",
            "type": "nominal",
            "scale": {"domain": names, "range": _COLOURS},
            "legend": legend,
        },
        "strokeDash": {"field": "variant", "type": "nominal", "scale": {"domain": names, "range": _DASHES}},
    }  # fmt: skip
    caption = (
        f"How often the draft is accepted at each position, of the rounds that got there. Position 1 counts all "
        f"{wording.counted(rows[0].rounds, 'round')} of {names[0]}.{_left_out(rows, played)}"
    )
    spec = {"data": {"values": values}, "mark": {"type": "line", "point": True}, "encoding": encoding}
    return Chart("Acceptance by position", caption, framed(spec, 290 + 18 * len(names)))


def _left_out(rows: Sequence[VariantSummary], played: int) -> str:
    return (
        ""
        if len(rows) == played
        else f" The {len(rows)} of {played} variants with the largest accept length are shown."
    )


def _histograms(report: Report, rows: Sequence[VariantSummary], played: int) -> Chart:
    counted = [(name, row.histogram) for name, row in zip(_names(report, rows), rows, strict=True)]
    seen = rows[0].observed
    if seen is not None and seen.histogram:
        counted.append((_SERVER, seen.histogram))
    titles = [f"{name}: {wording.counted(sum(histogram), 'round')}" for name, histogram in counted]
    values = [
        {"variant": title, "accepted": accepted, "share": 100 * ratio(count, sum(histogram))}
        for title, (_, histogram) in zip(titles, counted, strict=True)
        for accepted, count in enumerate(histogram)
    ]
    columns = 2
    spec: Spec = {
        "data": {"values": values},
        "facet": {
            "field": "variant",
            "type": "nominal",
            "sort": titles,
            "header": {"title": None, "labelLimit": 120, "labelFontSize": 10, "labelExpr": "split(datum.value, ': ')"},
        },
        "columns": columns,
        "spec": {
            "width": 110,
            "height": 80,
            "mark": {"type": "bar", "color": BLUE},
            "encoding": {
                "x": {
                    "field": "accepted",
                    "type": "ordinal",
                    "axis": {"title": "accepted tokens", "labelAngle": 0, "titleFontSize": 10},
                },
                "y": {
                    "field": "share",
                    "type": "quantitative",
                    "axis": {"title": "rounds (%)", "titleFontSize": 10, "tickCount": 4},
                },
            },
        },
    }
    caption = "The share of rounds that accepted so many drafted tokens, without the bonus token, of the rounds named."
    return Chart("Accepted tokens of a round", caption + _left_out(rows, played), configured(spec))


def _heat(report: Report, rows: Sequence[VariantSummary]) -> Chart | None:
    """Where just two facts vary and each pair stands there once."""
    facts = [name for name in report.facts if name != "name"]
    if len(facts) != 2 or "name" in report.facts or len(rows) < 4:
        return None
    across, down = sorted(facts, key=lambda fact: len({wording.fact(row, fact) for row in rows}))
    values = [
        {
            "across": shorten(wording.fact(row, across), MOST_LABEL),
            "down": shorten(wording.fact(row, down), MOST_LABEL),
            "length": row.accept_length,
            "said": wording.decimal(row.accept_length, 2),
        }
        for row in rows
    ]
    lengths = [row.accept_length for row in rows]
    middle = (min(lengths) + max(lengths)) / 2
    axes: Spec = {
        "x": {"field": "across", "type": "ordinal", "sort": None, "axis": {"title": across.replace("_", " ")}},
        "y": {
            "field": "down",
            "type": "ordinal",
            "sort": None,
            "axis": above(down.replace("_", " ")),
        },
    }
    legend = {"title": "accept length (tokens / round)", "orient": "bottom", "gradientLength": 180}
    colour = {
        "field": "length", "type": "quantitative", "scale": {"scheme": "blues", "zero": False}, "legend": legend,
    }  # fmt: skip
    ink = {"condition": {"test": f"datum.length > {middle}", "value": "white"}, "value": "black"}
    layers: list[Spec] = [
        {"mark": "rect", "encoding": {"color": colour}},
        {"mark": {"type": "text", "fontSize": 11}, "encoding": {"text": {"field": "said"}, "color": ink}},
    ]
    height = 110 + 26 * len({value["down"] for value in values})
    caption = "Each cell is the accept length of one variant over its own rounds."
    spec = {"data": {"values": values}, "encoding": axes, "layer": layers}
    return Chart(f"Accept length by {across} and {down}".replace("_", " "), caption, framed(spec, height))


def _agreement(report: Report, rows: Sequence[VariantSummary]) -> Chart | None:
    """Rounds of the server that each variant explains."""
    kinds = ("alike", "near tie", "unexplained")
    values: list[Spec] = []
    names = _names(report, rows)
    total = 0
    for name, row in zip(names, rows, strict=True):
        if row.agreement is not None:
            total = row.agreement.rounds
            counts = (row.agreement.alike, row.agreement.near_tie, row.agreement.unexplained)
            values += [
                {"variant": name, "kind": kind, "rounds": count, "order": place}
                for place, (kind, count) in enumerate(zip(kinds, counts, strict=True))
            ]
    if not values:
        return None
    encoding: Spec = {
        "x": {"field": "rounds", "type": "quantitative", "axis": {"title": f"rounds of the server (of {total:,})"}},
        "y": {"field": "variant", "type": "nominal", "sort": names, "axis": above("variant")},
        "color": {
            "field": "kind",
            "type": "nominal",
            "scale": {"domain": list(kinds), "range": ["#009e73", "#e69f00", "#b5179e"]},
            "legend": {"title": None, "orient": "bottom"},
        },
        "order": {"field": "order"},
    }
    caption = "How many of the server's own rounds each variant drafts alike, parts from at a near tie, or leaves open."
    height = 80 + 24 * len({value["variant"] for value in values})
    spec = {"data": {"values": values}, "mark": {"type": "bar", "stroke": "white"}, "encoding": encoding}
    return Chart("Against the server", caption, framed(spec, height))
