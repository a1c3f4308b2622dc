"""Checkpoints of training runs: patterns of folders, their order and names, and the curve of the report."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.heads import random_tensors, tiny_config, write_head
from support.trace_maker import H, V, make_requests, write_trace

from replay.checkpoint.config import parse_config
from replay.checkpoint.hub import step_of
from replay.cli.app import cli
from replay.cli.drafts import _say_broken, expand_drafts, name_heads

CONFIG = tiny_config(hidden_size=H, vocab_size=V, eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 1]})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, and two runs with three and two checkpoints."""
    root = tmp_path_factory.mktemp("runs")
    write_trace(root / "trace", [make_requests(6)])
    for run, steps in (("a", (1000, 500, 10000)), ("b", (500, 1000))):
        for step in steps:
            folder = root / run / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            write_head(folder, CONFIG, random_tensors(parse_config(CONFIG), seed=step))
    (root / "a" / "checkpoint-notes.txt").write_text("no folder")
    return root


def run(root: Path, *typed: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", str(root / "trace"), "--steps", "2", "--no-agreement", *typed])


def test_a_pattern_is_every_checkpoint_by_its_number(runs: Path) -> None:
    found = expand_drafts((runs / "a" / "checkpoint-*",))
    assert [folder.name for folder in found] == ["checkpoint-500", "checkpoint-1000", "checkpoint-10000"]
    assert expand_drafts((runs / "a" / "checkpoint-500", runs / "a" / "checkpoint-*")) == found
    result = run(runs, "--draft", f"{runs}/*/checkpoint-*", "--json")
    document = json.loads(result.stdout)
    expected = {
        "a:checkpoint-500": 500, "a:checkpoint-1000": 1000, "checkpoint-10000": 10000, "b:checkpoint-500": 500,
        "b:checkpoint-1000": 1000,
    }  # fmt: skip
    assert {name: head["step"] for name, head in document["draft"].items()} == expected
    assert [variant["draft"] for variant in document["variants"]] == list(expected)


def test_a_folder_with_such_a_name_goes_before_a_pattern(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head[1]"
    folder.mkdir()
    assert expand_drafts((folder,)) == (folder,)


def test_each_head_of_a_sweep_counts_as_by_itself(runs: Path) -> None:
    together = json.loads(run(runs, "--draft", f"{runs}/*/checkpoint-*", "--json").stdout)["variants"]
    alone = json.loads(run(runs, "--draft", f"{runs}/b/checkpoint-1000", "--json").stdout)["variants"][0]
    same = ("rounds", "accepted", "drafted", "histogram")
    assert {key: together[-1][key] for key in same} == {key: alone[key] for key in same}


def test_the_report_has_a_curve_by_step(runs: Path) -> None:
    out = run(runs, "--draft", f"{runs}/*/checkpoint-*", "--wiring", "embed,2", "--wiring", "2,embed").stdout
    curve = out[out.index("By step") : out.index("lost: accept length")]
    firsts = [line.split()[0].replace(",", "") for line in curve.splitlines() if line.strip()]
    assert [int(one) for one in firsts if one.isdecimal()] == [500, 1000, 10000] * 2 + [500, 1000] * 2
    assert all(name in curve for name in ("a · wiring embed,2", "b · wiring 2,embed")) and "best" in curve
    assert "By step" not in run(runs, "--draft", f"{runs}/a/checkpoint-500").stdout


def test_all_that_is_broken_is_named_and_nothing_replayed(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "r")
    (tmp_path / "r" / "a" / "checkpoint-500" / "config.json").unlink()
    (tmp_path / "r" / "b" / "checkpoint-1000" / "model.safetensors").write_bytes(b"half")
    result = run(runs, "--draft", f"{tmp_path}/r/*/checkpoint-*", "-o", str(tmp_path / "o"))
    assert result.exit_code == 1 and result.stdout == "" and not (tmp_path / "o").exists()
    assert "2 of 5 heads cannot be replayed" in result.stderr
    assert "a:checkpoint-500: " in result.stderr and "b:checkpoint-1000: " in result.stderr


def test_broken_heads_are_said_within_bounds() -> None:
    some, every = ({f"h{place}": "torn" for place in range(count)} for count in (2, 7))
    assert _say_broken(some, 7) == "2 of 7 heads cannot be replayed, leave them out: h0: torn; h1: torn"
    said = _say_broken(every, 7)  # nothing would be left
    assert said.startswith("7 of 7 heads cannot be replayed, type the folders of heads: h0: torn; ")
    assert said.endswith("h4: torn; and 2 more") and "leave them out" not in said


def test_a_pattern_without_folders_is_refused(runs: Path) -> None:
    for pattern in (f"{runs}/none-*", f"{runs}/a/checkpoint-*.txt", f"{runs}/[", ""):
        result = run(runs, "--draft", pattern)
        assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.stderr


def test_names_are_the_ends_of_paths_that_differ() -> None:
    paths = [Path(text) for text in ("/x/a/c-1", "/y/a/c-1", "/x/b/c-1", "/x/b/c-2")]
    assert list(name_heads(paths)) == ["x:a:c-1", "y:a:c-1", "b:c-1", "c-2"]
    assert list(name_heads([Path("/c-1"), Path("/x/c-1")])) == ["/c-1", "x:c-1"]


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-500", 500), ("epoch_1_step_2000", 2000), ("iter500", 500), ("Step=7", 7), ("ckpt.12", 12)]
    + [(name, None) for name in ("smollm2-eagle3", "final", "checkpoint", "footstep9", "checkpoint-500-bad", "7")],
)
def test_a_step_is_the_number_that_a_name_ends_with(name: str, step: int | None) -> None:
    assert step_of(f"/runs/{name}") == step
    assert step_of(None) is None
