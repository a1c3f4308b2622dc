"""What was written is what is read, bit for bit; who may write where; where the target's weights come from."""

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import safetensors.torch
import torch
from support.trace_maker import H, V, changed, make_header, make_request, make_requests, make_weights, write_trace

from replay.errors import CaptureError, OutputError, TraceCorruptError, TraceError, TraceIncompleteError, WiringError
from replay.traces.check import check_trace
from replay.traces.feed import Feed
from replay.traces.header import TraceHeader
from replay.traces.reader import Trace
from replay.traces.server_rounds import read_served
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


LATER = ["parents", "batch", "verify_pass", "batch_row"]  # columns that rounds did not have at first


def rounds(*rows: tuple[str, int, int, list[int], int]) -> pl.DataFrame:
    kinds = {"request_id": pl.String, "round": pl.Int32, "anchor": pl.Int32}
    return pl.DataFrame(rows, schema=kinds | {"drafted": pl.List(pl.Int32), "accepted": pl.Int32}, orient="row")


def tree(parents: list[int | None] | None, drafted: list[int]) -> pl.DataFrame:
    """One round of r0 whose drafted tokens continue ``parents``."""
    return rounds(("r0", 0, 2, drafted, 1)).with_columns(parents=pl.Series([parents], dtype=pl.List(pl.Int32)))


def test_the_servers_rounds(tmp_path: Path) -> None:
    kept = rounds(("r0", 0, 2, [5, 6], 1), ("r0", 1, 4, [7], 0))
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add_rounds(rounds(("r0", 0, 9, [1], 1), ("never", 0, 1, [1], 1)))
        writer.add_rounds(kept)  # a second try of the same request replaces its rounds
        writer.add(make_requests(1))
        writer.finish()
    trace = Trace.open(tmp_path / "t")
    assert trace.header.rounds
    assert trace.served_rounds().drop(LATER).equals(kept)
    assert trace.served_rounds().select(LATER).null_count().row(0) == (2, 2, 2, 2)  # nothing was said of these
    with TraceWriter.resume(tmp_path / "t", make_header()) as writer:
        writer.add_rounds(rounds(("r1", 0, 3, [8], 1)))
        writer.add(make_requests(2)[1:])
        assert Trace.open(tmp_path / "t", allow_incomplete=True).served_rounds().height == 3
        writer.finish()
    assert Trace.open(tmp_path / "t").served_rounds()["request_id"].to_list() == ["r0", "r0", "r1"]


def test_parents_of_a_servers_trees(tmp_path: Path) -> None:
    """A tree of six drafted tokens, the fifth without its parent; beside it a chain, and a file of no such column."""
    kept = tree([0, 0, 1, 3, -1, 2], [5, 6, 7, 7, 3, 1])
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add_rounds(rounds(("r1", 0, 3, [8], 1)))
        writer.add_rounds(kept)
        writer.add(make_requests(2))
        writer.finish()
    assert Trace.open(tmp_path / "t").served_rounds().drop(LATER[1:]).filter(request_id="r0").equals(kept)
    assert Trace.open(tmp_path / "t").served_rounds()["parents"].to_list() == [None, [0, 0, 1, 3, -1, 2]]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0], r"1 parents of 2 drafted tokens"),
        ([0, 2], r"the parent of drafted token 2 is 2, must be a number from -1 below its own"),
        ([-2, 0], r"the parent of drafted token 1 is -2"),
        ([0, None], r"the parent of drafted token 2 is None"),
    ],
)
def test_parents_that_cannot_be(tmp_path: Path, parents: list[int | None], message: str) -> None:
    tree(parents, [5, 6]).write_parquet(tmp_path / "rounds.parquet")
    with pytest.raises(TraceCorruptError, match=message):
        read_served(tmp_path / "rounds.parquet")
    with TraceWriter.create(tmp_path / "t", make_header()) as writer, pytest.raises(CaptureError, match=message):
        writer.add_rounds(tree(parents, [5, 6]))


