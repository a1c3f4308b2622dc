"""`replay --help` answers at once, since nothing heavy is imported before a command needs it."""

import importlib
import json
import pkgutil
import subprocess
import sys

import click
import pytest

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
