"""Which rows go into a file together: those of one client that keep the same."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replay.capture.asked import asked_of
from replay.capture.spool import FEED, LOGITS, Entry, client_of

if TYPE_CHECKING:
    import torch

File = tuple[str, tuple[str, ...] | None, bool]  # the client, what taps it asked for (None: all), whether in fp8


def split_by_file(
    entries: Sequence[Entry], tensors: "Mapping[str, torch.Tensor]"
) -> "dict[File, tuple[list[Entry], dict[str, torch.Tensor]]]":
    """``entries`` and their rows, file by file; copied only where there are several."""
    import torch

    files = [_file_of(entry.rid) for entry in entries]
    distinct = dict.fromkeys(files)
    if len(distinct) == 1:
        return {files[0]: (list(entries), dict(tensors))}
    owner_E = torch.tensor([list(distinct).index(file) for file in files])
    owner_R, owner_K, owner_M, owner_F = (
        owner_E.repeat_interleave(torch.tensor(counts))
        for counts in (
            [entry.rows for entry in entries],
            [entry.kept for entry in entries],
            [entry.logits for entry in entries],
            [len(entry.fed) for entry in entries],
        )
    )
    owners = {"input_ids": owner_R} | dict.fromkeys(LOGITS, owner_M) | dict.fromkeys(FEED, owner_F)
    return {
        file: (
            [entry for entry, its in zip(entries, files, strict=True) if its == file],
            {name: _picked(rows, owners.get(name, owner_K) == number) for name, rows in tensors.items()},
        )
        for number, file in enumerate(distinct)
    }


def _file_of(rid: str) -> File:
    asked = asked_of(rid)
    return (client_of(rid), None, False) if asked is None else (client_of(rid), asked.taps, asked.rounded)


def _picked(rows: "torch.Tensor", where: "torch.Tensor") -> "torch.Tensor":
    import torch

    if rows.element_size() > 1:
        return rows[where]
    return rows.view(torch.uint8)[where].view(rows.dtype)  # torch cannot index fp8
