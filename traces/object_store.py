"""Storage elsewhere, by fsspec: what lies in a folder, a range of one file's bytes, and errors in a sentence.

fsspec's file systems find keys, endpoints and proxies where their own libraries do (the environment, ~/.aws, gcloud),
and try again what may succeed. No key is read or said here.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from replay.errors import StorageError
from replay.printable import one_line
from replay.traces import files
from replay.traces.asking import ask_all

_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "https": ("aiohttp", "https"), "http": ("aiohttp", "https")}
# What changes with a file's content, the surest first: lists and questions for one file share the first that is there.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "Content-MD5", "Digest", "Last-Modified", "updated", "mtime")
# What a storage without lists is asked for by name: files of a trace, of a head and of a target.
_TRACE = (files.REQUESTS, files.ROUNDS, files.WEIGHTS)
_INDEX = "model.safetensors.index.json"
_CHECKPOINT = (
    "config.json", "model.safetensors", _INDEX, "pytorch_model.bin", "hf_quant_config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt",
    "mask_embedding.pt",
)  # fmt: skip
_NOBODY = files.shard_name(files.MAX_SHARDS)  # has a digit more than any shard
_LOT = 16  # shards that are asked for together
_SILENCE = 30.0  # seconds between two signs of life of a storage
# The roots of errors that are no OSError, where the library that raises them is loaded.
_ROOTS = {
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "aiohttp": ("ClientError",),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "fsspec.exceptions": ("FSTimeoutError",),
}
_NO_KEYS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
            "TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "DefaultCredentialsError",
            "RefreshError", "NoAuthTokenError"}  # fmt: skip
_LATE = {"TimeoutError", "FSTimeoutError", "ConnectTimeoutError", "ReadTimeoutError", "ServerTimeoutError"}
_FAR = {"EndpointConnectionError", "ClientConnectorError", "ConnectionError", "ConnectionClosedError", "gaierror",
        "ServerDisconnectedError", "TransportError"}  # fmt: skip
_MOST_REASON = 200  # characters
_MOST_KIND = 60

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file elsewhere: its address, size in bytes, and what changes with its content."""

    address: str
    size: int
    version: str


def list_folder(address: str) -> dict[str, Entry]:
    """The files that lie right in a folder, by name; the one file where ``address`` is that of a file, by its own.

    A web server without lists is asked for the files of a trace or a checkpoint by name. Raises StorageError where
    nothing lies there, or it cannot be said.
    """
    found = _listed(address) if not address.startswith("http") else _asked(address)
    if not found:
        raise StorageError(f"nothing lies at {address}; mend the address")
    return found


def find_folders(pattern: str) -> list[str]:
    """The addresses of folders that are called as ``pattern`` says, in no order. Raises StorageError."""
    scheme = pattern.partition("://")[0]
    if scheme.startswith("http"):
        raise StorageError(f"{pattern} is a pattern, and a web server lists no folders; type each address")
    with _spoken(pattern):
        system, path = _system(pattern)
        told = system.glob(path, detail=True)
    return [f"{scheme}://{name.strip('/')}" for name, one in told.items() if one.get("type") == "directory"]


def look(address: str) -> Entry:
    """One file as it is now. Raises StorageError."""
    return _entry(address, _told(address))


def read_range(entry: Entry, start: int, stop: int) -> bytes:
    """The bytes ``start`` to ``stop`` of a file. Raises StorageError, also where its storage gives no ranges."""
    with _spoken(entry.address):
        system, path = _system(entry.address)
        data = system.cat_file(path, start=start, end=stop)
    if len(data) != stop - start:
        raise StorageError(
            f"{entry.address} was asked for {stop - start} bytes and {len(data)} came; its storage has to give ranges "
            "of a file, else copy it to this machine"
        )
    return bytes(data)


def _told(address: str) -> dict[str, Any]:
    with _spoken(address):
        system, path = _system(address)
        told: dict[str, Any] = system.info(path, **({"refresh": True} if address.startswith("s3:") else {}))
        return told


def _listed(address: str) -> dict[str, Entry]:
    with _spoken(address):
        system, path = _system(address)
        told = system.ls(path, detail=True)
    names = {str(one["name"]).rstrip("/").rpartition("/")[2]: one for one in told if one.get("type") == "file"}
    if len(told) == 1 and str(told[0]["name"]).strip("/") == path.strip("/"):  # a file
        return {name: _entry(address, one) for name, one in names.items()}
    return {name: _entry(f"{address}/{name}", one) for name, one in names.items() if name}


def _asked(address: str) -> dict[str, Entry]:
    """A trace's or a checkpoint's files, or the one file; shards are asked for until one is not there."""
    _refuse_one_for_all(address)
    if found := _those(address, (files.HEADER, *_TRACE)):
        for first in range(0, files.MAX_SHARDS, _LOT):
            shards = _those(address, [files.shard_name(number) for number in range(first, first + _LOT)])
            found |= shards
            if len(shards) < _LOT:
                break
        return found
    if found := _those(address, _CHECKPOINT):
        return found | (_those(address, _shards_of(found[_INDEX])) if _INDEX in found else {})
    return {address.rpartition("/")[2]: look(address)}


