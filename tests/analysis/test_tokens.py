"""Requests token by token, on rounds and texts written by hand: what is said was worked out on paper."""

import io
from dataclasses import replace

import polars as pl
import pytest
from rich.console import Console
from support.rounds_maker import make_rounds, make_variant

from replay.analysis.tokens.report import render_view
from replay.analysis.tokens.spelling import Token, join_text, spell_after
from replay.analysis.tokens.view import RANKED, UNDRAFTABLE, UNKNOWN, Known, Ranking, View, view_requests
from replay.cli.plain import plain
from replay.traces.rounds import Rounds, table_schema

# 日 is e6 97 a5 and 😀 is f0 9f 98 80 in UTF-8 (the Unicode standard, 3.9): here they lie across tokens.
WORDS = {
    1: b"Say", 2: b" hi", 3: b"\xe6\x97", 4: b"\xa5", 5: "é".encode(), 6: b" ok\n", 7: b"\xf0\x9f", 8: b"\x98\x80",
    9: b"\xff", 10: b" no", 11: b"\\n",
}  # fmt: skip
TEXT = (1, 2, 3, 4, 5, 7, 8, 6)  # two of the prompt, six of the output
GOLDEN = """\
Variant hand
+ accepted   x first rejected   - behind it, not looked at   * the target's own token

Request r0 (chat): 6 output tokens, accept length 2.500 over 2 rounds
  prompt of 2 tokens, 1 of them cached, prefilled in pieces of 1 and 1
    "Say hi"

round 0 at 2 after "\\xe6\\x97": 1 accepted
  + "日"  x " no"  - "\\xf0\\x9f"  * "é"
  position 2: the target chose "é" (60.0 %), rank 3 in the draft with 4.0 %; it gave " no" (30.0 %)
  the draft had  " no" 50.0 %  " ok\\n" 20.0 %

round 1 at 4 after "é": 2 accepted, runs past the end of the output
  + "\\xf0\\x9f"  + "😀"  x "\\xff"  * " ok\\n"
  position 3: the target chose " ok\\n", which is not in the draft vocabulary
  the draft had  "\\xff" < 0.1 %
"""


def made() -> Rounds:
    rounds = make_rounds({make_variant("hand"): [[1, 2]]}, category="chat")
    rows = [("hand", "r0", 0, 2, [4, 10, 7], 1, False), ("hand", "r0", 1, 4, [7, 8, 9], 2, True)]
    table = pl.DataFrame(rows, schema=table_schema(), orient="row")
    return replace(rounds, table=table, requests=(replace(rounds.requests[0], prompt_tokens=2),))


def known() -> Known:
    rankings = {0: Ranking(3, 0.04, ((10, 0.5), (6, 0.2))), 1: Ranking(None, 0.0, ((9, 0.0001),))}
    return Known(TEXT, rankings, {4: {5: 0.6, 10: 0.3}}, cached_tokens=1, pieces=(1, 1))


def view(**more: bool) -> View:
    rounds = made()
    return view_requests(rounds, rounds.variants[0], {"r0": known()}, WORDS.__getitem__, **more)


def printed(shown: View, *, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(render_view(shown))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def test_a_request_is_told_token_by_token() -> None:
    assert printed(view()) == GOLDEN


def test_marks_tell_accepted_from_rejected_without_a_colour_and_in_ascii() -> None:
    said = plain(printed(view()))
    assert '  + "\\u65e5"  x " no"  - "' in said and '+ "\\U0001f600"  x "' in said


def test_lines_break_between_tokens_alone() -> None:
    said = printed(view(), width=24)
    assert all(said.count(cell) == 1 for cell in ('\n  + "日"  x " no"\n', '\n  - "\\xf0\\x9f"  * "é"\n'))


@pytest.mark.parametrize(
    ("before", "ids", "names"),
    [
        ((), (3, 4), ("\\xe6\\x97", "日")),
        ((1, 3), (4, 1), ("日", "Say")),
        ((3,), (1,), ("Say",)),  # the character never ends
        ((7,), (8,), ("😀",)),
        ((), (9, 6), ("\\xff", " ok\n")),
        ((), (3, 3), ("\\xe6\\x97", "\\xe6\\x97")),
    ],
)
def test_bytes_of_a_character_are_joined(before: tuple[int, ...], ids: tuple[int, ...], names: tuple[str, ...]) -> None:
    found = spell_after(before, ids, WORDS.__getitem__)
    assert found == tuple(map(Token, ids, names))


def test_a_text_has_its_characters_whole() -> None:
    assert join_text(TEXT, WORDS.__getitem__) == "Say hi日é😀 ok\n"
    assert join_text((1, 9), WORDS.__getitem__) == "Say\\xff"
    assert join_text(TEXT, None) is None


def test_without_a_trace_the_rounds_still_speak() -> None:
    rounds = made()
    shown = view_requests(rounds, rounds.variants[0], {}, None, notes=("the trace is gone",))
    first = shown.requests[0].rounds[0]
    assert first.rejection is not None
    assert (first.known, first.bonus, first.rejection.chosen, first.rejection.reason) == (None, None, None, UNKNOWN)
    said = printed(shown)
    assert "  + #4  x #10  - #7\n  position 2: what the target chose is not known\n" in said
    assert "Not shown\n  •  the trace is gone\n" in said


def test_reasons_are_told_apart() -> None:
    reasons = [one.rejection.reason for one in view().requests[0].rounds if one.rejection]
    assert reasons == [RANKED, UNDRAFTABLE]


def test_behind_the_recorded_end_nothing_is_a_reason() -> None:
    """Round 1 with only the output's tokens known up to its second one: what came after is nobody's choice."""
    rounds = made()
    short = replace(known(), tokens=TEXT[:7])
    last = view_requests(rounds, rounds.variants[0], {"r0": short}, None).requests[0].rounds[1]
    assert last.rejection is not None and (last.rejection.reason, last.rejection.top) == (UNKNOWN, ())


def test_rounds_whose_first_token_was_rejected_are_left() -> None:
    assert view(first_rejected=True).requests == ()
    rounds = made()
    table = rounds.table.with_columns(accepted=pl.col("accepted") - 1)
    shown = view_requests(
        replace(rounds, table=table), rounds.variants[0], {}, None, first_rejected=True
    ).requests[0]  # fmt: skip
    assert [one.round for one in shown.rounds] == [0] and shown.played == 2


def test_of_a_tree_the_text_says_what_was_taken() -> None:
    rounds = make_rounds({make_variant("tree", topk=2, num_draft_tokens=5): [[1, 2]]})
    rows = [("tree", "r0", 0, 2, [10, 4, 6, 9], 1, False)]
    rounds = replace(rounds, table=pl.DataFrame(rows, schema=table_schema(), orient="row"))
    one = view_requests(rounds, rounds.variants[0], {"r0": known()}, WORDS.__getitem__).requests[0].rounds[0]
    assert one.taken == (Token(4, "日"),) and one.bonus == Token(5, "é")
    assert one.rejection is not None and one.rejection.drafted is None and one.rejection.chosen == Token(5, "é")
