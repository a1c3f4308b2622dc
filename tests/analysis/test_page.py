"""The web page: nothing is loaded, every axis says what it shows, and the numbers are those of the rounds."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.documents import rare_diagnosis
from support.ladder_cases import make_anchors, make_replays
from support.report_cases import many, nothing, rewired, served, single, sweep
from support.rounds_maker import make_rounds, make_variant

from replay.analysis.compare.compare import compare
from replay.analysis.ladder.ladder import build_ladder
from replay.analysis.page.chart_parts import Chart
from replay.analysis.page.charts import MOST_CURVES, charts
from replay.analysis.page.compared import comparison_charts, write_comparison
from replay.analysis.page.diagnosed import diagnosis_charts, write_diagnosis
from replay.analysis.page.draw import draw
from replay.analysis.page.names import distinct
from replay.analysis.page.page import Page, write_page
from replay.analysis.page.plan_charts import plan_charts
from replay.analysis.page.planned import write_plan
from replay.analysis.page.token_data import token_data
from replay.analysis.plan.ask import Planned, Question, answer_question, read_costs
from replay.analysis.report.assessment import Report
from replay.analysis.report.report import assess
from replay.analysis.summary import summarise
from replay.analysis.tokens.view import Known, Ranking, View, view_requests
from replay.cli.app import cli
from replay.traces.rounds import Rounds
from replay.traces.rounds_file import write_rounds

CASES = {"single": single, "sweep": sweep, "served": served, "rewired": rewired, "many": many}
# What makes a browser fetch something: attributes and functions with an address, rules and calls that load.
# A link or a reference within the page fetches nothing.
LOADS = re.compile(
    r"(?:src|action|poster|href(?!=\"#part-))\s*=|url\((?!#)|@import|fetch\(|XMLHttpRequest|WebSocket|import\(|<link|<img"
)
HOSTILE = "</script><script>alert(1)</script>"


def found(rounds: Rounds) -> Report:
    return assess(rounds, summarise(rounds, resamples=200), resamples=200)


def tokens() -> View:
    """One request of two rounds whose words are a text that would end a script, and one across tokens."""
    rounds = make_rounds({make_variant("v"): [[1, 0]]}, category="<b>")
    words = {5: HOSTILE.encode(), 6: b"\xe6\x97", 7: b"\xa5\n"}
    known = Known(tuple([6, 7] * 10), {0: Ranking(2, 0.25, ((5, 0.5),)), 1: Ranking(None, 0.0, ())})
    return view_requests(rounds, rounds.variants[0], {"r0": known}, words.__getitem__, notes=("a <note>",))


@pytest.fixture(scope="module")
def page() -> str:
    return write_page(Page(found(rewired()), "as <text>\n", tokens()))


def axes(spec: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every axis of a specification that shows a field, with its title, whose lines are split by newlines."""
    if isinstance(spec, dict):
        for name in ("x", "y"):
            one = spec.get("encoding", {}).get(name)
            if isinstance(one, dict) and "field" in one:
                title = one["axis"]["title"]
                yield one, "\n".join(title) if isinstance(title, list) else title
        for value in spec.values():
            yield from axes(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from axes(value)


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    assert LOADS.findall(page) == []
    assert re.findall(r"https?://[^\s\"'<]*", page) == []
    assert len(page.encode()) < 300_000


def test_no_name_is_given_twice(page: str) -> None:
    """Charts name gradients and clips, and links name headings."""
    names = re.findall(r' id="([^"]*)"', page)
    assert len(names) == len(set(names)) and set(re.findall(r'(?:url\(|href=")#([\w-]+)', page)) <= set(names)


def test_foreign_text_is_text(page: str) -> None:
    assert page.count("<script") == page.count("</script>") == 2 and "<b>" not in page
    data = re.search(r'id="token-data">(.*?)</script>', page, re.DOTALL)
    assert data is not None and HOSTILE in json.loads(data[1])["words"]
    assert "as &lt;text&gt;" in page


def test_the_page_holds_what_the_report_says(page: str) -> None:
    report, text = found(rewired()), unescape(re.sub(r"<[^>]+>", "", page))
    for row in report.summaries:
        assert f"{row.accept_length:.3f}" in text and f"{row.accepted:,} / {row.drafted:,}" in text
    for said in (*report.doubts, *(word for pair in report.provenance for word in pair)):
        assert said in text


@pytest.mark.parametrize("case", CASES)
def test_every_axis_has_a_title(case: str) -> None:
    made = list(charts(found(CASES[case]())))
    for chart in made:
        titles = [title for _, title in axes(chart.spec)]
        assert chart.heading and chart.caption.endswith(".") and len(titles) >= 2 and all(titles), chart.heading
    assert len(made) >= 3


def test_titles_are_drawn_and_charts_fit_a_phone() -> None:
    for chart in charts(found(rewired())):
        drawn = draw(chart.spec)
        said = unescape(re.sub(r"<[^>]+>", "\n", drawn))
        assert all(line in said for _, title in axes(chart.spec) for line in title.split("\n")), chart.heading
        width = re.search(r'^<svg[^>]* width="([\d.]+)"', drawn)
        assert width is not None and float(width[1]) <= 358, chart.heading  # 390 less the page's margins


def chart_of(rounds: Rounds, heading: str) -> Chart:
    return next(chart for chart in charts(found(rounds)) if chart.heading == heading)


def test_charts_show_the_numbers_of_the_rounds() -> None:
    """Four requests on paper: 0 to 3 accepted of 3, so 10 rounds of 1.5 accepted on average."""
    rounds = make_rounds({make_variant("a"): [[0, 1, 2, 3], [3, 0, 1], [2, 2, 1]], make_variant("b"): [[0], [0], [0]]})
    first = chart_of(rounds, "Accept length").spec["data"]["values"][0]
    assert first["length"] == pytest.approx(2.5) and first["low"] <= 2.5 <= first["high"]
    values = chart_of(rounds, "Acceptance by position").spec["data"]["values"]
    assert [one["share"] for one in values[:3]] == pytest.approx([80.0, 62.5, 40.0])  # 8 of 10, 5 of 8, 2 of 5
    assert "(5 of 8 rounds of 3 requests that got there)" in values[1]["said"] and "low" not in values[1]  # too few
    bars = chart_of(rounds, "Accepted tokens of a round").spec["data"]["values"]
    assert [one["share"] for one in bars[:4]] == pytest.approx([20.0, 30.0, 30.0, 20.0])
    assert bars[0]["variant"].endswith("10 rounds")


def test_a_sweep_of_two_facts_is_a_heat_map() -> None:
    played = {
        make_variant(f"{wiring} {steps}", wiring=(wiring,), steps=steps): [[1, 0], [min(steps, 2)]]
        for wiring in ("3", "16") for steps in (2, 3)
    }  # fmt: skip
    values = chart_of(make_rounds(played), "Accept length by steps and wiring").spec["data"]["values"]
    assert {(one["across"], one["down"]) for one in values} == {("2", "3"), ("3", "3"), ("2", "16"), ("3", "16")}
    assert not any(chart.heading.startswith("Accept length by") for chart in charts(found(single())))


def test_a_sweep_of_more_facts_has_a_cell_for_each_variant() -> None:
    values = chart_of(many(), "Accept length by steps and the other facts").spec["data"]["values"]
    assert len({(one["across"], one["down"]) for one in values}) == len(values) == len(many().variants)


def test_the_servers_rounds_stand_beside() -> None:
    rounds = make_rounds({make_variant("a"): [[0, 1], [2]]}, observed=[[0, 1, 0], [2]])
    bars = chart_of(rounds, "Accepted tokens of a round").spec["data"]["values"]
    assert [one["share"] for one in bars if one["variant"] == "server\n4 rounds"] == [50.0, 25.0, 25.0]
    kinds = {one["kind"] for one in chart_of(rewired(), "Against the server").spec["data"]["values"]}
    assert kinds == {"alike", "near tie", "unexplained"}


def test_of_many_variants_some_curves_are_shown_and_the_page_says_so() -> None:
    rounds = many()
    chart = chart_of(rounds, "Acceptance by position")
    shown = {one["variant"] for one in chart.spec["data"]["values"]}
    assert len(shown) == min(MOST_CURVES, len(rounds.variants))
    if len(rounds.variants) > MOST_CURVES:
        assert f"The {MOST_CURVES} of {len(rounds.variants)} variants" in chart.caption


def test_names_that_are_alike_where_they_are_short_stay_apart() -> None:
    """Two heads whose names differ only in a middle that no chart has room for."""
    draft = "heads/" + "x" * 60 + "{}" + "y" * 60
    played = {make_variant(f"v{place}", draft=draft.format(place)): [[place, 0], [1, 0]] for place in range(3)}
    for chart in charts(found(make_rounds(played))):
        key = "down" if "across" in chart.spec else "variant"
        named = {one[key] for one in chart.spec["data"]["values"]}
        assert len(named) == 3 and all(len(line) <= 60 for name in named for line in name.split("\n")), chart.heading
    assert distinct(["a" * 99, "a" * 98 + "b"], 20).keys() == {"a" * 99, "a" * 98 + "b"}
    assert len(set(distinct(["a" * 99, "a" * 50 + "b" + "a" * 48], 20).values())) == 2


def test_marks_say_what_they_are() -> None:
    """A tooltip is a title within its mark: names, counts and their denominators."""
    rounds = make_rounds({make_variant("a<b"): [[0, 1, 2], [2, 1]]})
    drawn = {chart.heading: unescape(draw(chart.spec)) for chart in charts(found(rounds))}
    assert "<title>a<b, 5 rounds of 2 requests: accept length 2.200" in drawn["Accept length"]
    assert "4 of 5 rounds of 2 requests that got there" in drawn["Acceptance by position"]
    assert "2 of 5 rounds accepted 1 (40.0 %)" in drawn["Accepted tokens of a round"]
    assert all(mark.count("<title>") == mark.count("</title>") > 0 for mark in drawn.values())


def test_rounds_that_are_none_have_a_page_without_charts() -> None:
    text = write_page(Page(found(nothing()), "", None))
    assert "<svg" not in text and "<script" not in text and "No rounds" in text


def test_tokens_are_handed_over_as_they_are() -> None:
    data = token_data(tokens())
    words, (first, second) = data["words"], data["requests"][0]["rounds"]
    assert [words[place] for place in first[5]] == [HOSTILE] * 3 and first[2] == 1
    assert (words[first[4]], words[first[7]]) == ("日\\n", "\\xa5\\n")
    assert first[8][3:5] == [2, 2500] and second[8][2:4] == ["not in the draft vocabulary", None]
    assert data["notes"] == ["a <note>"] and data["requests"][0]["category"] == "<b>"


def test_without_the_library_the_page_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rounds(replace(sweep()), path := tmp_path / "r.parquet")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = CliRunner().invoke(cli, ["report", str(path), "--html", str(tmp_path / "r.html")])
    assert done.exit_code == 1 and done.stdout == "" and "pip install 'eagle-replay[page]'" in done.stderr
    assert not (tmp_path / "r.html").exists()


# ---- the pages of diagnose and compare ----


def test_a_diagnosis_is_a_ranking_and_a_waterfall() -> None:
    """The levels of tests/analysis/test_ladder.py, which says how they come about."""
    ladder = build_ladder(make_anchors(), make_replays(observed=[[1], [0, 0]]))
    diagnosis = replace(rare_diagnosis(), ladder=ladder)
    ranking, waterfall = diagnosis_charts(diagnosis)
    assert [one["probability"] for one in ranking.spec["data"]["values"]] == [
        100 * one.probability for one in diagnosis.ranked
    ]
    bars = [(one["from"], one["to"], one["kind"]) for one in waterfall.spec["data"]["values"]]
    assert bars == [
        (1.0, 1.9375, "level"), (1.9375, 1.6875, "lost"), (1.6875, 1.75, "gained"), (1.75, 1.75, "level"),
        (1.75, 1.5, "lost"), (1.5, 1.5, "level"), (1.5, 1.0, "lost"), (1.0, 1.0, "level"),
        (1.0, pytest.approx(4 / 3), "level"), (pytest.approx(1.0), pytest.approx(4 / 3), "gained"),
    ]  # fmt: skip
    text = write_diagnosis(diagnosis, "as text")
    assert LOADS.findall(text) == [] and text.count("<svg") == 2 and "Verdict: engine" in text
    assert "Provenance" not in text
    assert "<dt>trace</dt><dd>a&lt;b</dd>" in write_diagnosis(diagnosis, "as text", [("trace", "a<b")])


def test_a_comparison_is_a_difference_with_its_interval() -> None:
    rounds = make_rounds({make_variant("a"): [[0, 1], [2], [1, 1]], make_variant("b<"): [[1, 1], [2], [2, 2]]})
    comparison = compare(rounds)
    (chart,) = comparison_charts(comparison)
    (value,) = chart.spec["data"]["values"]
    assert value["difference"] == pytest.approx(8 / 5 - 5 / 5)  # accepted of five rounds each
    assert (value["low"], value["high"]) == comparison.pairs[0].ci95
    text = write_comparison(comparison, "")
    assert LOADS.findall(text) == [] and "b&lt; against a, 3 requests" in text and "difference (tokens / round)" in text


def test_every_axis_of_both_has_a_title() -> None:
    ladder = build_ladder(make_anchors(), make_replays())
    rounds = make_rounds({make_variant("a"): [[0, 1], [2]], make_variant("b"): [[1, 1], [2]]})
    made = [*diagnosis_charts(replace(rare_diagnosis(), ladder=ladder)), *comparison_charts(compare(rounds))]
    assert len(made) == 3 and all(title for chart in made for _, title in axes(chart.spec))


def test_compare_writes_its_page(tmp_path: Path) -> None:
    write_rounds(sweep(), path := tmp_path / "r.parquet")
    page = tmp_path / "c.html"
    for more in ((), ("--force",)):
        done = CliRunner().invoke(cli, ["compare", str(path), "--html", str(page), *more])
        assert done.exit_code == 0, done.output
    assert "Difference in accept length" in page.read_text() and done.stdout.splitlines()[0][:20] in page.read_text()


# ---- the page of a plan ----

TIMES = ("ms=20", "batch=8,ms=21", "steps=5,ms=26,accept=2.5", "batch=8,steps=5,ms=33,accept=2.5")
TREE = "steps=4,topk=4,draft_tokens=16,accept=3"


def planned(*times: str, **more: Any) -> Planned:
    question = Question(times=times, **more)
    return answer_question(question, read_costs(question))


@pytest.fixture(scope="module")
def of_loads() -> Planned:
    return planned(*TIMES, lengths=("steps=2,accept=1.9", TREE), steps="3")


def test_a_plan_is_speed_by_depth_break_even_and_what_is_lost(of_loads: Planned) -> None:
    speeds, even, losses = plan_charts(of_loads.plan)
    rows = {(row.load.spelled, row.setting.spelled): row for row in of_loads.plan.rows}
    drawn = speeds.spec["data"]["values"]
    assert {(one["load"], one["said"].split(":")[0].split(", ", 1)[1]) for one in drawn} == set(rows)
    (tree,) = (one for one in drawn if one["kind"] == "tree" and one["load"] == "batch 8")
    found = rows["batch 8", "4 steps, topk 4, 16 draft tokens"].tokens_per_second
    assert (tree["low"], tree["value"], tree["high"]) == (found.low, found.value, found.high)
    assert {one["steps"] for one in drawn if one["bounded"]} == {3} and "Hollow points" in speeds.caption
    assert {one["kind"] for one in even.spec["data"]["values"]} == {
        "head chain",
        "even chain",
        "head tree",
        "even tree",
    }
    assert [one["own"] for one in losses.spec["data"]["values"]] == [True, False, False] * 2
    for chart in (speeds, even, losses):
        titles = [title for _, title in axes(chart.spec)]
        assert titles and all(titles) and chart.caption.endswith("."), chart.heading
        width = re.search(r'^<svg[^>]* width="([\d.]+)"', draw(chart.spec))
        assert width is not None and float(width[1]) <= 358, chart.heading


def test_the_page_of_a_plan_holds_what_the_plan_says(of_loads: Planned) -> None:
    page = write_plan(of_loads, "as <text>")
    text = unescape(re.sub(r"<[^>]+>", "", page))
    assert LOADS.findall(page) == [] and page.count("<svg") == 3 and "as &lt;text&gt;" in page
    body = of_loads.to_json()
    for said in (*body["answers"], *body["doubts"], *(one["said"] for one in body["provenance"])):
        assert said in text
    assert all(schedule in text for schedule in (body["schedules"] or {}).values())
    for row in of_loads.plan.rows:
        assert f"{row.tokens_per_second.value:.1f}" in text and f"{row.round_ms.low:.2f} to" in text
    assert {term.name for term in of_loads.plan.costs} <= set(re.findall(r'scope="row">([\w-]+)<', page))


def test_without_a_plain_timing_there_is_no_chart_of_it() -> None:
    """Nothing is drawn against a speed that nobody knows."""
    told = planned("steps=3,ms=30,accept=2", "steps=5,ms=40,accept=2.2")
    headings = [chart.heading for chart in plan_charts(told.plan)]
    assert headings == ["Tokens a second by depth"]
    (chart,) = plan_charts(told.plan)
    assert not any(one["kind"] == "plain" for one in chart.spec["data"]["values"])
    assert "without speculation" not in chart.caption and "cannot tell" in write_plan(told, "")


def test_a_load_that_the_timings_leave_open_has_no_panel() -> None:
    """Two timings at batch 1 say next to nothing of batch 64."""
    told = planned("ms=20", "steps=3,ms=30,accept=2", batch="1,64")
    for chart in plan_charts(told.plan):
        shown = {one.get("load", one.get("row", "").split(",")[0]) for one in chart.spec["data"]["values"]}
        assert shown == {"batch 1"}, chart.heading
    speeds = next(iter(plan_charts(told.plan)))
    assert "1 of 2 loads have no panel" in speeds.caption
    assert list(plan_charts(planned("ms=20", "steps=3,ms=30,accept=2", batch="64").plan)) == []


def test_plan_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    asked = [word for time in TIMES for word in ("--time", time)]
    for more in ((), ("--force",)):
        done = CliRunner().invoke(cli, ["plan", *asked, "--html", str(page), *more])
        assert done.exit_code == 0, done.output
    assert "Where it breaks even" in page.read_text() and "num_speculative_tokens_per_batch_size" in page.read_text()
    done = CliRunner().invoke(cli, ["plan", *asked, "--html", str(page)])
    assert done.exit_code == 1 and "--force" in done.stderr and done.stdout == ""
