"""`replay check` on the command line: text, document, exit code, and what it does without."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.check_cases import (
    CHAIN,
    EAGLE3,
    HIDDEN,
    KIMI,
    Case,
    draft_config,
    ids,
    server_info,
    sound_tensors,
    target_config,
    write,
    write_case,
)
from support.serving import serving

from replay.check.run import RULES
from replay.cli.app import cli


def _run(draft: Path, target: Path, *more: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["check", "--draft", str(draft), "--target", str(target), *more])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_is_silent_on_a_sound_pair(tmp_path: Path) -> None:
    code, out, err = _run(*write_case(tmp_path, Case()))
    assert (code, err) == (0, "")
    assert out.startswith("nothing found: draft on target, sglang")
    assert "R[2,15,27] by SGLang 0.5.23" in " ".join(out.split())


def test_the_command_exits_1_with_errors_and_0_with_warnings(tmp_path: Path) -> None:
    broken = write_case(tmp_path / "a", Case(ids(26, 14, 1)))
    code, out, err = _run(*broken)
    assert code == 1 and out.startswith("error wiring.aux-layer-id") and err.startswith("replay: ")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert _run(*broken, "--exit-zero")[0] == 0
    code, out, err = _run(*write_case(tmp_path / "b", Case({"torch_dtype": None})))
    assert (code, err) == (0, "") and out.startswith("warning precision.dtype-cast")


def test_a_release_that_is_typed_is_the_one_that_serves(tmp_path: Path) -> None:
    """SGLang 0.5.12 adds 1 to ids of DeepSeek whatever the first one is, 0.5.14 does not (sgl-project/sglang#25454)."""
    kimi = write_case(tmp_path, Case(ids(2, 30, 58), target=KIMI))
    found = {version: _run(*kimi, "--engine-version", version)[1] for version in ("0.5.12", "0.5.14", "0.5.23.post1")}
    assert ["wiring.aux-layer-id" in text for text in found.values()] == [True, False, False]


def test_a_release_that_cannot_be_typed_is_refused(tmp_path: Path) -> None:
    pair = write_case(tmp_path, Case())
    code, _, err = _run(*pair, "--engine-version", "0.4.1")
    assert code != 0 and "0.4.1 is no release whose targets are known, possible are 0.5.9, " in err
    assert "the engine is vllm: leave" in _run(*pair, "--engine-version", "0.5.18", "--engine", "vllm")[2]
    asked = _run(*pair, "--engine-version", "0.5.18", "--server", "http://127.0.0.1:9")
    assert asked[0] != 0 and "--server" in asked[2]


def test_the_json_document(tmp_path: Path) -> None:
    code, out, _ = _run(*write_case(tmp_path, Case(ids(26, 14, 1))), "--json", "--server-args", EAGLE3 + CHAIN)
    document = json.loads(out)
    assert code == 1
    assert list(document) == ["schema_version", "findings", "checked", "unchecked", "fed"]
    assert document["findings"] == [
        {
            "fault": "wiring.aux-layer-id",
            "severity": "error",
            "what": "ids out of order: SGLang feeds R[2,15,27] in layer order, a head trained in the stated order "
            "reads each tap in another's place",
            "fix": document["findings"][0]["fix"],
            "evidence": {
                "file": "draft/config.json",
                "field": "eagle_config.eagle_aux_hidden_state_layer_ids",
                "seen": "[26, 14, 1]",
                "expected": "rising ids",
            },
        }
    ]
    assert len(document["checked"]) + sum(map(len, document["unchecked"].values())) == len(RULES)
    assert set(document["unchecked"]) == {"--trace", "--weights"}


def test_a_live_server_is_asked(tmp_path: Path) -> None:
    draft, target = write_case(tmp_path, Case())
    with _serving(server_info(kv_cache_dtype="fp8_e4m3")) as url:
        code, out, _ = _run(draft, target, "--server", url, "--json")
    assert code == 0
    assert [finding["fault"] for finding in json.loads(out)["findings"]] == ["precision.draft-kv"]


@contextmanager
def _serving(info: dict[str, Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(info).encode()
            self.send_response(200 if self.path == "/server_info" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (("--server", "127.0.0.1:1"), 1),  # nobody listens there
        (("--engine", "mlx"), 1),
        (("--wiring", "embed,99"), 1),
        (("--server-args", "--dtype 'half"), 1),
        (("--server", "x", "--server-args", "y"), 2),
        (("--server", "x", "--engine", "vllm"), 2),
    ],
)
def test_what_the_command_refuses(more: tuple[str, ...], code: int, tmp_path: Path) -> None:
    seen, out, err = _run(*write_case(tmp_path, Case()), *more)
    assert (seen, out) == (code, "") and err


def test_a_trace_adds_coverage(tmp_path: Path) -> None:
    """The invented target of trace_maker has 64 tokens; its traces are counted whole."""
    from collections import Counter

    from support.trace_maker import make_request, write_trace

    from replay.check.facts import count_emitted
    from replay.traces.reader import Trace

    requests = [make_request(f"r{seed}", seed) for seed in range(3)]
    trace = write_trace(tmp_path / "trace", [requests])
    wanted = Counter(token for request in requests for token in request.output_ids)
    assert count_emitted(Trace.open(trace)) == wanted
    code, out, _ = _run(*write_case(tmp_path, Case()), "--trace", str(trace), "--json")
    assert "coverage of emitted tokens" in json.loads(out)["checked"]
    assert code in (0, 1)


LEAN = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = sys.modules["polars"] = None
from pathlib import Path
from replay.check.run import check
from replay.check.facts import read_facts
print(len(check(read_facts(Path(sys.argv[1]), Path(sys.argv[2]))).findings))
"""


def test_it_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    """On a vocabulary map of real size: 32,000 of 128,256 tokens."""
    vocabulary, size = 128_256, 32_000
    config = draft_config(vocab_size=vocabulary, draft_vocab_size=size)
    tensors = sound_tensors() | {"lm_head.weight": torch.ones(size, HIDDEN), "d2t": torch.arange(size)}
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[2 * torch.arange(size)] = True
    draft = write(tmp_path / "draft", config, tensors | {"t2d": mask})
    target = write(tmp_path / "target", target_config(vocab_size=vocabulary))
    code = [sys.executable, "-I", "-c", LEAN, str(draft), str(target)]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
