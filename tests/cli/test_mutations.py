"""Valid heads, targets, traces and rounds with a mutation: each command ends in success or in one harmless sentence.

``REPLAY_MUTATIONS=5000`` tries more of them than `make test` does.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.check_cases import Case, write_case
from support.heads import INVENTED, write_head
from support.hostile import run
from support.trace_maker import make_requests, write_trace

EXAMPLES = int(os.environ.get("REPLAY_MUTATIONS", "40"))
bounded = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([10**9, -1, 2**64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    write_case(folder, Case())
    write_head(folder / "head", INVENTED)
    write_trace(folder / "trace", [make_requests(3)])
    assert run("simulate", folder / "trace", "--draft", folder / "head", "-o", folder / "r.parquet").code == 0
    return folder


def _commands(at: Path) -> list[list[object]]:
    return [
        ["check", "--draft", at / "draft", "--target", at / "target"],
        ["inspect", at / "head"],
        ["inspect", at / "trace"],
        ["simulate", at / "trace", "--draft", at / "head"],
        ["report", at / "r.parquet"],
    ]


def _run_all(at: Path, changed: str) -> None:
    for command in _commands(at):
        if any(str(part).endswith(changed.partition("/")[0]) for part in command):
            run(*command)


@bounded
@given(data=st.data())
@pytest.mark.parametrize("path", ["draft/config.json", "target/config.json", "head/config.json", "trace/trace.json"])
def test_a_field_of_another_value(path: str, sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    at = _copy(sound, tmp_path)
    document = json.loads((at / path).read_text())
    key = data.draw(st.sampled_from(sorted(document)) | st.text(max_size=12))
    document[key] = data.draw(VALUES)
    (at / path).write_text(json.dumps(document))
    _run_all(at, path)


@bounded
@given(data=st.data())
@pytest.mark.parametrize("path", ["draft/model.safetensors", "head/model.safetensors", "r.parquet"])
def test_bytes_that_are_others(path: str, sound: Path, tmp_path: Path, data: st.DataObject) -> None:
    at = _copy(sound, tmp_path)
    held = bytearray((at / path).read_bytes())
    place = data.draw(st.integers(0, min(len(held), 2000) - 1))
    held[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    (at / path).write_bytes(held[: data.draw(st.sampled_from([len(held), len(held) // 2]))])
    _run_all(at, path)


def _copy(sound: Path, folder: Path) -> Path:
    shutil.rmtree(folder / "at", ignore_errors=True)
    return Path(shutil.copytree(sound, folder / "at"))
