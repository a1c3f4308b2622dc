"""What is typed twice, how a command ends, what a pipe and an ASCII terminal get: each for every command."""

import io
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console
from support.every_command import every_command
from support.report_cases import many, sweep
from support.rounds_maker import make_rounds, make_variant

from replay.cli.app import cli
from replay.cli.plain import ascii_only, plain
from replay.traces.rounds_file import write_rounds

# ---- an option that is typed twice ----


def single_options() -> list[tuple[str, str]]:
    """Every option of every command that takes one value, by the command's words."""
    return [
        (words, spelling)
        for words, command in every_command(cli)
        for option in command.params
        if isinstance(option, click.Option) and not (option.multiple or option.is_flag)
        for spelling in option.opts
    ]


@pytest.mark.parametrize(("command", "option"), single_options())
def test_an_option_that_takes_one_value_is_refused_twice(command: str, option: str) -> None:
    """Click takes the last: `--prompts a --prompts b` recorded b without a word."""
    done = CliRunner().invoke(cli, [*command.split(), option, "1", option, "2"])
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith("replay: --") and "was typed 2 times; type --" in done.stderr


def test_a_command_of_a_group_is_found_behind_other_words() -> None:
    done = CliRunner().invoke(cli, ["trace", "subset", "t", "--limit", "1", "-o", "a", "--output", "b"])
    assert done.exit_code == 1 and "--output takes one value and was typed 2 times" in done.stderr


def test_other_mistakes_are_told_as_before() -> None:
    for arguments, said in (
        (["report", "--top"], "Option '--top' requires an argument"),
        (["report", "--tip", "1"], "No such option"),
        (["reprot"], "No such command"),
        (["capture", "--prompts", "a", "-o", "b", "--seed", "x"], "is not a valid integer"),
    ):
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == 2 and said in done.stderr


def test_repeated_flags_sweeps_and_server_arguments_pass(tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    write_rounds(sweep(), path)
    assert CliRunner().invoke(cli, ["report", str(path), "--json", "--json"]).exit_code == 0
    swept = CliRunner().invoke(cli, ["simulate", str(tmp_path / "none"), "--steps", "1", "--steps", "2"])
    assert "no draft head was given" in swept.stderr
    served = CliRunner().invoke(cli, ["serve", "--", "--trace", "a", "--trace", "b"])
    assert "was typed" not in served.stderr


# ---- pipes and terminals ----


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds") / "rounds.parquet"
    write_rounds(many(), path)
    return path


@cache  # a process each
def _run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LC_ALL", "LANG", "PYTHONUTF8")
    }
    return subprocess.run(
        [sys.executable, "-I", "-c", "from replay.cli.app import main; main()", *map(str, arguments)],
        capture_output=True, env=kept | environment, check=True,
    )  # fmt: skip


def test_what_is_piped_is_not_wrapped_and_has_no_spaces_at_line_ends(rounds: Path) -> None:
    lines = _run("report", rounds, LC_ALL="C.UTF-8").stdout.decode().splitlines()
    assert max(map(len, lines)) > 200 and not any(line.endswith(" ") for line in lines)
    assert lines[0].startswith("Best of 32 variants") and lines[0].endswith(".")
    narrow = _run("report", rounds, LC_ALL="C.UTF-8", COLUMNS="70").stdout.decode().splitlines()
    assert max(map(len, narrow)) <= 70 and not any(line.endswith(" ") for line in narrow)


@pytest.mark.parametrize("command", ["report", "compare"])
def test_the_locale_c_gets_ascii_and_the_same_words(command: str, rounds: Path) -> None:
    done = _run(command, rounds, LC_ALL="C")
    assert done.stdout.isascii() and b"?" not in done.stdout
    usual = _run(command, rounds, LC_ALL="C.UTF-8").stdout.decode()
    assert done.stdout.decode() == plain(usual)


def test_a_document_in_ascii_says_the_same(rounds: Path) -> None:
    import json

    done, usual = (_run("report", rounds, "--json", LC_ALL=locale).stdout for locale in ("C", "C.UTF-8"))
    assert done.isascii() and json.loads(done) == json.loads(usual)


def test_foreign_text_is_escaped_where_it_cannot_be_shown() -> None:
    assert plain("≈ 2.0 █▄· 中 é ±") == "~ 2.0 #4. \\u4e2d \\xe9 +/-"
    assert ascii_only(io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LC_ALL": "C"}, True), ({"LANG": "POSIX"}, True), ({"LANG": "C", "LC_ALL": "C.UTF-8"}, False),
        ({"LC_ALL": "C", "PYTHONUTF8": "1"}, False), ({}, False), ({"LANG": "de_DE.UTF-8"}, False),
    ],
)  # fmt: skip
def test_which_terminal_takes_ascii_only(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ascii_only(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) is expected


def test_a_table_has_the_same_lines_where_the_encoding_is_ascii() -> None:
    """rich would draw another table there, wider than what was measured."""
    from replay.analysis.report.report import render
    from replay.analysis.summary import summarise

    texts = []
    for encoding in ("ascii", "utf-8"):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
        Console(file=out, width=80, color_system=None, _environ={}).print(render(sweep(), summarise(sweep())))
        out.seek(0)
        texts.append([len(line) for line in out.read().splitlines()])
    assert texts[0] == texts[1]


# ---- Ctrl-C ----


def test_an_interrupted_command_exits_as_the_signal_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    write_rounds(make_rounds({make_variant("a"): [[1], [2]]}), tmp_path / "r.parquet")
    monkeypatch.setattr("replay.traces.rounds_join.read_rounds", interrupted)
    done = CliRunner().invoke(cli, ["report", str(tmp_path / "r.parquet")])
    assert done.exit_code == 128 + signal.SIGINT == 130
    assert done.stderr.startswith("replay: interrupted;")
