"""A good trace in which one thing at a time is wrong, and the sentence that refuses it.

Whoever wrote it gave it checksums that agree, or its reader was told not to look: test_verify.py is about those.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from support.trace_maker import changed, make_requests, write_trace

from replay.errors import TraceCorruptError, TraceError, TraceVersionError
from replay.traces.captured import CapturedRequest
from replay.traces.check import check_trace
from replay.traces.feed import Feed
from replay.traces.reader import Trace

SHARD = "shard-00000.safetensors"


@pytest.fixture(autouse=True)
def checksums_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Trace.open.__func__.__kwdefaults__, "verify", False)  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of four requests; in what pieces its prompt was prefilled is known of the second."""
    requests = make_requests(4)
    requests[1] = changed(requests[1], pieces=[(2, 2), (1, 9)])
    return write_trace(tmp_path / "t", [requests[:2], requests[2:]])


def test_the_good_trace_opens(folder: Path) -> None:
    trace = Trace.open(folder)
    assert len(trace) == 4
    assert [finding.severity for finding in check_trace(trace)] == ["note", "note"]


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"holds no trace\.json, so it is no trace: give the folder that a capture wrote"
    ):
        Trace.open(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, seen in (("nowhere", "does not exist"), ("file", "is a file"), ("link", "is a link to nothing")):
        with pytest.raises(TraceError, match=f"{name} {seen}, a trace is a folder: give the one that a capture wrote"):
            Trace.open(tmp_path / name)


def test_whatever_is_wrong_the_sentence_ends_in_what_to_do(folder: Path) -> None:
    """Once, wherever it was seen: on opening, and in rows that are read later."""
    trace = Trace.open(folder)
    (folder / "shard-00001.safetensors").write_bytes(b"cut")
    for call in (lambda: trace.read(3, ("2",)), lambda: trace.logits(3), lambda: Trace.open(folder)):
        with pytest.raises(TraceCorruptError, match=r"[^:]: fetch or capture the trace again$") as told:
            call()
        assert str(told.value).count("again") == 1
    edit_header(folder, "state", "done")
    with pytest.raises(TraceCorruptError, match=r"recording, complete: fetch or capture the trace again$"):
        Trace.open(folder)


# --- trace.json -----------------------------------------------------------------------------------------------------


def edit_header(folder: Path, place: str, value: object) -> None:
    """Set ``a.b.c`` of trace.json; the value ``...`` removes it."""
    header = json.loads((folder / "trace.json").read_text())
    *parents, last = place.split(".")
    inner = header
    for name in parents:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    (folder / "trace.json").write_text(json.dumps(header))


@pytest.mark.parametrize(
    ("place", "value", "error", "says"),
    [
        ("format", "other-trace", TraceVersionError, r"its format is 'other-trace', not replay-trace"),
        ("format", ..., TraceVersionError, r"its format is None, not replay-trace"),
        (
            "version",
            3,
            TraceVersionError,
            r"is of trace format version 3, this replay reads versions 1 to 2: update replay",
        ),
        (
            "version",
            0,
            TraceVersionError,
            r"is of trace format version 0, this replay reads versions 1 to 2: capture it again",
        ),
        ("version", "1", TraceCorruptError, r"version is '1', must be an integer from 0"),
        ("version", True, TraceCorruptError, r"version is True, must be an integer"),
        ("version", 1.0, TraceCorruptError, r"version is 1\.0, must be an integer"),
        ("state", "done", TraceCorruptError, r"state is 'done', must be one of recording, complete"),
        ("target", [], TraceCorruptError, r"target holds \[\] where a JSON object must stand"),
        ("target", ..., TraceCorruptError, r"trace\.json lacks the field target"),
        ("target.layers", 10**9, TraceCorruptError, r"target: layers is 1000000000, must be an integer from 1 to 9999"),
        ("target.hidden_size", -16, TraceCorruptError, r"hidden_size is -16, must be an integer from 1 to 1048576"),
        ("target.hidden_size", 10**30, TraceCorruptError, r"hidden_size is 10+, must be an integer"),
        ("target.hidden_size", 32, TraceCorruptError, r"tap 2 is 16 wide, the target's hidden_size is 32"),
        (
            "target.vocab_size",
            2**31,
            TraceCorruptError,
            r"vocab_size is 2147483648, must be an integer from 1 to 2147483647",
        ),
        ("target.vocab_size", None, TraceCorruptError, r"vocab_size is None, must be an integer"),
        ("target.tie_word_embeddings", "no", TraceCorruptError, r"tie_word_embeddings is 'no', must be true or false"),
        ("target.path", 7, TraceCorruptError, r"target: path is 7, must be a string"),
        ("engine.details", {"device": 1}, TraceCorruptError, r"engine: details: device is 1, must be a string"),
        ("taps.final", ..., TraceCorruptError, r"taps lacks final"),
        ("taps.7", {"dtype": "bfloat16", "width": 16}, TraceCorruptError, r"tap 7 is R\[7\], the target has 4 layers"),
        ("taps.02", {"dtype": "bfloat16", "width": 16}, TraceCorruptError, r"the tap 2 is written '02'"),
        ("taps.3", {"dtype": "bfloat16", "width": 16}, TraceCorruptError, r"lacks the tensor tap\.3 that trace\.json"),
        (
            "taps.embed",
            {"dtype": "bfloat16", "width": 16},
            TraceCorruptError,
            r"embed is 'lookup' and the stored taps are",
        ),
        ("taps.2.dtype", "float8", TraceCorruptError, r"dtype is 'float8', must be one of bfloat16, float16, float32"),
        (
            "taps.2.dtype",
            "float16",
            TraceCorruptError,
            r"tap\.2 is BF16 \[\d+, 16\], trace\.json .* make it F16 \[\d+, 16\]",
        ),
        ("taps.2.width", 10**7, TraceCorruptError, r"width is 10000000, must be an integer from 1 to 1048576"),
        ("topk", 0, TraceCorruptError, r"topk is 0, must be an integer from 1 to 64"),
        (
            "topk",
            5,
            TraceCorruptError,
            r"topk_ids is I32 \[\d+, 4\], trace\.json and the requests make it I32 \[\d+, 5\]",
        ),
        ("capture.temperature", -1.0, TraceCorruptError, r"temperature is -1\.0, must be a number from 0 to"),
        ("weights.file", "../target.safetensors", TraceCorruptError, r"must be one of target\.safetensors"),
        ("weights.bytes", -1, TraceCorruptError, r"weights: bytes is -1, must be an integer from 1"),
        ("weights.sha256", "abc", TraceCorruptError, r"sha256 is 'abc', must be 64 hexadecimal digits"),
        ("requests", -1, TraceCorruptError, r"requests is -1, must be an integer from 0"),
        ("requests", 5, TraceCorruptError, r"requests\.parquet lists 4 requests, trace\.json says 5"),
        ("requests", None, TraceCorruptError, r"state is 'complete' but requests or requests_sha256 is null"),
        ("requests_sha256", "0" * 64, TraceCorruptError, r"is not the file that was finished: its SHA-256 differs"),
        ("rounds", True, TraceCorruptError, r"rounds is True but rounds_sha256 is None"),
        ("missing", "nothing", TraceCorruptError, r"missing is 'nothing', must be a list of strings"),
    ],
)
def test_header_fields(folder: Path, place: str, value: object, error: type[Exception], says: str) -> None:
    edit_header(folder, place, value)
    with pytest.raises(error, match=says):
        Trace.open(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", r"is not valid JSON"),
        (b"[1]", r"holds \[1\] where a JSON object must stand"),
        (b"[" * 100_000, r"is not valid JSON"),
        (b'{"format": "replay-trace", "format": "replay-trace"}', r"the key 'format' stands twice"),
        (b'{"format": "replay-trace", "version": NaN}', r"NaN is no JSON number"),
        (b'{"format": "replay-trace", "version": 1' + b"0" * 5_000 + b"}", r"is not valid JSON"),
        (b"\xff\xfe", r"it is UTF-16; save it as UTF-8"),
        (b"\xff", r"is not UTF-8"),
        (b" " * ((1 << 24) + 1), r"holds 16777217 bytes, at most 16777216 are possible"),
    ],
)
def test_header_text(folder: Path, text: bytes, says: str) -> None:
    (folder / "trace.json").write_bytes(text)
    with pytest.raises(TraceCorruptError, match=says):
        Trace.open(folder)


