"""Traces of version 2: some taps of some requests, rows in fp8, prompts from some row on."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from support.less_maker import make_less
from support.trace_maker import H, beginning, make_four, make_header, make_request, write_trace

from replay.errors import CaptureError, TraceCorruptError, TraceError, WiringError
from replay.traces.captured import CapturedRequest
from replay.traces.check import check_trace
from replay.traces.copying import captured_request, copy_requests
from replay.traces.fp8 import dequantise, quantise
from replay.traces.header import FP8, OLDEST, VERSION, TapInfo, TraceHeader
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.shards import check_prefixes
from replay.traces.tensors import map_rows, parse_layout
from replay.traces.writer import TraceWriter


@pytest.fixture
def whole(tmp_path: Path) -> Trace:
    return Trace.open(write_trace(tmp_path / "whole", [make_four()]))


def wrong(trace: Trace) -> list[str]:
    return [found.what for found in check_trace(trace) if found.severity == "error"]


# ---- some taps of some requests ----


def test_a_trace_that_leaves_nothing_out_is_of_version_1(whole: Trace) -> None:
    header = json.loads((whole.path / "trace.json").read_text())
    assert header["version"] == OLDEST == 1 and "taps_for" not in header["capture"]
    layout = parse_layout(whole.path / "shard-00000.safetensors")
    assert layout.metadata["version"] == "1" and '"taps"' not in layout.metadata["requests"]


def test_each_request_has_its_own_taps(tmp_path: Path, whole: Trace) -> None:
    less = make_less(tmp_path / "less", whole, taps_for=1)
    assert less.header.version == VERSION and less.header.capture.choices == {"taps_for": 1}
    assert [record.taps for record in less.records] == [None, *[("final",)] * 3]
    assert pl.read_parquet(less.path / "requests.parquet")["taps"].to_list() == [None, *[["final"]] * 3]
    for index in range(4):
        mine, other = less.read(index, ["final"]), whole.read(index, ["final"])
        assert torch.equal(mine.taps["final"], other.taps["final"]) and torch.equal(mine.tokens, other.tokens)
    assert torch.equal(less.read(0, ["2"]).taps["2"], whole.read(0, ["2"]).taps["2"])
    with pytest.raises(WiringError, match=r"request 'r1' of .* has no tap 2; it has final: choose among these"):
        less.read(1, ["2"])
    with pytest.raises(WiringError, match=r"request 'r1' of .* has no tap 2"):
        less.tap_rows(1, "2", [0])
    assert wrong(less) == []
    assert less.taps == ("embed", "2", "final") and less.take(Part(requests=("r2",))).taps == ("embed", "final")


def test_requests_that_have_taps(tmp_path: Path, whole: Trace) -> None:
    less = make_less(tmp_path / "less", whole, taps_for=1)
    assert less.having(["embed", "final"]) is less and less.narrowed == ""
    some = less.having(["embed", "2"])
    assert [record.request_id for record in some.records] == ["r0"] and some.part == "with the tap 2 (1 of 4)"
    assert some.doubts[0] == "1 of 4 requests have the tap 2: only these are looked at."
    assert [len(tier) for tier in less.tiers()] == [1, 3] and less.tiers()[0].taps == ("embed", "2", "final")
    with pytest.raises(
        WiringError, match=r"no request of .* has the tap 2 at once; there are embed, final \(3 requests\): choose"
    ):
        less.take(Part(requests=("r1", "r2", "r3"))).having(["2"])


def test_an_interrupted_one_goes_on(tmp_path: Path, whole: Trace) -> None:
    folder = make_less(tmp_path / "less", whole, taps_for=1).path
    header = Trace.open(folder).header
    bare = make_request("late", 9)
    with TraceWriter.resume(folder, header) as writer:
        assert writer.done_ids == {"r0", "r1", "r2", "r3"}
        writer.add([replace(bare, taps={"final": bare.taps["final"]})])
        writer.finish()
    assert [record.taps is None for record in Trace.open(folder).records] == [True, *[False] * 4]
    with pytest.raises(TraceError, match=r"was begun with capture\.taps_for 1, now it is 2"):
        TraceWriter.resume(folder, replace(header, capture=replace(header.capture, taps_for=2)))


def test_version_1_takes_no_less(tmp_path: Path) -> None:
    request = make_request("r", 0, prompt=4)
    for less in (
        replace(request, taps={"final": request.taps["final"]}),
        replace(request, taps={name: rows[1:] for name, rows in request.taps.items()}, first_row=1),
    ):
        with TraceWriter.create(tmp_path / "t", make_header(), force=True) as writer, pytest.raises(CaptureError):
            writer.add([less])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"taps": ["2"]}, "taps is .*, must be final and others of 2, final"),
        ({"taps": ["final", "2"]}, "must be distinct tap names in the order of the stream"),
        ({"taps": ["2", "3", "final"]}, "must be final and others of 2, final"),
        ({"taps": 7}, "taps is 7, must be a list of strings"),
        ({"taps": None}, "'r1' and 'r3' have other taps, in one shard"),
        ({"first_row": 3}, "first_row is 3, must be an integer from 1 to 2"),
        ({"first_row": 1}, "trace.json and the requests make it"),
    ],
)
def test_records_that_disagree(tmp_path: Path, whole: Trace, changes: dict[str, object], says: str) -> None:
    folder = make_less(tmp_path / "less", whole, taps_for=1).path
    shard = folder / "shard-00001.safetensors"
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    records = json.loads(head["__metadata__"]["requests"])
    records[0] |= changes
    records = [{name: value for name, value in one.items() if value is not None or name != "taps"} for one in records]
    head["__metadata__"]["requests"] = json.dumps(records)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(TraceCorruptError, match=says):
        Trace.open(folder)


# ---- fp8 ----


def e4m3() -> torch.Tensor:
    """Every finite number of OCP's E4M3, by its definition: 4 bits of exponent with a bias of 7, 3 of mantissa."""
    normal = [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    positive = [m / 8 * 2.0**-6 for m in range(8)] + normal
    return torch.tensor(sorted({sign * one for one in positive for sign in (1, -1)}), dtype=torch.float64)


def test_fp8_is_the_nearest_number_of_the_format() -> None:
    rows = (
        torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-4, 1.0, 30.0, 1e4, 0, 1])[:, None]
    )
    rows[1, 3] = 1000.0  # an outlier costs the others nothing but what is far below them
    values, scale = quantise(rows.bfloat16())
    numbers = e4m3()
    assert numbers.max() == 448 and len(numbers) == 253
    scaled = rows.bfloat16().float() / scale[:, None]
    nearest = (scaled.double()[..., None] - numbers).abs().min(-1).values
    assert torch.equal((scaled.double() - values.double()).abs(), nearest)
    assert scale[4] == 1 and (values[4].float() == 0).all()
    told = dequantise(values, scale, torch.bfloat16)
    assert torch.equal(told, (values.float() * scale[:, None]).bfloat16())
    large = rows.abs() > rows.abs().amax(1, keepdim=True) / 2**14
    assert ((told.float() - rows).abs() / rows.abs())[large].max() < 2**-4 + 2**-7  # half a step of 3 bits, and of bf16


