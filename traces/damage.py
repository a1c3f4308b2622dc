"""What to type where a trace is damaged: said in one place, behind whatever was seen."""

from contextlib import ContextDecorator
from types import TracebackType

from replay.errors import TraceCorruptError

AGAIN = "fetch or capture the trace again"
AGAIN_OR_AS_IT_IS = f"{AGAIN}, or read it as it is with --no-verify"


class ReadingTrace(ContextDecorator):
    """A block or a function that reads a trace: its TraceCorruptError ends in what to do."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TraceCorruptError) and AGAIN not in str(error):
            raise TraceCorruptError(f"{error}: {AGAIN}") from error
