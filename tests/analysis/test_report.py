"""Reports as a person sees them: golden text at 80 and 120 columns, colour, and each doubt where it belongs."""

import io
import re
from dataclasses import replace

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
from replay.analysis.report.report import Report, answer, assess, observed_sentence, render
from replay.analysis.summary import summarise
from replay.analysis.view import View
from replay.traces.rounds import Rounds


@pytest.mark.parametrize(("requests", "said"), [(1, True), (5, True), (6, False), (30, False)])
def test_of_few_requests_the_best_is_not_named(requests: int, said: bool) -> None:
    """Of one comparison, two-sided at 0.05: 2 ^ -5 is the least p of a sign test over six requests."""
    alike = [[1, 0] if number % 2 else [0, 1, 0] for number in range(requests)]
    other = [[0, 1] if number % 2 else [1, 0] for number in range(requests)]
    rounds = make_rounds({make_variant("a"): alike, make_variant("b", kv="stale"): other})
    first = answer(assess(rounds, summarise(rounds)))
    assert first.startswith("Which of 2 variants is best cannot be told: kv ") == said, first
    assert first.startswith("Best of 2 variants") != said


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


def _assess(rounds: Rounds) -> Report:
    return assess(rounds, summarise(rounds, resamples=500), resamples=500)


def test_every_number_of_the_answer_is_that_of_the_rounds() -> None:
    rounds = sweep()
    found = _assess(rounds)
    assert found.best is not None
    for place, row in enumerate(found.together):
        length = (rounds.table.filter(variant=row.name)["accepted"] + 1).mean()
        assert f"with {'' if place else 'accept length '}{length:.3f}" in answer(found)
    assert "over 24 requests; the others lose" in answer(found)
    table = single().table
    said = answer(_assess(single()))
    assert f"ccept length {(table['accepted'] + 1).mean():.3f}" in said
    assert f"{table.height:,} rounds of 24 requests accepted {table['accepted'].sum():,} of" in said


