"""Charts of a report as Vega-Lite specifications: data in, plain objects out. Each axis says its unit and what of."""

import math
from collections.abc import Iterator, Sequence

from replay.analysis import wording
from replay.analysis.counts import position_rates, ratio, reached_positions
from replay.analysis.page.chart_parts import BLUE, GREY, INK, SAID, Chart, Spec, beside, framed, mark, panels, rows
from replay.analysis.page.names import distinct, folded, numbered
from replay.analysis.positions import LEAST_REQUESTS
from replay.analysis.report.assessment import Report
from replay.analysis.summary import VariantSummary

MOST_CURVES = 8  # variants that have a panel of curves and one of a histogram
_SERVER = "server"
_PANEL = 24  # characters of a line above a panel
_LENGTH = "accept length (tokens / round)"


def charts(report: Report) -> Iterator[Chart]:
    """Those for which there are numbers."""
    names = numbered_labels(report)
    played = [row for row in report.summaries if row.rounds]
    if not played:
        return
    yield _forest(played, names)
    few = sorted(played, key=lambda row: -row.accept_length)[:MOST_CURVES]
    yield _positions(few, names, len(played))
    yield _histograms(few, names, len(played))
    if (found := _heat(report, played)) is not None:
        yield found
    if (found := _agreement(played, names)) is not None:
        yield found


def full_label(report: Report, row: VariantSummary) -> str:
    """What a variant is called where there is room."""
    return wording.label(row, report.facts) or "replay"


def numbered_labels(report: Report) -> dict[str, str]:
    """By variant its name in charts, with its place in the table."""
    short = numbered([full_label(report, row) for row in report.summaries])
    return {row.name: name for row, name in zip(report.summaries, short, strict=True)}


def _said(row: VariantSummary, names: dict[str, str]) -> str:
    """The whole name, and over what its numbers were counted."""
    place = names[row.name].partition(" ")[0] if len(names) > 1 else ""
    counted = f"{wording.counted(row.rounds, 'round')} of {wording.counted(row.played_requests, 'request')}"
    return f"{place} {row.name}, {counted}".strip()


def _forest(played: Sequence[VariantSummary], names: dict[str, str]) -> Chart:
    order = sorted(played, key=lambda row: -row.accept_length)
    values: list[Spec] = []
    for row in order:
        low, high = row.accept_length_ci95
        bounds = {} if math.isnan(low) else {"low": low, "high": high}
        within = f" ({wording.interval(row.accept_length_ci95)})" if bounds else ""
        said = f"{_said(row, names)}: accept length {wording.decimal(row.accept_length)}{within}"
        values.append({"variant": names[row.name], "length": row.accept_length, **bounds, "said": said})
    seen = order[0].observed
    layers: list[Spec] = [
        {"mark": mark("rule", strokeWidth=2, color=BLUE), "encoding": {"x": _x("low"), "x2": {"field": "high"}}},
        {"mark": mark("point", color=BLUE), "encoding": {"x": _x("length")}},
    ]
    if seen is not None:
        layers.append(_server_line(seen.accept_length))
    most = max(row.rounds for row in played)
    caption = (
        f"A dot is a variant's accept length over its rounds (at most {wording.count(most)}), the line its 95 % "
        f"interval over {wording.counted(played[0].played_requests, 'request')}. Intervals may overlap where the "
        "paired difference in the table is sure." + ("" if seen is None else " The dashed line is what the server "
        "reported.")
    )  # fmt: skip
    return Chart("Accept length", caption, rows(values, "variant", "variant", layers))


def _x(field: str) -> Spec:
    axis = {"title": _LENGTH, "tickCount": 5}
    return {"field": field, "type": "quantitative", "scale": {"zero": False}, "axis": axis}


def _server_line(length: float) -> Spec:
    said = f"the server reported accept length {wording.decimal(length)}"
    return {
        "data": {"values": [{"length": length, "said": said}]},
        "mark": {"type": "rule", "strokeDash": [4, 3], "strokeWidth": 1.5, "color": GREY},
        "encoding": {"x": _x("length"), "y": None},
    }


