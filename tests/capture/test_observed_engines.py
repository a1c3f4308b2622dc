"""Accept lengths of other engines, on lines and pages as their own sources print them; counts are checked by hand.

vLLM's lines and names: vllm/v1/spec_decode/metrics.py, of 0.9 (Draft acceptance rate first) and of 0.32. TensorRT-LLM's
objects: cpp/include/tensorrt_llm/executor/types.h. llama.cpp's lines: docs/speculative.md and common/speculative.cpp.
"""

import json
from pathlib import Path

import pytest

from replay.capture.observed import Observed, read_observed
from replay.errors import CaptureError

VLLM_LOG = """\
(APIServer pid=7) INFO 11-30 12:00:00 [loggers.py:123] Engine 000: Avg prompt throughput: 1.0 tokens/s
(APIServer pid=7) INFO 11-30 12:00:00 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 1.80, Accepted \
throughput: 40.00 tokens/s, Drafted throughput: 250.00 tokens/s, Accepted: 400 tokens, Drafted: 2500 tokens, \
Per-position acceptance rate: 0.410, 0.190, 0.100, 0.060, 0.040, Avg Draft acceptance rate: 16.0%
(APIServer pid=7) INFO 11-30 12:00:10 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted \
throughput: 15.00 tokens/s, Drafted throughput: 50.00 tokens/s, Accepted: 150 tokens, Drafted: 500 tokens, \
Per-position acceptance rate: 0.600, 0.400, 0.300, 0.150, 0.050, Avg Draft acceptance rate: 30.0%
(APIServer pid=7) INFO 11-30 12:00:20 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: nan, Accepted \
throughput: 0.00 tokens/s, Drafted throughput: 0.00 tokens/s, Accepted: 0 tokens, Drafted: 0 tokens, Per-position \
acceptance rate: , Avg Draft acceptance rate: nan%
"""
VLLM_OLD_LOG = """\
INFO 05-01 12:00:00 [metrics.py:61] SpecDecoding metrics: Draft acceptance rate: 50.0%, Mean acceptance length: 2.00, \
Accepted: 100 tokens, Drafted: 200 tokens, Per-position acceptance rate: 0.600, 0.400
INFO 04-01 12:00:00 [metrics.py:61] SpecDecoding metrics: Draft acceptance rate: 50.0%, Accepted: 9 tokens, Drafted: 18
"""
# Counts measured on vLLM 0.32 on a CPU: 575 drafts, 235 107 50 33 21 accepted by position; its log said 1.78
VLLM_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 575.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 2875.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 446.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 235.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 107.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="3"} 33.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="4"} 21.0
"""
TENSORRT = [
    {"iter": 1, "specDecodingStats": {"numDraftTokens": 0, "numAcceptedTokens": 0, "numRequestsWithDraftTokens": 0,
                                      "acceptanceLength": 0.0}},
    {"iter": 2, "specDecodingStats": {"numDraftTokens": 24, "numAcceptedTokens": 12, "numRequestsWithDraftTokens": 8,
                                      "acceptanceLength": 2.5}},
    {"iter": 3, "specDecodingStats": {"numDraftTokens": 6, "numAcceptedTokens": 0, "numRequestsWithDraftTokens": 2,
                                      "acceptanceLength": 1.0}},
    {"iter": 4},
]  # fmt: skip
LLAMA_LOG = """\
slot print_timing: id  0 | task 0 |
       eval time =    1153.51 ms /    43 tokens (   26.83 ms per token,    37.28 tokens per second)
