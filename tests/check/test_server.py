"""Server arguments as typed and as a server in force reports them."""

from pathlib import Path
from typing import Any

import pytest
from support.check_cases import (
    Case,
    server_info,
    write_case,
)

from replay.check.facts import read_facts
from replay.check.run import check
from replay.check.server import live_server, parse_server_arguments
from replay.errors import UsageError


def test_a_launch_line_is_read() -> None:
    server = parse_server_arguments(
        "SGLANG_SIMULATE_ACC_LEN=2 CUDA_VISIBLE_DEVICES=0,1 python3 -m sglang.launch_server --model-path 'a b' "
        "--tp=8 --speculative-algo EAGLE3 --trust-remote-code --speculative-num-steps=5 --dtype bfloat16"
    )
    assert server.engine == "sglang" and server.stated and not server.live
    assert server.environment["SGLANG_SIMULATE_ACC_LEN"] == "2"
    assert server.arguments == {
        "model_path": "a b", "tp": "8", "speculative_algorithm": "EAGLE3", "trust_remote_code": True,
        "speculative_num_steps": 5, "dtype": "bfloat16",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["--dtype 'bfloat16", "--speculative-num-steps many", "--speculative-num-steps", "--context-length 1e99",
     "--context-length nan", "--dtype", "--speculative-config {", "--speculative-config 3"],
)  # fmt: skip
def test_a_launch_line_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_server_arguments(text)


@pytest.mark.parametrize("info", [None, [], "x", {}, {"internal_states": 3}, {"internal_states": []}])
def test_a_server_that_is_none_is_refused(info: object) -> None:
    with pytest.raises(UsageError):
        live_server(info, "http://here")


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        ({}, []),
        ({"speculative_algorithm": None}, []),
        ({"speculative_algorithm": ""}, ["config.steps"]),
        ({"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}, ["config.steps"]),
        ({"quantization": "fp8", "speculative_draft_model_quantization": "fp8"}, ["precision.draft-weights"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["precision.draft-kv"]),
        ({"speculative_algorithm": "EAGLE"}, ["wiring.aux-missing"]),
    ],
)
def test_arguments_in_force(arguments: dict[str, Any], faults: list[str], tmp_path: Path) -> None:
    draft, target = write_case(tmp_path, Case())
    found = check(read_facts(draft, target, live_server(server_info(**arguments), "http://here"))).findings
    assert [finding.fault for finding in found] == faults