# --- requests.parquet -----------------------------------------------------------------------------------------------


def edit_table(folder: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """Change the table and give trace.json the checksum of the new one, as somebody with intent would."""
    buffer = io.BytesIO()
    change(pl.read_parquet(folder / "requests.parquet")).write_parquet(buffer)
    (folder / "requests.parquet").write_bytes(buffer.getvalue())
    edit_header(folder, "requests_sha256", hashlib.sha256(buffer.getvalue()).hexdigest())


def put(column: str, row: int, value: Any) -> Callable[[pl.DataFrame], pl.DataFrame]:
    def change(frame: pl.DataFrame) -> pl.DataFrame:
        values = frame[column].to_list()
        values[row] = value
        return frame.with_columns(pl.Series(column, values, dtype=frame.schema[column]))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            put("shard", 0, "../shard-00000.safetensors"),
            r"shard is '\.\./shard-00000\.safetensors', must be a file name",
        ),
        (put("shard", 0, "/etc/passwd"), r"shard is '/etc/passwd', must be a file name like shard-00000\.safetensors"),
        (put("shard", 0, "shard-0.safetensors"), r"shard is 'shard-0\.safetensors'"),
        (put("shard", 0, "shard-00000.pt"), r"shard is 'shard-00000\.pt'"),
        (put("shard", 0, "shard-\u0660\u0660\u0660\u0660\u0660.safetensors"), r"must be a file name like shard-00000"),
        (put("shard", 0, None), r"shard is None, must be a string"),
        (put("shard", 2, "shard-00009.safetensors"), r"shard number 1 is called shard-00009"),
        (put("request_id", 1, "r0"), r"holds the request_id 'r0' twice"),
        (put("request_id", 1, ""), r"request_id is '', must be 1 to 1024 characters"),
        (put("request_id", 1, "other"), r"request_id of request 'other' is 'other', its shard says 'r1'"),
        (put("prompt_tokens", 0, 0), r"row 0: prompt_tokens is 0, must be an integer from 1"),
        (
            put("prompt_tokens", 0, 2**62),
            r"prompt_tokens is 4611686018427387904, must be an integer from 1 to 2147483648",
        ),
        (put("output_tokens", 0, -3), r"output_tokens is -3, must be an integer from 1"),
        (
            put("prompt_tokens", 0, 3),
            r"request 'r1' is said to begin at token, row and output \(3, 2, 1\) .* \(4, 3, 1\)",
        ),
        (put("row_start", 0, 1), r"is said to begin at token, row and output \(0, 1, 0\) of .* end at \(0, 0, 0\)"),
        (put("row_start", 3, 10**9), r"\(\d+, 1000000000, \d+\) of shard-00001"),
        (put("token_start", 0, -1), r"token_start is -1, must be an integer from 0"),
        (put("finish_reason", 0, "?"), r"finish_reason is '\?', must be one of stop, length, forced, abort"),
        (put("source", 0, "?"), r"source is '\?', must be one of generated, forced"),
        (put("temperature", 0, float("nan")), r"temperature is nan, must be a number"),
        (put("top_p", 0, 1.5), r"top_p is 1\.5, must be a number from 0 to 1"),
        (put("tail_ids", 0, [64]), r"tail_ids is \[64\], must be a list of integers from 0 to 63"),
        (put("server_histogram", 0, [-1]), r"server_histogram is \[-1\]"),
        (put("server_prefill_rows", 0, [1]), r"holds 1 pieces, server_prefill_forward_rows 0, both must be null or"),
        (put("server_prefill_forward_rows", 0, [1, 4]), r"server_prefill_rows holds 0 pieces, .*_forward_rows 2, both"),
        (put("server_prefill_rows", 1, [2]), r"holds 1 pieces, server_prefill_forward_rows 2, both must be null or"),
        (put("server_prefill_rows", 1, [2, 0]), r"server_prefill_rows is \[2, 0\], must be a list of integers from 1"),
        (put("server_prefill_rows", 1, [2, -1]), r"server_prefill_rows is \[2, -1\], must be a list of integers"),
        (put("server_prefill_rows", 1, [2, None]), r"server_prefill_rows is \[2, None\], must be a list of integers"),
        (put("server_prefill_rows", 1, [2, 2]), r"server_prefill_rows adds up to 4, the prompt has 3 tokens"),
        (put("server_prefill_forward_rows", 1, [1, 9]), r"holds a piece of 2 rows in a forward of 1"),
        (
            put("server_prefill_forward_rows", 1, [3, 9]),
            r"server_prefill_forward_rows of request 'r1' is \(3, 9\), its shard says \(2, 9\)",
        ),
        (put("shard_sha256", 0, "0" * 64), r"shard_sha256 of request 'r0' is '0{64}', its shard says"),
        (put("shard_bytes", 0, 9), r"shard_bytes of request 'r0' is 9, its shard says \d+"),
        (lambda frame: frame.drop("row_start"), r"lacks the column row_start"),
        (
            lambda frame: frame.with_columns(pl.col("row_start").cast(pl.Float64)),
            r"row_start is Float64, must be Int64",
        ),
        (lambda frame: frame.head(3), r"lists 3 requests, trace\.json says 4"),
        (lambda frame: pl.concat([frame.tail(2), frame.head(2)]), r"shard number 0 is called shard-00001"),
    ],
)
def test_table(folder: Path, change: Callable[[pl.DataFrame], pl.DataFrame], says: str) -> None:
    edit_table(folder, change)
    with pytest.raises(TraceCorruptError, match=says):
        Trace.open(folder)


