"""Ctrl-C amid an import waits for its end: numpy and torch go on with a module that was half loaded."""

import signal
import sys
from types import CodeType, FrameType

INTERRUPTED = "interrupted; what was whole before is kept, nothing half is left behind"
STATUS = 128 + signal.SIGINT  # of a program that the signal ends
_PAUSE = 0.005  # seconds from one look to the next
_IMPORTING = "<frozen importlib"
_outermost: CodeType | None = None


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
