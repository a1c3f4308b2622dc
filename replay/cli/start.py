"""Where the command ``replay`` begins: before its modules load, so that Ctrl-C ends it at any moment in one sentence.

An interrupt amid an import would leave half a module behind, which numpy and torch then go on with. So it waits for the
end of the import.
"""

import os
import signal
import sys
from types import CodeType, FrameType

INTERRUPTED = "interrupted; what was whole before is kept, nothing half is left behind"
STATUS = 128 + signal.SIGINT  # of a program that the signal ends
_PAUSE = 0.005  # seconds from one look to the next
_IMPORTING = "<frozen importlib"
_outermost: CodeType | None = None


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


def put_off_in_imports() -> None:
    """From now on an interrupt waits for the imports that the calling function has begun, where it would end the
    program: not under nohup, and not where a program handles it by itself."""
    global _outermost
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _outermost = sys._getframe(1).f_code
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _is_importing(frame):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, _look_again)
    signal.setitimer(signal.ITIMER_REAL, _PAUSE)


def _look_again(number: int, frame: FrameType | None) -> None:
    """Whoever handles interrupts by now has this one."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _outermost:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False
