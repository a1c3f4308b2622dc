"""Charts in a notebook: the page's own, as Vega-Lite and as SVG, and tables as polars frames."""

import json
import math
import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.documents import rare_diagnosis
from support.ladder_cases import make_anchors, make_replays
from support.report_cases import nothing, served, single, sweep
from support.rounds_maker import make_rounds, make_variant

import replay
from replay.analysis.ladder.ladder import build_ladder
from replay.analysis.page.charts import charts as page_charts
from replay.analysis.page.notebook import VEGA_LITE, Charts
from replay.analysis.report.report import assess
from replay.traces.rounds import Rounds


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    return sweep()


def grid() -> Rounds:
    """Two options that vary together."""
    variants = {
        make_variant(f"{taps} {steps}", steps=steps, wiring=tuple(taps.split(","))): [[1, steps]]
        for taps in ("2,9,15", "embed,2,9") for steps in (1, 3)
    }  # fmt: skip
    return make_rounds(variants)


@pytest.fixture(scope="module")
def shown(rounds: Rounds) -> Charts:
    return replay.charts(rounds)


def test_they_are_the_charts_of_the_page(rounds: Rounds, shown: Charts) -> None:
    drawn = list(page_charts(assess(rounds, replay.summarise(rounds))))
    assert [(one.heading, one.caption, one.spec) for one in shown] == [
        (one.heading, one.caption, one.spec) for one in drawn
    ]


def test_each_question_has_its_chart(shown: Charts) -> None:
    assert [one.heading for one in shown] == [
        "Accept length", "Acceptance by position", "Accepted tokens of a round",
        "Accept length by wiring and the other facts",
    ]  # fmt: skip
    assert shown["POSITION"] is shown[1] and list(shown[1:]) == list(shown)[1:]
    assert replay.charts(grid())["accept length by"].heading == "Accept length by steps and wiring"
    assert replay.charts(served())["server"].heading == "Against the server"
    assert [one.heading for one in replay.charts(replay.compare(sweep()))] == ["Difference in accept length"]
    ladder = build_ladder(make_anchors(), make_replays(observed=[[1], [0, 0]]))
    lost = replay.charts(replace(rare_diagnosis(), ladder=ladder))["training metric"]
    assert lost.heading == "From the training metric to the server"
    assert replay.charts(rare_diagnosis())["hypotheses"]
    assert replay.charts(nothing()) == []


def test_a_plan_has_its_charts() -> None:
    planned = replay.plan(times=["batch=1,tok/s=90", "batch=1,steps=3,accept=2.1,tok/s=110"])
    assert replay.charts(planned)["tokens a second"].spec == replay.charts(planned.plan)[0].spec
    assert repr(planned).startswith("Planned(Batch 1: speculate with 3 steps.")
    assert "Batch 1" in planned._repr_html_()
    with pytest.raises(replay.ReplayError, match="no timing of a server was given"):
        replay.plan()


def runs() -> Rounds:
    """Two runs of three checkpoints; one checkpoint was replayed on a single request."""
    every = [(run, step) for run in "ab" for step in (9, 50, 100)]
    played = {
        make_variant(f"{run}{step}", draft=f"{run}{step}"): [[1], [], []]
        if (run, step) == ("b", 9)
        else [[1, 2], [step % 3], [0]]
        for run, step in every
    }
    heads = {f"{run}{step}": {"path": f"/{run}/checkpoint-{step}", "step": step} for run, step in every}
    return replace(make_rounds(played), drafts=heads)


def test_checkpoints_of_a_run_are_a_curve_over_the_step() -> None:
    chart = replay.charts(runs())["training step"]
    values = chart.spec["data"]["values"]
    assert [(one["curve"], one["step"]) for one in values] == [(run, step) for run in "ab" for step in (9, 50, 100)]
    told = {row.name: row for row in replay.summarise(runs())}
    for one in values:
        row = told[f"{one['curve']}{one['step']}"]
        assert one["length"] == row.accept_length
        assert (one["low"], one["high"]) == row.accept_length_ci95 if row.name != "b9" else "low" not in one
    assert "<svg" in chart.html() and json.dumps(chart.spec, allow_nan=False)
    assert not [one for one in replay.charts(sweep()) if "training" in one.heading]


def test_a_chart_comes_as_vega_lite_and_as_svg(shown: Charts) -> None:
    for chart in shown:
        bundle = chart._repr_mimebundle_()
        assert set(bundle) == {VEGA_LITE, "text/html", "text/plain"}
        spec = json.loads(json.dumps(bundle[VEGA_LITE], allow_nan=False))
        assert spec["title"] == chart.heading and spec["background"] == "white" and spec["$schema"].endswith("v5.json")
        svg = bundle["text/html"].split("<br>")[1].split("<figcaption>")[0]
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "http" not in bundle["text/html"] and "<script" not in bundle["text/html"]
        assert bundle["text/plain"].startswith("Chart(")


def test_a_list_of_charts_shows_them_all(shown: Charts) -> None:
    html = shown[:2]._repr_html_()
    assert html.count("<svg") == html.count("<figcaption>") == 2


def test_without_the_library_that_draws_vega_lite_is_left(shown: Charts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert set(shown[0]._repr_mimebundle_()) == {VEGA_LITE, "text/plain"}
    assert "pip install" in shown._repr_html_() and "<td>Accept length</td>" in shown._repr_html_()


def test_a_chart_that_is_not_there_is_named() -> None:
    with pytest.raises(replay.ReplayError, match="no chart is called 'ladder'; there are Accept length; "):
        replay.charts(single())["ladder"]


@pytest.mark.parametrize("what", [None, "rounds.parquet", [], 3])
def test_what_has_no_charts_is_refused(what: object) -> None:
    with pytest.raises(replay.ReplayError, match="has no charts; give rounds"):
        replay.charts(what)  # type: ignore[arg-type]


def test_summaries_are_a_frame(rounds: Rounds) -> None:
    summaries = replay.summarise(rounds)
    table = summaries.table
    assert table.height == len(summaries)
    for row, one in zip(table.iter_rows(named=True), summaries, strict=True):
        low, high = one.accept_length_ci95
        assert (row["variant"], row["rounds"], row["accept_length"]) == (one.name, one.rounds, one.accept_length)
        assert (row["ci95_low"], row["ci95_high"], row["accept_rate"]) == (low, high, one.accept_rate)
        assert row["wiring"] == ",".join(one.wiring) and row["histogram"] == list(one.histogram)
    assert "<table" in table._repr_html_()


def test_what_is_not_known_is_null() -> None:
    summaries = replay.summarise(nothing())
    assert all(math.isnan(one.accept_length) for one in summaries)
    table = summaries.table
    unknown = ("accept_length", "ci95_low", "ci95_high", "accept_rate", "observed_accept_length")
    assert table.select(unknown).null_count().row(0) == (table.height,) * len(unknown)
    assert all(value is None for shares in table["position_conditional"] for value in shares)
    assert type(summaries)().table.columns == table.columns


def test_no_half_depth_is_on_the_axis() -> None:
    """Of two depths 1.5 is a tick, which would be called 2 as well."""
    planned = replay.plan(times=["tok/s=90", "steps=2,accept=1.8,tok/s=54.8"], lengths=["steps=1,accept=1.5"])
    assert re.findall(r">([0-9])</text>", replay.charts(planned)[0].html()) == ["1", "2"]