def test_requests_that_were_verified_together(tmp_path: Path) -> None:
    def together(batch: int) -> pl.DataFrame:
        return rounds(("r0", 0, 2, [5, 6], 1)).with_columns(batch=pl.lit(batch, pl.Int32))

    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        with pytest.raises(CaptureError, match=r"the column batch holds 0, must be 1 or more"):
            writer.add_rounds(together(0))
        writer.add_rounds(together(3))
        writer.add(make_requests(1))
        writer.finish()
    assert Trace.open(tmp_path / "t").served_rounds()["batch"].to_list() == [3]


def together(*rows: tuple[str, int | None, int | None, int | None]) -> pl.DataFrame:
    """One round of each of these requests, in ``batch`` of ``verify_pass`` as ``batch_row``."""
    names = {"request_id": pl.String, "batch": pl.Int32, "verify_pass": pl.Int64, "batch_row": pl.Int32}
    told = pl.DataFrame(rows, schema=names, orient="row")
    return rounds(*((name, 0, 2, [5, 6], 1) for name, *_ in rows)).with_columns(told.drop("request_id"))


def test_which_rounds_ran_together(tmp_path: Path) -> None:
    kept = together(("r0", 3, 7, 2), ("r1", 3, 7, 0), ("r2", 1, 8, 0), ("r3", 2, None, None))
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        assert writer.next_verify_pass() == 0
        writer.add_rounds(kept)
        assert writer.next_verify_pass() == 9
        with pytest.raises(CaptureError, match=r"with those before: row 0 of verify pass 7 stands twice"):
            writer.add_rounds(together(("r5", 3, 7, 0)))
        writer.add(make_requests(4))
        writer.finish()
    found = Trace.open(tmp_path / "t").served_rounds()
    assert found.drop("parents").equals(kept.select(found.drop("parents").columns))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("r0", 3, -1, 0)], r"the column verify_pass holds -1, must be 0 or more"),
        ([("r0", 3, 1, -1)], r"the column batch_row holds -1, must be 0 or more"),
        ([("r0", 3, 1, None)], r"1 round has a verify_pass or a batch_row without the other"),
        ([("r0", 3, None, 1), ("r1", 3, 4, None)], r"2 rounds have a verify_pass or a batch_row without the other"),
        ([("r0", 3, 1, 3)], r"row 3 of a batch of 3"),
        ([("r0", 3, 1, 2), ("r1", 3, 1, 2)], r"row 2 of verify pass 1 stands twice"),
        ([("r0", 3, 1, 2), ("r1", 2, 1, 1)], r"the rounds of verify pass 1 differ in batch"),
    ],
)
def test_passes_that_cannot_be(
    tmp_path: Path, rows: list[tuple[str, int | None, int | None, int | None]], message: str
) -> None:
    together(*rows).write_parquet(tmp_path / "rounds.parquet")
    with pytest.raises(TraceCorruptError, match=message):
        read_served(tmp_path / "rounds.parquet")
    with TraceWriter.create(tmp_path / "t", make_header()) as writer, pytest.raises(CaptureError, match=message):
        writer.add_rounds(together(*rows))


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


def test_parents_of_another_kind(tmp_path: Path) -> None:
    rounds(("r0", 0, 2, [5, 6], 1)).with_columns(parents=pl.lit("0,1")).write_parquet(tmp_path / "rounds.parquet")
    with pytest.raises(TraceCorruptError, match=r"the column parents is String, must be List"):
        read_served(tmp_path / "rounds.parquet")


def test_rounds_that_were_changed(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        writer.add_rounds(rounds(("r0", 0, 2, [5, 6], 1)))
        writer.add(make_requests(1))
        writer.finish()
    rounds(("r0", 0, 2, [5, 6], 2)).write_parquet(tmp_path / "t" / "rounds.parquet")
    with pytest.raises(TraceCorruptError, match=r"rounds\.parquet is not the file that was finished"):
        Trace.open(tmp_path / "t").served_rounds()


def test_rounds_that_cannot_be(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t", make_header()) as writer:
        with pytest.raises(CaptureError, match=r"2 of 1 drafted tokens accepted"):
            writer.add_rounds(rounds(("r0", 0, 2, [5], 2)))
        with pytest.raises(CaptureError, match=r"the column anchor is missing"):
            writer.add_rounds(rounds(("r0", 0, 2, [5], 1)).drop("anchor"))
        writer.add(make_requests(1))
        writer.finish()
    assert Trace.open(tmp_path / "t").served_rounds().height == 0
