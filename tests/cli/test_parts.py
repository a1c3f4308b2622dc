"""Parts of traces and several traces on the command line."""

import errno
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.heads import INVENTED, write_head
from support.trace_maker import changed, make_four, make_header, make_request, write_trace

from replay.cli.app import cli
from replay.errors import OutputError
from replay.traces.captured import CapturedRequest
from replay.traces.parts import Part
from replay.traces.reader import Trace
from replay.traces.rounds_file import read_rounds


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


def without_2(request: CapturedRequest) -> CapturedRequest:
    return replace(request, taps={name: rows for name, rows in request.taps.items() if name != "2"})


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

    monkeypatch.setattr("replay.traces.rounds_file.write_rounds", full)
    done = run(*typed, tmp_path / "s.parquet", exit_code=1)
    assert done.stdout.startswith("Accept length") and "replay: no room" in done.stderr
    monkeypatch.setattr("replay.analysis.page.page.write_page", full)
    done = run(*typed, tmp_path / "s.parquet", "--html", tmp_path / "s.html", exit_code=1)
    assert done.stdout.startswith("Accept length") and "replay: no room; no room" in done.stderr


def test_a_diagnosis_takes_a_part(folder: Path) -> None:
    typed = ("diagnose", folder / "one", "--draft", folder / "draft", "--observed", 1.5, "--steps", 2, "--no-ladder")
    said = run(*typed, "--category", "b", exit_code=1).stderr
    assert "10 rounds of 1 request leave the replay's accept length open, too wide" in said  # of four it is told
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


def test_faults_of_a_second_trace_are_found_before_the_first_is_replayed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "replay.simulator.cache.simulate_with_notes"
    monkeypatch.setattr(refused, lambda *_, **__: pytest.fail("something was replayed"))
    typed = ("simulate", folder / "one", tmp_path / "t", "--draft", folder / "draft", "--steps", 1)
    header = make_header()
    few = replace(header, taps={name: tap for name, tap in header.taps.items() if name != "2"})
    rows = [make_request(f"t{seed}", seed) for seed in range(2)]
    write_trace(tmp_path / "t", [[without_2(row) for row in rows]], header=few)
    assert re.search(r"tap 2\b.* embed, final", run(*typed, exit_code=1).stderr)
    shutil.rmtree(tmp_path / "t")
    write_trace(tmp_path / "t", [rows])
    shard = tmp_path / "t" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-7] ^= 4
    shard.write_bytes(data)
    assert "has changed since it was written" in run(*typed, exit_code=1).stderr


def test_a_part_that_only_one_of_several_traces_has(folder: Path) -> None:
    typed = ("simulate", folder / "one", folder / "two", "--draft", folder / "draft", "--steps", 1, "--no-agreement")
    done = run(*typed, "--category", "a", "--json")
    assert "note: trace two has no such request and is left out (category a)" in done.stderr
    assert json.loads(done.stdout)["trace"]["part"] == "category a (2 of 4)"
    both = json.loads(run(*typed, "--request", "r1", "--request", "s2", "--json").stdout)["trace"]
    assert [one["part"] for one in both["traces"]] == ["requests r1 (1 of 4)", "requests s2 (1 of 3)"]
    assert "no request is of category 'z', there are a (2), b (1)" in run(*typed, "--category", "z", exit_code=1).stderr
    said = run(*typed, "--category", "a", "--request", "s1", exit_code=1).stderr
    assert "of 7 requests none is left (category a; requests s1)" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--format", "csv", "--by", "category"), "--format is one table, in which --by has no place"),
        (("--format", "csv", "--observed", "1.5"), "--format is one table, in which --observed has no place"),
        (("--rank-precision", "fp8", "--by", "category"), "--rank-precision is one table, in which --by has"),
        (("--rank-precision", "fp8", "--observed", "1.5"), "--rank-precision is one table, in which --observed has"),
    ],
)
def test_what_a_table_cannot_show_is_refused(folder: Path, options: tuple[str, ...], said: str) -> None:
    assert said in run("simulate", folder / "one", "--draft", folder / "draft", *options, exit_code=1).stderr


