"""Reports as a person sees them: golden text at 80 and 120 columns, colour, HTML, and each doubt where it belongs."""

import io
import re
from dataclasses import replace
from html import unescape

import pytest
from rich.console import Console
from support.report_cases import (
    CASES,
    GOLDEN,
    WIDTHS,
    doubtful,
    many,
    nothing,
    plain,
    report,
    rewired,
    served,
    single,
    sweep,
)
from support.rounds_maker import make_rounds, make_variant

from replay.analysis import wording
from replay.analysis.report.agreement import agreement_legend, agreement_sentence
from replay.analysis.report.report import Report, answer, assess, observed_sentence
from replay.analysis.summary import summarise
from replay.traces.rounds import Rounds


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_the_golden_report(case: str, width: int) -> None:
    """After a wanted change `PYTHONPATH=tests python -m support.report_cases` makes the golden texts anew: read it."""
    text = plain(case, width)
    assert max(map(len, text.splitlines())) <= width
    assert text == (GOLDEN / f"report-{case}-{width}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 60, 79, 97, 200])
@pytest.mark.parametrize("case", CASES)
def test_no_width_cuts_a_number(case: str, width: int) -> None:
    """Columns move and names fold, but nothing is replaced by dots."""
    text = plain(case, width)
    assert "…" not in text
    if width >= 60:
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("case", CASES)
def test_colour_adds_nothing_but_colour(case: str) -> None:
    console = Console(file=io.StringIO(), width=80, color_system="truecolor", force_terminal=True, _environ={})
    with console.capture() as capture:
        console.print(report(case))
    bare = re.sub(r"\x1b\[[0-9;]*m", "", capture.get())
    assert bare != capture.get()
    assert "\n".join(line.rstrip() for line in bare.splitlines()) + "\n" == plain(case, 80)


@pytest.mark.parametrize("case", ["single", "sweep"])
def test_html_holds_the_same_text(case: str) -> None:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, _environ={})
    console.print(report(case))
    html = console.export_html()
    body = re.search(r"<code[^>]*>(.*)</code>", html, re.DOTALL)
    assert body is not None
    text = unescape(re.sub(r"<[^>]+>", "", body[1]))
    assert "\n".join(line.rstrip() for line in text.splitlines()).strip() == plain(case, 100).strip()


def _assess(rounds: Rounds) -> Report:
    return assess(rounds, summarise(rounds, resamples=500), resamples=500)


def test_every_number_of_the_answer_is_that_of_the_rounds() -> None:
    rounds = sweep()
    found = _assess(rounds)
    assert found.best is not None
    table = rounds.table.filter(variant=found.best.name)
    assert f"accept length {(table['accepted'] + 1).mean():.3f}" in answer(found)
    assert f"over {table.height} rounds of 24 requests" in answer(found)


def test_what_the_others_lose() -> None:
    best, other, third = (make_variant(name, kv=name) for name in ("a", "b", "c"))
    good, bad = [[3, 2], [3, 3], [2, 3]], [[0, 0, 1], [1, 0], [0, 1]]
    mixed = [[3, 3], [2, 2], [3, 2]]  # the same rounds on other requests
    for played, said in (
        ({best: good, other: bad}, r"; the other loses \d\.\d+ \(95 % interval \d\.\d+ to \d\.\d+\)\."),
        ({best: good, other: good}, r"^All 2 variants give accept length 3\.667 .* over 6 rounds of 3 requests\.$"),
        ({best: good, other: good, third: [[], [], []]}, r"; 1 gives the same, 1 has no rounds\."),
        ({best: good, other: good, third: bad}, r"; 1 gives the same, 1 loses \d\.\d+ \(95 % interval .*\)\."),
        ({best: good, other: mixed}, r"; the other loses 0\.\d+, within noise\."),
        ({best: good, other: mixed, third: bad}, r"; the others lose 0\.\d+ to \d\.\d+, 1 of them within noise\."),
        ({best: good, other: [[], [], []]}, r"; 1 has no rounds\."),
    ):
        assert re.search(said, answer(_assess(make_rounds(played)))), said


def test_the_best_is_the_first_of_equals_and_never_one_without_rounds() -> None:
    first, second, empty = (make_variant(name, kv=name) for name in ("a", "b", "c"))
    found = _assess(make_rounds({empty: [[], []], first: [[1], [2]], second: [[1], [2]]}))
    assert found.best is not None and found.best.name == "a"
    assert _assess(nothing()).best is None


