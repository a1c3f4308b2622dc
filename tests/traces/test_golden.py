"""Traces of each format version, written once (tests/golden/README.md says how): every later version must read them.

Expected values stand here literally. The logits follow from the script's rule by hand: log-sum-exp of s * [4, 2, 2, 2,
0, 0, 0, -2] is 8.05444978375343 for s = 2, 6.145762054721226 for 1.5, 2.9397850625546686 for 0.5 (Python's math).
"""

import hashlib
import itertools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from replay.traces.check import check_trace
from replay.traces.header import CaptureSettings, EngineInfo, TapInfo, TargetInfo, WeightsInfo
from replay.traces.reader import Trace

GOLDEN = Path(__file__).parents[1] / "golden" / "trace-v1"
SHARING = GOLDEN.with_name("trace-v2")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.open(GOLDEN)


@pytest.mark.parametrize(
    ("folder", "sha256"),
    [
        (GOLDEN, "c67f9e3483514424eee62dcce1df962ea923370dc36979fead8e111403eee58a"),
        (SHARING, "5e9d6aa75dfba731c9f532cc1e797c64356a148a185dec6441d252459709486d"),
    ],
)
def test_nobody_wrote_it_anew(folder: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest() == sha256


def test_header(trace: Trace) -> None:
    header = trace.header
    assert (header.version, header.state, header.created) == (1, "complete", "2026-11-29T19:00:00+00:00")
    assert header.target == TargetInfo(
        "golden", "/golden/target", "LlamaForCausalLM", "llama", 2, 4, 8, "bfloat16", False, 32, "9" * 64
    )
    assert header.engine == EngineInfo("sglang", "0.5.23", {"device": "cpu"})
    assert header.taps == {"1": TapInfo("float16", 4), "final": TapInfo("bfloat16", 4)}
    assert (header.topk, header.embed, header.requests, header.rounds) == (2, "lookup", 3, True)
    assert header.capture == CaptureSettings(4, 0.0, 1.0, -1, 7, True, "8" * 64)
    assert header.missing == ("what the target would choose after the last output token of request 'c'",)
    sha256 = "970d044bc8a4a55a65d6058de53717315067f334aba5681f54d829cdc3c9a63c"
    assert header.weights == WeightsInfo("target.safetensors", 288, sha256)


def test_requests(trace: Trace) -> None:
    table = trace.requests
    expected = {
        "request_id": ["a", "b", "c"],
        "category": ["maths", None, "maths"],
        "shard": ["shard-00000.safetensors", "shard-00000.safetensors", "shard-00001.safetensors"],
        "token_start": [0, 4, 0],
        "row_start": [0, 3, 0],
        "output_start": [0, 2, 0],
        "prompt_tokens": [2, 1, 3],
        "output_tokens": [2, 3, 1],
        "finish_reason": ["length", "stop", "forced"],
        "source": ["generated", "generated", "forced"],
        "temperature": [0.0, 0.0, 0.0],
        "top_p": [1.0, 1.0, 1.0],
        "top_k": [-1, -1, -1],
        "tail_ids": [[5], [1, 2], []],
        "server_completion_tokens": [None, 3, None],
        "server_verify_rounds": [None, 2, None],
        "server_histogram": [None, [1, 1, 0], None],
        "server_cached_tokens": [None, 0, None],
        "server_prefill_rows": [None, None, None],  # it was written before there were pieces
        "server_prefill_forward_rows": [None, None, None],
        "prefix_requests": [None, None, None],  # and before rows were shared
        "prefix_rows": [None, None, None],
        "shard_bytes": [1420, 1420, 956],
        "taps": [None, None, None],  # it is of version 1
        "first_row": [None, None, None],
        "server_cached_rows": [None, None, None],  # and before a server's prefix cache was recorded
        "server_cached_forward_rows": [None, None, None],
    }
    assert table.drop("shard_sha256").to_dict(as_series=False) == expected


def test_rows(trace: Trace) -> None:
    assert trace.taps == ("embed", "1", "final")
    rows = trace.read(1, ["embed", "1", "final"])
    assert (rows.request_id, rows.prompt_tokens, rows.output_tokens) == ("b", 1, 3)
    assert rows.tokens.tolist() == [7, 3, 4, 0]
    assert rows.tail_ids.tolist() == [1, 2]
    assert rows.taps["1"].dtype is torch.float16
    assert rows.taps["1"].tolist() == [[0.0, 0.375, 0.75, 1.125], [1.5, 1.875, 2.25, 2.625], [3.0, 3.375, 3.75, 4.125]]
    assert rows.taps["final"].dtype is torch.bfloat16
    assert rows.taps["final"].tolist() == [[1.5, 1.5, -1.5, 1.5], [-1.5, -1.5, 1.5, 1.5], [-1.5, -1.5, -1.5, 1.5]]
    assert rows.taps["embed"].tolist() == [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, -0.5, 0.5], [-0.5, -0.5, 0.5, 0.5]]
    assert trace.read(0, []).tokens.tolist() == [1, 2, 3, 4]
    assert trace.read(2, []).tokens.tolist() == [5, 6, 0, 6]