def test_a_table_of_a_report_has_no_place_for_other_metrics(tmp_path: Path) -> None:
    said = run("report", tmp_path / "gone", "--format", "md", "--peers", "--by", "trace", exit_code=1).stderr
    assert "--format is one table, in which --peers and --by have no place; leave one of them out" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fault", "nonsense"), "nonsense"), (("--wiring", "final:x"), "is no engine whose layer ids"),
        (("--precision", "int2"), "int2"),
        (("--kv", "nonsense"), "nonsense"), (("--verify", "nonsense"), "nonsense"),
    ],
)  # fmt: skip
def test_no_head_is_fetched_for_what_cannot_be(
    folder: Path, options: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.checkpoint.hub.head_folder", lambda _: pytest.fail("a head was fetched"))
    assert said in run("simulate", folder / "one", "--draft", "org/name", *options, exit_code=1).stderr


def test_a_cache_says_what_it_does(folder: Path, tmp_path: Path) -> None:
    typed = ("--draft", folder / "draft", "--steps", 1, "--no-agreement", "--cache", tmp_path / "cache")
    first = run("simulate", folder / "one", *typed).stderr
    assert "replayed before" not in first
    assert "note: 1 of 1 variants were replayed before" in run("simulate", folder / "one", *typed).stderr
    begun = run("simulate", folder / "begun", *typed).stderr
    assert f"note: the recording of {folder / 'begun'} has not ended, so --cache keeps nothing of it" in begun


def test_a_part_of_a_part_and_those_of_several_traces_are_told(folder: Path, tmp_path: Path) -> None:
    rounds = tmp_path / "r.parquet"
    head = ("--draft", folder / "draft", "--steps", 1, "--steps", 2, "--no-agreement")
    said = run("simulate", folder / "one", folder / "two", *head, "--limit", 2, "-o", rounds).stdout
    assert re.search(r"part +one: the first 2 \(2 of 4\)\n +part +two: the first 2 \(2 of 3\)\n", said)
    run("simulate", folder / "one", *head, "--category", "a", "-o", rounds, "--force")
    again = "category a (2 of 4); of these the first 1 (1 of 2)"
    assert json.loads(run("report", rounds, "--limit", 1, "--json").stdout)["trace"]["part"] == again
    assert re.search(r"part +" + re.escape(again), run("compare", rounds, "--limit", 1).stdout)
    assert json.loads(run("compare", rounds, "--limit", 1, "--json").stdout)["parts"] == [again]
    taken = Trace.open(folder / "one").take(Part(categories=("a",))).take(Part(limit=1))
    assert taken.part == again
    assert json.loads(run("report", rounds, "--by", "trace", "--json").stdout)["by"]["trace"][0]["name"] == "one"


def test_a_server_of_other_steps_is_near_to_none(folder: Path, tmp_path: Path) -> None:
    """A vLLM line of 2 tokens a draft, 100 drafts, 50 accepted."""
    log = tmp_path / "log"
    log.write_text("SpecDecoding metrics: Mean acceptance length: 1.50, Accepted: 50 tokens, Drafted: 200 tokens, "
                   "Per-position acceptance rate: 0.400, 0.100\n")  # fmt: skip
    typed = ("simulate", folder / "one", "--draft", folder / "draft", "--no-agreement", "--observed", log, "--steps")
    said = " ".join(run(*typed, 1, "--steps", 3).stdout.split())
    assert "the server drafted 2 steps, and no variant does." in said
    found = json.loads(run(*typed, 1, "--steps", 2, "--json").stdout)
    assert found["observed_elsewhere"]["steps"] == 2
    (near,) = [one for one in found["variants"] if one["name"] == found["observed_elsewhere"]["nearest"]]
    assert near["steps"] == 2


def test_what_a_server_elsewhere_accepted_stands_beside_the_report(folder: Path) -> None:
    typed = ("simulate", folder / "one", "--draft", folder / "draft", "--steps", 1, "--observed")
    said = " ".join(run(*typed, "1.5").stdout.split())
    assert "Observed elsewhere: 1.500 (given); the replay gives 1." in said
    refused = run(*typed, "0.2", "--wiring", "embed", exit_code=1)  # before anything is replayed
    assert "0.2 is no accept length" in refused.stderr
