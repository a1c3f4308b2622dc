"""Numbers of verify passes in a trace: each process of a server counts its own from 0, and a capture may be resumed."""


class PassNumbers:
    """One number for each verify pass of ``processes`` processes, from ``first`` on, rising with each one's own count.

    So passes of two processes never bear one number, nor do those of two captures into one trace.
    """

    def __init__(self, first: int, processes: int) -> None:
        self._first, self._processes = first, processes
        self._places: dict[int, int] = {}

    def number(self, pid: int, count: int) -> int | None:
        """Of the pass that process ``pid`` calls ``count``; None where more processes ran passes than should be."""
        place = self._places.setdefault(pid, len(self._places))
        return None if place >= self._processes else self._first + count * self._processes + place
