"""Many heads of one command: patterns of folders, names that tell them apart, and what is broken among them."""

import re
from collections.abc import Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import CheckpointError, ReplayError, UsageError

if TYPE_CHECKING:
    from replay.checkpoint.checkpoint import Checkpoint

_MOST_HEADS = 1000
_SAID = 5  # broken heads that are named with their reasons; of the others the number


def expand_drafts(typed: Sequence[Path | str]) -> tuple[Path, ...]:
    """What was typed after --draft, patterns replaced by their folders: numbers in names count as numbers.

    A text is the pattern of addresses. Raises UsageError for a pattern that no folder has, or too many have, and
    StorageError.
    """
    found: list[Path] = []
    for path in typed:
        if isinstance(path, Path) and (path.exists() or not has_magic(str(path))):
            found.append(path)
            continue
        folders = sorted(_in_storage(path) if isinstance(path, str) else _here(path), key=_natural)
        if not folders:
            raise UsageError(f"--draft {path} matches no folder; type the pattern of checkpoints' folders")
        found += folders
    if len(found) > _MOST_HEADS:
        raise UsageError(f"{len(found)} heads were asked for, {_MOST_HEADS} are possible; type a narrower pattern")
    return tuple(dict.fromkeys(found))


def _here(pattern: Path) -> list[Path]:
    return [one for one in map(Path, glob(str(pattern))) if one.is_dir()]


def _in_storage(pattern: str) -> list[Path]:
    from replay.traces.object_store import find_folders
    from replay.traces.remote import as_source

    return [as_source(one) for one in find_folders(pattern)]


def _natural(path: Path) -> list[tuple[int, str | int]]:
    pieces = re.split(r"([0-9]+)", str(path))
    return [(1, int(piece)) if piece.isdecimal() else (0, piece) for piece in pieces]


def name_heads(folders: Sequence[Path]) -> dict[str, Path]:
    """Each called after its folder, where two are called alike after the end of its path that tells them apart."""
    from replay.checkpoint.hub import spoken_name

    resolved = list(dict.fromkeys(folder.resolve() for folder in folders))
    short = [spoken_name(folder) for folder in resolved]
    return {_end(folder, name, resolved, short): folder for folder, name in zip(resolved, short, strict=True)}


def _end(folder: Path, name: str, others: Sequence[Path], names: Sequence[str]) -> str:
    alike = [other.parts for other, called in zip(others, names, strict=True) if called == name and other != folder]
    if not alike:
        return name
    for count in range(2, len(folder.parts)):
        end = folder.parts[-count:]
        if all(parts[-count:] != end for parts in alike):
            return ":".join(part.strip("/") for part in end)
    return str(folder)


def read_drafts(folders: Mapping[str, Path]) -> "dict[str, Checkpoint]":
    """All heads. Raises CheckpointError that names every one that is broken, and as ``read_draft`` where one is asked
    for."""
    from replay.cli.options import read_draft

    found, broken = {}, {}
    for name, folder in folders.items():
        try:
            found[name] = read_draft(folder)
        except ReplayError as error:
            if len(folders) == 1:
                raise
            broken[name] = str(error)
    if broken:
        raise CheckpointError(_say_broken(broken, len(folders)))
    return found


def _say_broken(broken: Mapping[str, str], every: int) -> str:
    names = list(broken)
    reasons = "; ".join(f"{name}: {broken[name]}" for name in names[:_SAID])
    more = f"; and {len(names) - _SAID} more" if len(names) > _SAID else ""
    advice = "leave them out" if len(names) < every else "type the folders of heads"
    return f"{len(names)} of {every} heads cannot be replayed, {advice}: {reasons}{more}"
