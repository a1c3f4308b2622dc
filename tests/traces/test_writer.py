"""One writer of a trace folder: places that are taken, what goes on, and what is never written."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from support.trace_maker import H, changed, make_header, make_request, make_requests, write_trace

from replay.errors import CaptureError, OutputError, TraceError, TraceIncompleteError
from replay.traces.reader import Trace
from replay.traces.writer import TraceWriter


def test_the_folder_must_be_empty(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", [make_requests(1)])
    with pytest.raises(
        OutputError, match=r"is not empty: type --resume to go on with its trace, --force to replace it"
    ):
        TraceWriter.create(folder, make_header())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=r"is a file, a trace is a folder"):
        TraceWriter.create(tmp_path / "file", make_header())


def test_force_replaces_a_trace_and_nothing_else(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", [make_requests(2), [make_request("x", 9)]])
    (folder / "notes.txt").write_text("mine")
    with TraceWriter.create(folder, make_header(), force=True) as writer:
        writer.add([make_request("new", 3)])
        writer.finish()
    assert Trace.open(folder).requests["request_id"].to_list() == ["new"]
    assert (folder / "notes.txt").read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"is no trace, so --force spares it"):
        TraceWriter.create(other, make_header(), force=True)
    assert os.listdir(other) == ["thesis.txt"]


def test_two_writers(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        with pytest.raises(OutputError, match=r"another process is writing to"):
            TraceWriter.resume(tmp_path / "t", make_header())
        writer.add(make_requests(1))
    with TraceWriter.resume(tmp_path / "t", make_header()) as writer:  # the lock is free again
        assert writer.done_ids == {"r0"}


def test_an_unfinished_trace(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", [make_requests(3)], finish=False)
    with pytest.raises(TraceIncompleteError, match=r"has not ended, 3 requests are whole: type .* --resume"):
        Trace.open(folder)
    assert len(Trace.open(folder, allow_incomplete=True)) == 3


def test_resume_goes_on_even_after_finish(tmp_path: Path) -> None:
    requests = make_requests(3)
    folder = write_trace(tmp_path / "t", [requests[:2]])
    with TraceWriter.resume(folder, make_header(target_path="/moved/target")) as writer:
        assert writer.done_ids == {"r0", "r1"}
        writer.add(requests[2:])
        with pytest.raises(TraceIncompleteError):
            Trace.open(folder)
        writer.finish()
    assert Trace.open(folder).requests["request_id"].to_list() == ["r0", "r1", "r2"]


def test_resume_of_nothing_begins(tmp_path: Path) -> None:
    with TraceWriter.resume(tmp_path / "t", make_header()) as writer:
        assert writer.done_ids == frozenset()
        writer.finish()
    assert len(Trace.open(tmp_path / "t")) == 0


def test_resume_with_other_settings(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", [make_requests(1)], finish=False)
    header = make_header()
    hotter = dataclasses.replace(header, capture=dataclasses.replace(header.capture, temperature=0.7))
    with pytest.raises(TraceError, match=r"begun with capture.temperature 0.0, now it is 0.7"):
        TraceWriter.resume(folder, hotter)
    other = dataclasses.replace(header, target=dataclasses.replace(header.target, fingerprint="e" * 64))
    with pytest.raises(TraceError, match=r"begun with target.fingerprint f+, now it is e+"):
        TraceWriter.resume(folder, other)
    fewer = dataclasses.replace(header, taps={"final": header.taps["final"]})
    with pytest.raises(TraceError, match=r"begun with taps 2 \(bfloat16 x 16\), final .* now it is final"):
        TraceWriter.resume(folder, fewer)


NAN = torch.tensor(float("nan"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"request_id": ""}, r"a request_id has 0 characters, 1 to 1024"),
        ({"finish_reason": "bored"}, r"finish_reason is 'bored', possible are stop, length, forced, abort"),
        ({"source": "dreamt"}, r"source is 'dreamt'"),
        ({"prompt_ids": []}, r"0 prompt and 4 output tokens"),
        ({"output_ids": [1, 2, 64, 3]}, r"holds the token id 64, the target's are 0 to 63"),
        ({"tail_ids": [-1]}, r"holds the token id -1"),
        ({"output_ids": [1, 2, 3]}, r"tap 2 is bfloat16 \[6, 16\], must be bfloat16 \[5, 16\]"),
        ({"taps": {"final": torch.zeros(6, H)}}, r"holds the taps final, the trace stores 2, final"),
        ({"taps": dict.fromkeys(("2", "final"), torch.zeros(6, H))}, r"tap 2 is float32 \[6, 16\], must be bfloat16"),
        ({"logsumexp": NAN.expand(4)}, r"logsumexp holds NaN or Inf, first in row 0"),
        ({"topk_ids": torch.full((4, 4), 64, dtype=torch.int32)}, r"topk_ids reach from 64 to 64"),
        ({"topk_ids": torch.zeros(4, 4, dtype=torch.int64)}, r"topk_ids is int64 \[4, 4\], must be int32 \[4, 4\]"),
        ({"topk_logprobs": torch.arange(16.0).reshape(4, 4)}, r"topk_logprobs rise within a row"),
    ],
)
def test_what_cannot_be_is_not_written(tmp_path: Path, change: dict[str, object], says: str) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        with pytest.raises(CaptureError, match=says):
            writer.add([make_request("good", 1), changed(make_request("bad", 2), **change)])
        assert writer.done_ids == frozenset()  # a batch is written whole or not at all
        writer.add([make_request("good", 1)])
        writer.finish()
    assert len(Trace.open(tmp_path / "t")) == 1


def test_nan_in_a_tap_is_named_by_row(tmp_path: Path) -> None:
    request = make_request("a", 1)
    request.taps["2"][4, 3] = float("inf")
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        with pytest.raises(CaptureError, match=r"request 'a': tap 2 holds NaN or Inf, first in row 4"):
            writer.add([request])


def test_no_request_twice(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add([make_request("a", 1)])
        with pytest.raises(CaptureError, match=r"request_id 'a' is in the trace already"):
            writer.add([make_request("a", 2)])
        with pytest.raises(CaptureError, match=r"request_id 'b' is in the trace already"):
            writer.add([make_request("b", 1), make_request("b", 2)])
