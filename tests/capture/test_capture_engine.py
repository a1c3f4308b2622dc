"""Capture from an engine in this process, which a stand-in plays: the same trace as from a server, and refusals."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_engine import FakeEngine, fake_engine
from support.fake_server import FakeServer, fake_server, make_target

from replay.capture.client.capture import capture_server
from replay.capture.client.engine import capture_engine
from replay.capture.options import ServerOptions
from replay.errors import CaptureError, OutputError, UsageError
from replay.traces.reader import Trace

PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9])


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.capture.client.api._LONGEST_PAUSE", 0.01)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with fake_engine(FakeServer(make_target(tmp_path / "target"), tmp_path / "trace")) as running:
        yield running


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"r{i}", "input_ids": ids}) for i, ids in enumerate(PROMPTS)))
    return path


def test_the_trace_is_that_of_a_server(engine: FakeEngine, prompts: Path, tmp_path: Path) -> None:
    result = capture_engine(engine, prompts, tmp_path / "trace", max_new_tokens=9)
    with fake_server(FakeServer(make_target(tmp_path / "other"), tmp_path / "served")) as server:
        capture_server(ServerOptions(server.url, prompts, tmp_path / "served", max_new_tokens=9), lambda _: None)
    ours, theirs = Trace.open(tmp_path / "trace"), Trace.open(tmp_path / "served")
    assert result.requests == result.recorded == len(ours) == len(theirs) == len(PROMPTS)
    places = {record.request_id: at for at, record in enumerate(theirs.records)}
    for at, record in enumerate(ours.records):
        mine, other = ours.read(at, ["2", "final"]), theirs.read(places[record.request_id], ["2", "final"])
        assert mine.tokens.tolist() == other.tokens.tolist()
        assert all(mine.taps[name].equal(other.taps[name]) for name in ("2", "final"))
    assert len(set(engine.salts)) == len(engine.salts)  # each prompt is computed, none taken from a cache


def test_less_is_kept_as_of_a_server(engine: FakeEngine, prompts: Path, tmp_path: Path) -> None:
    capture_engine(
        engine, prompts, tmp_path / "trace", max_new_tokens=9, taps_for=1, then_taps="embed", rows="fp8", prompt_rows=2
    )
    less = Trace.open(tmp_path / "trace")
    assert less.say_tiers() == "embed, 2, final (1 request); embed, final (3 requests)"
    assert "2" in less.rounded_taps and less.prompt_rows == 2


def test_the_engine_is_ones_own_again_after(engine: FakeEngine, prompts: Path, tmp_path: Path) -> None:
    capture_engine(engine, prompts, tmp_path / "trace", max_new_tokens=2)
    assert not engine.loop.is_running()
    assert engine.loop.run_until_complete(engine._states())


def test_what_it_refuses_is_left_out_and_what_fails_is_asked_again(
    engine: FakeEngine, prompts: Path, tmp_path: Path
) -> None:
    engine.server.refused, engine.server.unavailable = (1,), 1
    result = capture_engine(engine, prompts, tmp_path / "trace", max_new_tokens=2)
    assert result.refused == {"r1": "The input is longer than what the server takes."} and len(result.refused) == 1
    assert len(Trace.open(tmp_path / "trace")) == len(PROMPTS) - 1


def test_a_second_capture_resumes_or_is_refused(engine: FakeEngine, prompts: Path, tmp_path: Path) -> None:
    capture_engine(engine, prompts, tmp_path / "trace", max_new_tokens=2)
    with pytest.raises(OutputError, match="--resume"):
        capture_engine(engine, prompts, tmp_path / "trace", max_new_tokens=2)
    assert capture_engine(engine, prompts, tmp_path / "trace", max_new_tokens=2, resume=True).recorded == 0


def test_an_engine_that_does_not_record_is_refused(prompts: Path, tmp_path: Path) -> None:
    with (
        fake_engine(FakeServer(make_target(tmp_path / "target"), None)) as engine,
        pytest.raises(CaptureError, match=r"set REPLAY_RECORD to a folder, .* before sgl.Engine"),
    ):
        capture_engine(engine, prompts, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


def test_what_is_no_engine_is_refused(engine: FakeEngine, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'str' is no sgl.Engine"):
        capture_engine("http://127.0.0.1:30000", prompts, tmp_path / "trace")
    engine.tokenizer_manager = None
    with pytest.raises(UsageError, match="has been shut down"):
        capture_engine(engine, prompts, tmp_path / "trace")


def test_an_engine_that_says_nothing_is_not_waited_for(
    engine: FakeEngine, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.capture.client.engine._FIRST_SECONDS", 0.1)
    engine.tokenizer_manager = SimpleNamespace(get_internal_state=lambda: asyncio.sleep(60))
    with pytest.raises(CaptureError, match="gave no answer"):
        capture_engine(engine, prompts, tmp_path / "trace")


def test_a_thread_whose_loop_runs_is_refused_and_another_is_not(
    engine: FakeEngine, prompts: Path, tmp_path: Path
) -> None:
    async def notebook() -> None:
        with pytest.raises(UsageError, match=r"asyncio.to_thread"):
            capture_engine(engine, prompts, tmp_path / "trace", max_new_tokens=2)
        await asyncio.to_thread(capture_engine, engine, prompts, tmp_path / "trace", max_new_tokens=2)

    engine.loop.run_until_complete(notebook())
    assert len(Trace.open(tmp_path / "trace")) == len(PROMPTS)
