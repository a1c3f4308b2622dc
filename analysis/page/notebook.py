"""The charts of a web page in a notebook: as Vega-Lite where it draws these itself, as SVG where it shows HTML."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any, SupportsIndex, overload

from replay.analysis.compare.compare import Comparison
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.analysis.page.chart_parts import Chart
from replay.analysis.page.charts import charts as report_charts
from replay.analysis.page.compared import comparison_charts
from replay.analysis.page.diagnosed import diagnosis_charts
from replay.analysis.page.draw import draw
from replay.analysis.page.plan_charts import plan_charts
from replay.analysis.plan.ask import Planned
from replay.analysis.plan.plan import Plan
from replay.analysis.report.report import assess
from replay.analysis.summary import summarise
from replay.errors import UsageError
from replay.printable import html_table, one_line
from replay.traces.fields import show
from replay.traces.given import check_given
from replay.traces.rounds import Rounds

VEGA_LITE = "application/vnd.vegalite.v5+json"
_FIGURE = '<figure style="font-family: Arial, Helvetica, sans-serif">'  # whatever the notebook writes in
_PAPER = {"background": "white"}  # a page is white; a notebook may be dark, and the ink of charts is not


@dataclass(frozen=True, slots=True)
class NotebookChart(Chart):
    """A chart that a notebook shows by itself; ``spec`` is Vega-Lite."""

    def __repr__(self) -> str:
        return f"Chart({self.heading!r}: {one_line(self.caption)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Vega-Lite, and what stands in for it; HTML is left out where charts cannot be drawn in this process."""
        bundle = {VEGA_LITE: {"title": self.heading, **_PAPER, **_filled(self.spec)}, "text/plain": repr(self)}
        try:
            return {**bundle, "text/html": self.html()}
        except UsageError:
            return bundle

    def html(self) -> str:
        """The chart as an SVG with its heading and caption. Raises UsageError where charts cannot be drawn."""
        heading, caption = escape(one_line(self.heading)), escape(one_line(self.caption))
        drawn = draw({**self.spec, **_PAPER})
        return f"{_FIGURE}<b>{heading}</b><br>{drawn}<figcaption>{caption}</figcaption></figure>"


class Charts(list[NotebookChart]):
    """Charts in the order of the web page. ``charts["position"]`` is the first whose heading holds these words."""

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> NotebookChart: ...
    @overload
    def __getitem__(self, key: slice) -> "Charts": ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> "NotebookChart | Charts":
        """Raises UsageError where no heading holds the words, and for a number beyond the last."""
        if isinstance(key, slice):
            return Charts(super().__getitem__(key))
        check_given("the key", key, (str, int), "a number or words of a heading were expected")
        if isinstance(key, int) and -len(self) <= key < len(self):
            return super().__getitem__(key)
        if isinstance(key, int):
            raise UsageError(f"chart {key} was asked for; there are {len(self)}, from 0 on")
        assert isinstance(key, str)
        for chart in self:
            if key.lower() in chart.heading.lower():
                return chart
        there = "; ".join(chart.heading for chart in self) or "none"
        raise UsageError(f"no chart is called {show(key)}; there are {there}")

    def _repr_html_(self) -> str:
        try:
            return "\n".join(chart.html() for chart in self)
        except UsageError as error:
            return html_table(str(error), ("chart", "how to read it"), [[one.heading, one.caption] for one in self])


def _filled(spec: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing, which would override."""
    return {name: value for name, value in spec.items() if value is not None}


def charts(found: Rounds | Comparison | Diagnosis | Plan | Planned) -> Charts:
    """The charts that the web page of ``found`` has: a list, each with ``heading``, ``caption`` and ``spec``.

    Of rounds: accept lengths with their intervals, acceptance by position, accepted tokens of a round, a heat map where
    two options vary, checkpoints by step, agreement with the server. Of a comparison: the paired differences. Of a
    diagnosis: the likeliest hypotheses, and the ladder. Of a plan: tokens a second by depth, accept lengths against
    those that break even, what the head and the machine lose. Those without numbers are left out.

    Raises UsageError for anything else.

    >>> [chart.heading for chart in replay.charts(rounds)]
    ['Accept length', 'Acceptance by position', 'Accepted tokens of a round']
    """
    return Charts(NotebookChart(one.heading, one.caption, one.spec) for one in _of(found))


def _of(found: object) -> Iterable[Chart]:
    if isinstance(found, Rounds):
        return report_charts(assess(found, summarise(found)))
    if isinstance(found, Comparison):
        return comparison_charts(found)
    if isinstance(found, Diagnosis):
        return diagnosis_charts(found)
    if isinstance(found, Planned):
        found = found.plan
    if isinstance(found, Plan):
        return plan_charts(found)
    raise UsageError(
        f"{show(found)} has no charts; give rounds of simulate, a comparison of compare, a diagnosis of diagnose, or a "
        "plan"
    )