def test_table_of_no_parquet(folder: Path) -> None:
    (folder / "requests.parquet").write_bytes(b"PAR1" + b"\xff" * 64 + b"PAR1")
    edit_header(folder, "requests_sha256", hashlib.sha256((folder / "requests.parquet").read_bytes()).hexdigest())
    with pytest.raises(TraceCorruptError, match=r"requests\.parquet is no readable parquet file"):
        Trace.open(folder)


def test_table_and_header_that_both_lack_a_shard(folder: Path) -> None:
    edit_table(folder, lambda frame: frame.head(2))
    edit_header(folder, "requests", 2)
    with pytest.raises(TraceCorruptError, match=r"lists 2 requests, the shards hold 4"):
        Trace.open(folder)


# --- shards ---------------------------------------------------------------------------------------------------------


def read_shard(folder: Path) -> tuple[dict[str, Any], bytes]:
    data = (folder / SHARD).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_shard(folder: Path, head: object, data: bytes) -> None:
    text = json.dumps(head, separators=(",", ":")).encode()  # as long as it was written
    text += b" " * (-len(text) % 8)
    (folder / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_shard(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    head, data = read_shard(folder)
    change(head)
    write_shard(folder, head, data)


def edit_own_records(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[dict[str, Any]], object]:
    def edit(head: dict[str, Any]) -> None:
        records = json.loads(head["__metadata__"]["requests"])
        change(records)
        head["__metadata__"]["requests"] = json.dumps(records, separators=(",", ":"))

    return edit


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            lambda h: h.pop("tap.2"),
            TraceCorruptError,
            r"tap\.final begins at byte \d+, the one before ends at \d+|lacks",
        ),
        (
            lambda h: h["tap.2"].update(dtype="F32"),
            TraceCorruptError,
            r"tap\.2: F32 of shape \[\d+, 16\] does not fill",
        ),
        (
            lambda h: h["tap.2"].update(shape=[-5, 16]),
            TraceCorruptError,
            r"shape is \[-5, 16\], must be a list of integers",
        ),
        (lambda h: h["tap.2"].update(shape=[2**60, 16]), TraceCorruptError, r"shape is \[1152921504606846976, 16\]"),
        (lambda h: h["tap.2"].update(shape=[2**49, 2**49]), TraceCorruptError, r"does not fill \d+ bytes"),
        (
            lambda h: h["tap.2"].update(shape=h["tap.2"]["shape"][::-1]),
            TraceCorruptError,
            r"tap\.2 is BF16 \[16, \d+\]",
        ),
        (lambda h: h["tap.2"].update(shape="x"), TraceCorruptError, r"shape is 'x', must be a list of integers"),
        (
            lambda h: h["tap.2"].update(data_offsets=[0, 2**49]),
            TraceCorruptError,
            r"ends at byte \d+, .* it is truncated",
        ),
        (
            lambda h: h["tap.2"].update(data_offsets=[8, 4]),
            TraceCorruptError,
            r"data_offsets is \[8, 4\], must be two rising",
        ),
        (
            lambda h: h["tap.2"].update(data_offsets=h["tap.final"]["data_offsets"]),
            TraceCorruptError,
            r"begins at byte \d+",
        ),
        (lambda h: h["tokens"].pop("dtype"), TraceCorruptError, r"tokens lacks the field dtype"),
        (lambda h: h.update(tokens=None), TraceCorruptError, r"tokens holds None where a JSON object must stand"),
        (lambda h: h.pop("__metadata__"), TraceCorruptError, r"is not a shard of a replay trace"),
        (
            lambda h: h["__metadata__"].update(version="2"),
            TraceVersionError,
            r"is of version 2, possible beside its header: 1",
        ),
        (lambda h: h["__metadata__"].update(version=1), TraceCorruptError, r"version is 1, must be a string"),
        (
            lambda h: h["__metadata__"].update(requests="[]"),
            TraceCorruptError,
            r"must be a list of at least one record",
        ),
        (lambda h: h["__metadata__"].update(requests="{"), TraceCorruptError, r"requests is not valid JSON"),
        (lambda h: h["__metadata__"].update(data_sha256="0" * 64), TraceCorruptError, r"shard_sha256 of request 'r0'"),
        (
            edit_own_records(lambda r: r[1].update(server_prefill_rows=[2, 2])),
            TraceCorruptError,
            r"request 1: server_prefill_rows adds up to 4, the prompt has 3 tokens",
        ),
        (
            edit_own_records(lambda r: r[1].pop("server_prefill_rows")),
            TraceCorruptError,
            r"request 1: server_prefill_rows holds 0 pieces, server_prefill_forward_rows 2",
        ),
        (
            edit_own_records(lambda r: r[0].update(prompt_tokens=3)),
            TraceCorruptError,
            r"tokens is I32 \[8\], .* I32 \[9\]",
        ),
        (
            edit_own_records(lambda r: r[0].update(prompt_tokens=2**40)),
            TraceCorruptError,
            r"prompt_tokens is 1099511627776",
        ),
        (
            edit_own_records(lambda r: r[0].update(output_tokens=-1)),
            TraceCorruptError,
            r"request 0: output_tokens is -1",
        ),
        (
            edit_own_records(lambda r: r[0].update(request_id="r2")),
            TraceCorruptError,
            r"holds the request_id 'r2' twice",
        ),
        (edit_own_records(lambda r: r[0].pop("source")), TraceCorruptError, r"request 0 lacks the field source"),
        (edit_own_records(lambda r: r.pop()), TraceCorruptError, r"tokens is I32 \[8\], .* make it I32 \[3\]"),
    ],
)
def test_shard_header(
    folder: Path, change: Callable[[dict[str, Any]], object], error: type[TraceError], says: str
) -> None:
    edit_shard(folder, change)
    with pytest.raises(error, match=says):
        Trace.open(folder)


