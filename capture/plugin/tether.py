"""Start a command whose processes end with the one that starts it, however that ends: standard library only.

    python tether.py READ_END COMMAND...

READ_END is a pipe's, whose other end only the starting process holds: the kernel closes that when the process is gone,
after ``kill -9`` too. A keeper, forked before the command takes this process's place, waits for it and kills the
process group. A signal on the parent's death (prctl) would do less: SGLang's own children ask for theirs only after
seconds of imports, and one whose parent is gone by then stays, and loads the model.
"""

import os
import signal
import sys


def main() -> None:
    """Leave a keeper behind and become the command; its group must be this process's own."""
    read_end, command = int(sys.argv[1]), sys.argv[2:]
    if os.fork() == 0:
        _keep(read_end)
    os.close(read_end)
    os.execv(command[0], command)


def _keep(read_end: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    # all else that it has inherited: the recording folder's lock, and what the command prints to
    os.closerange(0, read_end)
    os.closerange(read_end + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(read_end, 1)  # returns once the other end is closed
    os.kill(0, signal.SIGKILL)  # the whole group; the keeper is in it, so that its number is nobody else's


if __name__ == "__main__":
    main()