def test_what_the_others_lose() -> None:
    best, other, third = (make_variant(name, kv=name) for name in ("a", "b", "c"))
    good, bad = [[3, 2], [3, 3], [2, 3]] * 3, [[0, 0, 1], [1, 0], [0, 1]] * 3
    mixed = [[3, 3], [2, 2], [3, 2]] * 3  # the same rounds on other requests
    empty: list[list[int]] = [[]] * 9
    near = [[*row[:-1], row[-1] - 1] if place == 4 else row for place, row in enumerate(good)]
    for played, said in (
        (
            {best: good, other: bad},
            r"^Best of 2 variants: kv a, .* 18 rounds of 9 .*; the other loses \d\.\d+ \(95 % interval .* to .*\)\.$",
        ),
        ({best: good, other: good}, r"^All 2 variants give accept length 3\.667 .* over 18 rounds of 9 requests\.$"),
        (
            {best: good, other: good, third: empty},
            r"told apart: .* and kv b with 3.667, over .*; 1 has no rounds\.",
        ),
        ({best: good, other: good, third: bad}, r"and kv b with 3.667, .*; the other loses \d\.\d+ \(95 % .*\)\."),
        ({best: good, other: near}, r"variants, not told apart: kv a with .* and kv b with 3.611, over 9 requests\.$"),
        ({best: good, other: mixed, third: bad}, r"not told apart: kv a .* and kv b .*; the other loses \d\.\d+ \("),
        ({best: good, other: bad, third: bad}, r"variants: kv a, .*; the others lose \d\.\d+\.$"),
        ({best: good, other: empty}, r"; 1 has no rounds\."),
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


def test_the_best_is_so_on_the_requests_that_both_have() -> None:
    """By itself b has the longer accept length, 3.0 against 2.5, on the first request alone: there a has 4.0."""
    easy = make_rounds({make_variant("a"): [[3, 3], [0, 0]], make_variant("b", kv="b"): [[2, 2], []]})
    found = _assess(easy)
    assert [row.accept_length for row in found.summaries] == [2.5, 3.0] and found.best is not None
    assert found.best.name == "a" and found.gaps["b"].difference == -1.0


def test_doubts_of_a_sweep() -> None:
    assert any("differ in steps" in doubt for doubt in _assess(many()).doubts)
    assert not any("differ in steps" in doubt for doubt in _assess(sweep()).doubts)
    one = make_rounds({make_variant("a"): [[3, 0]]})
    assert any("One request has rounds" in doubt for doubt in _assess(one).doubts)
    uneven = make_rounds({make_variant("a"): [[3], [0]], make_variant("b", kv="b"): [[3], []]})
    assert any("rounds on 1 to 2 requests" in doubt for doubt in _assess(uneven).doubts)
    assert any("request cannot tell 2 variants apart" in doubt for doubt in _assess(uneven).doubts)
    assert not any("no round" in doubt for doubt in _assess(uneven).doubts)  # b was only not replayed on the second
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


def shown(rounds: Rounds, view: View) -> list[str]:
    """The lines of a report of that view, at full width."""
    console = Console(width=500, color_system=None, _environ={})
    with console.capture() as capture:
        console.print(render(rounds, summarise(rounds, resamples=100), view))
    return [line.rstrip() for line in capture.get().splitlines()]


def _lengths(lines: list[str]) -> list[float]:
    """The column of accept lengths: what stands before an interval in a row of the first table."""
    return [float(found[1]) for line in lines if (found := re.search(r" (\d\.\d{3})  \d\.\d\d to \d\.\d\d ", line))]


def test_a_long_table_is_sorted_and_says_its_answer_twice() -> None:
    lines = shown(many(), View())
    assert _lengths(lines) == sorted(_lengths(lines), reverse=True) and len(_lengths(lines)) == 32
    assert lines[-1] == lines[0] and lines[0].startswith("Best of 32 variants")
    typed = shown(many(), View(sort="typed"))
    assert _lengths(typed) == [round(row.accept_length, 3) for row in summarise(many(), resamples=100)]


def test_the_top_of_a_table_says_how_many_more_there_are() -> None:
    lines = shown(many(), View(top=5))
    assert _lengths(lines) == _lengths(shown(many(), View()))[:5]
    assert "27 more variants are not shown" in lines and lines[-1] != lines[0]
    short = shown(sweep(), View(sort="length", top=1))
    assert _lengths(short) == [max(_lengths(shown(sweep(), View())))]
    assert short[0] == shown(sweep(), View())[0]  # what is not shown still counts


def test_positions_that_no_round_accepted_are_left_out() -> None:
    deep = make_rounds({make_variant("a", steps=64): [[3, 9], [0, 17], [2, 2]]})
    lines = shown(deep, View())
    assert sum("█" in line or "░" in line for line in lines) == 1 + 18
    assert any("0 to 18" in line for line in lines) and not any("0 to 64" in line for line in lines)
    assert "positions 19 to 64: no round got there" in lines
    other = make_variant("b", steps=64, kv="b")
    lines = shown(make_rounds({make_variant("a", steps=64): [[3], [0]], other: [[1], [2]]}), View())
    assert any("0 to 15" in line for line in lines)


def test_one_of_a_thing_is_never_said_in_the_plural() -> None:
    one, other = make_variant("a", steps=1), make_variant("b", steps=1, kv="b")
    looked = make_rounds({one: [[1]], other: [[0]]}, observed=[[1]], cut_last=True, source="forced", temperature=0.5)
    for rounds in (looked, make_rounds({one: [[1], []]}, observed=[[1], []]), make_rounds({one: [[]]})):
        for view in (View(), View(top=1)):
            text = "\n".join(shown(rounds, view))
            assert not re.search(r"(?<![\d.,])1 (requests|rounds|tokens|variants|steps|outputs|anchors)\b", text)


def test_bars_are_as_high_as_their_share() -> None:
    assert wording.bars([8, 4, 1, 0]) == "█▄▁·"
    assert wording.bars([1, 1000]) == "▁█"
    assert wording.bars([0, 0]) == "··"
    assert wording.bars([]) == ""
