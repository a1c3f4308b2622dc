"""Rows of two requests exchanged in any tap are seen in a few rows; sound traces of every kind are left alone.

The target here adds to a stream, as every transformer does: the next tap is the one before and something new.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.heads import tiny_config, write_head
from support.hostile import run
from support.trace_maker import V, changed, make_header, make_requests, write_trace
from torch import Tensor

import replay
from replay.traces.captured import CapturedRequest
from replay.traces.check import check_trace
from replay.traces.header import TapInfo
from replay.traces.reader import Trace
from replay.traces.self_check import self_check

WIDE = 64
TAPS = ("1", "2", "3", "final")
PROMPT = 12


def _lm_head() -> Tensor:
    return torch.randn(V, WIDE, generator=torch.Generator().manual_seed(0))


def _request(
    seed: int, output: int = 20, *, cap: float = 0.0, prompt: int = PROMPT, text: int | None = None
) -> CapturedRequest:
    """A request whose taps are one stream; ``text``: the seed of its rows, where they are those of another request."""
    generator = torch.Generator().manual_seed(100 + (seed if text is None else text))
    rows = prompt + output - 1
    stream = torch.randn(rows, WIDE, generator=generator)
    taps = {}
    for name in TAPS:
        stream = stream + 0.7 * torch.randn(rows, WIDE, generator=generator)
        taps[name] = stream / 2
    logits = taps["final"][prompt - 1 :] @ _lm_head().T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    top = logits.topk(4, dim=1)
    return CapturedRequest(
        f"r{seed}", None, torch.randint(0, V, (prompt,), generator=generator).tolist(), top.indices[:, 0].tolist(),
        "length", "generated", 0.0, 1.0, -1, taps, top.indices.int(), top.values - logits.logsumexp(1)[:, None],
        logits.logsumexp(1),
    )  # fmt: skip


def _write(folder: Path, requests: Sequence[CapturedRequest]) -> Trace:
    header = make_header("float32", tied=False)
    header = replace(
        header,
        target=replace(header.target, hidden_size=WIDE),
        taps={name: TapInfo("float32", WIDE) for name in TAPS},
        capture=replace(header.capture, max_new_tokens=64),
    )
    from replay.traces.writer import TraceWriter

    with TraceWriter.create(folder, header) as writer:
        writer.write_target_weights(_lm_head(), _lm_head())
        writer.add(requests)
        writer.finish()
    return Trace.open(folder)


def _exchange(requests: list[CapturedRequest], one: int, other: int, *names: str) -> list[CapturedRequest]:
    """Rows of two requests exchanged in some taps, as far as both have them."""
    a, b = requests[one], requests[other]
    rows = min(len(a.taps["1"]), len(b.taps["1"]))
    mixed = list(requests)
    for place, mine, theirs in ((one, a, b), (other, b, a)):
        taps = {name: torch.cat([theirs.taps[name][:rows], tap[rows:]]) if name in names else tap
                for name, tap in mine.taps.items()}  # fmt: skip
        mixed[place] = changed(mine, taps=taps)
    return mixed


@pytest.mark.parametrize("count", [2, 3, 12])
@pytest.mark.parametrize("names", [("1",), ("2",), ("3",), ("1", "2"), ("1", "2", "3")])
def test_taps_below_final_that_were_exchanged_are_named(tmp_path: Path, names: tuple[str, ...], count: int) -> None:
    requests = [_request(seed, 20 + seed % 3) for seed in range(count)]
    assert self_check(_write(tmp_path / "sound", requests)) == ()
    (said,) = self_check(_write(tmp_path / "mixed", _exchange(requests, 0, count - 1, *names)))
    assert said.startswith(f"In 2 of {count} requests (r0, r{count - 1}) the rows of some taps are not like the other")
    assert "but like those of another (r0, r" in said


def test_rows_of_nobody_are_named_where_there_are_requests_to_compare_with(tmp_path: Path) -> None:
    requests = [_request(seed) for seed in range(10)]
    taps = {**requests[4].taps, "2": torch.randn(len(requests[4].taps["2"]), WIDE)}
    (said,) = self_check(_write(tmp_path / "t", [*requests[:4], changed(requests[4], taps=taps), *requests[5:]]))
    assert said.startswith("In 1 of 10 requests (r4) the rows of some taps are not like")


@pytest.mark.parametrize("count", [2, 12])
def test_final_that_was_exchanged_is_named(tmp_path: Path, count: int) -> None:
    requests = _exchange([_request(seed) for seed in range(count)], 0, 1, "final")
    said = self_check(_write(tmp_path / "t", requests))
    assert said[0].startswith(f"In 2 of {count} requests (r0, r1) the rows of final do not give the choices")
    assert "replay inspect --check" in said[0]


def test_all_taps_that_were_exchanged_are_named_by_final(tmp_path: Path) -> None:
    """Among themselves they agree, so that only the recorded choices can tell."""
    (said,) = self_check(_write(tmp_path / "t", _exchange([_request(seed) for seed in range(6)], 2, 5, *TAPS)))
    assert said.startswith("In 2 of 6 requests (r2, r5) the rows of final")


@pytest.mark.parametrize(
    "requests",
    [
        [_request(seed, text=0) for seed in range(12)],
        [_request(seed, text=seed // 2) for seed in range(12)],
        [_request(seed, cap=5.0) for seed in range(12)],
        [_request(seed, 1 + seed % 5, prompt=2) for seed in range(12)],
        [_request(0)],
    ],
    ids=["one text", "texts in pairs", "capped logits", "short", "one request"],
)
def test_sound_traces_raise_no_doubt(tmp_path: Path, requests: list[CapturedRequest]) -> None:
    assert self_check(_write(tmp_path / "t", requests)) == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_taps_with_nothing_in_common_raise_no_doubt(tmp_path: Path, dtype: str) -> None:
    """Those of the invented target are drawn at random."""
    for count in (2, 6, 40):
        trace = Trace.open(
            write_trace(tmp_path / f"t{count}", [make_requests(count, dtype)], header=make_header(dtype))
        )
        assert self_check(trace) == ()


def test_every_command_that_replays_says_it(tmp_path: Path) -> None:
    mixed = _write(tmp_path / "t", _exchange([_request(seed) for seed in range(12)], 0, 1, "2"))
    config = tiny_config(hidden_size=WIDE, vocab_size=V, num_attention_heads=4, head_dim=16,
                         eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]})  # fmt: skip
    head = write_head(tmp_path / "head", config)
    shown = " ".join(run("simulate", mixed.path, "--draft", head, "-o", tmp_path / "r.parquet").stdout.split())
    assert "• In 2 of 12 requests (r0, r1) the rows of some taps" in shown
    document = json.loads(run("report", tmp_path / "r.parquet", "--json").stdout)
    assert document["trace"]["doubts"] == list(mixed.doubts) == document["doubts"][:1]
    found = json.loads(
        run("diagnose", mixed.path, "--draft", head, "--observed", "1.5", "--no-ladder", "--json").stdout
    )
    assert found["doubts"] == list(mixed.doubts)
    assert [one.what for one in check_trace(mixed) if one.severity == "error"] == list(mixed.doubts)
    assert replay.Trace.open(mixed.path).doubts == mixed.doubts
