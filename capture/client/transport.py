"""One exchange over HTTP, bounded whatever the other side does: its size, its time, and where it may lead.

A server can send a byte a second for ever, or headers without an end: a limit on each read would never be met. Here the
whole exchange has an end, at which its connection is shut.
"""

import http.client
import select
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

_MOST_ERROR = 1 << 16  # bytes of an error that are read
_BLOCK = 1 << 16
_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)


class SlowError(Exception):
    """The exchange was not over when its time was; how, in half a sentence."""


class LargeError(Exception):
    """The answer is larger than any that replay asks for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds from the question to the end of the answer, and from its first byte to its end; the bytes it may have."""

    whole: float
    body: float
    size: int


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of an answer; ``framed``: the server said where they end, so that none were lost."""

    data: bytes
    framed: bool


class _Watch:
    """Shuts the connections of an exchange when its time is over; ``expired`` says that it has."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._end = limits, time.monotonic() + limits.whole
        self._changed = threading.Condition()
        self._sockets: list[Any] = []
        self._over = self.expired = False
        self.said = f"gave no answer within {limits.whole:g} s"

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="replay-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()

    def add(self, connection: Any) -> None:
        """Watch another socket."""
        with self._changed:
            self._sockets.append(connection)

    def await_answer(self, connection: Any) -> None:
        """Wait for the first byte, from which on the answer has its own time. Not seen in what is encrypted."""
        if not isinstance(connection, ssl.SSLSocket):
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.poll(1000 * max(0.0, self._end - time.monotonic()))
            end = time.monotonic() + self._limits.body
            with self._changed:
                if end < self._end and poll.poll(0):
                    self._end, self.said = end, f"began an answer and did not end it within {self._limits.body:g} s"
                    self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._over and (left := self._end - time.monotonic()) > 0:
                self._changed.wait(left)
            self.expired = not self._over
            if self.expired:
                for connection in self._sockets:
                    _shut(connection)


def _shut(connection: Any) -> None:
    try:
        connection.shutdown(2)  # both ways: whoever waits in a read of it goes on
    except OSError:
        pass  # closed already


def ask(request: urllib.request.Request, limits: Limits) -> Body:
    """Send ``request`` and read the answer; where it only reads, a redirect is followed within the web.

    Raises SlowError, LargeError, urllib.error.HTTPError with the beginning of what it says as its ``msg``, OSError,
    ValueError or http.client.HTTPException where the connection or the answer fails.
    """
    with _Watch(limits) as watch, _as_slow(watch), _opened(request, limits, watch) as response:
        return _read(response, limits.size)


def ask_lines(request: urllib.request.Request, limits: Limits, clock: Callable[[], float]) -> list[tuple[float, bytes]]:
    """The lines of an answer that comes bit by bit, each with when its end came by ``clock``. Raises as ``ask``."""
    with _Watch(limits) as watch, _as_slow(watch), _opened(request, limits, watch) as response:
        return list(_lines(response, limits.size, clock))


def _lines(response: http.client.HTTPResponse, most: int, clock: Callable[[], float]) -> Iterator[tuple[float, bytes]]:
    size, rest = 0, b""
    while block := response.read1(_BLOCK):
        at = clock()
        size += len(block)
        if size > most:
            raise LargeError
        *whole, rest = (rest + block).split(b"\n")
        yield from ((at, line) for line in whole)
    if rest:
        yield clock(), rest


@contextmanager
def _opened(request: urllib.request.Request, limits: Limits, watch: _Watch) -> Iterator[http.client.HTTPResponse]:
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(), _Web(watch), urllib.request.HTTPDefaultErrorHandler(),
                    urllib.request.HTTPErrorProcessor()):  # fmt: skip
        opener.add_handler(handler)
    for _ in range(_MOST_REDIRECTS):
        try:
            response = opener.open(request, timeout=limits.whole)
        except urllib.error.HTTPError as error:
            moved = _moved(request, error)
            if moved is None:
                error.msg = _beginning(error)
                raise
            error.close()
            request = moved
            continue
        with response:
            yield response
        return
    raise ValueError(f"it redirects more than {_MOST_REDIRECTS} times")


def _moved(request: urllib.request.Request, error: urllib.error.HTTPError) -> urllib.request.Request | None:
    """The question for where the server redirects to, without the key: that may be another's."""
    place = error.headers.get("Location")
    if error.code not in _REDIRECTS or place is None or request.data is not None:
        return None
    url = urllib.parse.urljoin(request.full_url, place)
    return urllib.request.Request(url) if url.startswith(("http://", "https://")) else None


@contextmanager
def _as_slow(watch: _Watch) -> Iterator[None]:
    """What fails because the watch has shut it is said to be slow; an end that it made is none of the answer's."""
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        if watch.expired or isinstance(getattr(error, "reason", error), TimeoutError):
            raise SlowError(watch.said) from error
        raise
    if watch.expired:
        raise SlowError(watch.said)


def _read(response: http.client.HTTPResponse, most: int) -> Body:
    blocks, size = [], 0
    framed = response.length is not None or response.chunked
    if (response.length or 0) > most:
        raise LargeError
    while block := response.read1(_BLOCK):
        blocks.append(block)
        size += len(block)
        if size > most:
            raise LargeError
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return Body(b"".join(blocks), framed)


def _beginning(error: Any) -> str:
    try:
        data: bytes = error.read(_MOST_ERROR)
    except (OSError, ValueError, http.client.HTTPException):
        data = b""
    return data.decode("utf-8", "replace")


class _Watched(http.client.HTTPConnection):
    """A connection that the watch can shut."""

    def __init__(self, watch: _Watch, host: str, **named: Any) -> None:
        super().__init__(host, **named)
        self._watch = watch

    def connect(self) -> None:
        super().connect()
        self._watch.add(self.sock)

    def getresponse(self) -> http.client.HTTPResponse:
        self._watch.await_answer(self.sock)
        return super().getresponse()


class _WatchedSecurely(_Watched, http.client.HTTPSConnection):
    """The same with encryption."""


class _Web(urllib.request.AbstractHTTPHandler):
    """Opens watched connections for both schemes."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch
        self.http_request = self.https_request = self.do_request_

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Watched, self._watch), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_WatchedSecurely, self._watch), request)
