"""Accept lengths out of what servers print, on lines and pages as SGLang 0.5.23 writes them."""

import json
from pathlib import Path

import pytest

from replay.capture.observed import (
    observed_counters,
    observed_log,
    observed_metrics,
    observed_server_info,
    parse_log,
    read_observed,
)
from replay.errors import CaptureError

LOG = """\
[2026-11-29 14:57:01 TP0] Prefill batch, #new-seq: 1, #new-token: 40, #cached-token: 0, token usage: 0.00
[2026-11-29 14:57:03 TP0] Decode batch, #running-req: 4, #token: 5321, token usage: 0.01, accept len: 2.87, accept \
rate: 0.62, cuda graph: True, gen throughput (token/s): 412.35, #queue-req: 0
[2026-11-29 14:57:04] Decode batch, #running-req: 1, #full token: 42, full token usage: 0.01, #swa token: 7, swa \
token usage: 0.00, accept len: 1.37, accept rate: 0.12, cpu graph: False, gen throughput (token/s): 9.10, #queue-req: 2
[2026-11-29 14:57:05] Decode batch, #running-req: 3, #token: 42, token usage: 0.01, cuda graph: True, gen throughput \
(token/s): 9.10, #queue-req: 0
"""

METRICS = """\
# HELP sglang:spec_accept_length The average acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 1.8125
sglang:spec_accept_rate{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.1625
sglang:spec_num_steps{model_name="m"} 5.0
sglang:spec_num_draft_tokens{model_name="m"} 6.0
sglang:spec_verify_calls_total{model_name="m"} 809.0
sglang:gen_throughput{model_name="m"} 43.1
"""


def test_log_lines() -> None:
    lines = parse_log(LOG)
    assert [(line.running, line.accept_length, line.accept_rate) for line in lines] == [
        (4, 2.87, 0.62),
        (1, 1.37, 0.12),
    ]


def test_log_mean_weighs_by_running_requests() -> None:
    observed = observed_log(LOG)
    assert observed is not None and observed.accept_length == pytest.approx((4 * 2.87 + 1.37) / 5)
    assert observed.rounds is None and "2 decode lines" in observed.source


def test_log_without_speculation_says_nothing() -> None:
    assert observed_log(LOG.splitlines()[3]) is None


def test_metrics() -> None:
    observed = observed_metrics(METRICS)
    assert observed is not None
    assert (observed.accept_length, observed.num_steps, observed.num_draft_tokens) == (1.8125, 5, 6)


def test_metrics_before_the_first_interval_say_nothing() -> None:
    assert observed_metrics(METRICS.replace(" 1.8125", " 0.0")) is None
    assert observed_metrics(METRICS.replace(" 1.8125", " NaN")) is None


def test_server_info_averages_schedulers() -> None:
    info = {
        "speculative_num_steps": 5,
        "speculative_num_draft_tokens": 6,
        "internal_states": [{"avg_spec_accept_length": 2.0}, {"avg_spec_accept_length": 3.0}, {}],
    }
    observed = observed_server_info(info)
    assert observed is not None and observed.accept_length == 2.5 and observed.num_steps == 5
    assert observed_server_info({"internal_states": [{}]}) is None


def test_counters_add_histograms() -> None:
    metas = [
        {"completion_tokens": 9, "spec_verify_ct": 4, "spec_correct_drafts_histogram": [1, 2, 1]},
        {"completion_tokens": 3, "spec_verify_ct": 2, "spec_accept_histogram": [2]},
        {"completion_tokens": 1},
    ]
    observed = observed_counters(metas)
    assert observed is not None
    assert (observed.rounds, observed.histogram) == (6, (3, 2, 1))
    assert observed.accept_length == pytest.approx(1 + (2 + 2) / 6)


def test_counters_without_histogram_leave_the_prefill_token_out() -> None:
    observed = observed_counters([{"completion_tokens": 9, "spec_verify_ct": 4}])
    assert observed is not None and observed.accept_length == 2.0 and observed.histogram is None


def test_read_tells_sources_apart(tmp_path: Path) -> None:
    rows = [{"id": "a", "server": {"completion_tokens": 4, "verify_rounds": 2, "histogram": [1, 1]}}]
    texts = {
        "log": LOG,
        "metrics": METRICS,
        "info": json.dumps({"internal_states": [{"avg_spec_accept_length": 1.5}]}),
        "answers": "\n".join(json.dumps(row) for row in rows),
        "one": json.dumps({"text": "", "meta_info": {"spec_verify_ct": 1, "spec_correct_drafts_histogram": [0, 1]}}),
    }
    found = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        found[name] = read_observed(str(tmp_path / name)).accept_length
    assert found == {
        "log": pytest.approx(2.57), "metrics": 1.8125, "info": 1.5, "answers": 1.5, "one": 2.0,
    }  # fmt: skip
    assert read_observed("1.8").accept_length == 1.8


@pytest.mark.parametrize("source", ["0.5", "nan", "inf", "no/such/file"])
def test_read_refuses(source: str) -> None:
    with pytest.raises(CaptureError):
        read_observed(source)


def test_read_refuses_a_file_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n{}\n")
    with pytest.raises(CaptureError, match="says nothing of an accept length"):
        read_observed(str(tmp_path / "x"))