def _positions(few: Sequence[VariantSummary], names: dict[str, str], played: int) -> Chart:
    """A panel for each variant: its curve in its band, the first one's curve and the server's for comparison."""
    first, seen = few[0], few[0].observed
    others = [(_SERVER, position_rates(seen.histogram)[1])] if seen is not None and seen.histogram else []
    values: list[Spec] = []
    for row in few:
        panel = folded(names[row.name], _PANEL)
        values += [{"variant": panel, "series": "own", **one} for one in _own_curve(row, names)]
        compared = others if row is first else [("first", first.position_conditional), *others]
        values += [
            {"variant": panel, "series": name, "position": place, "share": 100 * share, "said": f"{name}, position "
             f"{place}: {wording.percent(share)}"}
            for name, shares in compared for place, share in enumerate(shares, 1) if not math.isnan(share)
        ]  # fmt: skip
    caption = (
        "How often the draft is accepted at each position, of the rounds that got there, and its 95 % interval over "
        f"requests, where {LEAST_REQUESTS} or more got there. Position 1 counts all "
        f"{wording.counted(first.rounds, 'round')} of {wording.counted(first.played_requests, 'request')} of "
        f"{names[first.name]}."
        + (" In the other panels the grey line is that variant." if len(few) > 1 else "")
        + (" The dashed line is the server." if others else "") + _left_out(few, played)
    )  # fmt: skip
    spec = panels(values, "variant", _curves(alone=len(few) == 1), width=125, height=110)
    return Chart("Acceptance by position", caption, spec)


def _own_curve(row: VariantSummary, names: dict[str, str]) -> Iterator[Spec]:
    reached = reached_positions(row.histogram)
    for place, share in enumerate(row.position_conditional, 1):
        if math.isnan(share):
            return
        low, high = row.position_conditional_ci95[place - 1]
        bounds = {} if math.isnan(low) else {"low": 100 * low, "high": 100 * high}
        within = f", {wording.percent(low)} to {wording.percent(high)}" if bounds else ""
        there = wording.counted(row.position_requests[place - 1], "request")
        rounds = wording.counted(reached[place - 1], "round")
        counted = f"{wording.count(reached[place])} of {rounds} of {there} that got there"
        said = f"{names[row.name]}, position {place}: {wording.percent(share)} ({counted}{within})"
        yield {"position": place, "share": 100 * share, **bounds, "said": said}


def _curves(*, alone: bool) -> Spec:
    title = "accepted (% of rounds that got there)"
    y_axis = {"title": title if alone else ["accepted (% of", "rounds that got there)"], "tickCount": 4}
    x = {"field": "position", "type": "ordinal", "axis": {
        "title": "position in the draft", "labelAngle": 0, "labelOverlap": True}}  # fmt: skip
    y = {"field": "share", "type": "quantitative", "axis": y_axis, "scale": {"domain": [0, 100]}}
    own, first, server = ({"filter": f"datum.series === '{name}'"} for name in ("own", "first", _SERVER))
    band = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    return {
        "encoding": {"x": x},
        "layer": [
            {"transform": [own, {"filter": "isValid(datum.low)"}], "encoding": band,
             "mark": {"type": "area", "color": BLUE, "opacity": 0.2, "aria": False}},
            {"transform": [first], "encoding": {"y": y}, "mark": {"type": "line", "color": GREY, "aria": False}},
            {"transform": [server], "encoding": {"y": y},
             "mark": {"type": "line", "color": INK, "strokeDash": [4, 3], "aria": False}},
            {"transform": [own], "encoding": {"y": y}, "mark": {"type": "line", "color": BLUE, "aria": False}},
            {"transform": [own], "encoding": {"y": y, "description": SAID},
             "mark": {"type": "point", "filled": True, "size": 28, "opacity": 1, "color": BLUE}},
        ],
    }  # fmt: skip


def _left_out(few: Sequence[VariantSummary], played: int) -> str:
    return (
        "" if len(few) == played else f" The {len(few)} of {played} variants with the largest accept length are shown."
    )


def _histograms(few: Sequence[VariantSummary], names: dict[str, str], played: int) -> Chart:
    counted = [(names[row.name], row.histogram) for row in few]
    seen = few[0].observed
    if seen is not None and seen.histogram:
        counted.append((_SERVER, seen.histogram))
    last = max(accepted for _, histogram in counted for accepted, count in enumerate(histogram) if count)
    values: list[Spec] = []
    for name, histogram in counted:
        total = sum(histogram)
        title = f"{folded(name, _PANEL)}\n{wording.counted(total, 'round')}"
        for accepted, count in enumerate(histogram[: last + 1]):
            of = f"{wording.count(count)} of {wording.counted(total, 'round')}"
            said = f"{name}: {of} accepted {accepted} ({wording.percent(ratio(count, total))})"
            values.append({"variant": title, "accepted": accepted, "share": 100 * ratio(count, total), "said": said})
    x_axis = {"title": "accepted tokens", "labelAngle": 0, "labelOverlap": True}
    spec: Spec = {
        "mark": {"type": "bar", "color": BLUE},
        "encoding": {
            "x": {"field": "accepted", "type": "ordinal", "axis": x_axis},
            "y": {"field": "share", "type": "quantitative", "axis": {"title": "rounds (%)", "tickCount": 4}},
            "description": SAID,
        },
    }
    caption = "The share of rounds that accepted so many drafted tokens, without the bonus token, of the rounds named."
    if any(sum(histogram[last + 1 :]) == 0 and len(histogram) > last + 1 for _, histogram in counted):
        caption += f" No round accepted more than {last}."
    spec = panels(values, "variant", spec, width=135, height=80)
    return Chart("Accepted tokens of a round", caption + _left_out(few, played), spec)


