"""Parts of traces and several traces on the command line."""

import errno
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.heads import INVENTED, write_head
from support.trace_maker import changed, make_four, make_request, write_trace

from replay.cli.app import cli
from replay.errors import OutputError
from replay.traces.rounds import read_rounds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces one (categories a, b, a and none) and two, a head, and unfinished ones with and without requests."""
    folder = tmp_path_factory.mktemp("parts")
    four = [changed(one, category=name) for one, name in zip(make_four(), ("a", "b", "a", None), strict=True)]
    write_trace(folder / "one", [four])
    write_trace(folder / "two", [[make_request(f"s{seed}", seed, output=10) for seed in range(3)]])
    write_trace(folder / "begun", [four[:2]], finish=False)
    write_trace(folder / "empty", [], finish=False)
    write_head(folder / "draft", INVENTED)
    return folder


def run(*arguments: object, exit_code: int = 0) -> Result:
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == exit_code, done.output
    return done


def test_several_traces_make_one_report_and_a_table_of_each(folder: Path, tmp_path: Path) -> None:
    typed = ("simulate", folder / "one", folder / "two", "--draft", folder / "draft", "--steps", 2)
    rounds = tmp_path / "r.parquet"
    said = run(*typed, "-o", rounds, "--by", "category").stdout
    assert "rounds of 7 requests" in said and "\nBy category\n" in said and "\nBy trace\n" in said
    found = json.loads(run("report", rounds, "--json").stdout)
    assert {row["name"]: row["requests"] for row in found["by"]["trace"]} == {"one": 4, "two": 3}
    part = json.loads(run("report", rounds, "--json", "--category", "a", "--by", "category").stdout)
    assert part["trace"]["part"] == "category a (2 of 7)" and part["variants"][0]["requests"] == 2
    assert [row["name"] for row in part["by"]["category"]] == ["a"] and part["variants"][0]["rounds"] == sum(
        part["variants"][0]["histogram"]
    )
    compared = json.loads(run("compare", rounds, rounds, "--category", "a", "--json").stdout)
    assert compared["requests"] == 2


def test_one_trace_that_is_typed_twice_is_one(folder: Path) -> None:
    typed = ("simulate", folder / "one", folder / "one", "--draft", folder / "draft", "--steps", 1, "--json")
    assert json.loads(run(*typed).stdout)["trace"]["requests"] == 4


def test_an_unfinished_trace_is_replayed_as_far_as_it_is_whole(folder: Path) -> None:
    typed = ("--draft", folder / "draft", "--steps", 1, "--json")
    found = json.loads(run("simulate", folder / "begun", *typed).stdout)
    assert found["trace"]["requests"] == 2 and "replayed, 2 requests, and" in found["doubts"][0]
    refused = run("simulate", folder / "empty", *typed, exit_code=1)
    assert "holds no whole request yet; wait for one" in refused.stderr


def test_rounds_are_written_before_the_report_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that closes early, as of `| head`, loses no replay; a disk that is full loses no report."""
    typed = ("simulate", folder / "one", "--draft", folder / "draft", "--steps", 1, "--no-agreement", "-o")

    def closed(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with monkeypatch.context() as patch:
        patch.setattr("replay.cli.simulate.show_rounds", closed)
        run(*typed, tmp_path / "r.parquet", exit_code=1)
    assert len(read_rounds(tmp_path / "r.parquet").requests) == 4

    def full(*_: object, **__: object) -> None:
        raise OutputError("no room")

    monkeypatch.setattr("replay.traces.rounds.write_rounds", full)
    done = run(*typed, tmp_path / "s.parquet", exit_code=1)
    assert done.stdout.startswith("Accept length") and "replay: no room" in done.stderr


def test_a_diagnosis_takes_a_part(folder: Path) -> None:
    typed = ("diagnose", folder / "one", "--draft", folder / "draft", "--observed", 1.5, "--steps", 2, "--no-ladder")
    said = run(*typed, "--category", "b", exit_code=1).stderr
    assert "10 rounds of 1 request leave the replay's accept length open" in said  # of four it is told
    assert "there are a (2), b (1), none (1)" in run(*typed, "--category", "z", exit_code=1).stderr


def test_traces_are_merged_and_cut(folder: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    assert run("trace", "merge", folder / "one", folder / "two", "-o", both).stdout.startswith(f"{both}: 7 requests (4")
    run("trace", "subset", both, "--category", "a", "-o", tmp_path / "a")
    counted = json.loads(run("trace", "stats", tmp_path / "a", folder / "begun", "--json").stdout)["traces"]
    assert [(one["all"]["requests"], one["state"]) for one in counted] == [(2, "complete"), (2, "recording")]
    refused = run("trace", "subset", folder / "gone", "-o", tmp_path / "a", exit_code=1).stderr
    assert "exists already: type --force to replace its trace, or another -o" in refused  # before the source is read
    assert "has not ended" in run("trace", "merge", folder / "begun", "-o", tmp_path / "m", exit_code=1).stderr


def test_what_a_server_elsewhere_accepted_stands_beside_the_report(folder: Path) -> None:
    typed = ("simulate", folder / "one", "--draft", folder / "draft", "--steps", 1, "--observed")
    said = " ".join(run(*typed, "1.5").stdout.split())
    assert "Observed elsewhere: 1.500 (given); the replay gives 1." in said
    refused = run(*typed, "0.2", "--wiring", "embed", exit_code=1)  # before anything is replayed
    assert "0.2 is no accept length" in refused.stderr
