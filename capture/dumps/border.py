"""Where a text's prompts end: from its loss mask, or from masks that were stored beside the dump."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.capture.dumps.sample import Sample, mask_of
from replay.errors import CaptureError
from replay.traces.fields import parse_json

if TYPE_CHECKING:
    from torch import Tensor

_MOST_LINE = 1 << 26


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of a text: tokens 0 to ``start`` are its prompt, those from there to ``end`` its output."""

    name: str
    start: int
    end: int


def turns_of(sample: Sample) -> list[Turn]:
    """Each run of trained tokens is an answer, and all that stands before it its prompt, as a server saw it.

    Without a mask the text is one answer to its first token. A text in which nothing was trained on has no turn.
    """
    if sample.mask_S is None:
        return [Turn(sample.name, 1, len(sample.tokens_S))]
    edges = sample.mask_S.int().diff(prepend=sample.mask_S.new_zeros(1).int(), append=sample.mask_S.new_zeros(1).int())
    starts, ends = (edges.eq(sign).nonzero()[:, 0].tolist() for sign in (1, -1))
    runs = [(max(1, start), end) for start, end in zip(starts, ends, strict=True) if end > max(1, start)]
    if len(runs) == 1:
        return [Turn(sample.name, *runs[0])]
    return [Turn(f"{sample.name}#{number}", *run) for number, run in enumerate(runs, 1)]


class Masks:
    """Loss masks by the tokens of their text."""

    def __init__(self, masks: "Mapping[tuple[int, ...], Tensor]", path: Path) -> None:
        self._masks, self._path = masks, path
        self._longer = {tokens[:-1]: tokens for tokens in masks}

    def apply(self, sample: Sample) -> Sample:
        """``sample`` with the mask of its tokens, and with the last token where the dump stops before it.

        A target consumes no last output token, and vLLM 0.32 then stores neither its state nor its id
        (example_hidden_states_connector.py ``request_finished``). Raises CaptureError where there is no such text.
        """
        import torch

        tokens = tuple(sample.tokens_S.tolist())
        whole = tokens if tokens in self._masks else self._longer.get(tokens)
        if whole is None:
            raise CaptureError(
                f"{sample.where} has tokens that no row of {self._path} has: name the data that the dump was made from"
            )
        return replace(sample, tokens_S=torch.tensor(whole), mask_S=self._masks[whole])


def read_masks(path: Path) -> Masks:
    """The columns ``input_ids`` and ``loss_mask`` of a .jsonl file, or of a folder or file that `datasets` saved.

    speculators 0.9.0 keeps them beside its dumps in such a folder (cli/prepare_data.py). Raises CaptureError.
    """
    import torch

    found: dict[tuple[int, ...], Tensor] = {}
    for where, ids, mask in _rows(path):
        if len(ids) != len(mask):
            raise CaptureError(f"{where} has {len(ids)} input_ids and a loss_mask of {len(mask)}")
        made = mask_of(torch.tensor(mask), where)
        assert made is not None
        found[tuple(ids)] = made
    return Masks(found, path)


def _rows(path: Path) -> Iterator[tuple[str, list[int], list[int]]]:
    files = sorted(path.rglob("*.arrow")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise CaptureError(f"{path} holds no .arrow file: --loss-masks takes a .jsonl file or what `datasets` saved")
    for file in files:
        rows = _arrow(file) if file.suffix == ".arrow" else _lines(file)
        for number, row in enumerate(rows):
            where = f"{file}, row {number}"
            yield where, _whole(row.get("input_ids"), where), _whole(row.get("loss_mask"), where)


def _whole(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise CaptureError(f"{where} has no input_ids and loss_mask that are lists of whole numbers")
    return [int(one) for one in value]


def _arrow(file: Path) -> Iterator[Mapping[str, Any]]:
    import polars as pl

    try:
        table = pl.read_ipc_stream(file, columns=["input_ids", "loss_mask"])
    except (pl.exceptions.PolarsError, OSError) as error:
        raise CaptureError(f"{file} has no columns input_ids and loss_mask that can be read ({error})") from error
    yield from table.iter_rows(named=True)


def _lines(file: Path) -> Iterator[Mapping[str, Any]]:
    with file.open("rb") as lines:
        while line := lines.readline(_MOST_LINE):
            row = parse_json(line, str(file), CaptureError) if line.strip() else {}
            if not isinstance(row, dict):
                raise CaptureError(f"{file} holds a line that is no JSON object: {json.dumps(row)[:40]}")
            if row:
                yield row
