"""The feed of a request: a few rows of what a server's draft really got when it was prefilled. See SPEC.md, section 5.

That is the prompt, or of one that came in pieces the first; where a server put the request back and prefilled it anew,
output rows may be among them.

Shapes: F rows of one request, W = slots * H features, H the target's width; T tokens, rows 0 .. T-2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from replay.errors import CaptureError, TraceCorruptError
from replay.traces.header import TAP_DTYPES, TraceHeader
from replay.traces.tensors import NAMES, Layout, map_rows

if TYPE_CHECKING:
    import torch

# the tensors of a shard, wide items first
REQUEST, ROW, TOKEN, POSITION, FEATURES = (
    f"feed.{name}" for name in ("request", "row", "token", "position", "features")
)
NUMBERS = (REQUEST, ROW, TOKEN, POSITION)


@dataclass(frozen=True, slots=True)
class Feed:
    """What the draft got in F of a request's rows, as it got it: ``token_F``, ``position_F`` int32, ``features_FW``.

    ``row_F`` int32, rising, says in which row each stood: a sound EAGLE-3 draft gets in row i token x[i+1], position i
    and the features of position i. What it got may be anything, NaN and tokens that are none included.
    """

    row_F: "torch.Tensor"
    token_F: "torch.Tensor"
    position_F: "torch.Tensor"
    features_FW: "torch.Tensor"

    def __len__(self) -> int:
        return len(self.row_F)


def check_feed(feed: Feed, header: TraceHeader, tokens: int, name: str) -> None:
    """Raises CaptureError where ``feed`` cannot be of a request of T = ``tokens``."""
    rows, dtype = feed.row_F.tolist(), str(feed.features_FW.dtype).removeprefix("torch.")
    width = feed.features_FW.shape[-1]
    numbers = (feed.row_F, feed.token_F, feed.position_F)
    if any(str(one.dtype) != "torch.int32" or one.shape != (len(rows),) for one in numbers):
        raise CaptureError(f"{name}: its feed has rows, tokens and positions of other kinds or numbers than int32 [F]")
    if feed.features_FW.shape != (len(rows), width) or not _is_wide(width, dtype, header):
        raise CaptureError(
            f"{name}: its feed has features {dtype} {list(feed.features_FW.shape)}, must be [{len(rows)}, a multiple "
            f"of {header.target.hidden_size}] in {', '.join(TAP_DTYPES)}"
        )
    if (problem := _row_problem(rows, tokens)) is not None:
        raise CaptureError(f"{name}: {problem}")


def feed_tensors(feeds: Sequence[Feed | None]) -> "dict[str, list[torch.Tensor]]":
    """The parts of every tensor of a shard, of its requests in order; empty where none of them has a feed.

    Raises CaptureError where their features are of different widths or dtypes.
    """
    import torch

    known = [(number, feed) for number, feed in enumerate(feeds) if feed is not None and len(feed)]
    kinds = {(feed.features_FW.dtype, feed.features_FW.shape[1]) for _, feed in known}
    if len(kinds) > 1:
        said = " and ".join(sorted(f"{dtype} x {width}" for dtype, width in kinds))
        raise CaptureError(
            f"requests of one batch have feeds of {said}; a draft is fed features of one width and dtype"
        )
    if not known:
        return {}
    return {
        REQUEST: [torch.full((len(feed),), number, dtype=torch.int32) for number, feed in known],
        ROW: [feed.row_F for _, feed in known],
        TOKEN: [feed.token_F for _, feed in known],
        POSITION: [feed.position_F for _, feed in known],
        FEATURES: [feed.features_FW for _, feed in known],
    }


def count_rows(layout: Layout) -> int:
    """How many rows of feed a shard holds, of all its requests."""
    return layout.tensors[FEATURES].shape[0] if FEATURES in layout.tensors else 0


def check_layout(layout: Layout, header: TraceHeader) -> None:
    """Raises TraceCorruptError where a shard holds tensors of a feed that are not all there, or do not fit."""
    there = [name for name in (*NUMBERS, FEATURES) if name in layout.tensors]
    if not there:
        return
    for name in (*NUMBERS, FEATURES):
        if name not in there:
            raise TraceCorruptError(
                f"{layout.path} lacks the tensor {name}, but holds {there[0]}: a feed has all or none"
            )
    rows = layout.tensors[ROW].shape[:1]
    for name in NUMBERS:
        place = layout.tensors[name]
        if (place.dtype, place.shape) != ("I32", rows):
            raise TraceCorruptError(
                f"{layout.path}: {name} is {place.dtype} {list(place.shape)}, must be I32 {list(rows)}"
            )
    place = layout.tensors[FEATURES]
    dtype = next((name for name, short in NAMES.items() if short == place.dtype), "")
    if place.shape[:1] != rows or len(place.shape) != 2 or not _is_wide(place.shape[1], dtype, header):
        raise TraceCorruptError(
            f"{layout.path}: {FEATURES} is {place.dtype} {list(place.shape)}, must be [{rows[0] if rows else '?'}, a "
            f"multiple of {header.target.hidden_size}] in {', '.join(NAMES[name] for name in TAP_DTYPES)}"
        )


def read_feed(layout: Layout, number: int, requests: int, tokens: int) -> Feed | None:
    """The feed of request ``number`` of the ``requests`` in a shard, T = ``tokens``; None where it has none.

    Only its own rows are touched, and the request numbers. Raises TraceCorruptError.
    """
    import torch

    if not count_rows(layout):
        return None
    owner_F = map_rows(layout, REQUEST)
    if bool((owner_F.diff() < 0).any()) or not 0 <= int(owner_F[0]) <= int(owner_F[-1]) < requests:
        raise TraceCorruptError(f"{layout.path}: {REQUEST} must not fall and must name its {requests} requests from 0")
    start, stop = torch.searchsorted(owner_F, torch.tensor([number, number + 1], dtype=torch.int32)).tolist()
    if start == stop:
        return None
    row_F, token_F, position_F, features_FW = (
        map_rows(layout, name, start, stop) for name in (ROW, TOKEN, POSITION, FEATURES)
    )
    if (problem := _row_problem(row_F.tolist(), tokens)) is not None:
        raise TraceCorruptError(f"{layout.path}: request {number}: {problem}")
    return Feed(row_F, token_F, position_F, features_FW)


def _is_wide(width: int, dtype: str, header: TraceHeader) -> bool:
    return dtype in TAP_DTYPES and width > 0 and width % header.target.hidden_size == 0


def _row_problem(rows: Sequence[int], tokens: int) -> str | None:
    rising = all(low < high for low, high in pairwise(rows))
    if rows and rising and rows[0] >= 0 and rows[-1] <= tokens - 2:
        return None
    return f"its feed is of rows {', '.join(map(str, rows[:8])) or 'none'}, must be rising rows from 0 to {tokens - 2}"