def test_what_the_server_reported_is_set_against_the_nearest_variant() -> None:
    assert "nearest is 3,16,28" in observed_sentence(_assess(sweep()))
    rounds = sweep()
    bare = tuple(replace(request, observed_histogram=None) for request in rounds.requests)
    assert "counting output tokens / rounds" in observed_sentence(_assess(replace(rounds, requests=bare)))
    silent = tuple(replace(request, observed_rounds=None) for request in bare)
    assert observed_sentence(_assess(replace(rounds, requests=silent))) == ""


def test_what_is_said_of_the_servers_own_rounds() -> None:
    (row,) = summarise(served(), resamples=100)
    assert agreement_sentence([row]) == (
        "Against the server's 1,440 rounds: 1,385 alike, 55 at a near tie, 0 unexplained (rounding flips about 50 of "
        "7,200 drafted tokens, 56 differ)."
    )
    assert agreement_legend([row]) == ""
    rows = summarise(rewired(), resamples=100)
    assert agreement_sentence(rows) == ""
    assert "how many of its 1,200 rounds" in agreement_legend(rows)
    assert "1,190 / 7 / 3" in plain("rewired", 120)
    for rounds in (single(), sweep()):
        rows = summarise(rounds, resamples=100)
        assert (agreement_sentence(rows), agreement_legend(rows)) == ("", "")


def test_unexplained_rounds_are_a_doubt_where_no_variant_explains_them() -> None:
    def raised(rounds: Rounds) -> list[str]:
        return [doubt for doubt in _assess(rounds).doubts if "unexplained" in doubt]

    (doubt,) = raised(rewired())
    assert doubt.startswith("3 of 1,200 rounds of the server are unexplained even in the variant that explains most")
    assert "`replay diagnose`" in doubt
    assert raised(served()) == []
    rounds = rewired()
    last = rounds.variants[-1]
    assert last.agreement is not None
    healed = replace(last, agreement=replace(last.agreement, alike=1105, unexplained=0))
    assert raised(replace(rounds, variants=(*rounds.variants[:-1], healed))) == []


DOUBTS = (
    "than the server did", "Only 6 requests", "interval of the accept length is wide", "teacher-forced",
    "were sampled (temperature 0.7)", "6 of 48 rounds (12 %) were cut", "9 of 240 drafted tokens (3.8 %)",
    "Over all 240 anchors", "for 5 of 6 requests only", "1 of 7 requests has no round", "logits of the prompts",
)  # fmt: skip


def test_every_doubt_is_raised_where_there_is_reason_and_only_there() -> None:
    raised = _assess(doubtful()).doubts
    assert [sum(words in doubt for doubt in raised) for words in DOUBTS] == [1] * len(DOUBTS)
    assert len(raised) == len(DOUBTS)
    assert _assess(single()).doubts == ()


def test_doubts_of_a_sweep() -> None:
    assert any("differ in steps" in doubt for doubt in _assess(many()).doubts)
    assert not any("differ in steps" in doubt for doubt in _assess(sweep()).doubts)
    one = make_rounds({make_variant("a"): [[3, 0]]})
    assert any("One request has rounds" in doubt for doubt in _assess(one).doubts)
    uneven = make_rounds({make_variant("a"): [[3], [0]], make_variant("b", kv="b"): [[3], []]})
    assert any("rounds on 1 to 2 requests" in doubt for doubt in _assess(uneven).doubts)
    below = make_rounds({make_variant("a", anchors=10, anchors_accepted=1): [[3], [3]]})
    assert any("below the served walk" in doubt for doubt in _assess(below).doubts)


def test_every_doubt_is_one_sentence() -> None:
    for rounds in (doubtful(), many(), nothing(), sweep(), served(), rewired()):
        for doubt in _assess(rounds).doubts:
            assert doubt.endswith(".") and ". " not in doubt and "\n" not in doubt


def test_only_facts_that_differ_are_columns() -> None:
    chain = [make_variant(f"k{steps}", steps=steps) for steps in (1, 3)]
    assert wording.varying(summarise(make_rounds({variant: [[1]] for variant in chain}))) == ("steps",)
    tree = [make_variant("a", num_draft_tokens=8), make_variant("b", num_draft_tokens=16)]
    assert wording.varying(summarise(make_rounds({variant: [[1]] for variant in tree}))) == ("num_draft_tokens",)
    alike = [make_variant("a"), make_variant("b")]
    assert wording.varying(summarise(make_rounds({variant: [[1]] for variant in alike}))) == ("name",)


def test_bars_are_as_high_as_their_share() -> None:
    assert wording.bars([8, 4, 1, 0]) == "█▄▁·"
    assert wording.bars([1, 1000]) == "▁█"
    assert wording.bars([0, 0]) == "··"
    assert wording.bars([]) == ""
