"""Where the command ``replay`` begins: before its modules load, so that Ctrl-C ends it in one sentence."""

import os
import signal
import sys

from replay.cli.interrupts import INTERRUPTED, STATUS, put_off_in_imports


def main() -> None:
    """Entry point of the ``replay`` command."""
    put_off_in_imports()
    if sys.stderr is None:
        _open_stderr()
    try:
        from replay.cli.app import main as run

        run()
    except KeyboardInterrupt:  # before the command began, or behind its end
        sys.stderr.write(f"replay: {INTERRUPTED}\n")
        sys.exit(STATUS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # what waits still comes too late


def _open_stderr() -> None:
    """It was closed, and libraries write to it all the same, those of workers too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.set_inheritable(2, True)
    sys.stderr = open(2, "w", closefd=False)
