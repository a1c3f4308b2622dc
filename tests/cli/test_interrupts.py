"""Ctrl-C amid an import waits for its end: half a module stays broken, and some libraries go on with it."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.heads import write_head
from support.served_maker import HEAD, make_checkpoint, make_served

SLOW = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
for _ in range(20):
    time.sleep(0.01)
whole = True
"""
SCRIPT = """
import signal, sys
from replay.cli.interrupts import put_off_in_imports

def run():
    put_off_in_imports()
    try:
        import slow
        signal.pause()
    except KeyboardInterrupt:
        print(sys.modules["slow"].whole)

sys.path.insert(0, sys.argv[1])
run()
"""


def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    for outer in (SCRIPT, "import outer"):  # a program that is itself imported is interrupted too
        (tmp_path / "outer.py").write_text(SCRIPT)
        line = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{outer}", str(tmp_path)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


@pytest.mark.parametrize("moment", ["replay.cli.app", "torch", "numpy.linalg"])
def test_the_command_ends_in_one_sentence_whatever_loads(tmp_path: Path, moment: str) -> None:
    """The interrupt comes when the module begins to load, and once more when the next one does."""
    script = f"""
import os, signal, sys

class Finder:
    left = 2

    def find_spec(self, name, *_):
        if self.left and name.startswith({moment!r}):
            self.left -= 1
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["replay", "simulate", sys.argv[1], "--draft", sys.argv[2]]
from replay.cli.start import main
main()
"""
    trace, head = make_served(tmp_path / "served", make_checkpoint()).path, write_head(tmp_path / "head", HEAD)
    line = [sys.executable, "-I", "-c", script, str(trace), str(head)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.stderr == "replay: interrupted; what was whole before is kept, nothing half is left behind\n"
    assert (done.stdout, done.returncode) == ("", 130)


def test_a_program_that_ignores_interrupts_goes_on(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SCRIPT.replace("signal.pause()", "1/1")
    line = [sys.executable, "-c", script + "\nprint('on')", str(tmp_path)]
    assert subprocess.run(line, capture_output=True, text=True, timeout=60).stdout == "on\n"
