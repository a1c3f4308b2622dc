"""One shard on its way to the disk: its requests' tensors, less what lies with earlier ones, joined, written whole."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from replay.traces import files
from replay.traces.feed import Feed, feed_tensors
from replay.traces.header import TraceHeader
from replay.traces.records import RequestRecord
from replay.traces.shards import expected_tensors, placed, shard_metadata
from replay.traces.stretches import TOKENS
from replay.traces.tensors import joined_shapes, pack_header, tensor_bytes

if TYPE_CHECKING:
    import torch


def stream_of(tensors: "Mapping[str, torch.Tensor]") -> list[str]:
    """The names of those of a request's ``tensors`` that have an element for each token or row."""
    return [name for name in tensors if name == TOKENS or name.startswith(("tap.", "scale."))]


def shard_parts(
    records: Sequence[RequestRecord],
    tensors: "Sequence[dict[str, torch.Tensor]]",
    feeds: Sequence[Feed | None],
    header: TraceHeader,
    taps: tuple[str, ...] | None,
) -> "dict[str, list[torch.Tensor]]":
    """By name the tensors of requests that have the same ``taps`` (None: all), request by request.

    ``tensors`` of each lose the tokens and rows that its record shares with earlier requests.
    """
    for record, one in zip(records, tensors, strict=True):
        one |= {name: one[name][record.shared :] for name in stream_of(one)}
    parts = {name: [one[name] for one in tensors] for name in expected_tensors(header, 0, 0, 0, taps)}
    return parts | feed_tensors(feeds)


def write_shard(
    path: Path, records: Sequence[RequestRecord], parts: "Mapping[str, Sequence[torch.Tensor]]"
) -> list[RequestRecord]:
    """Write the shard ``path``, all of it or nothing; the records with their places in it. Raises OSError."""
    shapes = joined_shapes(parts)
    blocks = [tensor_bytes(part) for name in shapes for part in parts[name]]
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    head = pack_header(shapes, shard_metadata(records, digest.hexdigest()))
    files.write_whole(path, [head, *blocks])
    size = len(head) + sum(len(block) for block in blocks)
    return placed(records, path.name, size, digest.hexdigest())
