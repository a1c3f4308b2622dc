"""The rounds file: written whole or not at all, read with distrust. Its columns are in rounds.py."""

import io
import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from replay.errors import OutputError, TraceCorruptError, TraceError, TraceVersionError
from replay.traces.fields import Fields, parse_json, show
from replay.traces.files import PLAIN, as_path, describe_path
from replay.traces.parquet import check_parquet, first_line
from replay.traces.remote import as_source
from replay.traces.rounds import JsonObject, Rounds, check_are_rounds
from replay.traces.rounds_check import check_rounds, corrupt_rounds
from replay.traces.rounds_metadata import request_info, variant_info

FORMAT = "replay-rounds"
VERSION = 1
METADATA_KEY = "replay"


def write_rounds(rounds: Rounds, path: Path, *, force: bool = False) -> None:
    """Write ``rounds`` to ``path``: the whole file appears at once, or nothing does.

    Raises OutputError when the file exists (without ``force``) or cannot be written, TraceCorruptError when the
    table is not one that ``read_rounds`` would read back.
    """
    check_are_rounds("rounds", rounds)
    path = as_path(path)
    check_rounds(rounds, path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise OutputError(f"{path} is no regular file and would be replaced: name another after -o")
    if os.path.exists(path) and not force:
        raise OutputError(f"{path} exists already: type --force to replace it, or another path after -o")
    head: JsonObject = {
        "format": FORMAT,
        "version": VERSION,
        "variants": [asdict(variant) for variant in rounds.variants],
        "requests": [asdict(request) for request in rounds.requests],
        "trace": rounds.trace,
        "drafts": rounds.drafts,
    }
    buffer = io.BytesIO()
    rounds.table.write_parquet(buffer, metadata={METADATA_KEY: _text(head)})
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")  # also on a disk of many machines
    try:
        with part.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror or error}): name a file in a folder that exists and has room"
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def is_rounds_file(path: Path) -> bool:
    """Whether ``path`` is a rounds file of any version; its table is not read."""
    import polars as pl
    from polars.exceptions import PanicException, PolarsError

    try:
        check_parquet(path)
        return METADATA_KEY in pl.read_parquet_metadata(path)
    except (OSError, TraceCorruptError, PolarsError, PanicException):
        return False


def read_rounds(path: Path) -> Rounds:
    """Read a rounds file, refusing whatever does not hold together.

    Raises TraceError when there is no such file, TraceVersionError when it is of another format or version,
    TraceCorruptError when its bytes, columns or values disagree with its metadata.
    """
    import polars as pl
    from polars.exceptions import PanicException, PolarsError

    path = as_source(path)
    if (seen := describe_path(path)) != PLAIN:
        raise TraceError(f"{path} {seen}, rounds are one parquet file: type replay simulate TRACE -o ROUNDS.parquet")
    try:
        check_parquet(path)
        metadata = pl.read_parquet_metadata(path)
        if METADATA_KEY not in metadata:
            raise TraceVersionError(
                f"{path} is a parquet file but not one of rounds: type the file that replay simulate -o wrote"
            )
        table = pl.read_parquet(path, glob=False, hive_partitioning=False)
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror or error}): name a file that you may read") from error
    except TraceCorruptError as error:
        raise TraceCorruptError(f"{error}: simulate again with -o") from error
    except (PolarsError, PanicException) as error:
        raise TraceCorruptError(
            f"{path} is no readable parquet file ({first_line(error)}): simulate again with -o"
        ) from error
    head = _head(metadata[METADATA_KEY], path)
    rounds = Rounds(
        table=table,
        variants=tuple(map(variant_info, head.objects("variants"))),
        requests=tuple(map(request_info, head.objects("requests"))),
        trace=head.object("trace").values,
        drafts=head.object("drafts").values,
    )
    check_rounds(rounds, path)
    return rounds


def _text(head: dict[str, Any]) -> str:
    """As JSON. A path that is no UTF-8 has a question mark for each odd byte: half characters are no text."""
    return json.dumps(head, allow_nan=False, ensure_ascii=False).encode(errors="replace").decode()


def _head(text: str, path: Path) -> Fields:
    """The metadata as an object of our format and version."""
    refusal = partial(corrupt_rounds, path)
    head = parse_json(text, "its metadata", refusal)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise TraceVersionError(
            f"{path} is a parquet file but not one of rounds: type the file that replay simulate -o wrote"
        )
    if head.get("version") != VERSION:
        raise TraceVersionError(
            f"{path} holds rounds of version {show(head.get('version'))}, this replay reads version {VERSION}: "
            "simulate again, or use the replay that wrote it"
        )
    root = Fields("its metadata", head, refusal)
    root.only(("format", "version", "variants", "requests", "trace", "drafts"))
    return root
