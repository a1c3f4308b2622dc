"""traces/SPEC.md and the code name the same fields, columns, tensors and files."""

import re
from dataclasses import MISSING, fields, replace
from importlib.resources import files as resources

import pytest
from support.trace_maker import make_header

from replay.traces import feed, files, header, record_fields, records, request_table, server_rounds, shards, sharing
from replay.traces.captured import CapturedRequest

SPEC = resources("replay.traces").joinpath("SPEC.md").read_text()


def section(number: int) -> str:
    return re.split(r"(?m)^## ", SPEC)[number]


def first_column(text: str) -> list[str]:
    """The names in backticks in the first column of every table, in order."""
    cells = re.findall(r"(?m)^\| (`[^|]*) \|", text)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def names(kind: type) -> set[str]:
    return {item.name for item in fields(kind)}


def test_header_fields() -> None:
    root, rest = section(3).split("`target`:\n")
    target, capture = rest.split("`capture`:\n")
    assert set(first_column(root)) == {"format"} | names(header.TraceHeader)
    assert set(first_column(target)) == names(header.TargetInfo)
    assert set(first_column(capture)) == names(header.CaptureSettings)
    for name in names(header.EngineInfo) | names(header.TapInfo) | names(header.WeightsInfo):
        assert f"`{name}`" in root or f'"{name}"' in root


@pytest.mark.parametrize(
    ("number", "expected"), [(4, request_table.table_schema()), (6, server_rounds.served_schema())]
)
def test_columns_and_their_types(number: int, expected: dict[str, object]) -> None:
    told = {}
    for cell, kind in re.findall(r"(?m)^\| (`[^|]*) \| ([^|]*) \|", section(number)):
        for name in re.findall(r"`([^`]+)`", cell):
            told[name] = kind.removesuffix(" or null")
    assert told == {name: str(kind) for name, kind in expected.items()}


def test_tensors_and_metadata() -> None:
    tensors, metadata = section(5).split("`__metadata__` of a shard:")
    expected = shards.expected_tensors(make_header(), 1, 1, 1)
    told = [name for name in first_column(tensors) if name not in ("tap.NAME", "scale.NAME")]
    assert set(told) == {name for name in expected if not name.startswith("tap.")} | {*feed.NUMBERS, feed.FEATURES}
    assert set(first_column(metadata)) == set(shards.shard_metadata([], "0" * 64))
    left_out = re.findall(r"`([a-z0-9_]+)`", metadata.split("without")[1].split("|")[0])
    assert tuple(left_out) == records.PLACE


def test_files_and_numbers() -> None:
    for name in (files.HEADER, files.REQUESTS, files.ROUNDS, files.WEIGHTS, files.LOCK, files.TEMPORARY):
        assert name in SPEC
    for word in (*records.FINISH_REASONS, *records.SOURCES, *header.TAP_DTYPES, *header.STATES, *header.EMBED_WAYS):
        assert word in SPEC
    for number in (
        header.MAX_LAYERS,
        header.MAX_WIDTH,
        header.MAX_VOCAB,
        header.MAX_TOPK,
        records.MAX_ID,
        record_fields.MAX_PREFIXES,
    ):
        assert str(number) in SPEC
    assert f"version {header.VERSION}" in SPEC.splitlines()[0]


def test_a_capture_gives_all_that_a_request_is() -> None:
    """Every column that follows neither from a place nor from counters is a field of CapturedRequest, or is found."""
    columns = {item for item in names(records.RequestRecord) if not item.startswith("server_")} - set(records.PLACE)
    found = {"prompt_tokens", "output_tokens", "prefix_requests", "prefix_rows"}  # what the writer finds
    assert columns - found <= names(CapturedRequest)


def test_what_version_2_adds() -> None:
    """Rows in fp8 with their scales, the choices of a capture, and what it takes to share rows."""
    taps = {"2": header.TapInfo(header.FP8, 16), "final": header.TapInfo("bfloat16", 16)}
    fp8 = shards.expected_tensors(replace(make_header(), taps=taps, version=header.VERSION), 1, 1, 1)
    scale = next(cells for cells in re.findall(r"(?m)^\| `scale.NAME` \|(.*)$", section(5)))
    assert {name for name in fp8 if name.startswith("scale.")} == {"scale.2"}
    assert (scale.split("|")[0].strip(), fp8["scale.2"][0]) == ("F32", "float32") and header.FP8 in section(5)
    told = re.findall(r"(?m)^\| `(\w+)` \| [^|]*, version 2 \|", section(3))
    assert {*told} == {*CHOSEN.choices} == names(header.CaptureSettings) - names_of_version_1()
    assert f"blocks of {sharing.BLOCK} tokens" in section(5) and f"/ {int(fp8_largest())}" in section(5)


CHOSEN = replace(make_header().capture, taps_for=1, then_taps=("2",), rows="fp8", prompt_rows=1)


def names_of_version_1() -> set[str]:
    return {item.name for item in fields(header.CaptureSettings) if item.default is MISSING}


def fp8_largest() -> float:
    import torch

    return torch.finfo(torch.float8_e4m3fn).max
