"""The folder between a recording server and the client that makes a trace of it: rows by request and position.

``replay serve --trace DIR`` or ``REPLAY_RECORD=DIR`` names DIR; everything a server writes lies in
``DIR/spool/LAUNCH``, LAUNCH being 16 hexadecimal digits drawn at each start, so two starts never mix. There are two
kinds of files, both renamed into place:

- ``rank-<pid>.json``, one per scheduler process: who it is, what it records, and in which state it is (manifest.py).
- ``rows-<pid>-<number>.safetensors``, only from the process that writes for its attention group, each with rows of one
  client only. Numbers rise; within a process a later entry is newer than an earlier one. Tensors, R rows, K of them
  with taps, and M rows with logits of k ids: ``input_ids`` [R] int32, ``tap.<name>`` [K, H] in the target's dtype,
  ``topk_ids`` [M, k] int32, ``topk_logprobs`` [M, k] float32, ``logsumexp`` [M] float32. Of F rows that the draft was
  fed also ``feed.token`` and ``feed.position`` [F] int32 and ``feed.features`` [F, slots * H]. The metadata key
  ``entries`` is a JSON list of Entry: each owns the next ``rows`` of R, the next ``rows - left_out`` of K, the next
  ``logits`` of M and as many of F as its ``fed`` names.

A file of version 3 has all taps of the server, and K is R. One of version 4 has what the requests in it ask for
(asked.py), all of them the same: the metadata key ``taps`` is the JSON list of its taps, and of a tap in fp8
(``float8_e4m3fn``) ``scale.<name>`` [K] float32 stands beside the rows (traces/fp8.py).

Row at position p is the target's state after it consumed the token at p. Nothing here is ever unpickled, request ids
appear only inside the JSON, and a file that is cut short or disagrees with itself is refused by name.

A client's request ids begin with RID_PREFIX and 16 hexadecimal digits of its own, which name it (``client_of``). While
it runs it holds the lock of ``client-<name>`` in the launch folder: rows of a client that nobody plays are anybody's
to delete (client/spool_reader.py).
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from replay.errors import CaptureError, TraceCorruptError
from replay.traces import files
from replay.traces.fields import Fields, parse_json
from replay.traces.header import FP8
from replay.traces.tensors import NAMES, Layout, joined_shapes, pack_header, parse_layout, tensor_bytes

if TYPE_CHECKING:
    import torch

FORMAT = "replay-spool"
VERSION = 3
PARTIAL = 4  # of files with no more than what was asked for; clients that do not ask are written none
SPOOL = files.SPOOL
RID_PREFIX = "replay-"  # only requests that a client of ours named so are recorded
LOGITS = ("topk_ids", "topk_logprobs", "logsumexp")  # tensors with a row for each row that has logits
TAP, SCALE = "tap.", "scale."  # how tensors of a tap are called
FEED = ("feed.token", "feed.position", "feed.features")  # tensors with a row for each row of ``fed``

KINDS = ("prefill", "decode", "verify", "feed")
_LAUNCH = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ROWS = re.compile(r"rows-(\d+)-(\d{8})\.safetensors", re.ASCII)
_RANK = re.compile(r"rank-\d+\.json", re.ASCII)
_CLIENT = re.compile(rf"{RID_PREFIX}[0-9a-f]{{16}}(?=-)", re.ASCII)
_LOCK = re.compile(rf"client-{RID_PREFIX}[0-9a-f]{{16}}", re.ASCII)
MOST = 1 << 31  # no number in a file of the spool is above, but for
MOST_PASSES = 1 << 48  # the verify passes of a server that runs for years


@dataclass(frozen=True, slots=True)
class Entry:
    """The rows of one request in one forward: positions ``start`` to ``start + rows``.

    ``logits`` of them, the last ones, have logits. Of a verify also: the drafted tokens in node order (the root left
    out), for a tree the parent of each (node numbers, 0 is the root, -1 where the server left the node out of its
    tree), how many were accepted, and what was chosen after each row (accepted tokens, then the bonus). ``start`` is
    then the anchor, ``batch`` the requests that were verified together, this one included, ``batch_row`` its place
    among them, and ``verify_pass`` the number of that verify among all of the process. Of a decode ``batch`` are the
    requests that were decoded together (0: a server of an older replay). Of a prefill ``forward_rows`` are the rows of
    the whole forward, those of other requests too. An entry of kind feed has no rows of the target:
    ``fed`` names those in which the draft was fed what the tensors of FEED hold, in the prefill that was recorded
    before it. Of a prefill the taps of the first ``left_out`` rows are not there: their client does not keep them.
    """

    rid: str
    kind: str
    start: int
    rows: int
    logits: int
    drafted: Sequence[int] = ()
    parents: Sequence[int] = ()
    accepted: int = 0
    chosen: Sequence[int] = ()
    batch: int = 0
    batch_row: int = 0
    verify_pass: int = 0
    forward_rows: int = 0
    fed: Sequence[int] = ()
    left_out: int = 0

    @property
    def kept(self) -> int:
        """How many of its rows the tensors of taps hold: the last ones."""
        return self.rows - self.left_out


@dataclass(frozen=True, slots=True)
class RowFile:
    """One file of rows, checked: where entry i begins in the tensors of R, M, F and K is ``first_row[i]``,
    ``first_logit[i]``, ``first_fed[i]`` and ``first_kept[i]``. ``taps`` are those that it holds."""

    layout: Layout
    entries: Sequence[Entry]
    taps: Sequence[str]
    first_row: Sequence[int]
    first_kept: Sequence[int]
    first_logit: Sequence[int]
    first_fed: Sequence[int]


def launch_folder(folder: Path, launch: str) -> Path:
    """Where the server started as ``launch`` writes. Raises CaptureError for a launch that is no id."""
    if not _LAUNCH.fullmatch(launch):
        raise CaptureError(f"{launch[:40]!r} is no launch id (16 hexadecimal digits): start the server by replay serve")
    return folder / SPOOL / launch


def is_launch(name: str) -> bool:
    """Whether a folder is called as a launch."""
    return _LAUNCH.fullmatch(name) is not None


def is_spooled(name: str) -> bool:
    """Whether a file of a launch folder is called as one of ours, whole or under way, but for the launch's own lock."""
    return any(kind.fullmatch(name.removesuffix(files.TEMPORARY)) for kind in (_ROWS, _RANK, _LOCK))