def test_rows_in_fp8(tmp_path: Path, whole: Trace) -> None:
    less = make_less(tmp_path / "less", whole, rows="fp8")
    assert less.header.taps["2"] == TapInfo(FP8, H) and less.header.taps["final"].dtype == "bfloat16"
    assert less.rounded_taps == ("2",)
    assert less.doubts[0].startswith(
        "The rows of 2 are stored in fp8, a byte a value, those of embed and final exactly:"
    )
    for index in range(4):
        rows, exact = less.read(index, ["2", "final"]).taps, whole.read(index, ["2", "final"]).taps
        assert torch.equal(rows["2"], dequantise(*quantise(exact["2"]), torch.bfloat16))
        assert rows["2"].dtype == torch.bfloat16 and torch.equal(rows["final"], exact["final"])
        assert torch.equal(less.tap_rows(index, "2", [3, 1]), rows["2"][[3, 1]])
        many = less.rows_of_many("2", {0: [1], index: [2, 0]} if index else {0: [1]})
        assert torch.equal(many[-2:] if index else many, rows["2"][[2, 0]] if index else rows["2"][[1]])
    assert wrong(less) == []
    tensor = parse_layout(less.path / "shard-00000.safetensors").tensors["tap.2"]
    assert tensor.dtype == "F8_E4M3" and tensor.stop - tensor.start == sum(record.rows for record in less.records) * H