@pytest.mark.parametrize(
    ("index", "ids", "logsumexp", "logprobs"),
    [
        (0, [[3, 1], [4, 0]], 8.05444978375343, [-0.05444978375343, -4.05444978375343]),
        (1, [[3, 1], [4, 0], [0, 1]], 6.145762054721226, [-0.145762054721226, -3.145762054721226]),
        (2, [[6, 2]], 2.9397850625546686, [-0.9397850625546686, -1.9397850625546686]),
    ],
)
def test_logits(trace: Trace, index: int, ids: list[list[int]], logsumexp: float, logprobs: list[float]) -> None:
    found_ids, found_logprobs, found_logsumexp = trace.logits(index)
    assert found_ids.tolist() == ids
    for row, total in zip(found_logprobs.tolist(), found_logsumexp.tolist(), strict=True):
        assert row == pytest.approx(logprobs, abs=1e-6)
        assert total == pytest.approx(logsumexp, abs=1e-6)


def test_weights_and_rounds(trace: Trace) -> None:
    assert trace.lm_head_weight()[6].tolist() == [-1.0, 1.0, 1.0, 1.0]
    assert trace.embed_weight()[6].tolist() == [-0.5, 0.5, 0.5, 0.5]
    rounds = trace.served_rounds()
    later = rounds.select("parents", "batch", "verify_pass", "batch_row")  # of which it has none
    assert rounds.drop(later.columns).rows() == [("b", 0, 1, [3, 6], 1), ("b", 1, 3, [2, 2], 0)]
    assert later.null_count().row(0) == (2, 2, 2, 2)


def test_it_was_written_before_there_was_a_feed(trace: Trace) -> None:
    assert trace.fed_rows == 0 and [trace.feed(index) for index in range(3)] == [None, None, None]


def test_check(trace: Trace) -> None:
    assert [(finding.severity, finding.what[:50]) for finding in check_trace(trace)] == [
        ("note", "3 of 3 files have the bytes that their checksums n"),
        ("note", "it lacks a checksum of trace.json: an earlier repl"),
        ("note", "lm_head(final) was computed for 6 of 6 output posi"),
    ]


def test_shared_rows_of_version_2() -> None:
    """Its rows follow from the script by hand: tap 1 counts positions, final is the code of the next token."""
    trace = Trace.open(SHARING)
    prefixes = [(record.request_id, record.prefix_requests, record.prefix_rows) for record in trace.records]
    assert trace.header.version == 2
    assert prefixes == [("a", None, None), ("b", (0,), (69,)), ("c", (0, 1), (69, 60)), ("d", None, None)]
    assert trace.requests["token_start"].to_list() == [0, 72, 0, 4]
    assert trace.requests["row_start"].to_list() == [0, 71, 0, 3]
    text, longer = [(3 * i + i // 8) % 8 for i in range(70)], [(5 + i // 9) % 8 for i in range(60)]
    for index, rest in enumerate(([3, 4], [*longer, 7], [*longer, 1, 2, 0], [3])):
        rows, scale = trace.read(index, ["1", "final"]), 1.0 if index == 3 else 2.0
        assert rows.tokens.tolist() == [*text, *rest]
        assert rows.taps["1"][:, 2].tolist() == [scale * (position + 0.5) for position in range(69 + len(rest))]
        signs = [[scale if token >> bit & 1 else -scale for bit in range(3)] for token in [*text, *rest][1:]]
        assert rows.taps["final"][:, :3].tolist() == signs
    # Of eight tokens each has one row of final, so that requests with other tokens have some of them in common.
    found = [finding.severity for finding in check_trace(trace) if "bit for bit" not in finding.what]
    assert found == ["note", "note"]


def test_the_script_still_writes_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value by value: other processors round log_softmax otherwise, other versions of polars write other parquet."""
    text = (GOLDEN.parent / "README.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(first + second, "tests/golden/README.md", "exec"), {})
    names = ("shard-00000.safetensors", "shard-00001.safetensors", "target.safetensors")
    for name, golden in itertools.product(names, (GOLDEN, SHARING)):
        made, kept = (load_file(folder / name) for folder in (tmp_path / golden.name, golden))
        assert made.keys() == kept.keys()
        for tensor, values in kept.items():
            torch.testing.assert_close(made[tensor], values, rtol=0, atol=1e-6 if values.dtype == torch.float32 else 0)
    for golden in (GOLDEN, SHARING):
        told, kept_table = (
            Trace.open(folder).requests.drop("shard_sha256") for folder in (tmp_path / golden.name, golden)
        )
        assert told.equals(kept_table)
