"""Launch lines held against SGLang itself: what it stops at, what it resolves them to, and how it builds the head."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rig.server import RIG
from support.launch_lines import CHAIN, EAGLE3, SOUND, STARTED, STOPPED, Launch

from replay.check.engine_config import context_of
from replay.check.facts import Facts, read_facts
from replay.check.finding import Finding
from replay.check.launch_line import split_line
from replay.check.override import rope_object
from replay.check.rules_positions import served_length
from replay.check.rules_precision import MISREADS, SPARES, STOPS
from replay.check.run import check
from replay.check.server import parse_server_arguments
from replay.check.speculation import resolve

METHODS = ("fp8", "mxfp8", "w8a8_fp8", *STOPS, *SPARES, *MISREADS)
BUILT = {f"head in {method}": Launch(f"{CHAIN} --speculative-draft-model-quantization {method}") for method in METHODS}
LAUNCHES = STOPPED | STARTED | BUILT | {line: Launch(line) for line in SOUND}
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Head and target of each launch; those with the same configs share theirs."""
    made: dict[str, tuple[Path, Path]] = {}
    written = {}
    for name, launch in LAUNCHES.items():
        key = json.dumps([dict(launch.head), dict(launch.target)])
        if key not in made:
            made[key] = launch.write(tmp_path_factory.mktemp("pair"))
        written[name] = made[key]
    return written


@pytest.fixture(scope="module")
def answers(folders: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What SGLang says of each launch, all asked of one process."""
    place = tmp_path_factory.mktemp("launched")
    cases = []
    for name in LAUNCHES:
        line = split_line(_line(name, folders))
        cases.append({"words": list(line.words), "environment": dict(line.environment)})
    (place / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-P", str(RIG / "launched.py"), str(place / "cases.json"), str(place / "answers.json")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
    with (place / "log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=place, check=False)
    assert done.returncode == 0, (place / "log").read_text(errors="replace")[-4000:]
    return dict(zip(LAUNCHES, json.loads((place / "answers.json").read_text()), strict=True))


def _line(name: str, folders: dict[str, tuple[Path, Path]]) -> str:
    head, target = folders[name]
    line = LAUNCHES[name].line.format(head=head, target=target)
    words = line.split(" ")
    first = next(index for index, word in enumerate(words) if word.startswith("-"))
    return " ".join([*words[:first], "python -m sglang.launch_server", *words[first:]])


def _facts(name: str, folders: dict[str, tuple[Path, Path]]) -> Facts:
    head, target = folders[name]
    return read_facts(head, target, parse_server_arguments(_line(name, folders)))


def _stops(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.what for finding in findings if finding.severity == "error" and "stops" in finding.what]


def test_there_are_enough_lines() -> None:
    assert len(STOPPED) + len(STARTED) >= 100
    assert len(SOUND) >= 25


@pytest.mark.parametrize("name", STOPPED)
def test_what_stops_the_engine_is_named_once(
    name: str, folders: dict[str, tuple[Path, Path]], answers: dict[str, Answer]
) -> None:
    assert "stop" in answers[name], f"SGLang starts: {answers[name]}"
    findings = check(_facts(name, folders)).findings
    stops = _stops(findings)
    assert stops, f"SGLang says {answers[name]['stop']}, check says {findings}"
    assert len(stops) == 1 or name in MORE, stops


# Two mistakes in one line, or one that head and target share.
MORE = {"an option of vLLM", "three GPUs", "more GPUs than heads"}


@pytest.mark.parametrize("name", STARTED)
def test_what_starts_is_resolved_alike(
    name: str, folders: dict[str, tuple[Path, Path]], answers: dict[str, Answer]
) -> None:
    told, facts = answers[name], _facts(name, folders)
    assert "stop" not in told, told["stop"]
    assert _stops(check(facts).findings) == []
    drafting = resolve(facts.server, facts.target.architecture)
    assert drafting.algorithm == {"NONE": None}.get(told["speculative_algorithm"], told["speculative_algorithm"])
    if drafting.algorithm in ("EAGLE", "EAGLE3"):
        numbers = [told[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
        assert [drafting.steps, drafting.topk, drafting.tokens] == numbers


@pytest.mark.parametrize("name", STARTED)
def test_the_configs_are_read_as_the_engine_overrides_them(
    name: str, folders: dict[str, tuple[Path, Path]], answers: dict[str, Answer]
) -> None:
    """Rope, theta, length and served length, of head and target."""
    told, facts = answers[name], _facts(name, folders)
    for whose, config in (("target", facts.target.stated), ("head", facts.draft.stated)):
        if whose in told:
            rope = rope_object(config.values)
            assert (rope["rope_type"], rope.get("rope_theta", 10000)) == (told[whose]["rope"], told[whose]["theta"])
    assert served_length(facts) == told["target"]["context"]
    if "head" in told and "ALLOW" not in _line(name, folders):
        assert min(context_of(facts.draft.config, facts.draft.rope), served_length(facts)) == told["head"]["context"]


@pytest.mark.parametrize("method", METHODS)
def test_a_plain_head_is_quantised_as_the_engine_does(
    method: str, folders: dict[str, tuple[Path, Path]], answers: dict[str, Answer]
) -> None:
    """A device has no part in the table but for mxfp4, which SGLang registers where it finds CUDA itself."""
    name = f"head in {method}"
    told = answers[name]
    found = [(finding.fault, finding.severity) for finding in check(_facts(name, folders)).findings]
    if method == "mxfp4":
        assert found == [] and told["stop"][1].startswith("ValueError: Unknown quantization method: mxfp4")
    elif method in STOPS:
        assert "stop" in told and found == [("precision.draft-weights", "error")]
    elif method in SPARES:
        assert told["layers"] == ["UnquantizedLinearMethod"] and found == []
    elif method in MISREADS:
        assert told.get("layers") != ["UnquantizedLinearMethod"]
        assert found == [("precision.draft-weights", "error")]
    else:
        assert "UnquantizedLinearMethod" not in told["layers"]
        assert found == [("precision.draft-weights", "warning")]


@pytest.mark.parametrize("line", SOUND)
def test_a_sound_line_is_silent(line: str, folders: dict[str, tuple[Path, Path]], answers: dict[str, Answer]) -> None:
    assert "stop" not in answers[line], answers[line]["stop"]
    assert check(_facts(line, folders)).findings == ()


def test_what_no_line_says_is_not_taken_for_a_fault(folders: dict[str, tuple[Path, Path]]) -> None:
    """A part of a line names neither command nor target; the rest may say what it lacks."""
    head, target = folders[SOUND[0]]
    for part in ("--speculative-num-steps 3 --speculative-eagle-topk 1", "--tp-size 2", "--dtype bfloat16"):
        assert check(read_facts(head, target, parse_server_arguments(part))).findings == ()
    whole = f"python -m sglang.launch_server {EAGLE3} $MORE".format(head=head, target=target)
    assert check(read_facts(head, target, parse_server_arguments(whole))).findings == ()
