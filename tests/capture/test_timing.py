"""`replay time`: the times of a server whose costs are known come back, and what cannot be timed is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fake_server import LAUNCH, FakeServer, make_target
from support.timed_server import PREFILL, TimedServer, cost_ms, timed_server

from replay.analysis.plan.ask import Question, answer_question, read_costs
from replay.analysis.plan.report import doubts
from replay.analysis.plan.settings import make_setting
from replay.capture.client.rounds_timed import read_chunks, time_rounds
from replay.capture.client.timed_prompts import TimingOptions
from replay.capture.client.timing import time_server
from replay.cli.app import cli
from replay.errors import CaptureError, TraceCorruptError, TraceVersionError, UsageError
from replay.traces.timings import Measured, read_measured, timings_bytes

OPTIONS = TimingOptions("", batches=(1, 4), contexts=(200,), repeats=2, tokens=48)
PROMPT = 200 - 48 // 2  # tokens of each prompt, so that its output is around the context


def timed(server: TimedServer, options: TimingOptions = OPTIONS) -> list[Measured]:
    """What replay finds, by the server's own clock."""
    with timed_server(server) as running:
        return time_server(replace(options, server=running.url), clock=running.clock)


# ---- the time of a round ----


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_the_costs_of_a_server_come_back(steps: int) -> None:
    """Though its requests are prefilled one after another, and end one after another."""
    for one in timed(TimedServer(steps)):
        assert (one.steps, one.num_draft_tokens, one.context) == (steps, steps + 1, 200)
        assert one.round_ms == pytest.approx([cost_ms(one.batch, steps, PROMPT)] * 2, rel=1e-9)
        assert (one.accept_length, one.prompts) == (1.0 if steps == 0 else None, None)  # random ids say nothing of it
        assert one.engine == "sglang 0.5.23" and not one.recording


def test_the_whole_answer_would_say_another_time() -> None:
    """What is left out matters: prefill, and rounds of fewer requests, are in the time from question to answer."""
    server = TimedServer(3)
    (one,) = timed(server, replace(OPTIONS, batches=(4,), repeats=1))
    rounds = list(server.chunks([[1] * PROMPT] * 4, 48))
    whole = sum(ms for ms, _ in rounds) / max(
        chunk["meta_info"].get("spec_verify_ct", 0) for _, s in rounds for chunk in s
    )
    assert whole > 1.1 * one.round_ms[0] and PREFILL > one.round_ms[0]


