"""capture --server against a stand-in whose every row is known; the real one is in test_sglang_plugin.py."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from click.testing import CliRunner
from support.fake_server import (
    LAUNCH,
    PATTERN,
    STEPS,
    VOCABULARY,
    FakeServer,
    fake_server,
    make_target,
    next_token,
    two,
)

from replay.capture.client import requests, watch
from replay.capture.client.api import open_api
from replay.capture.client.asking import Answered
from replay.capture.client.capture import capture_server
from replay.capture.client.requests import ServerClient
from replay.capture.client.spool_reader import SpoolReader, rid_of
from replay.capture.events import CaptureProgress, CaptureResult, Event, Noted
from replay.capture.kept import Kept
from replay.capture.launches import drop_launches
from replay.capture.options import ServerOptions
from replay.capture.spool import Entry, client_lock, launch_folder, row_file_names
from replay.cli.app import cli
from replay.diagnosis.feed import read_feeding
from replay.errors import CaptureError, OutputError, PromptError, TraceError, UsageError
from replay.traces.check import check_trace
from replay.traces.reader import Trace

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9], [10, 11, 12, 13]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_server(FakeServer(make_target(tmp_path / "tiny"), tmp_path / "recording")) as running:
        yield running


@pytest.fixture
def options(tmp_path: Path, server: FakeServer) -> ServerOptions:
    rows = [{"id": f"r{i}", "category": "c", "input_ids": ids} for i, ids in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ServerOptions(
        server.url, tmp_path / "prompts.jsonl", tmp_path / "trace", max_new_tokens=9, concurrency=2, retries=2
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.capture.client.api._LONGEST_PAUSE", 0.01)


def capture(options: ServerOptions) -> tuple[CaptureResult, list[Event]]:
    events: list[Event] = []
    return capture_server(options, events.append), events


def by_id(trace: Trace) -> dict[str, int]:
    return {record.request_id: index for index, record in enumerate(trace.records)}


def test_trace_holds_what_the_server_computed(options: ServerOptions, server: FakeServer) -> None:
    result, _ = capture(options)
    trace = Trace.open(options.out)
    assert (result.requests, result.recorded, len(trace)) == (4, 4, 4)
    assert not [finding for finding in check_trace(trace) if finding.severity == "error"]
    for i, prompt in enumerate(PROMPTS):
        rows = trace.read(by_id(trace)[f"r{i}"], ["embed", "2", "final"])
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 9:
            tokens.append(next_token(tokens[-1]))
        assert rows.tokens.tolist() == tokens
        assert torch.equal(rows.taps["2"], two(tokens[:-1], 0))
        assert rows.taps["final"].argmax(-1).tolist() == [next_token(token) for token in tokens[:-1]]
        assert rows.taps["embed"].argmax(-1).tolist() == tokens[:-1]


def test_trace_holds_what_the_draft_was_fed(options: ServerOptions) -> None:
    """Embed and R[2] of the last row of each prompt's first chunk, as the stand-in says."""
    capture(options)
    trace = Trace.open(options.out)
    found = read_feeding(trace)
    assert found is not None and (found.requests, found.rows, trace.fed_rows) == (4, 4, 4)
    assert found.wiring == ("embed", "2") and (found.next_token, found.offset) == (4, 0)
    feed = trace.feed(by_id(trace)["r0"])
    assert feed is not None and (feed.row_F.tolist(), feed.token_F.tolist()) == ([1], [3])


def test_trace_holds_the_pieces_of_prompts_and_what_ran_together(options: ServerOptions) -> None:
    """Two chunks a prompt, each beside 3 rows of somebody else, who stands in row 0 of every verify as well."""
    capture(options)
    trace = Trace.open(options.out)
    for record in trace.records:
        half = record.prompt_tokens // 2
        expected = [half, record.prompt_tokens - half] if half else [1]
        assert record.pieces == tuple((rows, rows + 3) for rows in expected)
    rounds = trace.served_rounds()
    assert set(rounds["batch"]) == {2} and set(rounds["batch_row"]) == {1}
    assert rounds["verify_pass"].n_unique() == len(rounds)
    for name in rounds["request_id"].unique():
        passes = rounds.filter(request_id=name).sort("round")["verify_pass"].to_list()
        assert passes == sorted(passes)