def _heat(report: Report, played: Sequence[VariantSummary]) -> Chart | None:
    """One fact across, steps where these vary; the others down, in rows that differ."""
    facts = [name for name in report.facts if name != "name"]
    if len(facts) < 2 or "name" in report.facts or len(played) < 4:
        return None
    across = (
        "steps" if "steps" in facts else min(facts, key=lambda fact: len({wording.fact(row, fact) for row in played}))
    )
    others = [fact for fact in facts if fact != across]
    told = {row.name: wording.label(row, others) if len(others) > 1 else wording.fact(row, others[0]) for row in played}
    short = distinct(list(told.values()), 3 * _PANEL)
    columns = distinct([wording.fact(row, across) for row in played], 16)
    if len(columns) < 2 or len(short) < 2:
        return None
    values: list[Spec] = [
        {
            "across": columns[wording.fact(row, across)],
            "down": folded(short[told[row.name]], _PANEL),
            "length": row.accept_length,
            "number": wording.decimal(row.accept_length, 2),
            "said": f"{wording.label(row, report.facts)}: accept length {wording.decimal(row.accept_length)} over "
            f"{wording.counted(row.rounds, 'round')}",
        }
        for row in played
    ]
    down = others[0] if len(others) == 1 else "the other facts"
    heading = f"Accept length by {across} and {down}".replace("_", " ")
    caption = "Each cell is the accept length of one variant over its own rounds."
    return Chart(heading, caption, _cells(values, across.replace("_", " "), " · ".join(others).replace("_", " ")))


def _cells(values: Sequence[Spec], across: str, down: str) -> Spec:
    lengths = [value["length"] for value in values]
    middle = (min(lengths) + max(lengths)) / 2
    names = list(dict.fromkeys(value["down"] for value in values))
    axes: Spec = {
        "x": {"field": "across", "type": "ordinal", "sort": None, "axis": {
            "title": across, "labelAngle": 0 if max(len(value["across"]) for value in values) < 8 else -35}},
        "y": {"field": "down", "type": "ordinal", "sort": names, "axis": beside(down)},
        "description": SAID,
    }  # fmt: skip
    legend = {"title": _LENGTH, "orient": "bottom", "gradientLength": 180}
    colour = {"field": "length", "type": "quantitative", "scale": {"scheme": "blues", "zero": False}, "legend": legend}
    ink = {"condition": {"test": f"datum.length > {middle}", "value": "white"}, "value": "black"}
    layers: list[Spec] = [
        {"mark": "rect", "encoding": {"color": colour}},
        {"mark": {"type": "text", "fontSize": 11}, "encoding": {"text": {"field": "number"}, "color": ink}},
    ]
    lines = max(name.count("\n") for name in names) + 1
    spec = {"data": {"values": list(values)}, "encoding": axes, "layer": layers}
    return framed(spec, 150 + max(26, 13 * lines + 7) * len(names))


def _agreement(played: Sequence[VariantSummary], names: dict[str, str]) -> Chart | None:
    """Rounds of the server that each variant explains."""
    kinds = ("alike", "near tie", "unexplained")
    values: list[Spec] = []
    total = 0
    for row in played:
        if row.agreement is not None:
            total = row.agreement.rounds
            counts = (row.agreement.alike, row.agreement.near_tie, row.agreement.unexplained)
            values += [
                {"variant": names[row.name], "kind": kind, "rounds": count, "order": place,
                 "said": f"{names[row.name]}: {wording.count(count)} of {wording.counted(total, 'round')} {kind}"}
                for place, (kind, count) in enumerate(zip(kinds, counts, strict=True))
            ]  # fmt: skip
    if not values:
        return None
    axis = {"title": f"rounds of the server (of {total:,})", "tickCount": 5}
    encoding: Spec = {
        "x": {"field": "rounds", "type": "quantitative", "axis": axis},
        "color": {
            "field": "kind",
            "type": "nominal",
            "scale": {"domain": list(kinds), "range": ["#009e73", "#e69f00", "#b5179e"]},
            "legend": {"title": None, "orient": "bottom"},
        },
        "order": {"field": "order"},
    }
    caption = "How many of the server's own rounds each variant drafts alike, parts from at a near tie, or leaves open."
    return Chart(
        "Against the server", caption, rows(values, "variant", "variant", [{"mark": mark("bar"), "encoding": encoding}])
    )
