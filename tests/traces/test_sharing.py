"""Rows of a shared prefix are stored once, and read as if every request had its own: held against the same requests
written without sharing.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trace_maker import H, beginning, changed, make_header, make_request, make_weights, write_trace

from replay.errors import TraceCorruptError, TraceVersionError
from replay.traces import sharing
from replay.traces.captured import CapturedRequest
from replay.traces.check import check_trace
from replay.traces.copying import copy_requests
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.records import RequestRecord
from replay.traces.shards import check_prefixes
from replay.traces.stretches import prefix_of, stretches
from replay.traces.tensors import pack_header, parse_layout, take_rows
from replay.traces.writer import TraceWriter

TAPS = ("2", "final")


def conversation() -> list[CapturedRequest]:
    """A system prompt of 150 tokens; b goes on with it, c with b's question, d has its tokens and other bits, e is
    all of b once more, f has nothing of them."""
    a, b, c, d = (make_request(name, seed, prompt=200 + 30 * seed) for seed, name in enumerate("abcd"))
    b = beginning(b, a, 150)
    c = beginning(c, b, 210)
    other = {tap: -rows for tap, rows in a.taps.items()}
    d = changed(beginning(d, changed(a, taps=other), 150), request_id="d")
    return [a, b, c, d, changed(b, request_id="e"), make_request("f", 9, prompt=80)]


def write_whole(folder: Path, batches: Sequence[Sequence[CapturedRequest]]) -> Path:
    """The twin: every request with all of its rows."""
    with TraceWriter.create(folder, make_header()) as writer:
        writer.share = False
        writer.write_target_weights(make_weights(), None)
        for batch in batches:
            writer.add(batch)
        writer.finish()
    return folder


def check_equal(trace: Trace, requests: Sequence[CapturedRequest]) -> None:
    assert [record.request_id for record in trace.records] == [request.request_id for request in requests]
    for index, request in enumerate(requests):
        rows = trace.read(index, TAPS)
        assert rows.tokens.tolist() == [*request.prompt_ids, *request.output_ids]
        assert all(torch.equal(rows.taps[tap], request.taps[tap]) for tap in TAPS)
        assert torch.equal(trace.logits(index)[1], request.topk_logprobs)
        few = [0, len(rows.tokens) // 2, len(rows.tokens) - 2, 1]
        assert all(torch.equal(trace.tap_rows(index, tap, few), request.taps[tap][few]) for tap in TAPS)
    some = {index: [1, 70, request.taps["2"].shape[0] - 1] for index, request in enumerate(requests)}
    expected = torch.cat([requests[index].taps["2"][rows] for index, rows in some.items()])
    assert torch.equal(trace.rows_of_many("2", some), expected)


@pytest.mark.parametrize("sizes", [(6,), (1, 1, 1, 1, 1, 1), (2, 4)])
def test_shared_rows_are_stored_once(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """In one shard and across several."""
    requests = conversation()
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    trace = Trace.open(write_trace(tmp_path / "t", [requests[i:j] for i, j in itertools.pairwise(ends)]))
    prefixes = [(record.prefix_requests, record.prefix_rows) for record in trace.records]
    b = len(requests[1].prompt_ids) + 4 - 1
    assert prefixes == [
        (None, None), ((0,), (150,)), ((0, 1), (150, 60)), (None, None), ((0, 1), (150, b - 150)), (None, None)
    ]  # fmt: skip
    assert trace.header.version == 2
    check_equal(trace, requests)
    assert [finding for finding in check_trace(trace) if finding.severity == "error"] == []
    assert trace.doubts == ()


def test_rows_of_a_prefix_are_read_without_the_shard_of_the_request_itself(tmp_path: Path) -> None:
    """A shard that is read is held against its checksum first, and these bytes are other ones."""
    requests = conversation()
    path = write_trace(tmp_path / "t", [[request] for request in requests])
    shard = path / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    trace = Trace.open(path)
    assert torch.equal(trace.tap_rows(1, "2", [3, 149]), requests[0].taps["2"][[3, 149]])
    with pytest.raises(TraceCorruptError, match="shard-00001"):
        trace.tap_rows(1, "2", [3, 150])


def test_no_rows_have_the_shape_and_dtype_of_their_tensor(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", [[request] for request in conversation()])
    none = Trace.open(path).rows_of_many("2", {1: [], 2: []})
    assert none.shape == (0, H) and none.dtype == torch.bfloat16
    layout = parse_layout(path / "shard-00000.safetensors")
    tokens = take_rows(layout, "tokens", [])
    assert tokens.shape == (0,) and tokens.dtype == torch.int32


def test_a_hundred_requests_that_share_2000_tokens(tmp_path: Path) -> None:
    """Within 10 % of the prefix once and the rest, and the same tensors as the twin's. A row of the invented target
    has 64 bytes and its token 4, an output 4 * 8 + 4 of logits: all else is what a table of 100 requests takes."""
    first = make_request("first", 1000, prompt=2000)
    requests = [beginning(make_request(f"r{i}", i, prompt=2040 + i % 9, output=40), first, 2000) for i in range(100)]
    batches = [requests[i : i + 16] for i in range(0, 100, 16)]
    path, twin = write_trace(tmp_path / "t", batches), write_whole(tmp_path / "twin", batches)
    once = 2000 + sum(len(request.prompt_ids) + 40 - 2000 for request in requests)
    assert sum(file.stat().st_size for file in path.glob("*")) < 1.10 * (once * (2 * 2 * H + 4) + 100 * 40 * 36)
    trace, whole = Trace.open(path), Trace.open(twin)
    assert (trace.header.version, whole.header.version) == (2, 1)
    for index in range(0, 100, 7):
        one, other = trace.read(index, TAPS), whole.read(index, TAPS)
        assert torch.equal(one.tokens, other.tokens)
        assert all(torch.equal(one.taps[tap], other.taps[tap]) for tap in TAPS)


def test_a_trace_that_shares_nothing_is_of_version_1(tmp_path: Path) -> None:
    """Fewer rows in common than a block are nothing; it can be read by older readers, and its rows are views."""
    a = make_request("a", 0, prompt=90)
    trace = Trace.open(write_trace(tmp_path / "t", [[a, beginning(make_request("b", 1, prompt=90), a, 63)]]))
    assert trace.header.version == 1 and not any(record.shared for record in trace.records)
    assert parse_layout(tmp_path / "t" / "shard-00000.safetensors").metadata["version"] == "1"


def test_minus_zero_is_not_zero(tmp_path: Path) -> None:
    a = make_request("a", 0, prompt=100)
    a.taps["2"][80:] = 0.0
    b = beginning(make_request("b", 1, prompt=100), a, 90)
    b.taps["2"][85] = -0.0
    trace = Trace.open(write_trace(tmp_path / "t", [[a], [b]]))
    assert trace.records[1].shared == 85
    assert torch.equal(trace.read(1, ["2"]).taps["2"].view(torch.int16), b.taps["2"].view(torch.int16))


def test_resumed_it_goes_on_sharing(tmp_path: Path) -> None:
    """A trace that shared nothing so far becomes one of version 2; a finished one too."""
    requests = conversation()
    path = write_trace(tmp_path / "t", [requests[:1]])
    assert Trace.open(path).header.version == 1
    for begin in (1, 3):
        with TraceWriter.resume(path, make_header()) as writer:
            for request in requests[begin : begin + 3]:
                if request.request_id not in writer.done_ids:
                    writer.add([request])
            writer.finish()
    trace = Trace.open(path)
    assert [record.shared for record in trace.records][:4] == [0, 150, 210, 0]
    check_equal(trace, requests)


def test_a_batch_that_never_came_is_not_shared_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = conversation()
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.write_target_weights(make_weights(), None)
        with monkeypatch.context() as broken:
            broken.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(Exception, match="No space left"):
                writer.add(requests[:2])
        writer.add(requests[2:3])
        writer.add(requests[:2])
        writer.finish()
    trace = Trace.open(tmp_path / "t")
    assert [record.shared for record in trace.records] == [0, 150, 210]
    check_equal(trace, [requests[2], *requests[:2]])


def test_a_part_copies_what_it_shared_with_others(tmp_path: Path) -> None:
    """subset: the request that stores a prefix is not in it; merge: prefixes are found across traces."""
    requests = conversation()
    trace = Trace.open(write_trace(tmp_path / "t", [requests[:3], requests[3:]]))
    copy_requests([trace.take(Part(requests=("c",)))], tmp_path / "one")
    one = Trace.open(tmp_path / "one")
    assert one.header.version == 1 and one.records[0].shared == 0
    check_equal(one, requests[2:3])
    copy_requests([trace.take(Part(requests=("b", "f"))), one], tmp_path / "both")
    both = Trace.open(tmp_path / "both")
    assert [record.shared for record in both.records] == [0, 0, 210]
    check_equal(both, [requests[1], requests[5], requests[2]])


def test_a_part_is_held_against_the_checksum_of_what_it_shares(tmp_path: Path) -> None:
    requests = conversation()
    path = write_trace(tmp_path / "t", [[request] for request in requests])
    shard = path / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    with pytest.raises(TraceCorruptError, match=r"shard-00000\.safetensors has changed since it was written"):
        Trace.open(path).take(Part(requests=("c",))).check_sums()
    with pytest.raises(TraceCorruptError, match=r"shard-00000\.safetensors has changed"):
        Trace.open(path).read(2, ["2"])
    Trace.open(path).take(Part(requests=("f",))).check_sums()
    assert len(Trace.open(path, verify=False).read(2, ["2"]).tokens) == 264
    said = [finding.what for finding in check_trace(Trace.open(path, verify=False)) if finding.severity == "error"]
    assert any("shard-00000.safetensors has changed" in what for what in said)


def test_not_finite_rows_name_the_shard_that_stores_them(tmp_path: Path) -> None:
    requests = conversation()
    path = write_trace(tmp_path / "t", [[request] for request in requests], finish=False)
    shard = path / "shard-00000.safetensors"
    place = parse_layout(shard).tensors["tap.2"]
    data = bytearray(shard.read_bytes())
    data[place.start + 7 * 2 * H : place.start + 7 * 2 * H + 2] = b"\xff\xff"
    shard.write_bytes(data)
    trace = Trace.open(path, allow_incomplete=True, verify=False)
    with pytest.raises(TraceCorruptError, match=r"shard-00000\S*: tap.2 holds NaN or Inf in row 7 of request 'c'"):
        trace.read(2, ["2"])


def edit_records(shard: Path, edit: dict[str, object], version: str = "2") -> None:
    """Change the last record that ``shard`` carries."""
    layout = parse_layout(shard)
    records = json.loads(layout.metadata["requests"])
    records[-1] |= edit
    torch_names = {"BF16": "bfloat16", "F32": "float32", "I32": "int32"}
    shapes = {name: (torch_names[one.dtype], one.shape) for name, one in layout.tensors.items()}
    metadata = {**layout.metadata, "requests": json.dumps(records), "version": version}
    shard.write_bytes(pack_header(shapes, metadata) + shard.read_bytes()[layout.data_start :])


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"prefix_requests": [1], "prefix_rows": [150]}, r"request 'b' is said to share the rows 0 to 150 of request "
         "number 1, which does not come before it"),
        ({"prefix_requests": [7], "prefix_rows": [150]}, r"number 7, which does not come before it"),
        ({"prefix_requests": [0, 0], "prefix_rows": [100, 50]}, r""),
        ({"prefix_requests": [0]}, r""),
        ({"prefix_requests": [0, 0]}, r"prefix_requests names 2 requests, prefix_rows 1 numbers of rows, both must"),
        ({"prefix_requests": None}, r"prefix_requests names 0 requests, prefix_rows 1 numbers of rows, both must"),
        ({"prefix_requests": [], "prefix_rows": []}, r"prefix_requests names 0 requests, prefix_rows 0 numbers"),
        ({"prefix_rows": [0]}, r"prefix_rows"),
        ({"prefix_rows": [-1]}, r"prefix_rows"),
        ({"prefix_rows": ["150"]}, r"prefix_rows"),
        ({"prefix_requests": [-1]}, r"prefix_requests"),
        ({"prefix_rows": [234]}, r"prefix_rows adds up to 234, the request has 233 rows"),
        ({"prefix_rows": [149]}, r"tokens is I32 \[84\], trace.json and the requests make it I32 \[85\]"),
    ],
)  # fmt: skip
def test_a_prefix_that_cannot_be_is_refused(tmp_path: Path, edit: dict[str, object], says: str) -> None:
    path = write_trace(tmp_path / "t", [conversation()[:1], conversation()[1:2]], finish=False)
    edit_records(path / "shard-00001.safetensors", edit)
    if not says:
        return check_equal(Trace.open(path, allow_incomplete=True), conversation()[:2])
    with pytest.raises(TraceCorruptError, match=says):
        Trace.open(path, allow_incomplete=True)


def test_the_owner_must_store_the_rows_itself() -> None:
    """Not as its own prefix: readers follow no chains."""

    def record(name: str, **prefix: tuple[int, ...]) -> RequestRecord:
        return dataclasses.replace(make_request(name, 0, prompt=100).record(make_header()), **prefix)  # type: ignore[arg-type]

    b = record("b", prefix_requests=(0,), prefix_rows=(80,))
    check_prefixes([record("a"), b, record("c", prefix_requests=(0, 1), prefix_rows=(70, 20))][:2], "here")
    check_prefixes([record("a"), b, record("c", prefix_requests=(0, 1), prefix_rows=(80, 10))], "here")
    with pytest.raises(
        TraceCorruptError, match="here: request 'c' is said to share the rows 70 to 90 of request number 1"
    ):
        check_prefixes([record("a"), b, record("c", prefix_requests=(0, 1), prefix_rows=(70, 20))], "here")


def test_versions_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", [conversation()[:1], conversation()[1:2]], finish=False)
    text = (path / "trace.json").read_text()
    (path / "trace.json").write_text(text.replace('"version": 2', '"version": 1'))
    with pytest.raises(
        TraceVersionError, match=r"shard-00001\.safetensors is of version 2, possible beside its header: 1"
    ):
        Trace.open(path, allow_incomplete=True, verify=False)
    edit_records(path / "shard-00001.safetensors", {}, "1")
    with pytest.raises(
        TraceCorruptError, match="a prefix of rows of other requests, which a trace of version 1 has not"
    ):
        Trace.open(path, allow_incomplete=True, verify=False)


# ---- against what is obvious ----


def common_rows(one: CapturedRequest, other: CapturedRequest) -> int:
    """How many first rows two requests have in common: the obvious way."""
    tokens = [[*request.prompt_ids, *request.output_ids] for request in (one, other)]
    most = min(map(len, tokens)) - 1
    for row in range(most):
        if tokens[0][row] != tokens[1][row]:
            return row
        if any(one.taps[tap][row].tolist() != other.taps[tap][row].tolist() for tap in TAPS):
            return row
    return most


@st.composite
def families(draw: st.DrawFn) -> list[CapturedRequest]:
    """Requests that go on with earlier ones from some row on, with other bits from an earlier row on at times."""
    made: list[CapturedRequest] = []
    for seed in range(draw(st.integers(2, 7))):
        prompt = draw(st.integers(1, 30))
        one = make_request(f"r{seed}", seed, prompt=prompt + 24, output=draw(st.integers(1, 4)))
        if made and draw(st.booleans()):
            parent = made[draw(st.integers(0, seed - 1))]
            rows = draw(st.integers(0, min(len(parent.prompt_ids), len(one.prompt_ids))))
            one = beginning(one, parent, rows)
            if rows and draw(st.booleans()):
                one.taps[draw(st.sampled_from(TAPS))][draw(st.integers(0, rows - 1))] += 1
        made.append(one)
    return made


@settings(max_examples=12, deadline=None)
@given(families(), st.lists(st.integers(1, 3), min_size=7, max_size=7))
def test_any_family_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, requests: list[CapturedRequest], sizes: list[int]
) -> None:
    """With blocks of 8 tokens: nothing is shared that differs, and what is shared misses less than a block of the most
    that any one earlier request has."""
    folder = tmp_path_factory.mktemp("t")
    batches, left = [], list(requests)
    for size in sizes:
        batches.append(left[:size])
        left = left[size:]
    with pytest.MonkeyPatch.context() as smaller:
        smaller.setattr(sharing, "BLOCK", 8)
        smaller.setattr(sharing, "_ROWS_AT_ONCE", 5)
        trace = Trace.open(write_trace(folder / "t", batches, weights=False))
    for index, (record, request) in enumerate(zip(trace.records, requests, strict=True)):
        rows = trace.read(index, TAPS)
        assert all(torch.equal(rows.taps[tap], request.taps[tap]) for tap in TAPS)
        assert rows.tokens.tolist() == [*request.prompt_ids, *request.output_ids]
        most = max((common_rows(request, other) for other in requests[:index]), default=0)
        assert most - 8 < record.shared <= most


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=6), st.data())
def test_stretches_are_what_following_each_position_gives(parents: list[tuple[int, int]], data: st.DataObject) -> None:
    """Of any tree of prefixes, each stretch of positions lies where each of its positions does."""
    plain = make_request("r", 0, prompt=25, output=1).record(make_header())
    records = [plain]
    owner: list[list[int]] = [[0] * plain.tokens]
    for parent, rows in parents:
        number, parent = len(records), parent % len(records)
        requests, lengths = prefix_of(records, parent, rows) if rows else ((), ())
        records.append(dataclasses.replace(plain, prefix_requests=requests or None, prefix_rows=lengths or None))
        owner.append([*owner[parent][:rows], *[number] * (plain.tokens - rows)])
    check_prefixes(records, "here")
    number = data.draw(st.integers(0, len(records) - 1))
    start = data.draw(st.integers(0, plain.tokens - 1))
    stop = data.draw(st.integers(start + 1, plain.tokens))
    told = [(one.record, position) for one in stretches(records, records[number], start, stop)
            for position in range(one.start, one.stop)]  # fmt: skip
    expected = [(records[owner[number][position]], position) for position in range(start, stop)]
    assert [position for _, position in told] == [position for _, position in expected]
    assert all(one is other for (one, _), (other, _) in zip(told, expected, strict=True))
