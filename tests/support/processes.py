"""Whether processes that nobody here has started have ended."""

import time
from collections.abc import Sequence

import psutil


def living(pids: Sequence[int], *, within: float = 10.0) -> list[int]:
    """Those of ``pids`` that are still there after so many seconds; at once where none is.

    One that has ended and whose exit code nobody has asked for is gone.
    """
    deadline = time.monotonic() + within
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