def manifest_name(pid: int) -> str:
    """The file name of a scheduler process's manifest (manifest.py)."""
    return f"rank-{pid}.json"


def is_manifest(name: str) -> bool:
    """Whether a file of a launch folder is called as a manifest."""
    return _RANK.fullmatch(name) is not None


def client_of(rid: str) -> str:
    """The name of the client that a request belongs to; empty where its id is none that a client of ours gives."""
    match = _CLIENT.match(rid)
    return match[0] if match else ""


def client_lock(folder: Path, client: str) -> Path:
    """The file whose lock a client holds while it lives. Only for names that ``client_of`` gives."""
    return folder / f"client-{client}"


def write_row_file(
    folder: Path,
    pid: int,
    number: int,
    entries: Sequence[Entry],
    tensors: "Mapping[str, Sequence[torch.Tensor]]",
    *,
    partial: bool = False,
) -> None:
    """Write one file of rows; each tensor is given in parts, which are joined. Raises OSError.

    ``partial``: it holds what its client asked for, which may be less than the server records.
    """
    shapes = joined_shapes(tensors)
    text = json.dumps([asdict(entry) for entry in entries], separators=(",", ":"), ensure_ascii=False)
    metadata = {"format": FORMAT, "version": str(PARTIAL if partial else VERSION), "entries": text}
    if partial:
        metadata["taps"] = json.dumps([name.removeprefix(TAP) for name in shapes if name.startswith(TAP)])
    head = pack_header(shapes, metadata)
    blocks = [tensor_bytes(part) for name in shapes for part in tensors[name]]
    write_file(folder / f"rows-{pid}-{number:08d}.safetensors", [head, *blocks])


def row_file_names(folder: Path) -> list[str]:
    """Names of all files of rows in a launch folder, each process's in the order they were written."""
    found = [(int(match[1]), int(match[2]), name) for name in names_in(folder) if (match := _ROWS.fullmatch(name))]
    return [name for _, _, name in sorted(found)]


def pid_of(name: str) -> int:
    """The process that wrote the file of rows ``name``, one of ``row_file_names``."""
    match = _ROWS.fullmatch(name)
    assert match is not None
    return int(match[1])


def read_row_file(path: Path, taps: Sequence[str], width: int) -> RowFile:
    """Parse and check a file of rows of a server that records ``taps``; nothing but its header is read.

    Raises TraceCorruptError naming the file.
    """
    layout = parse_layout(path)
    metadata = Fields(str(path), dict(layout.metadata))
    version = metadata.values.get("version")
    if metadata.values.get("format") != FORMAT or version not in (str(VERSION), str(PARTIAL)):
        raise TraceCorruptError(f"{path} is no file of recorded rows of version {VERSION} or {PARTIAL}")
    values = parse_json(metadata.text("entries"), f"{path}: entries")
    if not isinstance(values, list):
        raise TraceCorruptError(f"{path}: entries must be a list")
    entries = [_entry(Fields(f"{path}: entry {i}", value)) for i, value in enumerate(values)]
    held = _partial_taps(metadata, taps) if version == str(PARTIAL) else taps
    first_row, row = _places([entry.rows for entry in entries])
    first_kept, kept = _places([entry.kept for entry in entries])
    first_logit, logit = _places([entry.logits for entry in entries])
    first_fed, fed = _places([len(entry.fed) for entry in entries])
    features = layout.tensors["feed.features"].shape if "feed.features" in layout.tensors else ()
    columns = features[1] if len(features) == 2 else width
    for name, shape in (
        ("input_ids", (row,)),
        ("logsumexp", (logit,)),
        *((f"{TAP}{tap}", (kept, width)) for tap in held),
        *((f"{SCALE}{tap}", (kept,)) for tap in held if _is_rounded(layout, tap)),
        ("feed.token", (fed,)),
        ("feed.position", (fed,)),
        ("feed.features", (fed, max(width, columns - columns % width))),
    ):
        if name not in layout.tensors and not shape[0]:
            continue
        if name not in layout.tensors or layout.tensors[name].shape != shape:
            seen = list(layout.tensors[name].shape) if name in layout.tensors else "missing"
            raise TraceCorruptError(f"{path}: {name} is {seen}, its entries make it {list(shape)}")
    return RowFile(layout, entries, held, first_row, first_kept, first_logit, first_fed)


