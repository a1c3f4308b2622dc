"""Folders that were typed in the place of others: a trace for a head, a head for a trace, a run for its checkpoints."""

import os
from pathlib import Path

from replay.checkpoint.config_file import CONFIG
from replay.checkpoint.hub import step_of
from replay.errors import UsageError
from replay.printable import counted
from replay.traces.files import HEADER


def refuse_no_head(path: Path) -> None:
    """Raises UsageError for a trace's folder in the place of a head, and for one that holds heads and is none."""
    if os.path.lexists(path / HEADER):
        raise UsageError(f"{path} is a trace and no draft head; type the folder of a head after --draft")
    if os.path.lexists(path / CONFIG) or not (heads := _heads_in(path)):
        return
    last = path / heads[-1]
    prefix = heads[-1].rstrip("0123456789")  # as of checkpoint-500
    pattern = f"{prefix if all(name.startswith(prefix) for name in heads) else ''}*"
    every = f", or all of them in one replay simulate, --draft '{path / pattern}'" if len(heads) > 1 else ""
    raise UsageError(
        f"{path} is no draft head and holds {counted(len(heads), 'folder')} of heads; type one, --draft {last}{every}"
    )


def _heads_in(path: Path) -> list[str]:
    """The names of folders in ``path`` that have a config, in the order of their steps."""
    try:
        names = os.listdir(path)
    except OSError:  # whoever reads it says why
        return []
    found = [name for name in names if os.path.isfile(path / name / CONFIG)]
    return sorted(found, key=lambda name: (step_of(name) or 0, name))


def refuse_no_trace(path: Path) -> None:
    """Raises UsageError for a checkpoint's folder in the place of a trace."""
    if os.path.isfile(path / CONFIG) and not os.path.lexists(path / HEADER):
        raise UsageError(
            f"{path} is a checkpoint (it holds {CONFIG}) and no trace; type the folder that a capture wrote first, and "
            "that of the head after --draft"
        )
