"""Files of `replay time` as a plan reads them: bad lines by number, what was timed, and which timings go together."""

from dataclasses import replace
from pathlib import Path

import pytest

from replay.analysis.plan.ask import Question, answer_question, read_costs
from replay.analysis.plan.report import doubts
from replay.errors import UsageError
from replay.traces.timings import Measured, timings_bytes

TIMED = Measured(
    batch=1, context=200, steps=3, topk=1, num_draft_tokens=4, round_ms=(30.0,), rounds=20, accept_length=2.0,
    prompts=None, server="http://here", engine="sglang 0.5.23", model="tiny", algorithm="EAGLE3", draft="head",
    recording=False, time="2026-11-30T10:00:00+00:00", replay="0.1.0",
)  # fmt: skip


def test_a_bad_line_among_good_ones_is_named(tmp_path: Path) -> None:
    one = TIMED
    good = timings_bytes([one]).decode()
    for bad in (
        "{",
        "5",
        good.replace('"batch": 1', '"batch": 0'),
        good.replace('draft_tokens": 4', 'draft_tokens": 7'),
    ):
        (tmp_path / "t.jsonl").write_text(f"{good}\n{bad}\n{good}")
        with pytest.raises(UsageError, match=r"line 3 of .*t\.jsonl") as refused:
            read_costs(Question(benches=[str(tmp_path / "t.jsonl")]))
        assert str(refused.value).count("measure") + str(refused.value).count("anew") + str(refused.value).count(
            "take that timing out"
        ) in (1, 2)
    (tmp_path / "t.jsonl").write_text(good.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UsageError) as old:
        read_costs(Question(benches=[str(tmp_path / "t.jsonl")]))
    assert "measure it again" in str(old.value) and "anew" not in str(old.value)


def test_what_was_timed_is_read(tmp_path: Path) -> None:
    one = TIMED
    plain = replace(one, steps=0, num_draft_tokens=1, accept_length=1.0)

    def asked(first: Measured, second: Measured) -> Question:
        for name, line in (("a", first), ("b", second)):
            (tmp_path / name).write_bytes(timings_bytes([line]))
        return Question(benches=[str(tmp_path / "a"), str(tmp_path / "b")], lengths=["steps=3,accept=2"])

    with pytest.raises(UsageError, match=r"two models \(tiny and other\)"):
        read_costs(asked(plain, replace(one, model="other")))
    with pytest.raises(UsageError, match="twice"):
        read_costs(Question(benches=[str(tmp_path / "a"), str(tmp_path / "a")]))
    for second, words in (
        (replace(one, engine="sglang 0.5.20"), "2 engine versions"),
        (replace(one, recording=True), "recorded, so it was slower"),
        (one, ""),
    ):
        question = asked(plain, second)
        planned = answer_question(question, read_costs(question))
        told = " ".join(doubts(planned.plan))
        assert words in told if words else "engine versions" not in told and "recorded" not in told
        assert any("(tiny, sglang 0.5.23" in said for _, said in planned.provenance)