def _partial_taps(metadata: Fields, taps: Sequence[str]) -> tuple[str, ...]:
    """The taps that a file says it holds. Raises TraceCorruptError where they are none of ``taps``, or not distinct."""
    where = f"{metadata.where}: taps"
    held = Fields(where, {"taps": parse_json(metadata.text("taps"), where)}).texts("taps", most=len(taps))
    if len(set(held)) < len(held) or not set(held) <= set(taps):
        raise metadata.refuse("taps", f"some of {', '.join(taps)}")
    return held


def _is_rounded(layout: Layout, tap: str) -> bool:
    """Whether a tap's rows are in fp8, so that scales must stand beside them."""
    return f"{TAP}{tap}" in layout.tensors and layout.tensors[f"{TAP}{tap}"].dtype == NAMES[FP8]


def _places(counts: Sequence[int]) -> tuple[list[int], int]:
    """Where each of consecutive runs begins, and where the last ends."""
    ends = [0, *accumulate(counts)]
    return ends[:-1], ends[-1]


def storable(dtype: str) -> bool:
    """Whether rows of this torch dtype can be written."""
    return dtype in NAMES


def _entry(values: Fields) -> Entry:
    entry = Entry(
        rid=values.text("rid"),
        kind=values.choice("kind", KINDS),
        start=values.integer("start", 0, MOST),
        rows=values.integer("rows", 0, MOST),
        logits=values.integer("logits", 0, MOST),
        drafted=values.integers("drafted", 0, MOST),
        parents=values.integers("parents", -1, MOST),
        accepted=values.integer("accepted", 0, MOST),
        chosen=values.integers("chosen", 0, MOST),
        batch=values.integer("batch", 0, MOST),
        batch_row=values.integer("batch_row", 0, MOST),
        verify_pass=values.integer("verify_pass", 0, MOST_PASSES),
        forward_rows=values.integer("forward_rows", 0, MOST),
        fed=values.integers("fed", 0, MOST),
        left_out=values.integer("left_out", 0, MOST) if "left_out" in values.values else 0,
    )
    if entry.logits > entry.rows:
        raise values.refuse("logits", f"at most its {entry.rows} rows")
    if entry.left_out > (entry.rows if entry.kind == "prefill" else 0):
        raise values.refuse("left_out", f"0, or of a prefill at most its {entry.rows} rows")
    if 0 < entry.kept < entry.logits:  # where no row has taps, its client wants no more of this piece
        raise values.refuse("logits", f"at most its {entry.kept} rows with taps")
    if entry.kind == "verify" and not entry.accepted + 1 == entry.rows == len(entry.chosen):
        raise values.refuse("accepted", f"one less than its {entry.rows} rows and {len(entry.chosen)} chosen tokens")
    if entry.kind == "prefill" and entry.forward_rows < entry.rows:
        raise values.refuse("forward_rows", f"at least its {entry.rows} rows")
    if entry.kind == "verify" and entry.batch_row >= entry.batch:
        raise values.refuse("batch_row", f"below its batch of {entry.batch}")
    if (entry.kind == "feed") != bool(entry.fed) or (entry.fed and entry.rows):
        raise values.refuse(
            "fed", f"rows of an entry of kind feed, which has no others ({entry.kind}, {entry.rows} rows)"
        )
    return entry


def names_in(folder: Path) -> list[str]:
    """Names of what lies in a folder; none where it is not there. Raises CaptureError."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CaptureError(f"{folder} cannot be read: {error.strerror}; mend its permissions") from error


def write_file(path: Path, blocks: Sequence[bytes | memoryview]) -> None:
    """Rename ``blocks`` into place, not synced: after a power cut the client refuses what is torn and asks again."""
    temporary = path.with_name(path.name + files.TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            for block in blocks:
                file.write(block)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
