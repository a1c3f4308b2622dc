"""Charts of a plan: tokens a second by depth, accept length against where it breaks even, head against machine."""

import math
from collections.abc import Iterator, Sequence

from replay.analysis import wording
from replay.analysis.page.chart_parts import BLUE, GREY, RED, SAID, Chart, Spec, mark, panels, rows
from replay.analysis.plan.plan import Plan, Range, Row
from replay.analysis.plan.report import SOURCE_WORDS
from replay.analysis.plan.settings import PLAIN, Load
from replay.analysis.plan.shares import share

MOST_LOADS = 8  # that have a panel each
_DEPTH = "draft steps"


def plan_charts(plan: Plan) -> Iterator[Chart]:
    """Those for which there are numbers: a load at which the timings determine no depth's time has no panel."""
    loads = [choice.load for choice in plan.choices if any(map(_told, _rows(plan, choice.load)))]
    if loads:
        yield _speeds(plan, loads)
    even = [load for load in loads if any(row.break_even is not None for row in _rows(plan, load) if _told(row))]
    if even:
        yield _break_even(plan, even)
    if (found := _losses(plan)) is not None:
        yield found


def _rows(plan: Plan, load: Load) -> list[Row]:
    return [row for row in plan.rows if row.load == load and _finite(row.tokens_per_second)]


def _finite(found: Range) -> bool:
    return all(map(math.isfinite, (found.value, found.low, found.high)))


def _told(row: Row) -> bool:
    return _drafts(row) and row.round_ms.known


def _drafts(row: Row) -> bool:
    return row.setting.speculates


def _speeds(plan: Plan, loads: Sequence[Load]) -> Chart:
    values = [_speed(row) for load in loads[:MOST_LOADS] for row in _rows(plan, load)]
    title = "output tokens / s" if len(loads) == 1 else ["output tokens / s", "of the batch"]
    axis = {"title": title, "tickCount": 4}
    y = {"field": "value", "type": "quantitative", "scale": {"zero": False}, "axis": axis}
    plain = {"filter": "datum.kind === 'plain'"}
    layers: list[Spec] = [
        {"transform": [plain], "mark": {"type": "rect", "color": GREY, "opacity": 0.2, "aria": False},
         "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"transform": [plain], "mark": {"type": "rule", "color": GREY, "strokeWidth": 2},
         "encoding": {"y": y, "description": SAID}},
        *_curve("chain", BLUE, y),
        *_points("tree", RED, y),
    ]  # fmt: skip
    trees = " Orange diamonds are trees." if any(one["kind"] == "tree" for one in values) else ""
    known = any(row.setting == PLAIN for row in plan.rows)
    hollow = (
        " Hollow points have an accept length that other depths bound." if any(one["bounded"] for one in values) else ""
    )
    caption = (
        "Output tokens a second of all requests of the batch over the steps of a chain; the band is the range that "
        "accept lengths and timings leave." + (" The grey line is without speculation." if known else "") + trees
        + hollow + _loads_left(loads, plan)
    )  # fmt: skip
    spec = panels(values, "load", {"layer": layers}, width=104, height=110)
    return Chart("Tokens a second by depth", caption, {**spec, "resolve": {"scale": {"y": "independent"}}})


def _speed(row: Row) -> Spec:
    found, chain = row.tokens_per_second, row.setting.topk == 1
    source = SOURCE_WORDS.get(row.length_source, "") if _drafts(row) else ""
    said = (
        f"{row.load.spelled}, {row.setting.spelled}: {_range(found, 1)} tok/s at accept length "
        f"{wording.decimal(row.accept_length.value)}{f' ({source})' if source else ''}"
    )
    return {
        **_point(row, found),
        "kind": "plain" if not _drafts(row) else "chain" if chain else "tree",
        "bounded": row.length_source == "bounds",
        "said": said,
    }


def _point(row: Row, found: Range) -> Spec:
    return {"load": row.load.spelled, "steps": row.setting.steps, "value": found.value, "low": found.low,
            "high": found.high}  # fmt: skip


def _range(found: Range, digits: int) -> str:
    within = "" if found.low == found.high else f" ({wording.interval((found.low, found.high), digits)})"
    return f"{wording.decimal(found.value, digits)}{within}"


def _x() -> Spec:
    whole = "datum.value % 1 ? '' : datum.label"  # of two depths 1.5 is a tick, and no depth
    axis = {"title": _DEPTH, "tickMinStep": 1, "tickCount": 5, "format": "d", "labelExpr": whole}
    return {"field": "steps", "type": "quantitative", "scale": {"nice": False, "padding": 6}, "axis": axis}


