"""`replay --help` answers at once: nothing heavy is imported before a command needs it."""

import json
import os
import resource
import subprocess
import sys
from statistics import median

import pytest

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


def _cpu_seconds(*arguments: str) -> float:
    """User and system time of one run: unlike the clock on the wall it does not grow when the machine is busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _python(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def test_help_costs_under_half_a_second_more_than_python() -> None:
    console_script = os.path.join(os.path.dirname(sys.executable), "replay")
    help_seconds = median(_cpu_seconds(console_script, "--help") for _ in range(5))
    bare_seconds = median(_cpu_seconds("-c", "pass") for _ in range(5))
    assert help_seconds - bare_seconds < 0.5


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