def test_an_fp8_number_that_is_none_is_refused(tmp_path: Path, whole: Trace) -> None:
    folder = make_less(tmp_path / "less", whole, rows="fp8").path
    layout = parse_layout(folder / "shard-00000.safetensors")
    for place, junk in ((layout.tensors["tap.2"].start, b"\x7f"), (layout.tensors["scale.2"].start, b"\0\0\x80\x7f")):
        data = bytearray(layout.path.read_bytes())
        before = bytes(data)
        data[place : place + len(junk)] = junk
        layout.path.write_bytes(data)
        with pytest.raises(TraceCorruptError, match=r"(tap|scale)\.2 holds NaN or Inf in row 0 of request 'r0'"):
            Trace.open(folder, verify=False).read(0, ["2"])
        layout.path.write_bytes(before)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_is_above_0(tmp_path: Path, whole: Trace, scale: float) -> None:
    """Read and written: it would turn the signs of a row, or make it zeros."""
    less = make_less(tmp_path / "less", whole, rows="fp8")
    layout = parse_layout(less.path / "shard-00000.safetensors")
    one = captured_request(less, 0)
    data, place = bytearray(layout.path.read_bytes()), layout.tensors["scale.2"].start + 4
    data[place : place + 4] = struct.pack("<f", scale)
    layout.path.write_bytes(data)
    with pytest.raises(TraceCorruptError, match=rf"scale\.2 is {scale:g} in row 1 of request 'r0', it must be above 0"):
        Trace.open(less.path, verify=False).read(0, ["2"])
    wrong_scale = one.scales["2"].clone()
    wrong_scale[1] = scale
    with TraceWriter.create(tmp_path / "new", less.header) as writer:
        with pytest.raises(CaptureError, match=r"scale of tap 2 must be above 0"):
            writer.add([replace(one, scales={"2": wrong_scale})])


def test_final_is_never_in_fp8() -> None:
    header = replace(make_header(), taps={"final": TapInfo(FP8, H)}, version=VERSION)
    with pytest.raises(TraceCorruptError, match=r"the tap final is float8_e4m3fn, it is stored as it was computed"):
        TraceHeader.from_json(header.to_json())
    with pytest.raises(TraceCorruptError, match=r"dtype is 'float8_e4m3fn', must be one of bfloat16, float16, float32"):
        TraceHeader.from_json(
            replace(make_header(), taps={"2": TapInfo(FP8, H), "final": TapInfo("bfloat16", H)}).to_json()
        )


# ---- prompts from some row on ----


def test_the_last_rows_of_prompts(tmp_path: Path, whole: Trace) -> None:
    less = make_less(tmp_path / "less", whole, prompt_rows=2)
    lengths = [record.prompt_tokens for record in whole.records]
    assert lengths == [2, 3, 4, 5]
    assert [record.first_row for record in less.records] == [None, 1, 2, 3] and less.prompt_rows == 2
    for index, first in enumerate((0, 1, 2, 3)):
        rows, every = less.read(index, ["2"]), whole.read(index, ["2"])
        assert rows.first_row == first and torch.equal(rows.tokens, every.tokens)
        assert torch.equal(rows.taps["2"][first:], every.taps["2"][first:])
        assert not rows.taps["2"][:first].any() and len(rows.taps["2"]) == len(every.taps["2"])
        assert torch.equal(less.tap_rows(index, "2", [first, 5]), every.taps["2"][[first, 5]])
    with pytest.raises(TraceError, match=r"holds no row 1 of request 'r2', whose rows it has from 2 on"):
        less.tap_rows(2, "2", [3, 1])
    with pytest.raises(TraceError, match=r"holds no row 0 of request 'r1', whose rows it has from 1 on"):
        less.rows_of_many("2", {0: [0], 1: [2, 0]})
    assert wrong(less) == []
    one = captured_request(less, 3)
    zeros = one.taps["2"].clone()
    zeros[2] = 0
    with TraceWriter.create(tmp_path / "zeros", replace(less.header, weights=None)) as writer:
        writer.add([replace(one, taps={**one.taps, "2": zeros})])
        writer.finish()
    (said,) = wrong(Trace.open(tmp_path / "zeros"))
    assert said.endswith("rows of 2 are all zero, first row 5")  # it has its rows from 3 on
    stored = map_rows(parse_layout(less.path / "shard-00000.safetensors"), "tap.2")
    assert len(stored) == sum(record.stored_rows for record in less.records) == sum(r.rows for r in whole.records) - 6