def _curve(kind: str, colour: str, y: Spec) -> list[Spec]:
    """The chains of one kind: a band, a line, and a point for each depth."""
    only, x = {"filter": f"datum.kind === '{kind}'"}, _x()
    hollow = {"condition": {"test": "datum.bounded", "value": 0}, "value": 1}
    point = {"type": "point", "filled": False, "fill": colour, "size": 32, "opacity": 1, "color": colour}
    return [
        {"transform": [only], "mark": {"type": "area", "color": colour, "opacity": 0.2, "aria": False},
         "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"transform": [only], "mark": {"type": "rule", "color": colour, "opacity": 0.5, "aria": False},
         "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"transform": [only], "mark": {"type": "line", "color": colour, "aria": False}, "encoding": {"x": x, "y": y}},
        {"transform": [only], "mark": point,
         "encoding": {"x": x, "y": y, "description": SAID, "fillOpacity": hollow}},
    ]  # fmt: skip


def _points(kind: str, colour: str, y: Spec) -> list[Spec]:
    """Trees, of which several may have one depth: a point and its range each."""
    only, x = {"filter": f"datum.kind === '{kind}'"}, _x()
    point = {"type": "point", "filled": True, "shape": "diamond", "size": 50, "opacity": 1, "color": colour}
    return [
        {"transform": [only], "mark": {"type": "rule", "color": colour, "aria": False},
         "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"transform": [only], "mark": point, "encoding": {"x": x, "y": y, "description": SAID}},
    ]  # fmt: skip


def _break_even(plan: Plan, loads: Sequence[Load]) -> Chart:
    values = [
        {**_point(row, found), "kind": f"{kind} {'chain' if row.setting.topk == 1 else 'tree'}", "bounded": False,
         "said": f"{row.load.spelled}, {row.setting.spelled}: {words} {_range(found, 2)}"}
        for load in loads[:MOST_LOADS] for row in _rows(plan, load) if _drafts(row) and row.break_even is not None
        for kind, words, found in (("head", "accept length", row.accept_length),
                                   ("even", "breaks even at accept length", row.break_even))
        if math.isfinite(found.value)
    ]  # fmt: skip
    title = "accept length (tokens / round)" if len(loads) == 1 else ["accept length", "(tokens / round)"]
    y = {"field": "value", "type": "quantitative", "scale": {"zero": False}, "axis": {"title": title, "tickCount": 4}}
    layers = [part for kind, colour in (("head", BLUE), ("even", RED)) for part in (
        *_curve(f"{kind} chain", colour, y), *_points(f"{kind} tree", colour, y))]  # fmt: skip
    caption = (
        "Blue: the accept length that the head gives. Orange: the one at which speculation is as fast as none. It pays "
        "where blue lies above orange; bands are ranges." + _loads_left(loads, plan)
    )
    return Chart("Where it breaks even", caption, panels(values, "load", {"layer": layers}, width=118, height=110))


def _losses(plan: Plan) -> Chart | None:
    """Of each load the best depth as it is, with a perfect head, and on a machine that drafts for free."""
    told = {choice.load for choice in plan.choices if any(map(_told, _rows(plan, choice.load)))}
    found = [one for choice in plan.choices if choice.load in told and (one := share(plan, choice)) is not None]
    found = found[:MOST_LOADS]
    values: list[Spec] = []
    for one in found:
        ratios = (
            ("as it is", one.speedup),
            ("every draft accepted", one.perfect_head),
            ("drafting and verifying for free", one.free_machine),
        )
        for words, ratio in ratios:
            name = f"{one.load.spelled}, {one.setting.spelled}: {words}"
            bounds = {"low": ratio.low, "high": ratio.high} if math.isfinite(ratio.low) else {}
            values.append({"row": name, "times": ratio.value, **bounds, "own": words == "as it is",
                           "said": f"{name}: {_range(ratio, 2)} times the speed without speculation"})  # fmt: skip
    if not values:
        return None
    axis = {"title": "speed (times that without speculation)", "tickCount": 5}
    x: Spec = {"field": "times", "type": "quantitative", "axis": axis, "scale": {"domainMin": 0}}
    colour = {"condition": {"test": "datum.own", "value": BLUE}, "value": GREY}
    as_fast = [{"times": 1, "said": "as fast as without speculation"}]
    line = {"type": "rule", "strokeDash": [4, 3], "color": RED}
    layers: list[Spec] = [
        {"mark": mark("bar"), "encoding": {"x": x, "color": colour}},
        {"transform": [{"filter": "isValid(datum.low)"}], "mark": mark("rule", strokeWidth=2, aria=False),
         "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": {"value": RED}}},
        {"data": {"values": as_fast}, "mark": line, "encoding": {"x": x, "y": None}},
    ]  # fmt: skip
    caption = (
        "The best depth of each load. What a perfect head would add is the head's loss; what free drafting and "
        "verifying would add is the machine's. Thin lines are ranges, the dashed line is the speed without speculation."
    )
    return Chart("Head and machine", caption, rows(values, "row", "load, setting and what if", layers))


def _loads_left(loads: Sequence[Load], plan: Plan) -> str:
    many = "" if len(loads) <= MOST_LOADS else f" The first {MOST_LOADS} of {len(loads)} such loads are shown."
    loose = len(plan.choices) - len(loads)
    return many + (
        f" {loose} of {len(plan.choices)} loads have no panel, since the timings leave them open." if loose else ""
    )
