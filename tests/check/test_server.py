"""Server arguments as typed and as a server in force reports them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.check_cases import (
    Case,
    server_info,
    write_case,
)

from replay.check.facts import read_facts
from replay.check.launch_line import split_line
from replay.check.options import table
from replay.check.run import check
from replay.check.server import live_server, parse_server_arguments
from replay.errors import ReplayError, UsageError


def test_a_launch_line_is_read() -> None:
    server = parse_server_arguments(
        "SGLANG_SIMULATE_ACC_LEN=2 CUDA_VISIBLE_DEVICES=0,1 python3 -m sglang.launch_server --model-path 'a b' "
        "--tp=8 --speculative-algo EAGLE3 --trust-remote-code --speculative-num-steps=5 --dtype bfloat16"
    )
    assert server.engine == "sglang" and server.stated and not server.live
    assert server.environment["SGLANG_SIMULATE_ACC_LEN"] == "2"
    assert server.arguments == {
        "model_path": "a b", "tp_size": 8, "speculative_algorithm": "EAGLE3", "trust_remote_code": True,
        "speculative_num_steps": 5, "dtype": "bfloat16",
    }  # fmt: skip
    assert server.whole and server.refused == ()


@pytest.mark.parametrize(
    "text",
    ["--dtype 'bfloat16", "--speculative-config {", "--speculative-config 3", "vllm serve x --max-model-len many",
     "--config nowhere.yaml"],
)  # fmt: skip
def test_a_launch_line_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_server_arguments(text)


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("--speculative-num-steps many", "speculative_num_steps", "takes a whole number, many is none"),
        ("--speculative-num-steps", "speculative_num_steps", "has no value"),
        ("--context-length 1e99", "context_length", "1e99 is none"),
        ("--context-length nan", "context_length", "nan is none"),
        ("--dtype", "dtype", "has no value"),
        ("--dtype bflaot16", "dtype", "does not know bflaot16"),
        ("--speculative-attention-mode 3", "speculative_attention_mode", "does not know 3"),
        ("--trust-remote-code=yes", "trust_remote_code", "takes no value, 'yes' is given"),
        ("--speculative-num 3", "", "is short for more than one option"),
        ("--tp_size 8", "", "knows no option --tp_size"),
        ("--dtype half and more", "", "and belongs to no option"),
        ("--preferred-sampling-params {", "preferred_sampling_params", "takes JSON"),
        ("--config server.json", "config", "takes YAML"),
        ("--config", "config", "names no file"),
        ("--config a.yaml --config b.yaml", "config", "more than once"),
        ("--config=server.yaml", "config", "reads no file"),
        ("--conf server.yaml", "config", "reads no file"),
        ("python -m sglang.launch_server --help", "help", "prints its help and ends"),
    ],
)
def test_what_its_parser_stops_at_is_told(text: str, field: str, said: str) -> None:
    refused = parse_server_arguments(text).refused
    assert refused[0].field == field and said in refused[0].what
    assert all((one.seen, one.expected, one.fix) for one in refused)


def test_a_slip_is_met_with_the_name_that_was_meant() -> None:
    (slip,) = parse_server_arguments("--speculative-nun-steps 3").refused
    assert slip.fix == "write --speculative-num-steps"
    (value,) = parse_server_arguments("--dtype bflaot16").refused
    assert value.fix == "--dtype bfloat16"


def test_a_wrong_value_hides_no_other() -> None:
    server = parse_server_arguments("--speculative-num-steps 3.5 --tp-size 8 --dtype int7")
    assert [one.field for one in server.refused] == ["speculative_num_steps", "dtype"]
    assert server.arguments == {"tp_size": 8}


def test_what_the_shell_would_put_in_is_not_known() -> None:
    server = parse_server_arguments(
        "sglang serve $MODEL --tp $TP --dtype ${DTYPE} --speculative-num-steps $(nproc) --port <port> [options] $MORE"
    )
    assert server.refused == () and server.arguments == {} and not server.whole


# Each run by bash itself, with programs that write down what they were called with.
SHELL = {
    "as typed": "python -m sglang.launch_server --model-path a --tp 2",
    "over several lines": "python3 -m sglang.launch_server \\\n  --model-path a \\\n  --tp 2",
    "with a comment": "python -m sglang.launch_server --model-path a # --tp 3\n",
    "with another line after it": "python -m sglang.launch_server --model-path a --tp 2\necho --tp 3",
    "in a script": "#!/bin/bash\n# It's a server's\nset -e\nexport SGLANG_ONE='a\nb'\n\n"
    "python -m sglang.launch_server \\\n    --model-path a \\\n    --tp 2\n# done\necho done",
    "with variables": "SGLANG_ONE=1 SGLANG_TWO='2 3' python -m sglang.launch_server --model-path a",
    "with exports before it": "export SGLANG_ONE=1; python -m sglang.launch_server --model-path a",
    "behind env": "env SGLANG_ONE=1 python -m sglang.launch_server --model-path a",
    "into a file": "python -m sglang.launch_server --model-path a --tp 2 > log 2>&1",
    "into a pipe": "python -m sglang.launch_server --model-path a 2>&1 | cat --number",
    "in the background": "python -m sglang.launch_server --model-path a &",
    "before another": "python -m sglang.launch_server --model-path a && echo --tp 3",
    "with JSON": """python -m sglang.launch_server --json-model-override-args '{"a": [1, "b c"]}' --tp 2""",
    "by the command": "SGLANG_ONE=1 sglang serve a --tp 2",
    "by the command with options first": "sglang serve --model-path a --tp=2",
}
_PROGRAM = """#!{python}
import json, os, sys
seen = {{key: value for key, value in os.environ.items() if key.startswith("SGLANG_")}}
open({out!r}, "w").write(json.dumps([sys.argv[1:], seen]))
"""


@pytest.mark.parametrize("name", SHELL)
def test_a_line_is_taken_apart_as_a_shell_does(name: str, tmp_path: Path) -> None:
    programs, out = tmp_path / "bin", tmp_path / "seen.json"
    programs.mkdir()
    for program in ("python", "python3", "sglang"):
        (programs / program).write_text(_PROGRAM.format(python=sys.executable, out=str(out)))
        (programs / program).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    subprocess.run(["bash", "-c", f"{SHELL[name]}\nwait"], cwd=tmp_path, env=environment, check=True)
    words, variables = json.loads(out.read_text())
    line = split_line(SHELL[name])
    assert list(line.words) == words[1 if words[0] == "serve" else 2 :]
    assert dict(line.environment) == variables


def test_a_file_of_options_goes_before_the_others(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("speculative-algorithm: EAGLE3\nspeculative-num-steps: 3\ntp-size: 4\ntrust-remote-code: true\n"
                    "skip-server-warmup: false\ncuda-graph-bs-decode: [1, 2]\n")  # fmt: skip
    server = parse_server_arguments(f"sglang serve m --config {file} --tp-size 2")
    assert server.refused == ()
    assert server.arguments == {
        "model_path": "m", "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "tp_size": 2,
        "trust_remote_code": True, "cuda_graph_bs_decode": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp_size: 4", "knows no option --tp_size"),
        ("speculative-num-steps: 3.5", "3.5 is none"),
        ("speculative-num-steps: null", "None is none"),
        ("dtype: true", "does not know true"),
        ("disable-cuda-graph: true", "takes no disable-cuda-graph"),
        ("model-paht: x", "knows no option --model-paht"),
    ],
)
def test_what_a_file_of_options_must_not_say(text: str, said: str, tmp_path: Path) -> None:
    """SGLang 0.5.23 writes --KEY as the key stands there, underscores and all."""
    (tmp_path / "server.yml").write_text(text)
    (refusal,) = parse_server_arguments(f"--config {tmp_path}/server.yml").refused
    assert said in refusal.what


@pytest.mark.parametrize(
    "text", ["[1, 2]", "a: &x [1]\nb: *x", "a: [", "\tb", "- " * 5000, "a: !!python/object:os.x 1"]
)
def test_a_file_of_options_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text(text)
    with pytest.raises(UsageError):
        parse_server_arguments(f"--config {tmp_path}/server.yaml")


@pytest.mark.parametrize("text", ["x" * (1 << 18), "--x " * 5000])
def test_a_line_without_end_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="shorten the line"):
        parse_server_arguments(text)


def test_lines_of_options_belong_together() -> None:
    """As documents break them, with a backslash or without."""
    for line in ("\n--tp 2\n  --dtype half\n", "sglang serve m --tp 2\n  --dtype half", "--tp 2\n\n# so\n--dtype half"):
        assert parse_server_arguments(line).arguments | {"model_path": "m"} == {
            "model_path": "m", "tp_size": 2, "dtype": "half",
        }, line  # fmt: skip


def test_any_words_are_read_or_refused(tmp_path: Path) -> None:
    """Options, values and what a shell treats specially, thrown together; no finding prints a control character."""
    draft, target = write_case(tmp_path, Case())
    random = Random(7)
    names = [option.names[0] for option in table()]
    odd = ["'", '"', "\\", "$", "{", "}", "[", "--", "-", "=", "\n", "\x1b[31m", "\x00", "9" * 50, "1e5", "nan", "-1",
           "0", "x" * 5000, "|", "&&", ">", "<", ";", "#", "--config", "/dev/zero.yaml", "vllm", "sglang", "serve",
           "true", "[" * 900, '{"a":' * 900, "SGLANG_SIMULATE_ACC_LEN=3", "--json-model-override-args"]  # fmt: skip
    for _ in range(150):
        words = [random.choice(names if random.random() < 0.5 else odd) for _ in range(random.randint(1, 12))]
        try:
            found = check(read_facts(draft, target, parse_server_arguments(" ".join(words)))).findings
        except ReplayError as error:
            assert str(error)
            continue
        for finding in found:
            assert all(text.isprintable() and len(text) < 800 for text in (finding.what, finding.seen, finding.fix))


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