def _refuse_one_for_all(address: str) -> None:
    """Raises StorageError where even a file is there that no folder has: then nothing could be said not to be there."""
    told = _if_there(_told, f"{address}/{_NOBODY}")
    if told is not None:
        kind = one_line(str(told.get("mimetype") or "something"), _MOST_KIND)
        raise StorageError(
            f"{address} answers every name with {kind}, as a login page does, so its files cannot be told; mend the "
            "address, or copy the files to this machine"
        )


def _shards_of(index: Entry) -> list[str]:
    """The plain names of files that an index of shards has; whether it can be trusted is for its reader to say."""
    named = re.findall(rb'"(\w[\w.-]*\.safetensors)"', read_range(index, 0, index.size), re.ASCII)
    return sorted({name.decode("ascii") for name in named})


def _those(address: str, names: Sequence[str]) -> dict[str, Entry]:
    """Of the files called so those that are there."""
    found = ask_all(lambda name: _if_there(look, f"{address}/{name}"), names)
    return {name: one for name, one in zip(names, found, strict=True) if one is not None}


def _if_there(ask: Callable[[str], Answer], address: str) -> Answer | None:
    """The answer about a file, None where it is not there. Some storages forbid what is not there."""
    try:
        return ask(address)
    except StorageError as error:
        if _status(error.__cause__) in (401, 403, 404):
            return None
        raise


def _status(error: BaseException | None) -> int | None:
    if isinstance(error, PermissionError | FileNotFoundError):
        return 403 if isinstance(error, PermissionError) else 404
    told = getattr(error, "status", None) or getattr(error, "code", None)
    return told if isinstance(told, int) else None


def _entry(address: str, told: dict[str, Any]) -> Entry:
    size = told.get("size")
    if not isinstance(size, int):
        raise StorageError(f"{address} comes without a size, so no range of it can be read; copy it to this machine")
    version = next((str(told[name]) for name in _VERSIONS if told.get(name)), "")
    if not version:
        raise StorageError(
            f"{address} comes without an ETag, a checksum or a time of change, so a change of it would not be seen; "
            "have its server send one, or copy it to this machine (fsspec before 2025.9 tells no time of change)"
        )
    return Entry(address, size, version)


def _system(address: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the address as that calls it."""
    scheme = address.partition("://")[0]
    system = _open_system(scheme)
    return system, system._strip_protocol(address)


@cache
def _open_system(scheme: str) -> Any:
    package, extra = _PACKAGES[scheme]
    try:
        from fsspec import get_filesystem_class

        kind = get_filesystem_class(scheme)
    except ImportError as error:
        raise StorageError(
            f"{scheme}:// takes the package {package}; type pip install 'eagle-replay[{extra}]'"
        ) from error
    logging.getLogger(package).addHandler(logging.NullHandler())  # else what it logs and raises goes to the terminal
    return kind(use_listings_cache=False, skip_instance_cache=True, **_settings(extra))


def _settings(extra: str) -> dict[str, Any]:
    """So that a storage which accepts a question and says nothing ends the command within some minutes."""
    if extra == "s3":  # which waits for 15 seconds, five times as often
        told = "AWS_MAX_ATTEMPTS" in os.environ
        return {} if told else {"config_kwargs": {"retries": {"total_max_attempts": 2}}}
    from aiohttp import ClientTimeout

    patience = ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
    if extra == "gs":
        return {"requests_timeout": patience}
    return {"client_kwargs": {"trust_env": True, "timeout": patience}}  # proxies


def forget_systems() -> None:
    """Open file systems anew, after the environment has changed."""
    _open_system.cache_clear()


@contextmanager
def _spoken(address: str) -> Iterator[None]:
    """Errors of a storage as one sentence each. Raises StorageError."""
    try:
        yield
    except tuple(_kinds()) as error:
        cause = error.__cause__ if address.startswith("http") else None  # where all becomes FileNotFoundError
        told = error if cause is None or not isinstance(cause, tuple(_kinds())) else cause
        raise StorageError(_say(address, told)) from told


def _kinds() -> Iterator[type[BaseException]]:
    yield from (OSError, TimeoutError, ValueError)
    for module, names in _ROOTS.items():
        loaded = sys.modules.get(module)
        yield from (getattr(loaded, name) for name in names if hasattr(loaded, name))


def _say(address: str, error: BaseException) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    status = _status(error)
    scheme = address.partition("://")[0]
    if names & _NO_KEYS:
        return f"{address} takes keys and none were found; {_KEYS[scheme]}"
    if status in (401, 403):
        return f"{address} may not be read with the keys that were found, or without any; {_KEYS[scheme]}"
    if status == 404:
        return f"{address} is not there, or not any more; mend the address, or put it there again"
    if names & _LATE:
        return f"{address} did not answer in time; try again when its storage and the network are well"
    if names & _FAR:
        return f"the storage of {address} cannot be reached; look at the network and the endpoint"
    told = str(error).strip() or type(error).__name__
    return f"{address} cannot be read ({one_line(' '.join(told.split()), _MOST_REASON)}); look at the storage"


_KEYS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or FSSPEC_S3_ANON=true for a public one",
    "gs": "type gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "https": "a web server's keys cannot be given: copy it to this machine",
    "http": "a web server's keys cannot be given: copy it to this machine",
}
