"""Every way replay refuses. One sentence each: what was seen, what was possible, what to type.

ReplayError
├── UsageError          an option or argument value that cannot be
├── WiringError         a wiring that the trace or the head does not fit
├── CheckpointError     a draft head or target checkpoint that cannot be loaded as it stands
├── PromptError         a prompt file or a row of it
├── CaptureError        the target or its engine could not be recorded
├── StorageError        shared or object storage that cannot be read, or has changed
├── OutputError         the place to write to: exists already, is full, cannot be written
├── WorkerError         processes or a cluster that replay a sweep: ended, cannot be reached, unlike each other
└── TraceError          a trace or rounds file that cannot be trusted
    ├── TraceVersionError     another format or version
    ├── TraceIncompleteError  recording has not ended
    └── TraceCorruptError     bytes, shapes or values that disagree with the header

The command line turns a ReplayError into its message on stderr and exit code 1. Every other exception is a bug.
"""

from replay.printable import one_line


class ReplayError(Exception):
    """The user can mend this; the message says how, in one line of bounded length whatever it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UsageError(ReplayError):
    """An option or argument value that cannot be."""


class WiringError(ReplayError):
    """A wiring that the trace or the head does not fit."""


class CheckpointError(ReplayError):
    """A draft head or target checkpoint that cannot be loaded as it stands."""


class PromptError(ReplayError):
    """A prompt file, or a row of it, that cannot be used."""


class CaptureError(ReplayError):
    """The target or its engine could not be recorded."""


class StorageError(ReplayError):
    """Shared or object storage cannot be read, lacks what is asked for, or has changed."""


class OutputError(ReplayError):
    """The place to write to exists already, is full, or cannot be written."""


class WorkerError(ReplayError):
    """Processes or a cluster that replay a sweep ended, cannot be reached, or are unlike each other."""


class TraceError(ReplayError):
    """A trace or rounds file that cannot be trusted."""


class TraceVersionError(TraceError):
    """The file is of another format or version."""


class TraceIncompleteError(TraceError):
    """Recording has not ended, so the trace is not whole."""


class TraceCorruptError(TraceError):
    """Bytes, shapes or values disagree with what the header says."""
