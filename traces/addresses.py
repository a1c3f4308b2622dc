"""Addresses of shared storage (``s3://bucket/trace``) and the place of each in the cache, one told from the other.

What lies at ``s3://bucket/trace`` has its place in ``$REPLAY_CACHE/remote/s3/bucket/trace``. Here is text alone:
nothing is asked, nothing is made.
"""

import os
import re
from pathlib import Path, PurePath

from replay.errors import OutputError, UsageError
from replay.printable import shorten

SCHEMES = ("s3", "gs", "https", "http")

_FULL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.ASCII | re.DOTALL)
_MOST_PART = 200  # bytes of one part of an address, which becomes a file's name
_REMOTE = f"{os.sep}remote{os.sep}"


def cache_folder() -> Path | None:
    """$REPLAY_CACHE, or ~/.cache/replay where it is not set; None for a user without a home."""
    if named := os.environ.get("REPLAY_CACHE"):
        return Path(named).absolute()
    try:
        return (Path.home() / ".cache" / "replay").absolute()
    except RuntimeError:  # neither HOME nor an entry in the list of users, as in a container of a foreign uid
        return None


def is_address(value: object) -> bool:
    """Whether ``value`` reads as an address of whatever scheme, also one that became a path (``s3:/bucket``)."""
    return _text_of(value) is not None


def is_pattern(address: object) -> bool:
    """Whether an address stands for all that are called like it."""
    return "*" in str(address) or "[" in str(address)


def parse_address(value: object, *, pattern: bool = False) -> str:
    """The address in its one spelling, without a slash at its end; ``pattern``: or what stands for several.

    Raises UsageError for another scheme than ``SCHEMES``, for keys in it, and for parts that no file could have.
    """
    text = _text_of(value) or ""
    scheme, rest = text.partition("://")[0].lower(), text.partition("://")[2].rstrip("/")
    shown = shorten(re.sub(r"//[^/]*@", "//...@", re.sub(r"[?#].*", "?...", text, flags=re.DOTALL)), 200)
    if scheme not in SCHEMES:
        raise UsageError(f"{shown} is of no storage that replay reads; give a folder, or {_schemes()}")
    parts = rest.split("/")
    if any(sign in rest for sign in "?#\0") or "@" in parts[0]:
        raise UsageError(
            f"{shown} holds more than a place; leave out what stands behind ? or before @, and give keys by the "
            "environment"
        )
    if any(part in ("", ".", "..") or len(os.fsencode(part)) > _MOST_PART for part in parts):
        raise UsageError(f"{shown} names no place; type it as {scheme}://{_FIRST[scheme]}/FOLDER")
    if is_pattern(rest) and not pattern:
        raise UsageError(f"{shown} is a pattern, which --draft of replay simulate alone takes; type one address")
    if is_pattern(parts[0]):
        raise UsageError(f"{shown} is a pattern of {_FIRST[scheme].lower()}s, which are not listed; type one of them")
    return f"{scheme}://{rest}"


_FIRST = {"s3": "BUCKET", "gs": "BUCKET", "https": "HOST", "http": "HOST"}


def place_of(address: str) -> str:
    """The path of an address, as ``parse_address`` spells it, in the cache. Raises OutputError without a cache."""
    scheme, _, rest = address.partition("://")
    return os.path.join(remote_folder(), scheme, rest)


def address_of(place: str) -> str | None:
    """The address whose place in the cache ``place`` is; None of any other path."""
    if _REMOTE not in place or cache_folder() is None:
        return None
    root = remote_folder() + os.sep
    scheme, _, rest = place.removeprefix(root).partition(os.sep)
    return f"{scheme}://{rest}" if place.startswith(root) and scheme in SCHEMES and rest else None


def remote_folder() -> str:
    """The part of the local cache that is for storage. Raises OutputError where there is no such cache."""
    if (cache := cache_folder()) is None:
        raise OutputError("there is no place for the local cache of a storage; name a folder with REPLAY_CACHE")
    return os.path.join(os.path.realpath(cache), "remote")


def refuse_address(value: object) -> None:
    """Raises UsageError for an address where only a path of this machine can be."""
    if is_address(value):
        scheme = str(_text_of(value)).partition("://")[0]
        raise UsageError(f"an address ({scheme}://...) was given where a path of this machine belongs; give a path")


def _text_of(value: object) -> str | None:
    """``value`` with both slashes, where it reads as an address."""
    if isinstance(value, str):
        return value if _FULL.fullmatch(value) else None
    if isinstance(value, PurePath) and value.parts:
        scheme = value.parts[0].removesuffix(":")
        if scheme.lower() in SCHEMES and value.parts[0].endswith(":"):
            return f"{scheme}://{'/'.join(value.parts[1:])}"
    return None


def _schemes() -> str:
    return " or ".join([", ".join(f"{scheme}://" for scheme in SCHEMES[:-1]), f"{SCHEMES[-1]}://"])