def test_the_accept_length_is_that_of_the_prompts(tmp_path: Path) -> None:
    """Whole cycles of 0, 2, 1, 3 accepted are 2.5 a round; a window may cut a cycle."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5]}\n')
    server = TimedServer(3)
    (one,) = timed(server, replace(OPTIONS, batches=(2,), prompts=prompts, tokens=200, repeats=1))
    assert one.accept_length == pytest.approx(2.5, abs=0.05)
    assert one.prompts is not None
    asked = server.asked[-1]
    assert [len(ids) for ids in asked["input_ids"]] == [100, 100]
    assert asked["input_ids"][0][-5:] == [4, 5, 1, 2, 3] and asked["input_ids"][1][-5:] == [1, 2, 3, 4, 5]


def test_no_rows_are_shared_and_no_end_of_text_stops() -> None:
    server = TimedServer()
    timed(server)
    prompts = [tuple(ids) for asked in server.asked for ids in asked["input_ids"]]
    keys = [key for asked in server.asked for key in asked["extra_key"]]
    assert len(set(prompts)) == len(prompts) == 15 and len(set(keys)) == 12  # a warm-up and two repeats of 1 + 4
    assert all(asked["sampling_params"]["ignore_eos"] for asked in server.asked)


def test_a_plan_from_measured_timings_predicts_a_depth_that_was_not_measured(tmp_path: Path) -> None:
    files = []
    for steps in (0, 1, 3):
        path = tmp_path / f"{steps}.jsonl"
        path.write_bytes(timings_bytes(timed(TimedServer(steps))))
        files.append(str(path))
    asked = Question(benches=files, lengths=["steps=5,accept=2.2", "steps=3,accept=2", "steps=1,accept=1.6"])
    planned = answer_question(asked, read_costs(asked))
    rows = {(row.load.batch, row.setting): row for row in planned.plan.rows}
    for batch in (1, 4):
        found = rows[batch, make_setting(5)]
        assert found.round_ms.low <= cost_ms(batch, 5, PROMPT) <= found.round_ms.high and found.round_ms.known
    assert any("measured on" in said for _, said in planned.provenance)


def test_repeats_that_differ_are_in_doubt(tmp_path: Path) -> None:
    (one,) = timed(TimedServer(3), replace(OPTIONS, batches=(1,), repeats=1))
    for name, times in (("steady", (30.0, 30.2, 29.9, 30.1)), ("busy", (30.0, 70.0, 45.0, 31.0))):
        (tmp_path / name).write_bytes(timings_bytes([replace(one, round_ms=times)]))
        asked = Question(benches=[str(tmp_path / name)], lengths=["steps=3,accept=2"])
        found = doubts(answer_question(asked, read_costs(asked)).plan)
        assert any("1 of 1 timings are not known within 10 %" in doubt for doubt in found) == (name == "busy")


def test_rounds_that_come_several_at_a_time_are_counted_by_tokens_or_refused() -> None:
    plain = timed(TimedServer(0, joined=4))
    assert [one.round_ms[0] for one in plain] == pytest.approx([cost_ms(one.batch, 0, PROMPT) for one in plain])
    with pytest.raises(CaptureError, match="--stream-interval 1"):
        timed(TimedServer(3, joined=2))


# ---- refusals ----


@pytest.mark.parametrize(
    ("server", "options", "words"),
    [
        (TimedServer(running=2), {}, "has 2 requests running and 0 waiting"),
        (TimedServer(state={"dp_size": 2}), {}, "is 2 copies"),
        (TimedServer(3, state={"speculative_adaptive": True}), {}, "fixed steps"),
        (TimedServer(3, state={"speculative_num_steps": None}), {}, "all three as numbers"),
        (TimedServer(state={"disaggregation_mode": "decode"}), {}, "only prefills or only decodes"),
        (TimedServer(), {"batches": (9,)}, "runs 8 requests at a time"),
        (TimedServer(), {"contexts": (4090,)}, "longer than the server's context of 4096"),
        (TimedServer(state={"memory_usage": {"token_capacity": 500}}), {}, "it needs 896 tokens of KV cache"),
        (TimedServer(state={"memory_usage": {"token_capacity": 50}}), {"batches": None}, "no batch fits"),
        (TimedServer(state={"context_length": 40}), {"contexts": None}, "too many beside a context of 16"),
        (TimedServer(), {"contexts": None, "tokens": 2000}, "too many beside a context of 512"),
        (TimedServer(refuse="too long"), {}, "refuses batch 1 at context 200 .too long."),
        (TimedServer(cut=True), {}, "stream ended before"),
        (TimedServer(5), {"tokens": 16}, "decoded together for"),
        (TimedServer(recording={"state": "failed"}), {}, "does not record"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_timed_is_refused(server: TimedServer, options: dict[str, Any], words: str) -> None:
    with pytest.raises((CaptureError, UsageError), match=words):
        timed(server, replace(OPTIONS, **options))


def test_a_recording_server_is_slower_and_has_to_be_asked_for(tmp_path: Path) -> None:
    FakeServer(make_target(tmp_path / "target"), tmp_path / "spool").manifest()
    told = {"folder": str(tmp_path / "spool"), "launch": LAUNCH, "host": "here", "state": "recording"}
    server = TimedServer(3, recording=told, state={"context_length": 128})
    options = replace(OPTIONS, contexts=(60,), batches=(1,), repeats=1)
    with pytest.raises(CaptureError, match="--allow-recording"):
        timed(server, options)
    assert server.asked == []
    (one,) = timed(server, replace(options, allow_recording=True))
    assert one.recording
    (tmp_path / "it").write_bytes(timings_bytes([one]))
    (timing,) = read_costs(Question(benches=[str(tmp_path / "it")])).timings
    assert "recording" in timing.source


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 3}, "--tokens is 3"), ({"repeats": 0}, "--repeats is 0"), ({"batches": ()}, "--batch"),
        ({"contexts": (0,)}, "--context"), ({"contexts": (24,)}, "half of --tokens 48"),
        ({"prompts": Path("none.jsonl")}, "none.jsonl"), ({"seed": -1}, "--seed is -1"),
        ({"raw": True}, "--raw is of texts"),
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused_before_anything_is_asked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):  # nobody listens there
        time_server(replace(OPTIONS, server="http://127.0.0.1:9", **changes))


def test_others_that_come_meanwhile_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a server that says a moment late that nothing runs any more is believed."""
    monkeypatch.setattr("replay.capture.client.timing._SETTLE", 0.0)
    late = TimedServer(joining=[0, 2, 1, 0])
    assert len(timed(late, replace(OPTIONS, repeats=1))) == 2 and late.joining == []
    with pytest.raises(CaptureError, match="1 request running and 0 waiting, so it is not asked alone"):
        timed(TimedServer(joining=[0, 1, 1, 1, 1, 1]), replace(OPTIONS, repeats=1))


def test_what_the_server_does_not_run_is_left_out_and_said() -> None:
    notes: list[str] = []
    server = TimedServer(loads_page=False)
    with timed_server(server):
        options = replace(OPTIONS, server=server.url, batches=None, repeats=1)
        found = time_server(options, on_note=notes.append, clock=server.clock)
    assert [one.batch for one in found] == [1, 2, 4, 8]
    assert "batch 16" in notes[0] and "nobody does" in notes[1]