# ---- all of them together ----


def test_copies_are_bit_for_bit(tmp_path: Path, whole: Trace) -> None:
    less = make_less(tmp_path / "less", whole, taps_for=2, rows="fp8", prompt_rows=2)
    out = tmp_path / "part"
    copy_requests([less.take(Part(requests=("r1", "r3")))], out)
    part = Trace.open(out)
    assert part.header.version == VERSION and part.header.capture == less.header.capture
    for mine, theirs in ((0, 1), (1, 3)):
        one, other = part.records[mine], less.records[theirs]
        assert (one.request_id, one.taps, one.first_row) == (other.request_id, other.taps, other.first_row)
        for tap in one.taps or ("2", "final"):
            for ours, stored in zip(part.stored_rows(mine, tap), less.stored_rows(theirs, tap), strict=True):
                assert (ours is None) == (stored is None)
                assert ours is None or torch.equal(ours.view(torch.uint8), stored.view(torch.uint8))


def test_copies_announce_what_their_requests_have(tmp_path: Path, whole: Trace) -> None:
    less = make_less(tmp_path / "less", whole, taps_for=2)

    def copied(name: str, *traces: Trace) -> TraceHeader:
        copy_requests(traces, tmp_path / name / "copy", named_by_trace=len(traces) > 1)
        assert wrong(Trace.open(tmp_path / name / "copy")) == []
        return Trace.open(tmp_path / name / "copy").header

    bare = copied("bare", less.take(Part(requests=("r2", "r3"))))
    assert list(bare.taps) == ["final"] and bare.capture.choices == {} and bare.version == OLDEST
    first = copied("first", less.take(Part(limit=2)))
    assert list(first.taps) == ["2", "final"] and first.capture.choices == {} and first.version == OLDEST
    other = make_less(tmp_path / "other", whole.take(Part(limit=3)), taps_for=2, prompt_rows=2)
    both = copied("both", less, other)
    assert list(both.taps) == ["2", "final"] and both.capture.choices == {} and both.version == VERSION
    again = copied("again", Trace.open(tmp_path / "both" / "copy").take(Part(limit=3)))
    assert [what for what in both.missing if what.startswith("the ") and "requests" in what] == [
        "the taps 2 of 3 of 7 requests: not all have all of these",
        "the rows of longer prompts before their last 2, of 2 of 7 requests",
    ]
    assert [what for what in again.missing if "requests" in what] == [
        "the taps 2 of 1 of 3 requests: not all have all of these"
    ]


def test_traces_of_other_choices_are_merged_where_their_rows_are_alike(tmp_path: Path, whole: Trace) -> None:
    ten = make_less(tmp_path / "ten", whole.take(Part(limit=2)), taps_for=1)
    last = make_less(tmp_path / "last", whole.take(Part(requests=("r2", "r3"))), prompt_rows=2)
    plain = Trace.open(write_trace(tmp_path / "plain", [[make_request("other", 8)]]))
    copy_requests([ten, last, plain], tmp_path / "all")
    merged = Trace.open(tmp_path / "all")
    assert merged.header.version == VERSION and merged.header.capture.choices == {}
    assert [(record.taps, record.first_row) for record in merged.records] == [
        (None, None), (("final",), None), (None, 2), (None, 3), (None, None),
    ]  # fmt: skip
    assert wrong(merged) == []
    rounded = make_less(tmp_path / "fp8", whole, rows="fp8")
    with pytest.raises(TraceError, match=r"the traces differ in rows, exact in .*plain and fp8 in .*fp8; give"):
        copy_requests([plain, rounded], tmp_path / "none")