def fed_requests() -> list[CapturedRequest]:
    """r0 and r1 with feeds of rows 0 and 1, and of row 1; r1 has 4 rows."""
    return [
        changed(one, feed=Feed(*(torch.tensor(rows, dtype=torch.int32) for _ in range(3)), torch.ones(len(rows), 32)))
        for one, rows in zip(make_requests(2), ([0, 1], [1]), strict=True)
    ]


@pytest.fixture
def fed_folder(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "fed", [fed_requests(), make_requests(4)[2:]])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda h: h.update({"feed.seat": h.pop("feed.token")}),
            r"lacks the tensor feed\.token, but holds feed\.request",
        ),
        (lambda h: h["feed.row"].update(dtype="F32"), r"feed\.row is F32 \[3\], must be I32 \[3\]"),
        (lambda h: h["feed.token"].update(shape=[3, 1]), r"feed\.token is I32 \[3, 1\], must be I32 \[3\]"),
        (lambda h: h["feed.row"].update(shape=[]), r"feed\.row: I32 of shape \[\] does not fill"),
        (
            lambda h: h["feed.features"].update(shape=[96]),
            r"feed\.features is F32 \[96\], must be \[3, a multiple of 16\]",
        ),
        (lambda h: h["feed.features"].update(shape=[4, 24]), r"feed\.features is F32 \[4, 24\]"),
        (lambda h: h["feed.features"].update(shape=[6, 16]), r"feed\.features is F32 \[6, 16\], must be \[3, a"),
        (
            lambda h: h["feed.features"].update(dtype="I32"),
            r"feed\.features is I32 \[3, 32\], must be .* BF16, F16, F32",
        ),
    ],
)
def test_feed_header(fed_folder: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    edit_shard(fed_folder, change)
    with pytest.raises(TraceCorruptError, match=says):
        Trace.open(fed_folder)


@pytest.mark.parametrize(
    ("tensor", "at", "value", "index", "says"),
    [
        ("feed.request", 1, 1, 1, r"of rows 1, 1, must be rising rows from 0 to 3"),  # r0's second row is then r1's
        ("feed.request", 0, 2, 0, r"feed\.request must not fall and must name its 2 requests from 0"),
        ("feed.request", 2, 2, 0, r"feed\.request must not fall and must name its 2 requests from 0"),
        ("feed.request", 0, -1, 0, r"feed\.request must not fall"),
        ("feed.row", 1, 0, 0, r"of rows 0, 0, must be rising rows from 0 to 1"),
        ("feed.row", 2, 4, 1, r"of rows 4, must be rising rows from 0 to 3"),
        ("feed.row", 0, -5, 0, r"of rows -5, 1, must be"),
    ],
)
def test_rows_of_a_feed_that_cannot_be(
    fed_folder: Path, tensor: str, at: int, value: int, index: int, says: str
) -> None:
    edit_values(fed_folder, tensor, 4 * at, value.to_bytes(4, "little", signed=True))
    trace = Trace.open(fed_folder)
    with pytest.raises(TraceCorruptError, match=says):
        trace.feed(index)
    errors = [finding.what for finding in check_trace(trace) if finding.severity == "error"]
    assert any(re.search(says, what) for what in errors)  # beside the checksum, which differs as well


def test_what_a_faulty_server_fed_is_no_error_of_the_trace(fed_folder: Path) -> None:
    """An id of no token, and NaN: read as they are, and NaN is told."""
    edit_values(fed_folder, "feed.token", 0, (-7).to_bytes(4, "little", signed=True))
    edit_values(fed_folder, "feed.features", 4 * 32, b"\x00\x00\xc0\x7f")
    trace = Trace.open(fed_folder)
    feed = trace.feed(0)
    assert feed is not None and feed.token_F.tolist() == [-7, 1] and bool(feed.features_FW[1, 0].isnan())
    (warning,) = [finding for finding in check_trace(trace) if finding.severity == "warning"]
    assert (warning.request_id, warning.what) == ("r0", "1 of 2 recorded rows that the draft was fed hold NaN or Inf")


def test_extra_bytes_and_truncation_at_every_length(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data + b"x")
    with pytest.raises(TraceCorruptError, match=rf"holds {len(data) + 1} bytes, its tensors end at byte {len(data)}"):
        Trace.open(folder)
    for size in range(0, len(data), 97):
        (folder / SHARD).write_bytes(data[:size])
        with pytest.raises(TraceCorruptError, match=rf"{SHARD}.*(truncated|no safetensors file)"):
            Trace.open(folder)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 0])
