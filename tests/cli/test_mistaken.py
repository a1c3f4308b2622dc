"""Folders typed in the place of others, and the page of `replay simulate`."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.heads import INVENTED, write_head
from support.trace_maker import make_four, write_trace

from replay.capture.target_check import refuse_other
from replay.cli.app import cli
from replay.errors import CaptureError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistaken")
    write_trace(folder / "trace", [make_four()])
    for name in ("draft", "runs/a/checkpoint-900", "runs/a/checkpoint-1000", "few/last"):
        (folder / name).mkdir(parents=True)
        write_head(folder / name, INVENTED)
    return folder


def said(folder: Path, *typed: str) -> str:
    done = CliRunner().invoke(cli, [str(folder / word[1:]) if word.startswith("/") else word for word in typed])
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith("replay: ") and done.stderr.count("\n") == 1
    return done.stderr.replace(str(folder), "")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("simulate", "/trace", "--draft", "/trace"), "/trace is a trace and no draft head; type the folder of a head"),
        (("simulate", "/draft", "--draft", "/trace"), "/draft is a checkpoint (it holds config.json) and no trace"),
        (("diagnose", "/draft", "--draft", "/trace"), "/draft is a checkpoint (it holds config.json) and no trace"),
        (("check", "--draft", "/trace", "--target", "/draft"), "/trace is a trace and no draft head"),
        (
            ("simulate", "/trace", "--draft", "/runs/a"),
            "/runs/a is no draft head and holds 2 folders of heads; type one, --draft /runs/a/checkpoint-1000, or all "
            "of them in one replay simulate, --draft '/runs/a/checkpoint-*'",
        ),
        (("simulate", "/trace", "--draft", "/few"), "holds 1 folder of heads; type one, --draft /few/last\n"),
    ],
)
def test_a_folder_in_the_place_of_another_is_called_what_it_is(
    folder: Path, typed: tuple[str, ...], expected: str
) -> None:
    assert expected in said(folder, *typed)


def test_capture_takes_no_head_and_no_trace(folder: Path) -> None:
    with pytest.raises(CaptureError, match=r"is a draft head .* the target that it drafts for"):
        refuse_other(folder / "draft")
    with pytest.raises(CaptureError, match="is a trace: give --model the folder of the target"):
        refuse_other(folder / "trace")
    refuse_other(folder / "runs")


def test_simulate_writes_the_page_that_report_writes(folder: Path) -> None:
    page, rounds = folder / "page.html", folder / "r.parquet"
    typed = ["simulate", str(folder / "trace"), "--draft", str(folder / "draft"), "-o", str(rounds), "--steps", "1"]
    done = CliRunner().invoke(cli, [*typed, "--html", str(page)])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(cli, ["report", str(rounds), "--html", str(folder / "again.html")])
    assert again.exit_code == 0 and page.read_text() == (folder / "again.html").read_text()
    same = CliRunner().invoke(cli, [*typed, "--html", str(rounds), "--force"])
    assert same.exit_code == 1 and "both name" in same.stderr
