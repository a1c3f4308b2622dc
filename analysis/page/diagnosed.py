"""A diagnosis as a page: how likely each hypothesis is, and the ladder as a waterfall."""

import math
from collections.abc import Iterator, Sequence

from replay.analysis import wording
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.analysis.ladder.ladder import Ladder
from replay.analysis.ladder.report import answer as ladder_answer
from replay.analysis.page.chart_parts import BLUE, GREEN, GREY, RED, Chart, Spec, mark, rows
from replay.analysis.page.document import document
from replay.analysis.page.names import numbered
from replay.analysis.page.parts import bullets, pairs_section

_SHOWN = 10  # hypotheses
_ENDS = ("level", "lost", "gained")


def write_diagnosis(diagnosis: Diagnosis, text: str, provenance: Sequence[tuple[str, str]] = ()) -> str:
    """The HTML; ``text`` is the diagnosis as the terminal shows it, ``provenance`` what it was made of, in pairs.

    Raises UsageError where charts cannot be drawn.
    """
    named = f", {diagnosis.named}" if diagnosis.named else ""
    why = f"{diagnosis.why[:1].upper()}{diagnosis.why[1:]}."
    parts = (
        ("Fix", (diagnosis.fix,) if diagnosis.fix else ()),
        ("Doubts on the trace", diagnosis.doubts),
        ("Cannot be told apart", diagnosis.undecided),
        ("What would tell", diagnosis.separate),
        ("What the head lacks", diagnosis.limits),
    )
    sections = [line for heading, said in parts if said for line in bullets(heading, said)]
    if provenance:
        sections += pairs_section("Provenance", provenance)
    return document(f"Verdict: {diagnosis.verdict}{named}", (why,), diagnosis_charts(diagnosis), sections, text)


def diagnosis_charts(diagnosis: Diagnosis) -> Iterator[Chart]:
    """Those for which there are numbers."""
    yield _ranking(diagnosis)
    if diagnosis.ladder is not None and sum(math.isfinite(one.accept_length) for one in diagnosis.ladder.rungs) > 1:
        yield _waterfall(diagnosis.ladder)


def _ranking(diagnosis: Diagnosis) -> Chart:
    ranked = diagnosis.ranked[:_SHOWN]
    names = numbered([one.name for one in ranked])
    values = [
        {"hypothesis": name, "probability": 100 * one.probability, "said": f"{one.name}: "
         f"{wording.percent(one.probability)}"}
        for name, one in zip(names, ranked, strict=True)
    ]  # fmt: skip
    x = {
        "field": "probability",
        "type": "quantitative",
        "scale": {"domain": [0, 100]},
        "axis": {"title": f"probability (%, of {len(diagnosis.ranked)} hypotheses)", "tickCount": 5},
    }
    bar: Spec = {"mark": mark("bar", color=BLUE), "encoding": {"x": x}}
    rounds = wording.counted(diagnosis.healthy.evidence.rounds, "round")
    shown = f"; the {len(ranked)} likeliest are shown" if len(ranked) < len(diagnosis.ranked) else ""
    caption = f"How likely each hypothesis is after {rounds} of the server{shown}."
    return Chart("Hypotheses", caption, rows(values, "hypothesis", "hypothesis", [bar]))


def _waterfall(ladder: Ladder) -> Chart:
    values = list(_bars(ladder))
    title = "accept length (tokens / round)"
    encoding: Spec = {
        "x": {
            "field": "from",
            "type": "quantitative",
            "scale": {"domainMin": 1},
            "axis": {"title": title, "tickCount": 5},
        },
        "x2": {"field": "to"},
        "color": {
            "field": "kind",
            "type": "nominal",
            "scale": {"domain": list(_ENDS), "range": [GREY, RED, GREEN]},
            "legend": {"title": None, "orient": "bottom"},
        },
    }
    bar: Spec = {"mark": mark("bar", stroke=GREY), "encoding": encoding}
    caption = f"{ladder_answer(ladder)} Each bar reaches from the rung before to this one."
    return Chart("From the training metric to the server", caption, rows(values, "rung", "rung", [bar]))


def _bars(ladder: Ladder) -> Iterator[Spec]:
    """A level stands on 1, a change leads to its level; what was not measured has no bar."""
    before = math.nan
    for rung in ladder.rungs:
        level = rung.accept_length
        if math.isfinite(level) and math.isnan(rung.change):
            said = f"{rung.name}: accept length {wording.decimal(level)}"
            yield {"rung": rung.name, "from": 1.0, "to": level, "kind": "level", "said": said}
        elif math.isfinite(rung.change):
            end = level if math.isfinite(level) else before  # what is unexplained leads to what was observed
            kind = "lost" if rung.change < 0 else "gained" if rung.change > 0 else "level"
            said = f"{rung.name}: {rung.change:+.3f}, to accept length {wording.decimal(end)}"
            yield {"rung": rung.name, "from": end - rung.change, "to": end, "kind": kind, "said": said}
        before = level if math.isfinite(level) else before