draft acceptance rate = 0.57576 (  171 accepted /   297 generated)
statistics ngram_simple: #calls = 15, #gen drafts = 5, #acc drafts = 5, #gen tokens = 187, #acc tokens = 73
statistics        draft-mtp: #calls(b,g,a) = 1 10 10, #gen drafts =   10, #acc drafts = 9, #gen tokens = 110, \
#acc tokens = 48, dur(b,g,a) = 0.009, 97.349, 0.006 ms
statistics        draft-mtp: #calls(b,g,a) = 2 20 20, #gen drafts =   15, #acc drafts = 9, #gen tokens = 110, \
#acc tokens = 67, dur(b,g,a) = 0.009, 97.349, 0.006 ms
"""


def seen(text: str, folder: Path) -> Observed:
    (folder / "said").write_text(text)
    return read_observed(str(folder / "said"))


def test_log_lines_of_vllm_are_weighed_by_their_drafts(tmp_path: Path) -> None:
    """500 and 100 drafts of 5 tokens, 400 and 150 of them accepted."""
    found = seen(VLLM_LOG, tmp_path)
    assert found.accept_length == pytest.approx(1 + 550 / 600)
    assert found.num_steps == 5 and found.source.startswith("2 log lines of vLLM, 1 + accepted / drafts")
    old = seen(VLLM_OLD_LOG, tmp_path)
    assert (old.accept_length, old.num_steps) == (2.0, 2) and old.source.startswith("1 log line of vLLM,")


def test_log_lines_of_vllm_with_nothing_accepted_count(tmp_path: Path) -> None:
    """Without rates: 100 drafts of 5 with 150 accepted, and 300 of 5 with none; 1 + 150 / 400."""
    line = "SpecDecoding metrics: Mean acceptance length: {}, Accepted: {} tokens, Drafted: {} tokens"
    found = seen("\n".join([line.format("2.50", 150, 500), line.format("1.00", 0, 1500)]), tmp_path)
    assert found.accept_length == pytest.approx(1.375) and found.source.startswith("2 log lines of vLLM")
    assert seen(line.format("1.00", 0, 1500), tmp_path).accept_length == 1.0


def test_counters_of_vllm_give_a_histogram(tmp_path: Path) -> None:
    found = seen(VLLM_METRICS, tmp_path)
    assert found.accept_length == pytest.approx(1 + 446 / 575)
    assert (found.rounds, found.num_steps) == (575, 5)
    assert found.histogram == (340, 128, 57, 17, 12, 21) and sum(found.histogram) == 575
    two = VLLM_METRICS + VLLM_METRICS.replace('engine="0"', 'engine="1"')
    assert seen(two, tmp_path).rounds == 1150 and seen(two, tmp_path).accept_length == found.accept_length


def test_counters_that_do_not_hold_together_give_no_histogram(tmp_path: Path) -> None:
    assert seen(VLLM_METRICS.replace(" 107.0", " 300.0"), tmp_path).histogram is None
    assert seen(VLLM_METRICS.replace('position="1"', 'position="7"'), tmp_path).histogram is None
    with pytest.raises(CaptureError, match="says nothing of an accept length"):
        seen(VLLM_METRICS.replace(" 575.0", " 0.0"), tmp_path)


@pytest.mark.parametrize("form", ["array", "lines"])
def test_iterations_of_tensorrt_are_added_up(form: str, tmp_path: Path) -> None:
    text = json.dumps(TENSORRT) if form == "array" else "\n".join(map(json.dumps, TENSORRT))
    found = seen(text, tmp_path)
    assert (found.accept_length, found.rounds) == (1 + 12 / 10, 10)
    assert "1 + accepted / requests with drafts" in found.source


def test_answers_of_tensorrt_are_weighed_by_their_iterations(tmp_path: Path) -> None:
    """40 tokens in 10 iterations and 20 in 20."""
    answers = [
        {"choices": [{"text": "a", "avg_decoded_tokens_per_iter": mean}], "usage": {"completion_tokens": tokens}}
        for mean, tokens in ((4.0, 40), (1.0, 20))
    ]
    answers.append({"choices": [{"text": "a"}], "usage": {"completion_tokens": 7}})
    found = seen("\n".join(map(json.dumps, answers)), tmp_path)
    assert (found.accept_length, found.rounds) == (60 / 30, None)
    assert "of 2 answers of TensorRT-LLM, generated tokens / decoding iterations" in found.source


def test_statistics_of_llama_cpp_count_drafts(tmp_path: Path) -> None:
    """The last line of each kind: 5 drafts with 73 tokens and 15 with 67."""
    found = seen(LLAMA_LOG, tmp_path)
    assert (found.accept_length, found.rounds) == (1 + 140 / 20, 20)
    rate = "\n".join(LLAMA_LOG.splitlines()[:3])
    with pytest.raises(CaptureError, match="accepted / drafted tokens, and no number of rounds, so no accept length"):
        seen(rate, tmp_path)
