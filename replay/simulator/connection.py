"""The way to a Ray cluster: the addresses that can be typed, and whether a program is connected to one already."""

import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from replay.errors import UsageError, WorkerError
from replay.traces.fields import show

AUTO, LOCAL = "auto", "local"
_ADDRESS = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:]{2,45}\]):([0-9]{1,5})", re.ASCII)
_SETTINGS = 4  # the type of a frame
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])  # with no settings in it
_PATIENCE = 5.0  # seconds for a cluster to answer


def check_address(address: str) -> None:
    """Raises UsageError for what names no cluster."""
    found = _ADDRESS.fullmatch(address)
    if address not in (AUTO, LOCAL) and (found is None or not 0 < int(found[2]) < 1 << 16):
        raise UsageError(
            f"{show(address)} is not the address of a Ray cluster, so there are no workers; name the "
            "one of this machine by auto, another one by HOST:PORT, or one that is started here by local"
        )


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """ray, connected; a program that is connected already stays so."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs ray; type pip install 'eagle-replay[ray]'") from error
    if ray.is_initialized():
        check_connected(address, ray.get_runtime_context().gcs_address)
        yield ray
        return
    if found := _ADDRESS.fullmatch(address):
        _knock(found[1].strip("[]"), int(found[2]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings of ray's own that are to change
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise WorkerError(
            f"no Ray cluster can be reached at {address} ({type(error).__name__}); start one by ray start --head and "
            "name the address that it says, or take workers of this machine alone"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def check_connected(address: str, connected: str) -> None:
    """Raises UsageError where ``address`` is not that of the cluster which a program is ``connected`` to."""
    found, other = _ADDRESS.fullmatch(address), _ADDRESS.fullmatch(connected)
    alike = found and other and found[2] == other[2] and _is_same_host(found[1].strip("[]"), other[1].strip("[]"))
    if address != AUTO and not alike:
        raise UsageError(
            f"workers of {address} were asked for, and this program is connected to the Ray cluster at {connected}; "
            'give "auto" for that one, or call ray.shutdown() first'
        )


def _is_same_host(one: str, other: str) -> bool:
    """Whether both names are those of one machine, as far as it can be told here."""
    try:
        a, b = ({str(info[4][0]) for info in socket.getaddrinfo(host, None)} for host in (one, other))
    except OSError:
        return one == other
    return bool(a & b) or all(any(map(_is_here, addresses)) for addresses in (a, b))


def _is_here(address: str) -> bool:
    """Whether an address is one of this machine's own: no other can be listened at."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _knock(host: str, port: int) -> None:
    """Whether anybody answers: ray itself waits for minutes."""
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE) as line:
            other = not os.environ.get("RAY_USE_TLS") and _speaks_otherwise(line)
    except OSError as error:
        raise WorkerError(
            f"nothing answers at {host}:{port} ({error.strerror or error}); name the address that ray start "
            "--head said, or take workers of this machine alone"
        ) from error
    if other:
        raise WorkerError(
            f"what answers at {host}:{port} is no Ray cluster; name the address that ray start --head said, or take "
            "workers of this machine alone"
        )


def _speaks_otherwise(line: socket.socket) -> bool:
    """Whether the other side is no server of gRPC, which begins with a frame of settings (RFC 9113, 3.4)."""
    line.settimeout(_PATIENCE)
    try:
        line.sendall(_HELLO)
        said = line.recv(9)
    except OSError:
        return True  # it says nothing, or hangs up
    return len(said) < 4 or said[3] != _SETTINGS