def test_a_feed_that_comes_after_a_short_answer_is_waited_for(options: ServerOptions, server: FakeServer) -> None:
    """Of one-token answers it is the last that comes: after all rows, when the request has long been answered."""
    keep = server._keep

    def late(entry: Entry, tensors: dict[str, torch.Tensor]) -> None:
        if entry.kind == "feed":
            threading.Timer(0.4, keep, (entry, tensors)).start()
        else:
            keep(entry, tensors)

    server._keep = late  # type: ignore[method-assign]
    capture(replace(options, max_new_tokens=1))
    trace = Trace.open(options.out)
    assert all(trace.feed(index) is not None for index in range(4))
    assert not [text for text in trace.header.missing if "was fed" in text]


@pytest.mark.parametrize("why", ["", "moved"])
def test_a_feed_that_never_comes_is_missing_and_ends_nothing(
    options: ServerOptions, server: FakeServer, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It is waited for so long, and not at all where the server says that it records none."""
    monkeypatch.setattr(requests, "_FEED_SECONDS", 60.0 if why else 0.2)
    monkeypatch.setattr(server, "_write_feed", lambda *_: None)
    server.manifest(no_feed=why)
    _, events = capture(options)
    trace = Trace.open(options.out)
    assert (len(trace), trace.fed_rows, read_feeding(trace)) == (4, 0, None)
    said = f"4 requests of which it was not recorded what the draft was fed{' (moved)' if why else ''}"
    assert said in trace.header.missing and said in [event.text for event in events if isinstance(event, Noted)]


def test_what_a_version_lacks_is_missing_once(options: ServerOptions, server: FakeServer) -> None:
    note = "SGLang 9.9.9 has not been tried; recording was tried with 0.5.23"
    server.manifest(notes=[note])
    _, events = capture(options)
    capture(replace(options, resume=True))
    assert list(Trace.open(options.out).header.missing).count(note) == 1
    assert note in [event.text for event in events if isinstance(event, Noted)]


def test_a_feed_that_ends_midway_is_waited_for_no_more(options: ServerOptions, server: FakeServer) -> None:
    """The manifest is looked at again while a request waits: long before the wait for a feed ends."""
    answer = server.answer

    def end_feed(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["input_ids"] == PROMPTS[1]:
            server._write_feed = lambda *_: None  # type: ignore[method-assign]
            server.manifest(no_feed="moved")
        return answer(body)

    server.answer = end_feed  # type: ignore[method-assign]
    began = time.monotonic()
    capture(replace(options, concurrency=1))
    assert time.monotonic() - began < requests._FEED_SECONDS
    trace = Trace.open(options.out)
    assert (len(trace), trace.fed_rows) == (4, 1)
    assert "3 requests of which it was not recorded what the draft was fed (moved)" in trace.header.missing


def test_embedding_that_is_a_lookup_is_not_stored(options: ServerOptions) -> None:
    capture(options)
    trace = Trace.open(options.out)
    assert trace.header.embed == "lookup" and set(trace.header.taps) == {"2", "final"}
    assert "embed" in trace.taps


def test_rounds_counters_and_tail(options: ServerOptions) -> None:
    capture(options)
    trace = Trace.open(options.out)
    rounds = trace.served_rounds()
    record = trace.records[by_id(trace)["r0"]]
    # 1 token of the prefill, then 1 + 3 + 2 + 1 + 3 by the pattern: 11 of which 9 are asked for
    own = rounds.filter(rounds["request_id"] == "r0").sort("round")
    assert own["accepted"].to_list() == [0, 2, 1, 0, 2] == [*PATTERN, *PATTERN][:5]
    assert own["anchor"].to_list() == [5, 6, 9, 11, 12]
    assert (record.server_verify_rounds, record.server_histogram) == (5, (2, 1, 2))
    last = trace.read(by_id(trace)["r0"], []).tokens[-1]
    assert record.tail_ids == (next_token(int(last)), next_token(next_token(int(last))))


def test_requests_have_ids_and_cache_salts_of_their_own(options: ServerOptions, server: FakeServer) -> None:
    capture(options)
    rids = [body["rid"] for body in server.asked]
    assert len(set(rids)) == len(rids) == 5  # and the probe
    assert all(rid.startswith("replay-") and "r0" not in rid for rid in rids)
    assert [body["extra_key"] for body in server.asked] == rids


def test_spool_is_empty_afterwards(options: ServerOptions, server: FakeServer) -> None:
    assert server.folder is not None
    capture(options)
    assert row_file_names(launch_folder(server.folder, LAUNCH)) == []


def test_trace_may_lie_in_the_recording_folder(options: ServerOptions, server: FakeServer) -> None:
    assert server.folder is not None
    capture(replace(options, out=server.folder))
    assert len(Trace.open(server.folder)) == 4


@pytest.mark.parametrize("trouble", ["unavailable", "aborted", "cut"])
def test_trouble_is_tried_again(options: ServerOptions, server: FakeServer, trouble: str) -> None:
    setattr(server, trouble, 2)
    capture(options)
    trace = Trace.open(options.out)
    assert len(trace) == 4 and [finding for finding in check_trace(trace) if finding.severity == "error"] == []
    assert len({body["rid"] for body in server.asked}) == len(server.asked) == 7
    # the rows of a try that was aborted under way are no part of the trace, and of no use to anyone
    assert trace.served_rounds().height == 20
    assert server.folder is not None and row_file_names(launch_folder(server.folder, LAUNCH)) == []


def test_a_prompt_that_is_refused_is_left_out_by_name(options: ServerOptions, server: FakeServer) -> None:
    server.refused = (7,)
    result, events = capture(options)
    reason = "The input is longer than what the server takes."
    assert (result.refused, len(Trace.open(options.out))) == ({"r2": reason}, 3)
    sentence = f"the server refused request 'r2' ({reason})"
    assert sentence in Trace.open(options.out).header.missing
    assert any(isinstance(event, Noted) and sentence in event.text for event in events)
    # resumed, it is asked again: once more in vain, then not
    assert capture(replace(options, resume=True))[0].refused == {"r2": reason}
    assert Trace.open(options.out).header.missing.count(sentence) == 1
    server.refused = ()
    assert capture(replace(options, resume=True))[0].refused == {}
    assert len(Trace.open(options.out)) == 4 and sentence not in Trace.open(options.out).header.missing


def test_prompts_that_are_all_refused_are_no_trace(options: ServerOptions, server: FakeServer) -> None:
    answer = server.answer

    def refuse(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return answer(body) if "probe" in body["rid"] else (400, {"error": "no"})

    server.answer = refuse  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="refused all 4 requests, the first: no"):
        capture(options)


def test_files_hold_rows_of_one_client_and_go_with_it(options: ServerOptions, server: FakeServer) -> None:
    """A client that has died leaves its rows to the next one; those of a living one are left alone."""
    assert server.folder is not None
    folder = launch_folder(server.folder, LAUNCH)
    dead, living = ("replay-" + digit * 16 for digit in "01")
    client_lock(folder, dead).touch()
    with SpoolReader(folder, (), VOCABULARY, living):
        for client in (dead, living, "replay-stray"):
            server.answer({"rid": rid_of(client, "0", 0), "input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
        capture(options)
        left = row_file_names(folder)
        assert {json.loads(row_file_header(folder / name)["entries"])[0]["rid"] for name in left} == {f"{living}-0-0"}


def row_file_header(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    metadata: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return metadata


def test_lasting_trouble_ends_it_and_keeps_what_is_whole(options: ServerOptions, server: FakeServer) -> None:
    answer = server.answer

    def answer_some(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (503, {}) if body["input_ids"] == PROMPTS[3] else answer(body)

    server.answer = answer_some  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"failed 3 times.*--resume"):
        capture(replace(options, concurrency=1))
    assert len(Trace.open(options.out, allow_incomplete=True)) == 3
    server.answer = answer  # type: ignore[method-assign]
    asked = len(server.asked)
    result, _ = capture(replace(options, resume=True))
    assert (result.recorded, len(Trace.open(options.out))) == (1, 4)
    assert len(server.asked) == asked + 2  # the probe and the one that was missing


def test_request_without_rows_is_asked_again(
    options: ServerOptions, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_ROWS_SECONDS", 0.3)
    answer = server.answer

    def rowless_once(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        server.rowless = int(body["input_ids"] == PROMPTS[1] and sum(o["input_ids"] == [6] for o in server.asked) == 0)
        return answer(body)

    server.answer = rowless_once  # type: ignore[method-assign]
    _, events = capture(replace(options, concurrency=1))
    assert [event.text for event in events if isinstance(event, Noted)] == [
        "the rows of request 'r1' did not come whole; asking again"
    ]
    assert len(Trace.open(options.out)) == 4


def test_torn_file_is_not_believed(options: ServerOptions, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_ROWS_SECONDS", 0.3)
    assert server.folder is not None
    folder = launch_folder(server.folder, LAUNCH)
    (folder / "rows-8-00000001.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    (folder / "rows-9-00000001.safetensors").symlink_to("/etc/passwd")
    capture(options)
    assert len(Trace.open(options.out)) == 4
    assert sorted(row_file_names(folder)) == ["rows-8-00000001.safetensors", "rows-9-00000001.safetensors"]


def test_recording_that_fails_midway_ends_the_capture(
    options: ServerOptions, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = server.answer

    def fail_then(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["input_ids"] == PROMPTS[2]:
            server.manifest(state="failed", reason="cannot write: No space left on device")
            server.rowless = 9
        return answer(body)

    server.answer = fail_then  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"stopped recording.*No space left"):
        capture(replace(options, concurrency=1))
    trace = Trace.open(options.out, allow_incomplete=True)
    sentence = (
        "the requests that were not finished when the server stopped recording (cannot write: No space left on device)"
    )
    assert len(trace) == 2 and sentence in trace.header.missing
    server.answer, server.rowless = answer, 0  # type: ignore[method-assign]
    server.manifest()
    capture(replace(options, resume=True))
    assert len(Trace.open(options.out)) == 4 and sentence not in Trace.open(options.out).header.missing


def test_recording_that_fails_unseen_on_disk_is_asked_for(
    options: ServerOptions, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose disk is full cannot say so in its manifest; it says so when it is asked."""
    monkeypatch.setattr(watch, "_ASK_SECONDS", 0.1)
    answer = server.answer

    def fail_then(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["input_ids"] == PROMPTS[2]:
            server.reported_state, server.reported_reason, server.rowless = "failed", "No space left on device", 9
        return answer(body)

    server.answer = fail_then  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"stopped recording.*No space left"):
        capture(replace(options, concurrency=1))
    assert "No space left" in Trace.open(options.out, allow_incomplete=True).header.missing[-1]


def test_server_started_anew_is_noticed_and_resumed(options: ServerOptions, server: FakeServer) -> None:
    answer = server.answer
    assert server.folder is not None
    folder = server.folder

    at_work = threading.Lock()

    def start_anew(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with at_work:
            if body["input_ids"] == PROMPTS[2]:
                server.rowless = 9
                drop_launches(folder, "f" * 16)
            return answer(body)

    server.answer = start_anew  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="restarted"):
        capture(replace(options, concurrency=1))
    with at_work:  # the client gives up at the first file that is gone; the server's thread drops the rest meanwhile
        pass
    kept = len(Trace.open(options.out, allow_incomplete=True))
    assert kept <= 2  # rows of the answered two that were not joined yet are gone with the server
    server.answer, server.rowless, server.passes = answer, 0, 0  # type: ignore[method-assign]
    server.manifest()
    result, _ = capture(replace(options, resume=True))
    assert result.recorded == 4 - kept
    ids = [record.request_id for record in Trace.open(options.out).records]
    assert sorted(ids) == ["r0", "r1", "r2", "r3"]


def test_passes_of_a_server_started_anew_are_told_from_those_before(
    options: ServerOptions, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts from 0 again; the requests that were safe keep their numbers."""
    monkeypatch.setattr("replay.capture.client.shard.SHARD_REQUESTS", 1)
    refused, answer = PROMPTS[3], server.answer
    server.answer = (  # type: ignore[method-assign]
        lambda body: (400, {"error": {"message": "no"}}) if body["input_ids"] == refused else answer(body)
    )
    capture(options)
    before = Trace.open(options.out).served_rounds()
    server.answer, server.passes = answer, 0  # type: ignore[method-assign]
    capture(replace(options, resume=True))
    rounds = Trace.open(options.out).served_rounds()
    assert rounds.filter(pl.col("request_id") != "r3").equals(before)
    assert rounds["verify_pass"].n_unique() == len(rounds) > len(before) > 0


def test_client_that_is_killed_is_gone_on_with(options: ServerOptions, server: FakeServer) -> None:
    """kill -9: what is whole stays, the rest is asked for, nothing twice, and its rows go with the next client."""
    answer, third, killed = server.answer, threading.Event(), threading.Event()
    assert server.folder is not None
    folder = launch_folder(server.folder, LAUNCH)

    def hang_at_third(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, value = answer(body)  # with its rows
        if body["input_ids"] == PROMPTS[2]:
            third.set()
            killed.wait(60)
        return status, value

    server.answer = hang_at_third  # type: ignore[method-assign]
    script = (
        "import sys; from pathlib import Path\n"
        "from replay.capture.client import capture, shard\n"
        "from replay.capture.options import ServerOptions\n"
        "shard.SHARD_REQUESTS = 1\n"
        "url, prompts, out = sys.argv[1:]\n"
        "options = ServerOptions(url, Path(prompts), Path(out), max_new_tokens=9, concurrency=1)\n"
        "capture.capture_server(options, lambda _: None)"
    )
    typed = [options.server, str(options.prompts), str(options.out)]
    with subprocess.Popen([sys.executable, "-c", script, *typed]) as process:
        assert third.wait(60)
        deadline = time.monotonic() + 10
        while not (options.out / "shard-00001.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    killed.set()
    server.answer = answer  # type: ignore[method-assign]
    before = (options.out / "shard-00000.safetensors").read_bytes()
    assert len(Trace.open(options.out, allow_incomplete=True)) == 2 and row_file_names(folder)
    result, _ = capture(replace(options, resume=True))
    trace = Trace.open(options.out)
    assert result.recorded == 2 and (options.out / "shard-00000.safetensors").read_bytes() == before
    assert sorted(record.request_id for record in trace.records) == ["r0", "r1", "r2", "r3"]
    assert trace.served_rounds().height == 20 and row_file_names(folder) == []


def test_api_key_is_sent_and_asked_for(options: ServerOptions, server: FakeServer) -> None:
    server.api_key = "s3cret"
    with pytest.raises(CaptureError, match="--api-key"):
        capture(options)
    capture(replace(options, api_key="s3cret"))
    assert "s3cret" not in (options.out / "trace.json").read_text()


def test_api_key_is_not_sent_to_where_a_server_redirects(server: FakeServer) -> None:
    with fake_server(FakeServer(server.target, None, redirect=server.url)) as moved:
        assert open_api(moved.url, " s3cret\n").get("/model_info")["model_path"] == str(server.target)
    assert (moved.keys, server.keys) == (["Bearer s3cret"], [None])


@pytest.mark.parametrize("key", ["s3\ncret", "s3\x00cret", "s3\u2028cret"])
def test_api_key_that_no_header_holds_is_refused_unseen(key: str) -> None:
    with pytest.raises(UsageError, match="--api-key") as refusal:
        open_api("127.0.0.1:9", key)
    assert "s3" not in str(refusal.value)


@pytest.mark.parametrize("url", ["host:port", "host:70000", "host:0", "http://:30000", "http://[::1", "http://a b:1"])
def test_address_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"--server .* http://127\.0\.0\.1:30000"):
        open_api(url)


def test_path_that_no_url_holds_is_not_tried_again() -> None:
    with pytest.raises(CaptureError, match="is no address"):
        open_api("http://127.0.0.1:9/\x00").call("/model_info")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wiring": ["2", "embed"]}, "wiring 'embed,2', the running one has '2,embed'"),
        ({"server_wiring": ["2"]}, "server_wiring 'embed,2', the running one has '2'"),
        ({"details": {"speculative_num_steps": "5"}}, "speculative_num_steps '2', the running one has '5'"),
        ({"details": {}}, "speculative_num_steps '2', the running one has unset"),
        *(
            ({"details": {"speculative_num_steps": "2", name: "x"}}, f"{name} unset, the running one has 'x'")
            for name in ("draft_fingerprint", "draft_config", "dtype", "quantization", "kv_cache_dtype")
        ),
    ],
)
def test_trace_is_not_gone_on_with_by_another_server(
    options: ServerOptions, server: FakeServer, change: dict[str, Any], message: str
) -> None:
    capture(options)
    asked = len(server.asked)
    server.manifest(**change)
    with pytest.raises(TraceError, match=message):
        capture(replace(options, resume=True))
    assert len(server.asked) == asked and len(Trace.open(options.out)) == 4


def test_other_details_may_change_between_resumes(options: ServerOptions, server: FakeServer) -> None:
    capture(options)
    server.manifest(details={"speculative_num_steps": str(STEPS), "torch": "another"})
    assert capture(replace(options, resume=True))[0].recorded == 0


@pytest.mark.parametrize("way", ["resume", "force"])
def test_trace_is_left_alone_by_a_server_without_the_plugin(
    options: ServerOptions, server: FakeServer, way: str
) -> None:
    capture(options)
    asked, server.folder = len(server.asked), None
    with pytest.raises(OutputError, match=r"holds a trace, and .* does not record"):
        capture(replace(options, **{way: True}))
    assert len(server.asked) == asked and len(Trace.open(options.out)) == 4
    assert not (options.out / "responses.jsonl").exists()


def refusals() -> list[tuple[str, Callable[[FakeServer], None], str]]:
    return [
        ("refused", lambda s: setattr(s, "reported_state", "refused"), "SGLang 0.4.0 was seen"),
        ("rank missing", lambda s: setattr(s, "world", 2), "has 2 ranks, 1 of them"),
        ("rank failed", lambda s: s.manifest(state="failed", reason="disk"), "does not record .failed: disk"),
        ("no writer", lambda s: s.manifest(writer=False), "no rank"),
        ("elsewhere", lambda s: setattr(s, "folder", Path("/nowhere")), "--recording"),
    ]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in refusals()], ids=[case[0] for case in refusals()])
def test_refused_before_the_first_prompt(
    options: ServerOptions, server: FakeServer, change: Callable[[FakeServer], None], message: str
) -> None:
    change(server)
    with pytest.raises(CaptureError, match=message):
        capture(options)
    assert server.asked == [] and not options.out.exists()


def test_recording_folder_may_be_seen_elsewhere(options: ServerOptions, server: FakeServer) -> None:
    seen, server.folder = server.folder, Path("/nowhere")
    answer = server.answer

    def record_there(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        server.folder = seen
        try:
            return answer(body)
        finally:
            server.folder = Path("/nowhere")

    server.answer = record_there  # type: ignore[method-assign]
    capture(replace(options, recording=seen, concurrency=1))
    assert len(Trace.open(options.out)) == 4


def test_taps_can_be_fewer_but_keep_what_the_draft_is_fed(options: ServerOptions) -> None:
    capture(replace(options, taps="embed"))
    assert set(Trace.open(options.out).header.taps) == {"2", "final"}
    with pytest.raises(UsageError, match="3 are not recorded"):
        capture(replace(options, taps="3", force=True))


@pytest.mark.parametrize(
    ("taps", "message"),
    [("2,embd", "'embd' is not a tap"), ("2,,final", "'' is not a tap"), ("2,out:1", "names 2 twice")],
)
def test_taps_that_cannot_be_are_refused_before_the_server_is_asked(
    options: ServerOptions, server: FakeServer, taps: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        capture(replace(options, taps=taps))
    assert server.keys == [] and not options.out.exists()


@pytest.mark.parametrize("choosing", [False, True])
def test_fewer_taps_after_the_first_requests(options: ServerOptions, server: FakeServer, choosing: bool) -> None:
    """A server of an older replay hands over all of its taps of all requests; the trace keeps what was asked for."""
    server.choosing = choosing
    capture(options)
    whole = Trace.open(options.out)
    less = replace(options, out=options.out.with_name("less"), taps_for=2, then_taps="embed", rows="fp8", prompt_rows=2)
    capture(less)
    trace = Trace.open(less.out)
    held = {record.request_id: (record.taps, record.first_row) for record in trace.records}
    assert held == {"r0": (None, 3), "r1": (None, None), "r2": (("final",), 1), "r3": (("final",), 2)}
    assert not [finding for finding in check_trace(trace) if finding.severity == "error"]
    for name, index in by_id(trace).items():
        mine, theirs = trace.read(index, ["final"]), whole.read(by_id(whole)[name], ["final"])
        assert torch.equal(mine.tokens, theirs.tokens)
        assert torch.equal(mine.taps["final"][mine.first_row :], theirs.taps["final"][mine.first_row :])
    capture(replace(less, resume=True))
    # Without --then-taps the others keep what the draft is fed, which is all that this server records.
    capture(replace(options, out=options.out.with_name("fed"), taps_for=2))
    assert Trace.open(options.out.with_name("fed")).header.capture.then_taps == ("embed", "2")
    with pytest.raises(UsageError, match=r"--then-taps 3 are not recorded by the server \(it records embed,2,final\)"):
        capture(replace(less, force=True, then_taps="3"))


def test_a_server_that_chooses_gives_the_trace_of_one_that_does_not(options: ServerOptions, server: FakeServer) -> None:
    """Byte for byte, the rounding of fp8 included; its files hold less."""
    written: dict[bool, int] = {}
    shards: dict[bool, dict[str, bytes]] = {}
    for choosing in (False, True):
        server.choosing, server.tap_bytes = choosing, 0
        out = options.out.with_name(f"chosen-{choosing}")
        less = replace(options, out=out, taps_for=2, then_taps="embed", rows="fp8", prompt_rows=2, concurrency=1)
        capture(less)
        written[choosing] = server.tap_bytes
        shards[choosing] = {path.name: path.read_bytes() for path in sorted(out.glob("shard-*"))}
    assert shards[True] == shards[False] != {}
    probe = 3 * 4 * 5 * VOCABULARY  # all of it: three taps of float32
    rows = {f"r{i}": min(2, len(prompt)) + 8 for i, prompt in enumerate(PROMPTS)}
    final = sum(4 * VOCABULARY * count for count in rows.values())
    two = sum((VOCABULARY + 4) * rows[name] for name in ("r0", "r1"))
    assert probe + final + two <= written[True] <= 1.2 * (probe + final + two) < written[False] / 1.5


def test_a_row_that_was_asked_for_and_is_not_there_is_asked_for_again(
    options: ServerOptions, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row more is left out than was asked for: that is lost, not unasked, and the client does not take it."""
    monkeypatch.setattr(requests, "_ROWS_SECONDS", 0.5)
    monkeypatch.setattr(requests, "_ATTEMPTS", 2)
    server.choosing, server.left_out_too = True, 1
    with pytest.raises(CaptureError, match="'r0' did not come whole, at the last of 2 tries"):
        capture(replace(options, prompt_rows=2))


def test_last_line_names_every_tap_that_inspect_does(options: ServerOptions) -> None:
    """Also embed, of which no row is stored: it is looked up."""
    command = ["capture", "--server", options.server, "--prompts", str(options.prompts), "-o", str(options.out)]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0 and done.stdout.endswith(f" taps {','.join(Trace.open(options.out).taps)}\n")
    assert ",".join(Trace.open(options.out).taps) == "embed,2,final"


@pytest.mark.parametrize("json_wanted", [False, True])
def test_no_trace_is_no_success(options: ServerOptions, server: FakeServer, json_wanted: bool) -> None:
    """A server without the plugin: its answers are kept and named, and the exit code says that this is not a trace."""
    server.folder, server.refused = None, (6,)
    command = ["capture", "--server", options.server, "--prompts", str(options.prompts), "-o", str(options.out)]
    done = CliRunner().invoke(cli, [*command, *(["--json"] if json_wanted else [])], catch_exceptions=False)
    responses = options.out / "responses.jsonl"
    assert done.exit_code == 1 and len(responses.read_text().splitlines()) == 3
    assert (
        f"replay: {options.server} does not record, so there is no trace: its 3 answers are kept in {responses}; start "
        "it by replay serve for a trace"
    ) in " ".join(done.stderr.splitlines())
    if json_wanted:
        document = json.loads(done.stdout)
        assert (document["requests"], document["recorded"], document["taps"]) == (4, 3, [])
    else:
        assert done.stdout == ""


def test_places_and_rows_that_cannot_be(options: ServerOptions, tmp_path: Path) -> None:
    (options.out).mkdir()
    (options.out / "x").touch()
    with pytest.raises(OutputError, match="exists already"):
        capture(options)
    forced = tmp_path / "forced.jsonl"
    forced.write_text(json.dumps({"input_ids": [1], "output_ids": [2]}))
    with pytest.raises(PromptError, match="only generates"):
        capture(replace(options, prompts=forced, out=tmp_path / "other"))
    with pytest.raises(CaptureError, match="no answer"):
        capture(replace(options, server="127.0.0.1:9", out=tmp_path / "other"))


def test_header_tells_of_the_server(options: ServerOptions) -> None:
    capture(options)
    engine = Trace.open(options.out).header.engine
    assert (engine.name, engine.version, engine.details["wiring"]) == ("sglang", "0.5.23", "embed,2")
    assert engine.details["speculative_num_steps"] == str(STEPS)


def test_rows_that_come_before_the_answers_count_as_progress(
    options: ServerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few requests, all in flight at once, are no reason for a bar that stands still."""
    monkeypatch.setattr("replay.capture.client.requests._TELL_SECONDS", -1.0)
    monkeypatch.setattr("replay.capture.client.requests.ServerClient._is_whole", _late(ServerClient._is_whole))
    result, events = capture(options)
    told = [event for event in events if isinstance(event, CaptureProgress)]
    assert any(event.output_tokens > 0 and event.requests_done == 0 for event in told)
    assert all(event.output_tokens_left >= 0 for event in told)
    assert (told[-1].output_tokens, told[-1].requests_done) == (result.output_tokens, result.requests)


def _late(real: Callable[[ServerClient, Answered, Kept], bool]) -> Callable[[ServerClient, Answered, Kept], bool]:
    """Rows are found whole a little after the answer."""
    return lambda client, one, kept: time.monotonic() - one.since > 0.2 and real(client, one, kept)


def test_differing_histogram_is_said(options: ServerOptions, server: FakeServer) -> None:
    answer = server.answer

    def other(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, value = answer(body)
        if body["input_ids"] == PROMPTS[0]:
            value["meta_info"]["spec_correct_drafts_histogram"] = [5, 0, 0]
        return status, value

    server.answer = other  # type: ignore[method-assign]
    _, events = capture(options)
    text = "1 request whose recorded rounds differ from the histogram the server counted for them"
    assert Noted(text) in events and text in Trace.open(options.out).header.missing


def test_stock_server_gives_answers_that_can_be_followed(options: ServerOptions, server: FakeServer) -> None:
    from replay.capture.observed import read_observed
    from replay.capture.prompts import read_prompts

    server.folder, server.old_paths = None, True
    result, events = capture(options)
    assert result.taps == () and any(isinstance(event, Noted) and "does not record" in event.text for event in events)
    responses = options.out / "responses.jsonl"
    rows = read_prompts(responses).rows
    assert sorted(row.request_id for row in rows) == ["r0", "r1", "r2", "r3"]
    assert all(row.output_ids is not None and len(row.output_ids) == 9 for row in rows)
    observed = read_observed(str(responses))
    assert observed.rounds == 20 and observed.histogram == (8, 4, 8)
    # cut off in the middle of a line, it goes on where it was
    responses.write_bytes(responses.read_bytes()[:-20])
    asked = len(server.asked)
    capture(replace(options, resume=True))
    assert len(server.asked) == asked + 1 and len(read_prompts(responses).rows) == 4


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({"max_new_tokens": 8}, {}, "max_new_tokens 9, now it is 8"),
        ({"temperature": 0.5}, {}, "temperature 0.0, now it is 0.5"),
        ({}, {"r1": [5]}, "'r1', which has another prompt now"),
        ({}, {"r3": None}, "'r3', which is not among the prompts"),
    ],
)
def test_answers_are_gone_on_with_by_the_same_question_only(
    options: ServerOptions, server: FakeServer, changes: dict[str, Any], rows: dict[str, list[int] | None], message: str
) -> None:
    server.folder = None
    capture(options)
    asked = len(server.asked)
    prompts = {f"r{i}": ids for i, ids in enumerate(PROMPTS)} | rows
    options.prompts.write_text("\n".join(json.dumps({"id": k, "input_ids": v}) for k, v in prompts.items() if v))
    with pytest.raises(TraceError, match=message):
        capture(replace(options, resume=True, **changes))
    assert len(server.asked) == asked


def test_a_stock_server_may_refuse_a_prompt(options: ServerOptions, server: FakeServer) -> None:
    server.folder, server.refused = None, (6,)
    result, _ = capture(options)
    assert list(result.refused) == ["r1"] and len((options.out / "responses.jsonl").read_text().splitlines()) == 3


def test_vocabulary_of_the_stand_in_fits_its_rows() -> None:
    assert VOCABULARY == 16 and sorted(next_token(token) for token in range(16)) == list(range(16))


def test_a_router_is_refused_by_the_address_of_a_server_behind_it(options: ServerOptions, server: FakeServer) -> None:
    """The pages of sglang-router 0.3.2 in front of two servers: it has none of a server's own facts."""
    server.router = True
    said = f"{server.url} is a router of 2 servers: give --server the address of one that records, as http://10.0.0.1"
    with pytest.raises(CaptureError, match=re.escape(said)):
        capture(options)