def test_a_header_length_that_cannot_be(folder: Path, length: int) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(length.to_bytes(8, "little") + data[8:])
    with pytest.raises(TraceCorruptError, match=rf"header of {length}|is not valid JSON"):
        Trace.open(folder)


def test_a_missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()
    with pytest.raises(TraceCorruptError, match=r"lacks shard-00000\.safetensors, but holds shard-00001\.safetensors"):
        Trace.open(folder)


def test_the_last_shard_missing(folder: Path) -> None:
    (folder / "shard-00001.safetensors").unlink()
    with pytest.raises(TraceCorruptError, match=r"requests\.parquet lists 4 requests, the shards hold 2"):
        Trace.open(folder)


def test_a_shard_cut_after_opening(folder: Path) -> None:
    """Reading a mapping beyond its file's end would end the process with SIGBUS."""
    trace = Trace.open(folder)
    with open(folder / SHARD, "r+b") as file:
        file.truncate(100)
    with pytest.raises(TraceCorruptError, match=r"holds 100 bytes now, \d+ when it was opened"):
        trace.read(0, ["2"])


@pytest.mark.parametrize("name", ["trace.json", "requests.parquet", SHARD, "target.safetensors"])
def test_links_are_not_followed(folder: Path, name: str) -> None:
    os.rename(folder / name, folder.parent / "elsewhere")
    os.symlink(folder.parent / "elsewhere", folder / name)
    with pytest.raises(TraceCorruptError, match=rf"{name} is a symbolic link; a trace holds plain files only"):
        Trace.open(folder).embed_weight()