@pytest.mark.parametrize(
    "line", [b"data: {}", b"data: 7", b'data: {"error": {"message": "no"}}', b'data: {"meta_info": {}}', b"data: {",
             b'data: {"meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 1}, "index": 0}']
)  # fmt: skip
def test_a_stream_of_another_form_is_refused(line: bytes) -> None:
    with pytest.raises(CaptureError):
        read_chunks([(0.0, line)], 1)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(CaptureError, match="stream ended before all 2"):
        time_rounds(read_chunks([(0.0, b""), (0.1, b"data: [DONE]")], 2), 2, drafts=False)


def test_a_block_of_drafts_is_no_chain() -> None:
    """SGLang 0.5.23 says one step and a block of draft tokens for DFLASH (arg_groups/speculative_hook.py)."""
    with pytest.raises(CaptureError, match="7 draft tokens in 3 steps"):
        timed(TimedServer(3, state={"speculative_num_draft_tokens": 7}))


def test_each_repeat_goes_on_in_the_texts(tmp_path: Path) -> None:
    texts = [[text] * 300 for text in range(50, 58)]
    rows = [json.dumps({"id": str(row[0]), "input_ids": row}) for row in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    notes: list[str] = []
    for repeats in (4, 5):
        server = TimedServer(3)
        options = replace(OPTIONS, batches=(2,), repeats=repeats, prompts=tmp_path / "prompts.jsonl")
        with timed_server(server) as running:
            time_server(replace(options, server=running.url), clock=running.clock, on_note=notes.append)
        asked = [[prompt[-1] for prompt in body["input_ids"]] for body in server.asked]
        assert asked[1:5] == [[52, 53], [54, 55], [56, 57], [50, 51]]
    (note,) = notes  # of five repeats, which ask ten
    assert "8 texts" in note and "ask 10" in note


# ---- the file, and the command ----


def test_a_timings_file_holds_what_was_measured() -> None:
    measured = timed(TimedServer(3))
    lines = [json.loads(line) for line in timings_bytes(measured).splitlines()]
    assert [read_measured(line, "it") for line in lines] == measured


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line | {"format_version": 2}, lambda line: line | {"round_ms": []},
        lambda line: line | {"round_ms": [1, "x"]}, lambda line: line | {"round_ms": [0]},
        lambda line: line | {"batch": 0}, lambda line: line | {"accept_length": 9}, lambda line: line | {"steps": "3"},
        lambda line: {key: line[key] for key in line if key != "time"},
    ],
)  # fmt: skip
def test_a_line_that_is_no_timing_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    line = json.loads(timings_bytes(timed(TimedServer(1), replace(OPTIONS, batches=(1,), repeats=1))))
    with pytest.raises((TraceCorruptError, TraceVersionError)):
        read_measured(change(line), "it")
    (tmp_path / "bad.jsonl").write_text(json.dumps(change(line)))
    with pytest.raises(UsageError, match=r"bad\.jsonl"):
        read_costs(Question(benches=[str(tmp_path / "bad.jsonl")]))


def test_the_command_writes_a_file_that_plan_reads(tmp_path: Path) -> None:
    out = tmp_path / "timings.jsonl"
    with timed_server(TimedServer(3, paced=True)) as server:
        typed = ["time", "--server", server.url, "-o", str(out), "--batch", "1,2", "--repeats", "2", "--tokens", "48"]
        first = CliRunner().invoke(cli, typed)
        again = CliRunner().invoke(cli, typed)
        forced = CliRunner().invoke(cli, [*typed, "--force", "--json"])
    assert first.exit_code == 0 and "2 timings of 3 steps" in " ".join(first.output.split())
    assert again.exit_code == 1 and "--force" in again.output
    document = json.loads(forced.stdout)
    assert [one["batch"] for one in document["timings"]] == [1, 2]
    planned = CliRunner().invoke(cli, ["plan", "--bench", str(out), "--length", "steps=3,accept=2", "--json"])
    assert planned.exit_code == 0, planned.output
    rows = [row for row in json.loads(planned.stdout)["rows"] if row["timed"]]
    assert [row["setting"]["steps"] for row in rows] == [3, 3]


def test_the_command_refuses_in_one_sentence(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("mine")
    out = str(tmp_path / "t.jsonl")
    for typed in (
        ["--server", "http://127.0.0.1:9", "-o", out],
        ["--server", "nowhere at all", "-o", out],
        ["--server", "http://127.0.0.1:9", "-o", str(note), "--force"],
        ["--server", "http://127.0.0.1:9", "-o", out, "--batch", "x"],
        ["--server", "http://127.0.0.1:9", "-o", out, "--context", "0"],
    ):
        result = CliRunner().invoke(cli, ["time", *typed])
        assert result.exit_code == 1 and result.output.startswith("replay: ") and "Traceback" not in result.output
        assert "replay serve" not in result.output  # which would record, and be refused
    assert note.read_text() == "mine"
