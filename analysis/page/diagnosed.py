"""A diagnosis as a page: how likely each hypothesis is, and the ladder as a waterfall."""

import math
from collections.abc import Iterator

from replay.analysis import wording
from replay.analysis.diagnosis.verdict import Diagnosis
from replay.analysis.ladder.ladder import Ladder
from replay.analysis.ladder.report import answer as ladder_answer
from replay.analysis.page.chart_parts import BLUE, GREEN, GREY, MOST_LABEL, RED, Chart, Spec, above, framed
from replay.analysis.page.document import bullets, document
from replay.printable import shorten

_SHOWN = 10  # hypotheses
_ENDS = ("level", "lost", "gained")


def write_diagnosis(diagnosis: Diagnosis, text: str) -> str:
    """The HTML; ``text`` is the diagnosis as the terminal shows it. Raises UsageError where charts cannot be drawn."""
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
    return document(f"Verdict: {diagnosis.verdict}{named}", (why,), diagnosis_charts(diagnosis), sections, text)


def diagnosis_charts(diagnosis: Diagnosis) -> Iterator[Chart]:
    """Those for which there are numbers."""
    yield _ranking(diagnosis)
    if diagnosis.ladder is not None and sum(math.isfinite(one.accept_length) for one in diagnosis.ladder.rungs) > 1:
        yield _waterfall(diagnosis.ladder)


def _ranking(diagnosis: Diagnosis) -> Chart:
    ranked = diagnosis.ranked[:_SHOWN]
    names = [shorten(f"{place}. {one.name}", MOST_LABEL) for place, one in enumerate(ranked, 1)]
    values = [
        {"hypothesis": name, "probability": 100 * one.probability, "said": wording.percent(one.probability)}
        for name, one in zip(names, ranked, strict=True)
    ]
    x = {
        "field": "probability",
        "type": "quantitative",
        "scale": {"domain": [0, 100]},
        "axis": {"title": f"probability (%, of {len(diagnosis.ranked)} hypotheses)"},
    }
    y = {"field": "hypothesis", "type": "nominal", "sort": names, "axis": above("hypothesis")}
    spec = {"data": {"values": values}, "mark": {"type": "bar", "color": BLUE}, "encoding": {"x": x, "y": y}}
    rounds = wording.counted(diagnosis.healthy.evidence.rounds, "round")
    caption = f"How likely each hypothesis is after {rounds} of the server; the {len(ranked)} likeliest are shown."
    return Chart("Hypotheses", caption, framed(spec, 80 + 22 * len(values)))


def _waterfall(ladder: Ladder) -> Chart:
    values = list(_bars(ladder))
    names = [value["rung"] for value in values]
    title = "accept length (tokens / round)"
    encoding: Spec = {
        "x": {"field": "from", "type": "quantitative", "scale": {"domainMin": 1}, "axis": {"title": title}},
        "x2": {"field": "to"},
        "y": {"field": "rung", "type": "nominal", "sort": names, "axis": above("rung")},
        "color": {
            "field": "kind",
            "type": "nominal",
            "scale": {"domain": list(_ENDS), "range": [GREY, RED, GREEN]},
            "legend": {"title": None, "orient": "bottom"},
        },
    }
    spec = {"data": {"values": values}, "mark": {"type": "bar", "minBandSize": 4}, "encoding": encoding}
    caption = f"{ladder_answer(ladder)} Each bar reaches from the rung before to this one."
    return Chart("From the training metric to the server", caption, framed(spec, 100 + 24 * len(values)))


def _bars(ladder: Ladder) -> Iterator[Spec]:
    """A level stands on 1, a change leads to its level; what was not measured has no bar."""
    before = math.nan
    for rung in ladder.rungs:
        level = rung.accept_length
        if math.isfinite(level) and math.isnan(rung.change):
            yield {"rung": rung.name, "from": 1.0, "to": level, "kind": "level"}
        elif math.isfinite(rung.change):
            end = level if math.isfinite(level) else before  # what is unexplained leads to what was observed
            kind = "lost" if rung.change < 0 else "gained" if rung.change > 0 else "level"
            yield {"rung": rung.name, "from": end - rung.change, "to": end, "kind": kind}
        before = level if math.isfinite(level) else before
