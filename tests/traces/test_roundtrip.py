"""What was written is what is read, bit for bit; who may write where; where the target's weights come from."""

import dataclasses
import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import safetensors.torch
import torch
from support.trace_maker import H, V, changed, make_header, make_request, make_requests, make_weights, write_trace

from replay.errors import CaptureError, TraceError, WiringError
from replay.traces.check import check_trace
from replay.traces.feed import Feed
from replay.traces.header import TraceHeader
from replay.traces.reader import Trace
from replay.traces.writer import ServerCounters, TraceWriter

BITS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}


def any_finite(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Every finite bit pattern may come: subnormals, both zeros, the largest."""
    kind = BITS[dtype]
    info = torch.iinfo(kind)
    bits = torch.randint(info.min, info.max + 1, shape, dtype=kind, generator=generator)
    values = bits.view(getattr(torch, dtype))
    return torch.where(values.isfinite(), values, torch.zeros((), dtype=values.dtype))


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("seed", range(8))
def test_what_was_written_is_what_is_read(tmp_path: Path, dtype: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for number in range(5):
        prompt, output = (int(torch.randint(1, 40, (), generator=generator)) for _ in range(2))
        request = make_request(f"ä {number}", number, prompt=prompt, output=output, dtype=dtype)
        taps = {tap: any_finite((prompt + output - 1, H), dtype, generator) for tap in request.taps}
        server = ServerCounters(output, 3, [1, 2], 0) if number % 2 else None
        tail = list(range(number))
        requests.append(changed(request, taps=taps, server=server, tail_ids=tail, category=None, temperature=0.1))
    write_trace(tmp_path / "t", [requests[:2], requests[2:]], header=make_header(dtype))
    trace = Trace.open(tmp_path / "t")
    assert trace.requests["request_id"].to_list() == [request.request_id for request in requests]
    assert trace.requests["temperature"].to_list() == [0.1] * 5
    assert trace.requests["server_histogram"].to_list() == [None, [1, 2], None, [1, 2], None]
    for index, request in enumerate(requests):
        rows = trace.read(index, ["final", "2"])
        assert rows.tokens.tolist() == [*request.prompt_ids, *request.output_ids]
        assert (rows.prompt_tokens, rows.output_tokens) == (len(request.prompt_ids), len(request.output_ids))
        assert rows.tail_ids.tolist() == request.tail_ids
        for tap, values in request.taps.items():
            assert rows.taps[tap].dtype == values.dtype
            assert torch.equal(rows.taps[tap].view(BITS[dtype]), values.view(BITS[dtype]))  # -0.0 is not 0.0
        ids, logprobs, logsumexp = trace.logits(index)
        assert ids.tolist() == request.topk_ids.tolist()
        assert torch.equal(logprobs, request.topk_logprobs) and torch.equal(logsumexp, request.logsumexp)


def test_a_shard_is_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    requests = make_requests(3)
    folder = write_trace(tmp_path / "t", [requests])
    tensors = safetensors.torch.load_file(folder / "shard-00000.safetensors")
    assert sorted(tensors) == ["logsumexp", "tap.2", "tap.final", "tokens", "topk_ids", "topk_logprobs"]
    assert torch.equal(tensors["tap.2"], torch.cat([request.taps["2"] for request in requests]))
    assert torch.equal(safetensors.torch.load_file(folder / "target.safetensors")["embed"], make_weights())


def test_the_header_comes_back_equal() -> None:
    header = make_header("float16", tied=False)
    assert TraceHeader.from_json(header.to_json()) == header


def make_feed(rows: list[int], seed: int, dtype: str = "bfloat16", slots: int = 3) -> Feed:
    """Any numbers and any bits, NaN and ids of no token among them."""
    generator = torch.Generator().manual_seed(seed)
    token_F, position_F = torch.randint(-(1 << 31), (1 << 31) - 1, (2, len(rows)), generator=generator).to(torch.int32)
    bits = torch.randint(-(1 << 15), 1 << 15, (len(rows), slots * H), dtype=torch.int16, generator=generator)
    bits[0, :2] = torch.tensor([0x7FC1, -32768], dtype=torch.int16)  # a NaN with a payload, and -0.0
    features = bits.view(torch.bfloat16)
    return Feed(torch.tensor(rows, dtype=torch.int32), token_F, position_F, features.to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", list(BITS))
def test_what_was_fed_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    """Some requests of a shard have a feed, some have none; a shard without any has no tensors for it."""
    feeds = [None, make_feed([0, 2], 1, dtype), None, make_feed([1], 3, dtype), make_feed([0], 4, dtype), None]
    requests = [changed(one, feed=feed) for one, feed in zip(make_requests(6), feeds, strict=True)]
    folder = write_trace(tmp_path / "t", [requests[:4], requests[4:5], requests[5:]])
    trace = Trace.open(folder)
    assert trace.fed_rows == 4
    for index, feed in enumerate(feeds):
        found = trace.feed(index)
        assert (found is None) == (feed is None)
        if found is not None and feed is not None:
            for name in ("row_F", "token_F", "position_F"):
                assert torch.equal(getattr(found, name), getattr(feed, name))
            assert torch.equal(found.features_FW.view(BITS[dtype]), feed.features_FW.view(BITS[dtype]))
    last = safetensors.torch.load_file(folder / "shard-00002.safetensors")
    assert not [name for name in last if name.startswith("feed.")]
    assert [finding.severity for finding in check_trace(trace)].count("error") == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"row_F": torch.tensor([1, 0], dtype=torch.int32)}, r"request 'r1': its feed is of rows 1, 0, must be rising"),
        ({"row_F": torch.tensor([0, 9], dtype=torch.int32)}, r"of rows 0, 9, must be rising rows from 0 to 3"),
        ({"row_F": torch.tensor([-1, 0], dtype=torch.int32)}, r"of rows -1, 0, must be rising"),
        ({"token_F": torch.zeros(3, dtype=torch.int32)}, r"of other kinds or numbers than int32 \[F\]"),
        ({"position_F": torch.zeros(2, dtype=torch.int64)}, r"of other kinds or numbers than int32 \[F\]"),
        ({"features_FW": torch.zeros(2, H + 1)}, r"features float32 \[2, 17\], must be \[2, a multiple of 16\]"),
        ({"features_FW": torch.zeros(2, H).double()}, r"features float64 \[2, 16\], must be .* in bfloat16, float16"),
        ({"features_FW": torch.zeros(3, H)}, r"features float32 \[3, 16\], must be \[2, a multiple"),
    ],
)
def test_a_feed_that_cannot_be_is_not_written(tmp_path: Path, change: dict[str, torch.Tensor], says: str) -> None:
    feed = dataclasses.replace(make_feed([0, 1], 0), **change)
    with TraceWriter.create(tmp_path / "t", make_header()) as writer, pytest.raises(CaptureError, match=says):
        writer.add([changed(make_requests(2)[1], feed=feed)])


def test_feeds_of_two_widths_are_not_of_one_draft(tmp_path: Path) -> None:
    one, other = make_requests(2)
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        with pytest.raises(CaptureError, match=r"feeds of torch\.bfloat16 x 32 and torch\.bfloat16 x 48"):
            writer.add([changed(one, feed=make_feed([0], 0)), changed(other, feed=make_feed([0], 0, slots=2))])


def test_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", [make_requests(1)])
    header = json.loads((folder / "trace.json").read_text())
    header["colour"] = "blue"
    del header["header_sha256"]
    (folder / "trace.json").write_text(json.dumps(header))
    assert len(Trace.open(folder)) == 1


def test_embed_is_looked_up(tmp_path: Path) -> None:
    request = make_request("a", 1)
    trace = Trace.open(write_trace(tmp_path / "t", [[request]]))
    assert trace.taps == ("embed", "2", "final")
    ids = [*request.prompt_ids, *request.output_ids][:-1]
    assert torch.equal(trace.read(0, ["embed"]).taps["embed"], torch.stack([make_weights()[token] for token in ids]))


def test_single_rows_of_a_tap(tmp_path: Path) -> None:
    """Stored and looked up, of a request that is not the first of its shard: the rows that ``read`` gives."""
    trace = Trace.open(write_trace(tmp_path / "t", [make_requests(3)]))
    for tap in trace.taps:
        whole = trace.read(2, [tap]).taps[tap]
        rows = [len(whole) - 1, 0, 1]
        assert torch.equal(trace.tap_rows(2, tap, rows), whole[rows])
    assert "embed" in trace.taps
    with pytest.raises(WiringError, match="holds no tap 3"):
        trace.tap_rows(0, "3", [0])


def test_a_tap_that_is_not_there(tmp_path: Path) -> None:
    trace = Trace.open(write_trace(tmp_path / "t", [make_requests(1)]))
    with pytest.raises(WiringError, match=r"holds no tap 3; it holds embed, 2, final"):
        trace.read(0, ["3"])


def save_checkpoint(folder: Path, prefix: str, *, sharded: bool, lm_head: bool) -> None:
    folder.mkdir()
    tensors = {f"{prefix}model.embed_tokens.weight": make_weights(seed=1), "other.weight": torch.zeros(3)}
    if lm_head:
        tensors[f"{prefix}lm_head.weight"] = make_weights(seed=2)
    if not sharded:
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
        return
    names = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in names.items():
        safetensors.torch.save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("tied", [False, True])
def test_without_a_sidecar_the_checkpoint_is_read(tmp_path: Path, sharded: bool, prefix: str, tied: bool) -> None:
    save_checkpoint(tmp_path / "target", prefix, sharded=sharded, lm_head=not tied)
    header = make_header(tied=tied, target_path=str(tmp_path / "target"))
    trace = Trace.open(write_trace(tmp_path / "t", [make_requests(1)], header=header, weights=False))
    assert "embed" in trace.taps
    assert torch.equal(trace.embed_weight(), make_weights(seed=1))
    assert torch.equal(trace.lm_head_weight(), make_weights(seed=1 if tied else 2))


def test_neither_sidecar_nor_checkpoint(tmp_path: Path) -> None:
    trace = Trace.open(write_trace(tmp_path / "t", [make_requests(1)], weights=False))
    assert trace.taps == ("2", "final")
    with pytest.raises(
        TraceError, match=r"holds no target\.safetensors and the target's folder /nowhere/target is not"
    ):
        trace.lm_head_weight()


def test_a_checkpoint_of_another_shape(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    tensors = {"model.embed_tokens.weight": torch.zeros(V, H + 1)}
    safetensors.torch.save_file(tensors, tmp_path / "target" / "model.safetensors")
    header = make_header(target_path=str(tmp_path / "target"))
    trace = Trace.open(write_trace(tmp_path / "t", [make_requests(1)], header=header, weights=False))
    with pytest.raises(TraceError, match=r"is \[64, 17\], the trace's target makes it \[64, 16\]"):
        trace.embed_weight()


def test_an_index_that_leaves_its_folder(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    index = {"weight_map": {"model.embed_tokens.weight": "../secret.safetensors"}}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    header = make_header(target_path=str(tmp_path / "target"))
    trace = Trace.open(write_trace(tmp_path / "t", [make_requests(1)], header=header, weights=False))
    with pytest.raises(TraceError, match=r"'\.\./secret\.safetensors', which is no file name"):
        trace.embed_weight()


def test_writing_to_a_mapped_tensor_changes_no_file(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", [make_requests(2)])
    before = (folder / "shard-00000.safetensors").read_bytes()
    Trace.open(folder).read(0, ["2"]).taps["2"].zero_()
    assert (folder / "shard-00000.safetensors").read_bytes() == before


PEAK = """
import resource, sys
from replay.traces.reader import Trace
trace = Trace.open(sys.argv[1])
for indices in ([len(trace) - 1], range(len(trace))):
    for index in indices:
        trace.read(index, tuple(trace.header.taps))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    """Reading 32 MiB request by request peaks like reading one request of 2 MiB, within 8 MiB."""
    taps = {tap: torch.ones(32_768, H, dtype=torch.bfloat16) for tap in ("2", "final")}
    requests = [changed(make_request(f"{n}", n, prompt=32_765), taps=taps) for n in range(16)]
    folder = write_trace(tmp_path / "t", [requests])
    assert (folder / "shard-00000.safetensors").stat().st_size > 32 << 20
    child = subprocess.run([sys.executable, "-I", "-c", PEAK, folder], check=True, capture_output=True, text=True)
    one, every = map(int, child.stdout.split())
    assert every - one < 8


def test_pieces_of_a_prompt_come_back(tmp_path: Path) -> None:
    """Where they are not known nothing is said of them: a shard is then what it was before there were pieces."""
    pieces: list[list[tuple[int, int]] | None] = [[(1, 32), (1, 4)], None, [(4, 4)], [(1, 7)]]
    plain = write_trace(tmp_path / "plain", [make_requests(4)])
    requests = [changed(one, pieces=told) for one, told in zip(make_requests(4), pieces, strict=True)]
    folder = write_trace(tmp_path / "t", [requests[:2], requests[2:]])
    trace = Trace.open(folder)
    assert [record.pieces for record in trace.records] == [((1, 32), (1, 4)), (), ((4, 4),), ((1, 7),)]
    assert [trace.read(index, ()).pieces for index in range(4)] == [record.pieces for record in trace.records]
    assert trace.requests["server_prefill_rows"].to_list() == [[1, 1], None, [4], [1]]
    assert trace.requests["server_prefill_forward_rows"].to_list() == [[32, 4], None, [4], [7]]
    assert b"server_prefill" in (folder / "shard-00000.safetensors").read_bytes()
    assert b"server_prefill" not in (plain / "shard-00000.safetensors").read_bytes()


def test_a_table_without_pieces_is_an_older_one(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", [make_requests(2)])
    buffer = io.BytesIO()
    table = pl.read_parquet(folder / "requests.parquet")
    table.drop("server_prefill_rows", "server_prefill_forward_rows").write_parquet(buffer)
    (folder / "requests.parquet").write_bytes(buffer.getvalue())
    header = json.loads((folder / "trace.json").read_text())
    header["requests_sha256"] = hashlib.sha256(buffer.getvalue()).hexdigest()
    del header["header_sha256"]
    (folder / "trace.json").write_text(json.dumps(header))
    assert [record.pieces for record in Trace.open(folder).records] == [(), ()]


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([], r"request 'r1': server_prefill_rows holds 0 pieces, server_prefill_forward_rows 0"),
        ([(2, 1)], r"holds a piece of 2 rows in a forward of 1"),
        ([(0, 4), (2, 4)], r"holds a piece of 0 rows in a forward of 4"),
        ([(2, 4), (2, 4)], r"server_prefill_rows adds up to 4, the prompt has 3 tokens"),
    ],
)
def test_pieces_that_cannot_be_are_not_written(tmp_path: Path, pieces: list[tuple[int, int]], says: str) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer, pytest.raises(CaptureError, match=says):
        writer.add([changed(make_requests(2)[1], pieces=pieces)])
