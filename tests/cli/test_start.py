"""`replay --help` answers at once, since nothing heavy is imported before a command needs it."""

import importlib
import json
import pkgutil
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import replay.cli

HEAVY = ("torch", "polars", "transformers", "numpy", "safetensors", "sglang")
# Reads sys.modules when the process ends, after click has printed its help and left.
HELP = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from replay.cli.app import main
sys.argv = ["replay", *json.loads(sys.argv[1])]
main()
"""


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", *arguments], capture_output=True, text=True, check=True)


def _commands() -> list[str]:
    from replay.cli.app import cli

    return sorted(cli.commands)


@pytest.mark.parametrize("command", [None, *_commands()])
def test_help_imports_nothing_heavy(command: str | None) -> None:
    arguments = ["--help"] if command is None else [command, "--help"]
    done = _python("-c", HELP, json.dumps(arguments))
    assert done.stdout.startswith("Usage: replay"), done.stdout
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert {"replay.cli.app", "click"} <= loaded
    assert loaded.isdisjoint(HEAVY), sorted(loaded.intersection(HEAVY))


def test_every_command_that_is_written_can_be_typed() -> None:
    from replay.cli.app import cli

    written = set()
    for file in pkgutil.iter_modules(replay.cli.__path__):
        module = importlib.import_module(f"replay.cli.{file.name}")
        commands = [one for one in vars(module).values() if isinstance(one, click.Command) and one is not cli]
        written |= {one for one in commands if getattr(one.callback, "__module__", "") == module.__name__}
    typed = set(cli.commands.values())
    for group in [one for one in typed if isinstance(one, click.Group)]:
        typed |= set(group.commands.values())
    assert written == typed


def test_every_command_has_examples_that_can_be_typed() -> None:
    """Each is read by the command itself, which then would look for its files."""
    from replay.cli.app import cli
    from replay.cli.examples import EXAMPLES

    assert set(EXAMPLES) == set(cli.commands)
    for name, lines in EXAMPLES.items():
        for line in lines:
            program, command, *arguments = shlex.split(line.partition(" > ")[0])
            assert (program, command) == ("replay", name)
            typed = cli.commands[name]
            if isinstance(typed, click.Group):
                typed, arguments = typed.commands[arguments[0]], arguments[1:]
            context = typed.make_context(typed.name, arguments)  # raises UsageError where it cannot be
            assert context.params


@pytest.mark.parametrize("command", _commands())
def test_the_examples_end_the_help_a_line_each(command: str) -> None:
    from replay.cli.app import cli
    from replay.cli.examples import EXAMPLES

    shown = CliRunner().invoke(cli, [command, "--help"]).stdout.rstrip().splitlines()
    assert [line.strip() for line in shown[-len(EXAMPLES[command]) :]] == list(EXAMPLES[command])


def test_python_m_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "replay", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, _python("-c", HELP, '["--version"]').stdout)


def test_python_m_in_half_a_checkout_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """As where a wheel is installed and the folder at hand has no `replay/analysis`."""
    from replay import __main__

    (tmp_path / "replay" / "cli").mkdir(parents=True)
    for name, text in (("__init__", ""), ("cli/__init__", ""), ("cli/app", "import replay.analysis_is_elsewhere\n")):
        (tmp_path / "replay" / f"{name}.py").write_text(text)
    shutil.copy(str(__main__.__file__), tmp_path / "replay" / "__main__.py")
    done = subprocess.run([sys.executable, "-m", "replay"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("replay: this folder hides") and done.stderr.count("\n") == 1


def test_shells_are_given_their_completion() -> None:
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(
            [sys.executable, "-I", "-c", "import sys; sys.argv = ['replay']; from replay.cli.app import main; main()"],
            env={"_REPLAY_COMPLETE": f"{shell}_source"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0 and "_REPLAY_COMPLETE" in done.stdout


def test_a_full_stdout_is_refused_in_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        for arguments in (["--help"], ["faults"], ["faults", "--json"]):
            ran = subprocess.run(
                [sys.executable, "-c", "from replay.cli.app import main; main()", *arguments],
                stdout=full, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert ran.returncode == 1
            assert ran.stderr.startswith("replay: the output cannot be written (No space left on device)")
            assert ran.stderr.count("\n") == 1