@pytest.mark.parametrize("name", ["trace.json", "requests.parquet", SHARD, "target.safetensors"])
def test_pipes_are_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(TraceCorruptError, match=rf"{name} is not a plain file"):
        Trace.open(folder).embed_weight()


def edit_values(folder: Path, tensor: str, position: int, value: bytes) -> None:
    head, data = read_shard(folder)
    start = head[tensor]["data_offsets"][0] + position
    write_shard(folder, head, data[:start] + value + data[start + len(value) :])


@pytest.mark.parametrize("value", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"], ids=["NaN", "Inf", "-Inf"])
def test_nan_and_inf_in_a_tap(folder: Path, value: bytes) -> None:
    edit_values(
        folder, "tap.2", 2 * 16 * 3, value
    )  # row 3 of the shard is row 1 of the second request, which has 2 + 1
    trace = Trace.open(folder)
    assert trace.read(0, ["2", "final"]).request_id == "r0"
    assert trace.read(1, ["final"]).request_id == "r1"  # what nobody asks for is not read
    with pytest.raises(TraceCorruptError, match=r"tap\.2 holds NaN or Inf in row 1 of request 'r1'"):
        trace.read(1, ["2"])


def test_nan_in_the_logits_summary(folder: Path) -> None:
    edit_values(folder, "logsumexp", 0, b"\x00\x00\xc0\x7f")
    with pytest.raises(TraceCorruptError, match=r"logsumexp holds NaN or Inf in row 0 of request 'r0'"):
        Trace.open(folder).logits(0)


@pytest.mark.parametrize(("value", "told"), [(64, "to 64"), (-1, "from -1")])
def test_token_ids_that_cannot_be(folder: Path, value: int, told: str) -> None:
    edit_values(folder, "tokens", 0, value.to_bytes(4, "little", signed=True))
    with pytest.raises(
        TraceCorruptError, match=rf"tokens of request 'r0' reach .*{told}.* the target's ids are 0 to 63"
    ):
        Trace.open(folder).read(0, [])


def test_a_flipped_bit_is_found_on_demand(folder: Path) -> None:
    head, data = read_shard(folder)
    start = head["tap.2"]["data_offsets"][0]
    write_shard(folder, head, data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :])
    errors = [finding.what for finding in check_trace(Trace.open(folder)) if finding.severity == "error"]
    assert len(errors) == 1 and f"{SHARD} has changed since it was written: its SHA-256 is" in errors[0]


def test_a_changed_sidecar_is_found_on_demand(folder: Path) -> None:
    data = bytearray((folder / "target.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "target.safetensors").write_bytes(data)
    errors = [finding.what for finding in check_trace(Trace.open(folder)) if finding.severity == "error"]
    assert any("target.safetensors has changed since it was written" in what for what in errors)


def test_a_sidecar_of_another_size(folder: Path) -> None:
    edit_header(folder, "weights.bytes", 7)
    with pytest.raises(TraceCorruptError, match=r"target\.safetensors holds \d+ bytes, trace\.json says 7"):
        Trace.open(folder).embed_weight()


def test_pickles_are_never_loaded(folder: Path) -> None:
    torch.save({"tokens": torch.zeros(3)}, folder / SHARD)
    with pytest.raises(TraceCorruptError, match=rf"{SHARD} is truncated or no safetensors file"):
        Trace.open(folder)