def test_parts_of_a_trace_become_one_again(tmp_path: Path, whole: Trace) -> None:
    """The part with fewer taps is a trace of these alone, and still goes with the richer part of the same recording."""
    for rows in ("exact", "fp8"):
        less = make_less(tmp_path / rows, whole, taps_for=2, rows=rows)
        for name, part in (("first", Part(limit=2)), ("rest", Part(requests=("r2", "r3")))):
            copy_requests([less.take(part)], tmp_path / f"{rows}-{name}")
        first, rest = (Trace.open(tmp_path / f"{rows}-{name}") for name in ("first", "rest"))
        assert (list(rest.header.taps), rest.header.version, rest.header.capture.choices) == (["final"], OLDEST, {})
        assert first.header.version == (OLDEST if rows == "exact" else VERSION)
        for order in ((first, rest), (rest, first)):
            copy_requests(order, tmp_path / "again", force=True)
            again = Trace.open(tmp_path / "again")
            assert wrong(again) == [] and again.header.taps == less.header.taps and again.header.version == VERSION
            assert again.header.capture.rows == rows
            assert "the taps 2 of 2 of 4 requests: not all have all of these" in again.header.missing
            for index, record in enumerate(again.records):
                mine = captured_request(again, index)
                theirs = captured_request(less, int(record.request_id[1:]))
                assert mine.taps.keys() == theirs.taps.keys() and mine.scales.keys() == theirs.scales.keys()
                assert all(bits(mine.taps[tap]).equal(bits(theirs.taps[tap])) for tap in mine.taps)


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)


def test_taps_that_are_stored_otherwise_are_not_merged(tmp_path: Path, whole: Trace) -> None:
    """The third trace has no tap beside ``final``: the first two differ, in whatever place it stands."""
    less = make_less(tmp_path / "less", whole, rows="fp8")
    copy_requests([make_less(tmp_path / "t", whole, taps_for=1).take(Part(requests=("r1",)))], tmp_path / "bare")
    bare, out = Trace.open(tmp_path / "bare"), tmp_path / "out"
    wide = replace(make_header(), taps={"2": TapInfo("float32", H), "final": TapInfo("bfloat16", H)})
    one = make_request("x", 9)
    other = Trace.open(
        write_trace(tmp_path / "f32", [[replace(one, taps={**one.taps, "2": one.taps["2"].float()})]], header=wide)
    )
    for order in ((bare, whole, less), (whole, bare, less), (whole, less, bare)):
        with pytest.raises(TraceError, match=r"the traces differ in rows, exact in .*whole and fp8 in .*less; give"):
            copy_requests(order, out, named_by_trace=True)
    with pytest.raises(TraceError, match=r"differ in tap 2, bfloat16 x 16 in .*whole and float32 x 16 in .*f32; give"):
        copy_requests([bare, whole, other], out, named_by_trace=True)


def test_a_part_whose_prompts_are_whole_is_of_version_1(tmp_path: Path, whole: Trace) -> None:
    less = make_less(tmp_path / "less", whole, prompt_rows=3)
    assert [record.first_row for record in less.records] == [None, None, 1, 2]
    for name, limit, version, rows in (("short", 2, OLDEST, None), ("both", 3, VERSION, 3)):
        copy_requests([less.take(Part(limit=limit))], tmp_path / name)
        header = Trace.open(tmp_path / name).header
        assert (header.version, header.capture.prompt_rows) == (version, rows)
        assert any(what.startswith("the rows of longer prompts") for what in header.missing) == (name == "both")


# ---- beside shared rows ----


