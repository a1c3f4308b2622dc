"""What `replay capture` keeps of each request: taps, fp8, last rows of prompts; in process, with a tiny target."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from replay.capture.encode import EncodedRequest
from replay.capture.events import Event, Sized
from replay.capture.kept import Kept
from replay.capture.local.record import capture_local
from replay.capture.options import CaptureOptions, ServerOptions, check_options
from replay.capture.size import RowSize, expect
from replay.cli.app import cli
from replay.errors import TraceError, UsageError
from replay.traces.check import check_trace
from replay.traces.fp8 import dequantise, quantise
from replay.traces.reader import Trace

PROMPTS = [{"id": f"r{seed}", "input_ids": [3 + seed, *range(1, 6 + seed)]} for seed in range(4)]
TAPS = "embed,1,2,3,final"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> CaptureOptions:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("kept")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "target")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    # One request in a batch: what is computed does not depend on who else is asked for.
    return CaptureOptions(str(folder / "target"), prompts, folder / "whole", taps=TAPS, max_new_tokens=5, concurrency=1)


@pytest.fixture(scope="module")
def whole(options: CaptureOptions) -> Trace:
    capture_local(options, lambda _: None)
    return Trace.open(options.out)


@pytest.fixture
def record(options: CaptureOptions, whole: Trace, tmp_path: Path) -> Callable[..., tuple[Trace, list[Event]]]:
    def record(**choices: object) -> tuple[Trace, list[Event]]:
        events: list[Event] = []
        capture_local(replace(options, out=tmp_path / "trace", **choices), events.append)  # type: ignore[arg-type]
        trace = Trace.open(tmp_path / "trace")
        assert [found for found in check_trace(trace) if found.severity != "note"] == []
        return trace, events

    return record


def needed(events: list[Event]) -> int:
    return next(event.room.needed for event in events if isinstance(event, Sized))


def held(trace: Trace) -> int:
    """Bytes of shards and weights, without their headers."""
    weights = (trace.path / "target.safetensors").stat().st_size
    return weights + sum(layout.size - layout.data_start for layout in trace.layouts)


def by_name(trace: Trace) -> dict[str, int]:
    return {record.request_id: index for index, record in enumerate(trace.records)}


def test_all_taps_of_the_first_requests(whole: Trace, record: Callable[..., tuple[Trace, list[Event]]]) -> None:
    less, events = record(taps_for=2, then_taps="out:1")
    assert less.header.capture.choices == {"taps_for": 2, "then_taps": ("2",)}
    assert "the taps 1, 3 of some requests: they were recorded of the first 2 requests alone" in less.header.missing
    where, there = by_name(less), by_name(whole)
    assert {name: less.records[index].taps for name, index in where.items()} == {
        "r0": None, "r1": None, "r2": ("2", "final"), "r3": ("2", "final"),
    }  # fmt: skip
    for name, index in where.items():
        taps = less.records[index].taps or ("1", "2", "3", "final")
        mine, theirs = less.read(index, taps).taps, whole.read(there[name], taps).taps
        assert all(torch.equal(mine[tap], theirs[tap]) for tap in taps)
    assert 0 <= needed(events) - held(less) < 1000 and held(less) < held(whole)


def test_more_first_requests_than_there_are(whole: Trace, record: Callable[..., tuple[Trace, list[Event]]]) -> None:
    less, _ = record(taps="1", taps_for=9, then_taps="2,final")
    assert [one.taps for one in less.records] == [None] * 4 and less.taps == ("embed", "1", "2", "final")
    assert not [what for what in less.header.missing if "alone" in what]


def test_rows_in_fp8(whole: Trace, record: Callable[..., tuple[Trace, list[Event]]]) -> None:
    less, events = record(rows="fp8")
    for name, index in by_name(less).items():
        mine, theirs = less.read(index, ["2", "final"]).taps, whole.read(by_name(whole)[name], ["2", "final"]).taps
        assert torch.equal(mine["2"], dequantise(*quantise(theirs["2"]), torch.bfloat16))
        assert torch.equal(mine["final"], theirs["final"])
    assert 0 <= needed(events) - held(less) < 1000
    assert "the exact rows of 1, 2, 3: they are stored in fp8" in less.header.missing


def test_the_last_rows_of_prompts(whole: Trace, record: Callable[..., tuple[Trace, list[Event]]]) -> None:
    less, events = record(prompt_rows=7)
    assert {name: less.records[index].first_row for name, index in by_name(less).items()} == {
        "r0": None, "r1": None, "r2": 1, "r3": 2,
    }  # fmt: skip
    index = by_name(less)["r3"]
    assert torch.equal(less.read(index, ["1"]).taps["1"][2:], whole.read(by_name(whole)["r3"], ["1"]).taps["1"][2:])
    assert 0 <= needed(events) - held(less) < 1000
    assert "the rows of longer prompts before their last 7" in less.header.missing


def test_going_on_takes_the_same_choices(options: CaptureOptions, tmp_path: Path) -> None:
    begun = replace(options, out=tmp_path / "t", taps_for=2, then_taps="2", rows="fp8", prompt_rows=3)
    capture_local(begun, lambda _: None)
    capture_local(replace(begun, resume=True), lambda _: None)
    for choices, says in (
        ({"taps_for": 3}, r"capture\.taps_for 2, now it is 3"),
        ({"then_taps": "1"}, r"capture\.then_taps 2, now it is 1"),
        ({"taps_for": None, "then_taps": None}, r"capture\.taps_for 2, now it is None"),
        ({"rows": "exact"}, r"capture\.rows fp8, now it is exact"),
        ({"prompt_rows": None}, r"capture\.prompt_rows 3, now it is None"),
    ):
        with pytest.raises(TraceError, match=says):
            capture_local(replace(begun, resume=True, **choices), lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "code", "says"),
    [
        ("--taps-for 0 --then-taps 2", 1, "--taps-for 0 cannot be: type a number that is 1 to "),
        ("--taps-for 20", 1, "--taps-for 20 records all taps of 20 requests: type --then-taps T, those of the others"),
        ("--then-taps 2", 1, "--then-taps 2 says what to record after the first requests: type --taps-for N"),
        ("--taps-for 2 --then-taps 2,out:1", 1, "--then-taps 2,out:1 names 2 twice: name each tap once"),
        ("--taps-for 2 --then-taps x", 1, "'x' is not a tap"),
        ("--taps-for 2 --then-taps ''", 1, "'' is not a tap"),
        ("--taps-for 2 --then-taps 9", 1, "tap 9 is R[9], the target has 4 layers"),
        ("--taps-for nan --then-taps 2", 2, "'nan' is not a valid integer"),
        ("--taps-for 99999999999999999999 --then-taps 2", 1, "cannot be: type a number that is 1 to "),
        ("--rows fp4", 2, "'fp4' is not one of 'exact', 'fp8'"),
        ("--prompt-rows 7", 1, "--prompt-rows 7 cannot be: type last:W, W from 1 to 1099511627776 rows"),
        ("--prompt-rows last:9999999999999", 1, "1 to 1099511627776 rows"),
        ("--prompt-rows last:0", 1, "--prompt-rows last:0 cannot be"),
        ("--prompt-rows last:-1", 1, "--prompt-rows last:-1 cannot be"),
        ("--prompt-rows first:3", 1, "--prompt-rows first:3 cannot be"),
        ("--prompt-rows last:", 1, "--prompt-rows last: cannot be"),
    ],
)
def test_what_cannot_be(options: CaptureOptions, tmp_path: Path, typed: str, code: int, says: str) -> None:
    given = [one.strip("'") for one in typed.split(" ")]
    asked = ["capture", "--model", options.model, "--prompts", str(options.prompts), "-o", str(tmp_path / "t"), *given]
    result = CliRunner().invoke(cli, asked)
    assert (result.exit_code, says in result.output) == (code, True), result.output
    assert not (tmp_path / "t").exists()


def test_a_server_may_leave_the_other_taps_open(tmp_path: Path) -> None:
    check_options(ServerOptions("http://x", tmp_path / "p", tmp_path / "t", taps_for=3))
    with pytest.raises(UsageError, match="--rows fp4 is not one of exact, fp8"):
        check_options(ServerOptions("http://x", tmp_path / "p", tmp_path / "t", rows="fp4"))
    with pytest.raises(UsageError, match="--prompt-rows -1 cannot be"):
        check_options(ServerOptions("http://x", tmp_path / "p", tmp_path / "t", prompt_rows=-1))


def test_the_bytes_of_a_large_target(tmp_path: Path) -> None:
    """docs/record.md's table, by arithmetic: H 7168, bf16, 200 prompts of 50,000 tokens with 2,000 of output."""
    taps = ("2", "3", "4", "29", "30", "31", "57", "58", "59", "final")
    requests = [EncodedRequest(f"r{n}", None, (1,) * 50_000, None, 2_000) for n in range(200)]
    whole, then = RowSize(taps, 7168, 2, 32), ("3", "30", "58", "final")
    first = frozenset(f"r{n}" for n in range(20))

    def bytes_of(size: RowSize, kept: Kept) -> int:
        return expect(tmp_path, size, requests, kept=kept, layers=61).needed

    outputs, token = 400_000 * (32 * 8 + 4), 4 * 10_400_000
    every = 10_400_000 * 10 * 14_336 + outputs + token
    assert bytes_of(whole, Kept(taps)) == every
    tiered = (1_040_000 * 10 + 9_360_000 * 4) * 14_336 + outputs + token
    assert bytes_of(whole, Kept(taps, then, first)) == tiered
    fp8 = 10_400_000 * (9 * (7168 + 4) + 14_336) + outputs + token
    assert bytes_of(replace(whole, rows="fp8"), Kept(taps, rows="fp8")) == fp8
    window = 200 * (2_048 + 2_000) * 10 * 14_336 + outputs + token
    assert bytes_of(whole, Kept(taps, prompt_rows=2048)) == window
