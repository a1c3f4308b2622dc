"""Heads by hub id: ``org/name`` or ``org/name@revision``, out of the hub's own cache first, and only then fetched.

The cache is huggingface_hub's (``HF_HOME``, ``HF_HUB_CACHE``), laid out as ``models--org--name/snapshots/REVISION``.
"""

import os
import re
from pathlib import Path

from replay.errors import CheckpointError
from replay.printable import one_line

_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,100}))?", re.ASCII)
_SNAPSHOT = re.compile(r"models--(.+)", re.ASCII | re.DOTALL)
_STEP = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|step|iter|iteration|epoch)[-_.=]?([0-9]{1,15})$", re.ASCII | re.I)
_WANTED = ["*.json", "*.safetensors", "pytorch_model*.bin"]
_MOST_REASON = 200  # characters


def head_folder(path: Path) -> Path:
    """The folder of a head: ``path`` itself, or where it is none and reads as a hub id, its snapshot in the cache.

    What the cache lacks is fetched. Raises CheckpointError where it can be had nowhere.
    """
    found = _ID.fullmatch(path.as_posix())
    if found is None or os.path.lexists(path):
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise CheckpointError(
            f"{path} is no folder, and a hub id needs huggingface_hub; give a folder, or type pip install "
            "huggingface_hub"
        ) from error
    repository, revision = found[1], found[2]
    try:
        cached = Path(snapshot_download(repository, revision=revision, local_files_only=True))
        if _is_whole(cached):
            return cached
    except (LocalEntryNotFoundError, ValueError):
        pass  # not there yet
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_WANTED))
    except (OSError, ValueError) as error:
        raise CheckpointError(_unreachable(path, error)) from error


def spoken_name(folder: Path) -> str:
    """What a head or target is called: its folder's name, of a snapshot in the hub's cache the name of its id."""
    if folder.parent.name == "snapshots" and (found := _SNAPSHOT.fullmatch(folder.parent.parent.name)):
        return found[1].rpartition("--")[2]
    return folder.name or str(folder)


def step_of(folder: str | Path | None) -> int | None:
    """The step of training that a checkpoint's folder names at its end, as ``checkpoint-500`` or ``epoch_1_step_500``.

    None where it names none, or is a snapshot of a hub.
    """
    found = None if folder is None else _STEP.search(Path(folder).name)
    return None if found is None else int(found[1])


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has a config and weights: one that was fetched for its config alone has none."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return (folder / "config.json").exists() and any(path.exists() for path in weights)


def _unreachable(path: Path, error: Exception) -> str:
    """Why a hub id cannot be had, in one sentence. The hub's own kinds of errors are told by their names."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    if "GatedRepoError" in kinds:
        return f"{path} is gated on the hub; ask for access there and type hf auth login, or give --draft a folder"
    if "RepositoryNotFoundError" in kinds or "RevisionNotFoundError" in kinds:
        return (
            f"{path} is neither a folder here nor a model on the hub that you may read; mend the name, type hf auth "
            "login if it is private, or give --draft a folder"
        )
    if HF_HUB_OFFLINE:
        return (
            f"{path} is no folder here and not in the hub's cache {HF_HUB_CACHE}, and HF_HUB_OFFLINE keeps from "
            "fetching it; unset that, or give --draft a folder"
        )
    reason = one_line(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__, _MOST_REASON)
    return (
        f"{path} is no folder here and not in the hub's cache {HF_HUB_CACHE}, and the hub cannot be reached ({reason}"
        "); fetch it where there is a network, or give --draft a folder"
    )