def alike(count: int) -> list[CapturedRequest]:
    """Requests that begin with the same 80 tokens and rows."""
    made = [make_request(f"r{seed}", seed, prompt=82 + seed) for seed in range(count)]
    return [made[0], *(beginning(one, made[0], 80) for one in made[1:])]


def test_a_request_shares_with_one_that_has_its_taps(tmp_path: Path) -> None:
    """Of four requests that begin alike: all taps, fewer, all again, fewer again; in batches of their own."""
    whole = Trace.open(write_trace(tmp_path / "whole", [alike(4)]))
    first = {"r0", "r2"}
    header = replace(whole.header, version=VERSION, weights=None)
    with TraceWriter.create(tmp_path / "less", header) as writer:
        writer.write_target_weights(whole.embed_weight(), None)
        for index, record in enumerate(whole.records):
            one = captured_request(whole, index)
            taps = one.taps if record.request_id in first else {"final": one.taps["final"]}
            writer.add([replace(one, taps=taps)])
        writer.finish()
    less = Trace.open(tmp_path / "less")
    assert [record.prefix_requests for record in less.records] == [None, (0,), (0,), (0,)]
    for index in range(4):
        taps = less.records[index].taps or ("2", "final")
        assert torch.equal(less.read(index, taps).taps["final"], whole.read(index, taps).taps["final"])
    assert wrong(less) == []
    # In another order the one with fewer taps comes first, and no other finds its rows there.
    copy_requests([less.take(Part(requests=("r1",))), less.take(Part(requests=("r0", "r3")))], tmp_path / "other")
    other = Trace.open(tmp_path / "other")
    assert [(record.request_id, record.prefix_requests) for record in other.records] == [
        ("r1", None), ("r0", None), ("r3", (0,)),
    ]  # fmt: skip
    assert wrong(other) == []


def test_rows_in_fp8_are_shared_with_their_scales(tmp_path: Path) -> None:
    whole = Trace.open(write_trace(tmp_path / "whole", [alike(3)]))
    less = make_less(tmp_path / "less", whole, rows="fp8")
    assert [record.shared for record in less.records] == [record.shared for record in whole.records] != [0, 0, 0]
    for index in range(3):
        rows = less.read(index, ["2"]).taps["2"]
        assert torch.equal(rows, dequantise(*quantise(whole.read(index, ["2"]).taps["2"]), torch.bfloat16))
        assert torch.equal(less.tap_rows(index, "2", [3, 79, 82]), rows[[3, 79, 82]])
    assert wrong(less) == []


def test_requests_without_early_rows_share_none(tmp_path: Path) -> None:
    whole = Trace.open(write_trace(tmp_path / "whole", [alike(3)]))
    less = make_less(tmp_path / "less", whole, prompt_rows=70)
    assert [record.shared for record in less.records] == [0, 0, 0] and less.prompt_rows == 70
    assert wrong(less) == []
    # Beside them others share as they would alone, in whatever order they are written, at once or later.
    for name, order in (("after", [whole, less]), ("before", [less, whole])):
        copy_requests(order, tmp_path / name / "all", named_by_trace=True)
        merged = Trace.open(tmp_path / name / "all")
        assert {record.request_id: record.shared for record in merged.records} == {
            **{f"less/r{number}": 0 for number in range(3)},
            **{f"whole/r{number}": shared for number, shared in enumerate((0, 80, 80))},
        }
        assert wrong(merged) == []
    shorter = make_less(tmp_path / "shorter", whole, prompt_rows=83)
    assert [(record.first_row, record.shared) for record in shorter.records] == [(None, 0), (None, 80), (1, 0)]
    assert wrong(shorter) == []
    record = replace(whole.records[2], first_row=3)
    with pytest.raises(TraceCorruptError, match="which lacks some of its taps or rows"):
        check_prefixes([replace(whole.records[0], first_row=3), *whole.records[1:]], "there")
    with pytest.raises(TraceCorruptError, match="which lacks some of its taps or rows"):
        check_prefixes([replace(whole.records[0], taps=("final",)), *whole.records[1:]], "there")
    assert record.row_origin == record.row_start - record.shared - 3
