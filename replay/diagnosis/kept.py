"""What a diagnosis replayed along a server's drafts, kept in a cache: one that was stopped goes on."""

import io
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay.analysis.followed import Followed
from replay.errors import TraceError
from replay.simulator.cache import Cache, is_whole
from replay.simulator.cache_keys import rows_sha256
from replay.simulator.variant import ResolvedVariant
from replay.traces import files

if TYPE_CHECKING:
    import polars as pl

_MOST = 1 << 32  # bytes of an entry


def asked_of(rounds: "pl.DataFrame", scales: Sequence[float], served_products: bool) -> str:
    """What was asked beside the variant, as an entry's name has it."""
    return repr(("followed", rows_sha256(rounds), tuple(scales), served_products))


def find_followed(cache: Cache, variant: ResolvedVariant, asked: str) -> Followed | None:
    """What was kept of ``variant``; None where it is not there whole."""
    path = cache.place(variant, asked, ".npz")
    try:
        return _read(path) if is_whole(path) else None
    except TraceError:
        return None


def keep_followed(cache: Cache, variant: ResolvedVariant, asked: str, followed: Followed) -> None:
    """Raises OutputError."""
    path = cache.place(variant, asked, ".npz")
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {item.name: np.asarray(getattr(followed, item.name)) for item in fields(Followed)}
    np.savez(buffer, **arrays)
    cache.write(path, lambda: files.write_whole(path, [buffer.getvalue()]))


def _read(path: Path) -> Followed:
    with np.load(io.BytesIO(files.read_small(path, _MOST)), allow_pickle=False) as kept:
        values: dict[str, Any] = {item.name: kept[item.name] for item in fields(Followed)}
    values |= {"scales": tuple(values["scales"].tolist()), "choices": int(values["choices"])}
    return Followed(**{**values, "by_depth": bool(values["by_depth"])})
